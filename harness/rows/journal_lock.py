"""One writer at a time: the lock of a journal.

flock where the file system has it: it goes with the process, however that ends. Elsewhere (Lustre without -o flock,
some NFS and FUSE) a claim, a file beside the journal that names its writer. One that a process of this machine has left
behind is taken over; whether one of another machine still runs cannot be told from here, so that is for the user.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from vramsweep.harness.files import plain_json
from vramsweep.harness.files.bounded_reads import open_regular
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import process_identity

fcntl: Any
try:
    import fcntl
except ModuleNotFoundError:  # Windows, where rows are only read
    fcntl = None

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_TRIES = 5  # at a claim, each time that another one has just gone


class Lock:
    """The lock of the open file `descriptor` at `path`, held until `release` or the end of the process.

    Raises UserError where another process holds it, and OSError where it cannot be had for another reason.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._claim: Path | None = None
        try:
            if not _flocked(descriptor):
                raise _taken(path)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _claim(path)
            self._claim = claim_path(path)

    def release(self) -> None:
        """Give a claim back; an flock goes when its file is closed."""
        if self._claim is not None:
            self._claim.unlink(missing_ok=True)


def _flocked(descriptor: int) -> bool:
    """Whether an flock was had; one who only looks whether there is one (`is_locked`) has it for a moment."""
    for wait in (0.0, 0.01, 0.05, 0.1):
        time.sleep(wait)
        with contextlib.suppress(BlockingIOError):
            _flock(descriptor, "LOCK_EX")
            return True
    return False


def _flock(descriptor: int, kind: str) -> None:
    """Raises BlockingIOError where another process has it, OSError where there are no such locks."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.flock(descriptor, getattr(fcntl, kind) | fcntl.LOCK_NB)


def claim_path(path: Path) -> Path:
    """Where the claim to a journal lies."""
    return path.with_name(f"{path.name}.lock")


def is_locked(path: Path) -> bool:
    """Whether a process is writing the journal at `path`; False too where a machine cannot tell of another one's."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        try:
            _flock(file.fileno(), "LOCK_SH")
        except BlockingIOError:
            return True
        except OSError:
            return claim_path(path).exists() and process_identity.is_alive(_writer(claim_path(path))) is not False
    return False


def _claim(path: Path) -> None:
    aside = claim_path(path).with_name(f"{claim_path(path).name}.{os.getpid()}")
    # whole before it has the name, whoever is killed when
    aside.write_text(json.dumps(process_identity.own_identity()), encoding="utf-8")
    try:
        _become(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _become(aside: Path, path: Path) -> None:
    """Give a claim its name. Raises UserError where another holds it."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            os.link(aside, claim_path(path))
            return
        writer = _writer(claim_path(path))
        alive = process_identity.is_alive(writer)
        if alive is False:
            _set_aside(path)
        elif alive:
            raise _taken(path)
        elif claim_path(path).exists():
            raise UserError(
                f"{claim_path(path)} says that {writer.get('host', 'somebody')} writes here, where the file system has "
                "no locks; remove that file if no sweep runs there"
            )
    raise _taken(path)


def _set_aside(path: Path) -> None:
    """Take a claim away whose writer is gone; back again where another one has just put its own there."""
    gone = claim_path(path).with_name(f"{claim_path(path).name}.gone.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        claim_path(path).rename(gone)
        if process_identity.is_alive(_writer(gone)) is not False:
            with contextlib.suppress(FileExistsError):
                os.link(gone, claim_path(path))
        gone.unlink()


def _writer(file: Path) -> dict[str, object]:
    """Who a claim is of; empty where there is none, or it does not say."""
    return plain_json.read_object(file) or {}


def _taken(path: Path) -> UserError:
    return UserError(f"another sweep is writing {path}; wait for it, or give this one another name=")
