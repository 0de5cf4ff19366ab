"""Files of a results folder, which anybody may have made: read only if they are regular, written whole.

Reading a pipe would wait, and a device has no end. A link is followed only if `links` is true, and only to a regular
file. This module is not for files that the user names for other purposes.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LIMIT = 1 << 28  # most bytes of a file that is read whole: a plan of some million trials
GIVEN = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # opened for us by a shell, as with <(...); may be a pipe
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
_NO_LINKS: int = getattr(os, "O_NOFOLLOW", 0)
FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk's quota is used up",
    errno.EFBIG: "no file of this process may grow that large (see ulimit -f)",
}


def open_descriptor(path: Path, flags: int, links: bool = False) -> int:
    """Open a regular file without waiting; `flags` are those of os.open. Raises OSError for any other kind of file."""
    found = os.open(path, flags | _FLAGS | (0 if links else _NO_LINKS), 0o644)
    kind = os.fstat(found).st_mode
    if stat.S_ISFIFO(kind) and str(path).startswith(GIVEN):
        os.set_blocking(found, True)
    elif not stat.S_ISREG(kind):
        os.close(found)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return found


def open_regular(path: Path, limit: int | None = None, links: bool = True) -> BinaryIO:
    """Open a file to read. Raises OSError if it is not regular, or has more than `limit` bytes."""
    file = os.fdopen(open_descriptor(path, os.O_RDONLY, links), "rb")
    size = os.fstat(file.fileno()).st_size
    if limit is not None and size > limit:
        file.close()
        raise OSError(errno.EINVAL, f"it has {size:,} bytes; at most {limit:,} are read", str(path))
    return file


def read_content(path: Path, limit: int = LIMIT, links: bool = True) -> bytes:
    """Read the whole of a file. Raises OSError as `open_regular` does."""
    with open_regular(path, limit, links) as file:
        return file.read(limit) or b""


def read_tail(path: Path, size: int) -> bytes:
    """Read the last `size` bytes of a file that a worker left, or all of it. Raises OSError, also for a link."""
    with open_regular(path, links=False) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read(size)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a path next to `path` to write to. It replaces `path` when the block ends, so readers find a whole file.

    A failure leaves the old file. Raises OSError, which names `path`.
    """
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")  # random, so that nobody can have put a link there
    try:
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        yield aside
        aside.replace(path)
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error_reason(error), str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def error_reason(error: OSError) -> str:
    """Return in words why a file could not be read or written."""
    return FULL.get(error.errno or 0) or error.strerror or str(error)
