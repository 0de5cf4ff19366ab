"""For a process that has this folder on its PYTHONPATH: a file system that knows no locks."""

import errno
import fcntl
import os


def flock(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


fcntl.flock = flock
