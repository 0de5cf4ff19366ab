"""The journal: `results/<sweep>/journal.jsonl`, one row a line, only ever appended to.

One process writes, under an exclusive lock held as long as the journal is open; each row is one write and one fsync,
so a row that `append` returned from survives a power cut. A writer that was killed can leave a torn last line: the
next one starts a fresh line after it, and readers skip and count it. Readers take no lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from vramsweep.harness.errors import UserError
from vramsweep.harness.row import Outcome, Row, complete

NAME = "journal.jsonl"


class Journal:
    """The writing end of one sweep's journal.

    Raises UserError when the folder cannot be written, the disk is full or another sweep holds the lock.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise UserError(
                f"another sweep is writing {self.path}; wait for it, or give this one another name="
            ) from None
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            self._write(b"\n")

    def append(self, row: Row) -> Row:
        """Store one row, checked against the schema, and return it with every column.

        Raises RowError (schema) or UserError (disk).
        """
        whole = complete(row)
        self._write(json.dumps(whole, separators=(",", ":"), allow_nan=False).encode() + b"\n")
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


def read(path: Path) -> tuple[list[Row], int]:
    """The rows of a journal (the file, or the sweep's folder) and how many lines could not be read.

    Raises UserError when there is no such file.
    """
    file = path / NAME if path.is_dir() else path
    rows: list[Row] = []
    unreadable = 0
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; name a folder under results/") from None
    for line in lines:
        if not line:
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and "trial_id" in row:
            rows.append(row)
        else:
            unreadable += 1
    return rows, unreadable


def terminal(rows: Iterable[Row]) -> dict[str, Row]:
    """The one row that counts for each finished trial: its last terminal one, by trial id."""
    return {row["trial_id"]: row for row in rows if row.get("terminal")}


def succeeded(row: Row) -> bool:
    """Whether a terminal row answers its trial's question: measured, out of memory, or known to be impossible."""
    return row["outcome"] in (Outcome.OK, Outcome.OOM, Outcome.HOST_OOM, Outcome.INVALID, Outcome.SKIPPED)


def _unwritable(path: Path, error: OSError) -> UserError:
    if error.errno == errno.ENOSPC:
        return UserError(f"the disk is full: {path} takes no more rows; all rows before are safe, free space and rerun")
    return UserError(f"cannot write {path}: {error.strerror}; choose a writable folder with results=DIR")
