"""Killing processes for good: the orphans of an attempt, and those of a launcher that was killed itself.

A worker and its fork server die with their parent (PR_SET_PDEATHSIG). Processes that a trial has started do not: a
script's ranks, data loaders, daemons. All of them carry their launcher's mark in their environment. A guard process
waits for the launcher's end and kills all that carry its mark. If the guard is killed too, the next launcher in that
folder does so. Not covered: a process that has cleared its environment and left its session, once the launcher is dead.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vramsweep.harness.process.interpreter import build_command

MARK = "VRAMSWEEP_RUN"  # the variable that holds the mark
END_S = 10.0  # seconds that killed processes may take to end


class Process(NamedTuple):
    """The kernel's entry of a process: its parent, whether it has ended and only waits for its parent to notice, and
    its session."""

    parent: int
    ended: bool
    session: int


def list_processes() -> Iterator[tuple[int, Process]]:
    """Yield all processes of the machine by id, in one pass, the newest first. Source: proc_pid_stat(5)."""
    for pid in _pids():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()  # from the third field on
            threads = int(fields[17])  # the first may have ended while others run
            yield pid, Process(int(fields[1]), fields[0] in b"ZX" and threads < 2, int(fields[3]))


def processes_below(pids: Iterable[int], processes: Mapping[int, Process]) -> set[int]:
    """Return the descendants of some processes, all generations, including those that have ended."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, process in processes.items():
        children[process.parent].append(pid)
    found, parents = set[int](), list(pids)
    while parents:
        new = set(children[parents.pop()]) - found
        found |= new
        parents += new
    return found


def trees(*roots: int) -> list[set[int]]:
    """Return for each root the set of the root and its descendants."""
    processes = dict(list_processes())
    return [{root} | processes_below([root], processes) for root in roots]


def marked_processes(run: str) -> Iterator[tuple[int, bool]]:
    """Yield the processes that carry a launcher's mark, as far as this user may see; none of them has ended."""
    mark = f"{MARK}={run}".encode()
    for pid in _pids():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                yield pid, False


def end_processes(find: Callable[[], Iterable[tuple[int, bool]]], passes: int = 2) -> set[int]:
    """Kill the processes that `find` yields, each with whether it has ended. Stop after `passes` passes in a row that
    found none running and none new. Return those that are still there after END_S: they do not end, or fork for ever.

    Each is killed when it is found, again and again, because one that forks and ends faster than a pass would escape.
    """
    until = time.monotonic() + END_S
    tried: set[int] = set()
    quiet = 0
    while quiet < passes:
        found, running = set[int](), set[int]()
        for pid, ended in find():
            found.add(pid)
            if not ended:
                running.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until:
                return running or found
        new = found - tried
        if running and not new:  # the known ones only need time
            time.sleep(0.005)
        quiet = 0 if running or new else quiet + 1
        tried |= new
    return set()


def describe_stuck(pids: Iterable[int]) -> str:
    """Say why killed processes may still be there."""
    every = ", ".join(map(str, sorted(pids)))
    return f"killed, but still ran after {END_S:g} s (held by a driver, or forking endlessly): process {every}"


def end_marked(run: str) -> set[int]:
    """Kill the processes that carry a mark, in more passes, because one that forks and ends at once escapes many."""
    return end_processes(partial(marked_processes, run), passes=10)


def _pids() -> list[int]:
    """List all process ids, the newest first: of a process that forks and ends, the newest one is still there."""
    return sorted((int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()), reverse=True)


class Guard:
    """A process that kills what carries the mark `run` once this process has ended, however it ends."""

    def __init__(self, run: str) -> None:
        # in a session of its own, so that a terminal's Ctrl-C does not reach it
        command = build_command("vramsweep.harness.process.orphans", run)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self.pid = self._process.pid

    def alive(self) -> bool:
        """Return whether the guard still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Let the guard kill now, and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * END_S)


if __name__ == "__main__":
    sys.stdin.buffer.read()  # until the other end is closed; the kernel does that for a killed process
    end_marked(sys.argv[1])
