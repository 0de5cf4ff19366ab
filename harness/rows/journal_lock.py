"""The lock of a journal, which lets one process at a time write it, and the identity by which a writer is known.

flock is used if the file system has it, because it ends with the process, however that ends. Else (Lustre without -o
flock, some NFS and FUSE) the lock is a claim, a file next to the journal that names its writer. A claim of an ended
process of this machine is taken over. Whether one of another machine still runs cannot be told here: the user decides.

A process's identity is kept in files so that another process can tell later whether it still runs. Process ids are
reused, so the start is kept too: in ticks, because the time of day and psutil's creation time jump.
"""

import contextlib
import errno
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vramsweep.harness.files import plain_json
from vramsweep.harness.files.bounded_reads import open_regular
from vramsweep.harness.messages.errors import UserError

fcntl: Any
try:
    import fcntl
except ModuleNotFoundError:  # Windows, where rows are only read
    fcntl = None

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_TRIES = 5  # at a claim, one each time that another claim has just gone


class Lock:
    """The lock of the open file `descriptor` at `path`, held until `release` or the end of the process.

    Raises UserError if another process holds it, and OSError if it cannot be had for another reason.
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
        """Remove the claim, if there is one; an flock ends when its file is closed."""
        if self._claim is not None:
            self._claim.unlink(missing_ok=True)


def _flocked(descriptor: int) -> bool:
    """Try to take the flock, and retry, because a process that only checks (`is_locked`) has it for a moment."""
    for wait in (0.0, 0.01, 0.05, 0.1):
        time.sleep(wait)
        with contextlib.suppress(BlockingIOError):
            _flock(descriptor, "LOCK_EX")
            return True
    return False


def _flock(descriptor: int, kind: str) -> None:
    """Take an flock. Raises BlockingIOError if another process has it, OSError if there are no such locks."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.flock(descriptor, getattr(fcntl, kind) | fcntl.LOCK_NB)


def claim_path(path: Path) -> Path:
    """Return the path of the claim to a journal."""
    return path.with_name(f"{path.name}.lock")


def is_locked(path: Path) -> bool:
    """Return whether a process is writing the journal at `path`; False if another machine's is not visible."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        try:
            _flock(file.fileno(), "LOCK_SH")
        except BlockingIOError:
            return True
        except OSError:
            return claim_path(path).exists() and is_alive(_writer(claim_path(path))) is not False
    return False


def _claim(path: Path) -> None:
    aside = claim_path(path).with_name(f"{claim_path(path).name}.{os.getpid()}")
    # written whole before it gets its name, so that a kill leaves no partial claim
    aside.write_text(json.dumps(own_identity()), encoding="utf-8")
    try:
        _become(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _become(aside: Path, path: Path) -> None:
    """Give a claim its name. Raises UserError if another process holds it."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            os.link(aside, claim_path(path))
            return
        writer = _writer(claim_path(path))
        alive = is_alive(writer)
        if alive is False:
            _set_aside(path)
        elif alive:
            raise _taken(path)
        elif claim_path(path).exists():
            raise UserError(
                f"{claim_path(path)} says that {writer.get('host', 'some host')} is writing here. The file system has "
                "no locks, so remove that file if no sweep runs there"
            )
    raise _taken(path)


def _set_aside(path: Path) -> None:
    """Remove a claim whose writer has ended; restore it if another process has just put its own there."""
    gone = claim_path(path).with_name(f"{claim_path(path).name}.gone.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        claim_path(path).rename(gone)
        if is_alive(_writer(gone)) is not False:
            with contextlib.suppress(FileExistsError):
                os.link(gone, claim_path(path))
        gone.unlink()


def _writer(file: Path) -> dict[str, object]:
    """Return the identity of a claim's writer; empty if there is no claim, or it does not say."""
    return plain_json.read_object(file) or {}


def _taken(path: Path) -> UserError:
    return UserError(f"another sweep is writing {path}; wait for it, or give this one another name=")


def own_identity() -> dict[str, Any]:
    """Return the identity of this process, in values that JSON can hold."""
    return {"host": platform.node(), "pid": os.getpid(), "ticks": _ticks(os.getpid()), **_space()}


def is_alive(process: Mapping[str, Any]) -> bool | None:
    """Return whether the process that `own_identity` describes still runs; None if that cannot be told from here, as of
    another host or container."""
    pid, ticks = process.get("pid"), process.get("ticks")
    if process.get("host") != platform.node() or not isinstance(pid, int) or not isinstance(ticks, int):
        return None
    if process.get("boot") != _space()["boot"]:
        return False
    return None if process.get("space") != _space()["space"] else _ticks(pid) == ticks


def _ticks(pid: int) -> int | None:
    """Return a process's start in ticks since the boot: field 22 of proc_pid_stat(5). None if it has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return None if state == "Z" else int(fields[18])
    return None


def _space() -> dict[str, Any]:
    """Return where process ids are valid: the boot's id, and the inode of the container's pid namespace."""
    found: dict[str, Any] = {"boot": None, "space": None}
    with contextlib.suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["space"] = Path("/proc/self/ns/pid").stat().st_ino
    return found
