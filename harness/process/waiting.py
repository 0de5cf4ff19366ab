"""Waiting for processes without spinning, and care for the logs that they write meanwhile.

A log belongs to the process that appends to it. We only keep it small and read its end, never the whole. A worker that
floods its output would fill the disk by the morning.
"""

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from vramsweep.harness.files.bounded_reads import read_tail
from vramsweep.harness.rows.outcome import REASON_LENGTH, error_text

LOOK_S = 1.0  # between two looks; each costs the parent about 100 µs
LOG_LIMIT = 64 << 20  # bytes of one log
LOG_KEPT = 256 << 10  # bytes of its end that stay when it is cut
LAST_LINES = 100  # of a log that are searched for why its process ended; a C++ stack is shorter
LONGEST_POLL_S = 3600.0  # poll() takes milliseconds as a 32-bit number

Look = Callable[[], float | None]  # called now and then; returns the seconds until the next call, None for LOOK_S


def readable(descriptors: Iterable[int], seconds: float, look: Look | None = None) -> set[int]:
    """Return the descriptors that have something to read, or have ended, within `seconds`.

    Blocks in poll(); `look` is called meanwhile.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    step = (look() or LOOK_S) if look else LONGEST_POLL_S
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        found = poll.poll(max(0.0, min(left, step)) * 1000)
        if found or left <= 0:
            return {descriptor for descriptor, _ in found}
        if look:
            step = look() or LOOK_S


class Logs:
    """Logs of one attempt, which must be open for appending. `dropped` counts the bytes that were cut off them."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self.dropped = 0

    def look(self) -> None:
        """Cut each log that has grown past LOG_LIMIT down to its last LOG_KEPT bytes."""
        for path in self.paths:
            with contextlib.suppress(OSError):  # not there yet, or no disk space even for the rest: look again later
                size = path.lstat().st_size
                if size > LOG_LIMIT:
                    end = read_tail(path, LOG_KEPT)
                    os.truncate(path, 0)
                    self.dropped += size - len(end)
                    with path.open("ab") as file:
                        file.write(b"[%d bytes of this log were dropped]\n" % (size - len(end)) + end)


def last_words(path: Path) -> str | None:
    """Return the line near the end of a log that tells of a fault, else its last line that is not empty.

    At most REASON_LENGTH characters; None if there is none.
    """
    try:
        lines = read_tail(path, LOG_KEPT).decode(errors="replace").splitlines()
    except OSError:
        return None
    said = error_text([line.strip() for line in lines[-LAST_LINES:] if line.strip()])
    return said[:REASON_LENGTH] if said else None
