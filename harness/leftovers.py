"""Ending processes for good: what an attempt leaves, and what a launcher leaves that was killed itself.

A worker and its template die with their parent (PR_SET_PDEATHSIG), but not what a trial has started: a script's ranks,
data loaders, daemons. All of them carry their launcher's mark in their environment. A guard, a process of its own that
waits for the launcher's end, ends what carries it; should the guard be killed too, the next launcher in that folder
does. Not covered: a process that has cleared its environment and left its session, once the launcher is dead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from vramsweep.harness.interpreter import build_command

MARK = "VRAMSWEEP_RUN"  # the variable that holds the mark
END_S = 10.0  # for killed processes to end


def end(find: Callable[[], set[int]]) -> set[int]:
    """Kill the processes that `find` finds until it finds none; returns those that do not end in time.

    At once and again, as what forks and ends faster than it is looked for would never be met.
    """
    until = time.monotonic() + END_S
    tried: set[int] = set()
    quiet = 0  # times that there was nothing but what had ended, and waits for a parent of its own
    while (found := find()) and quiet < 2:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            return set(filter(runs, found))
        if found <= tried:  # nothing new: they only need time
            time.sleep(0.005)
        quiet = quiet + 1 if found <= tried and not any(map(runs, found)) else 0
        tried |= found
    return set()


def descendants(pid: int) -> set[int]:
    """The processes below one, all generations, those too that have ended and wait for their parents: what has ended
    since it was listed may have left another."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return set()


def runs(pid: int) -> bool:
    """Whether a process has not ended; one that has may still wait for its parent to notice."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def marked(run: str) -> set[int]:
    """The processes that carry a launcher's mark, as far as this user may see."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == run and runs(process.pid):
                found.add(process.pid)
    return found


class Guard:
    """Ends what carries the mark `run` once this process has ended, however it does."""

    def __init__(self, run: str) -> None:
        # in a session of its own: a terminal's Ctrl-C is not for it
        self._process = subprocess.Popen(
            build_command("vramsweep.harness.leftovers", run), stdin=subprocess.PIPE, start_new_session=True
        )
        self.pid = self._process.pid

    def alive(self) -> bool:
        """Whether it is still there."""
        return self._process.poll() is None

    def close(self) -> None:
        """Let it do its work now, and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * END_S)


if __name__ == "__main__":
    sys.stdin.buffer.read()  # until the other end is closed, which the kernel does for a process that is killed
    end(lambda: marked(sys.argv[1]))
