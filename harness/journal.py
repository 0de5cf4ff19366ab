"""The journal: `results/<sweep>/journal.jsonl`, one row a line, only ever appended to.

One process writes a file, under an exclusive lock held as long as it is open; each row, or several that are ready
together, are one write and one fsync, so a row that `append` returned from survives a power cut. A writer that was
killed can leave a torn last line: the next one starts a fresh line after it. Several writers (nodes that share a
folder) each have a file of their own, `journal-<writer>.jsonl`, and readers merge them. Readers take no lock.

A line ends in the checksum of the row before it, `,"checksum":"%08x"}`: CRC-32 of the row's JSON. A line that is not
what was written is skipped and counted, never half-believed; lines without one (before schema version 2) are taken as
they are.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from vramsweep.harness import upgrade
from vramsweep.harness.errors import UserError
from vramsweep.harness.row import Row, complete, encodable, system

NAME = "journal.jsonl"
PLAN = "plan.json"  # beside it: the command, its trials, and the answer that its report begins with
_CHECKSUM = re.compile(rb',"checksum":"([0-9a-f]{8})"\}$')
_CHECKSUM_LENGTH = len(',"checksum":"00000000"}')
# What flock says on file systems that have no locks: Lustre without -o flock, some NFS
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
System = tuple[str | None, ...]


class Journal:
    """The writing end of one writer's journal; `writer` is None where a sweep has only one.

    `locked` says whether the file system gave a lock. Raises UserError when the folder cannot be written, the disk is
    full or another sweep holds the lock.
    """

    def __init__(self, folder: Path, writer: str | None = None) -> None:
        self.path = folder / (NAME if writer is None else f"journal-{writer}.jsonl")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            new = not self.path.exists()
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        try:
            self.locked = self._lock()
            if new:
                _sync_folder(folder)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                self._write(b"\n")
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another sweep is writing {self.path}; wait for it, or give this one another name="
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise UserError(
                    f"cannot lock {self.path}: {error.strerror}; choose another folder: results=DIR"
                ) from None
            return False
        return True

    def append(self, row: Row) -> Row:
        """Store one row, checked against the schema, and return it with every column.

        Raises RowError (schema) or UserError (disk).
        """
        return self.extend([row])[0]

    def extend(self, rows: Iterable[Row]) -> list[Row]:
        """The same for several rows, in one write and one fsync."""
        whole = [complete(row) for row in rows]
        if whole:
            self._write(b"".join(map(line, whole)))
        return whole

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._fd, data)
            if written != len(data):  # a full disk takes part of the row: say so rather than go on with torn rows
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._fd)
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def line(row: Row) -> bytes:
    """A row as it stands in the journal, its checksum and the end of the line included."""
    text = json.dumps(encodable(row), separators=(",", ":"), allow_nan=False).encode()
    return text[:-1] + b',"checksum":"%08x"}\n' % zlib.crc32(text)


def intact(text: bytes) -> bool:
    """Whether a line, without its end, is what was written; one that has no checksum is believed."""
    found = _CHECKSUM.search(text, max(0, len(text) - _CHECKSUM_LENGTH))
    if found is None:
        return b'"checksum"' not in text
    return zlib.crc32(b"}", zlib.crc32(text[: found.start()])) == int(found[1], 16)


def files(place: Path) -> list[Path]:
    """The journals of a sweep's folder, every writer's; of a file, that file."""
    if not place.is_dir():
        return [place]
    own = place / NAME
    return [*([own] if own.exists() else []), *sorted(place.glob("journal-*.jsonl"))] or [own]


def read(place: Path) -> tuple[list[Row], int]:
    """The rows of a journal (the file, or the sweep's folder) and how many lines could not be believed.

    Rows of several writers come in the order in which their attempts began. Raises UserError if there is no such file.
    """
    rows: list[Row] = []
    unreadable = 0
    several = files(place)
    for file in several:
        try:
            lines = file.read_bytes().split(b"\n")
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}; name a folder under results/") from None
        for text in filter(None, lines):
            row = parsed(text)
            if row is None:
                unreadable += 1
            else:
                rows.append(row)
    if len(several) > 1:
        rows.sort(key=lambda row: str(row.get("started_at") or ""))
    return rows, unreadable


def parsed(text: bytes) -> Row | None:
    """The row of one line in today's layout; None where it is none, or not what was written."""
    row = None
    if intact(text):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(text)
            if b"\\ud" in text:  # perhaps half a character: rows of other programs, and of version 1
                row = encodable(row)
    if not isinstance(row, dict) or not isinstance(row.get("trial_id"), str):
        return None
    row.pop("checksum", None)
    return upgrade.row(row)


def terminal(rows: Iterable[Row]) -> dict[str, Row]:
    """The last terminal row of each trial, by its id, whatever system it is of."""
    return {row["trial_id"]: row for row in rows if row.get("terminal")}


def finished(rows: Iterable[Row], wanted: Mapping[str, System]) -> tuple[dict[str, Row], dict[str, Row]]:
    """The row that counts for each of the `wanted` trials, measured on the system that it would run on now.

    An empty system is that of a trial that cannot run here.

    And those that do not count, since they are of other systems: the last one of each trial that has no other.
    """
    mine: dict[str, Row] = {}
    others: dict[str, Row] = {}
    for row in rows:
        trial_id = row["trial_id"]
        if not row.get("terminal") or trial_id not in wanted:
            continue
        if row.get("attempt") != 0 and not wanted[trial_id]:  # cannot run here, so nothing is compared with it
            continue
        if row.get("attempt") == 0:  # never started: measured nowhere, and no word against what was measured
            if mine.get(trial_id, row).get("attempt") == 0:
                mine[trial_id] = row
        else:
            (mine if system(row) == wanted[trial_id] else others)[trial_id] = row
    return mine, {trial_id: row for trial_id, row in others.items() if trial_id not in mine}


def _sync_folder(folder: Path) -> None:
    """A new file survives a power cut only once its folder is synced; some file systems do not take it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"the disk is full: {path} takes no more rows; all rows before are safe, free space and rerun")
    return UserError(f"cannot write {path}: {error.strerror}; choose a writable folder with results=DIR")
