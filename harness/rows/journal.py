"""The journal: `results/<sweep>/trials/journal.jsonl`, one row a line, only ever appended to.

One process writes a file, under an exclusive lock held while the file is open (journal_lock.py). A row, or several that
are ready together, are one write and one fsync. So a row that `append` returned survives a power cut. A killed writer
can leave a torn last line. The next writer starts a fresh line after it, whatever size a shared folder reports for the
file. Several writers (nodes that share a folder) each have their own file, `journal-<writer>.jsonl`. Readers merge
these files and take no lock.

A line ends in the checksum of its row, `,"checksum":"%08x"}`: CRC-32 of the row's JSON. A line that is not what was
written is skipped and counted, never half-believed. Lines without a checksum come from before schema version 2 or from
other programs. They are accepted if they name a trial and an outcome and hold plausible values (schema.is_plausible).
Carriage returns and a byte order mark, which editors and git add, are ignored.
"""

import codecs
import contextlib
import errno
import json
import os
import re
import threading
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from vramsweep.harness.files import plain_json
from vramsweep.harness.files.bounded_reads import error_reason, open_descriptor, open_regular
from vramsweep.harness.files.sweep_folder import OWN, describe_missing
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import migrations
from vramsweep.harness.rows.journal_lock import Lock
from vramsweep.harness.rows.schema import BY_NAME, Row, complete_row, is_plausible, system_of, to_encodable

NAME = "journal.jsonl"
PLAN = "plan.json"  # next to it, one per writer: the command, its trials, and the answer that its report begins with
_CHECKSUM = re.compile(rb',"(.{8})":"([0-9a-f]{8})"\}$', re.DOTALL)
_CHECKSUM_LENGTH = len(',"checksum":"00000000"}')
LIMIT = 1 << 34  # bytes of a journal: millions of rows
LONGEST = 1 << 27  # bytes of a line: twice the largest result
_UNSAID: Row = dict.fromkeys(BY_NAME)
System = tuple[str | None, ...]


class Journal(contextlib.AbstractContextManager["Journal"]):
    """The writing end of one writer's journal; `writer` is None if a sweep has only one.

    Raises UserError if the folder cannot be written, the disk is full or another sweep holds the lock. Writing and
    closing also raise it if the file is gone or lacks rows. Lines that others append to it stay.
    """

    def __init__(self, folder: Path, writer: str | None = None) -> None:
        self.path = folder / name(writer)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            new = not self.path.exists()
            self._fd = open_descriptor(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        try:
            self._lock = Lock(self.path, self._fd)
            if new:
                _sync_folder(folder)
            self._turn = threading.Lock()  # concurrent trials write too
            self._end = 0 if new else None  # offset at which the last write ended; None if a line may be torn
            self._last = b""  # the bytes right before that offset
        except BaseException as error:
            os.close(self._fd)
            if not isinstance(error, OSError):
                raise
            raise UserError(f"cannot lock {self.path}: {error.strerror}; choose another folder: results=DIR") from None

    def append(self, row: Row) -> Row:
        """Store one row, checked against the schema, and return it with every column.

        Raises RowError (schema) or UserError (disk).
        """
        return self.extend([row])[0]

    def extend(self, rows: Iterable[Row]) -> list[Row]:
        """Store several rows in one write and one fsync, and return them with every column. Raises as `append`."""
        whole = [complete_row(row) for row in rows]
        if whole:
            with self._turn:
                self._write(b"".join(map(line, whole)))
        return whole

    def _write(self, data: bytes) -> None:
        lost = self._lost()
        try:
            size = os.fstat(self._fd).st_size
            if self._put(data if self._end == size else b"\n" + data) != size:  # another process wrote in between
                self._put(b"\n" + data)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        if lost := lost or self._lost():
            raise UserError(lost)

    def _put(self, data: bytes) -> int:
        """Append all of the data and return the offset where it begins. Raises OSError."""
        self._end, written = None, 0
        while written < len(data):  # if only a part is written, the next error says why
            written += os.write(self._fd, data[written:])
        os.fsync(self._fd)
        self._end, self._last = os.lseek(self._fd, 0, os.SEEK_CUR), data[-_CHECKSUM_LENGTH:]
        return self._end - len(data)

    def _lost(self) -> str | None:
        """Return a message if written rows may be gone: file deleted, moved, cut or rewritten; else None."""
        try:
            there = os.path.samestat(self.path.stat(), found := os.fstat(self._fd))
        except OSError:
            there = False
        what = "deleted or moved"
        if there:
            at = (self._end or 0) - len(self._last)
            if self._end is None or os.pread(self._fd, len(self._last), at) == self._last:
                return None
            what = f"cut or rewritten (it had {self._end:,} bytes and has {found.st_size:,})"
        return (
            f"{self.path} was {what} while the sweep was writing it, so the sweep stops. Rows may be lost; put the "
            "file back, or run the same command again"
        )

    def close(self) -> None:
        """Close the file and release the lock."""
        with self._turn:
            closing, self._fd = self._fd, -1  # a trial that ends after the sweep has stopped writes nowhere
        os.close(closing)
        self._lock.release()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        lost = None if kind else self._lost()
        self.close()
        if lost:
            raise UserError(lost)


def line(row: Row) -> bytes:
    """Return a row as its line in the journal, including its checksum and the end of the line."""
    text = json.dumps(to_encodable(row), separators=(",", ":"), allow_nan=False).encode()
    return text[:-1] + b',"checksum":"%08x"}\n' % zlib.crc32(text)


def intact(text: bytes) -> bool:
    """Return whether a line, without its end, is what was written; a line without a checksum is believed.

    A last key of another name is a damaged checksum, because no column ends a line as a checksum does.
    """
    text = bare(text)
    found = _CHECKSUM.search(text, max(0, len(text) - _CHECKSUM_LENGTH))
    if found is None:
        return b'"checksum"' not in text
    return found[1] == b"checksum" and zlib.crc32(b"}", zlib.crc32(text[: found.start()])) == int(found[2], 16)


def bare(text: bytes) -> bytes:
    """Return a line without byte order mark and line end, which editors and git may change."""
    return text.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")


def name(writer: str | None) -> str:
    """Return the file name of a writer's journal."""
    return NAME if writer is None else f"journal-{writer}.jsonl"


def plan_name(writer: str | None) -> str:
    """Return the file name of a writer's plan."""
    return PLAN if writer is None else f"plan-{writer}.json"


def plans(folder: Path) -> list[dict[str, Any]]:
    """Return the readable plans of the writers' last commands in this folder, the latest last."""
    files = [file for own in (folder, folder / OWN) for file in (own / PLAN, *sorted(own.glob("plan-*.json")))]
    found = map(plain_json.read_object, files)
    return sorted((one for one in found if one is not None), key=lambda one: str(one.get("started_at")))


def files(place: Path) -> list[Path]:
    """Return the journals of a sweep's folder, every writer's, those begun by an earlier version first. For a file
    return that file; for a folder without any, the path that a journal would have."""
    if not place.is_dir():
        return [place]
    found = [file for own in (place, place / OWN) for file in ((own / NAME), *sorted(own.glob("journal-*.jsonl")))]
    return [file for file in found if file.exists()] or [place / NAME]


def read(place: Path) -> tuple[list[Row], int]:
    """Return the rows of a journal (the file, or the sweep's folder) and how many lines could not be believed.

    Rows of several writers are sorted by when their attempts began. Raises UserError if there is no such file.
    """
    found: list[Row | None] = []
    several = files(place)
    for file in several:
        try:
            found += [row for row, _ in since(file)]
        except OSError as error:
            raise refusal(file, error) from None
    rows = [row for row in found if row is not None]
    if len(several) > 1:
        rows.sort(key=_began)
    return rows, len(found) - len(rows)


def since(file: Path, at: int = 0, torn: bool = True) -> Iterator[tuple[Row | None, int]]:
    """Yield the row of each line from byte `at` on (None if it is not believed), and where the line ends.

    `torn`: count the last line even without its end. Of a line longer than `LONGEST`, only the beginning is read as a
    row. Raises OSError.
    """
    with open_regular(file, LIMIT) as stream:
        if at:
            stream.seek(at)
        begins = True
        while (text := stream.readline(LONGEST)) and (torn or text.endswith(b"\n") or len(text) == LONGEST):
            at += len(text)
            if begins and (found := bare(text)):
                yield parsed(found), at
            begins = text.endswith(b"\n")


class Tail:
    """Reads a sweep's journals as they grow: each time only the whole lines that are new.

    `rows` holds all rows so far, cut to `columns`; rows of several writers are sorted by when their attempts began.
    `unreadable` counts lines that could not be believed. After a file was replaced or cut, all is read again.
    """

    def __init__(self, place: Path, columns: Collection[str]) -> None:
        self._place, self._columns = place, columns
        self._clear()

    def _clear(self) -> None:
        self._read: dict[Path, tuple[int, int]] = {}  # each file's inode, and the offset read so far
        self.rows: list[Row] = []
        self.unreadable = 0

    def look(self) -> bool:
        """Read the new lines and return whether there were any. Raises UserError if there is no journal."""
        several = files(self._place)
        try:
            now = {file: file.stat() for file in several}
            before = self._read
            if any(file not in now or now[file].st_ino != one[0] or now[file].st_size < one[1]
                   for file, one in before.items()):  # fmt: skip
                self._clear()
            found = [row for file in several for row in self._new(file, now[file].st_ino)]
        except OSError as error:
            raise refusal(Path(error.filename or several[0]), error) from None
        self.unreadable += found.count(None)
        self.rows += filter(None, found)
        if len(several) > 1:
            self.rows.sort(key=_began)
        return bool(found)

    def _new(self, file: Path, inode: int) -> Iterator[Row | None]:
        for row, end in since(file, self._read.get(file, (inode, 0))[1], torn=False):
            self._read[file] = inode, end
            yield row and {name: row.get(name) for name in self._columns}


def parsed(text: bytes) -> Row | None:
    """Return the row of one line in today's layout, with every column; None if it is none or was damaged."""
    row = None
    if intact(text):
        with contextlib.suppress(ValueError, RecursionError):
            # NaN and Infinity, which other programs write and JSON lacks, become null
            row = json.loads(bare(text), parse_constant=lambda name: None)
            if b"\\ud" in text:  # perhaps a lone surrogate, as in rows of other programs and of version 1
                row = to_encodable(row)
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("trial_id", "outcome")):
        return None
    row.pop("checksum", None)
    if not is_plausible(row):
        return None
    found = migrations.upgrade_row(row)
    return _UNSAID | found if found is row or is_plausible(found) else None


def terminal(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the last terminal row of each trial, by its id, whatever system it was measured on."""
    return {row["trial_id"]: row for row in rows if row.get("terminal")}


def finished(rows: Iterable[Row], wanted: Mapping[str, System]) -> tuple[dict[str, Row], dict[str, Row]]:
    """Return the row that counts for each of the `wanted` trials, by id, and the rows that do not count.

    A row counts if it was measured on the system that the trial would run on now. An empty system means that the trial
    cannot run here. The rows that do not count are of other systems: the last one of each trial that has no other row.
    """
    mine: dict[str, Row] = {}
    others: dict[str, Row] = {}
    for row in rows:
        trial_id = row["trial_id"]
        if not row.get("terminal") or trial_id not in wanted:
            continue
        if row.get("attempt") == 0:  # never started: measured nowhere, so it replaces no measured row
            if mine.get(trial_id, row).get("attempt") == 0:
                mine[trial_id] = row
        elif wanted[trial_id]:  # else the trial cannot run here, so nothing is compared with it
            (mine if system_of(row) == wanted[trial_id] else others)[trial_id] = row
    return mine, {trial_id: row for trial_id, row in others.items() if trial_id not in mine}


def _began(row: Row) -> str:
    return str(row.get("started_at") or "")


def refusal(file: Path, error: OSError) -> UserError:
    """Return the error for a journal that is missing or cannot be read."""
    if not file.exists():
        return UserError(describe_missing(file.parent if file.name == NAME else file))
    return UserError(f"cannot read {file}: {error_reason(error)}; name a folder under results/")


def _sync_folder(folder: Path) -> None:
    """Sync a folder, because only then a new file survives a power cut. Some file systems refuse that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> UserError:
    reason = error_reason(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(f"{reason}: {path} takes no more rows. Those before are kept; free space and rerun")
    if error.errno == errno.ELOOP:
        return UserError(f"{path} is a link, which vramsweep does not write through; choose another: results=DIR")
    return UserError(f"cannot write {path}: {reason}; choose a writable folder with results=DIR")
