"""The host's memory while an attempt runs: one that takes all of it is ended before the kernel ends somebody else.

Looked at the more often the less there is left, so that what fills it at the full speed of all cores is met in time.
What is faster still meets the kernel's killer, which takes a worker before the launcher (runners/worker/worker.py).

Not covered: the device's memory (gpu_occupancy.py), what is in swap.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from vramsweep.harness.machine import host_memory
from vramsweep.harness.process.waiting import LOOK_S
from vramsweep.harness.rows.outcome import HostMemory

SHARE = 64  # the part of the memory below which next to nothing is left, within these bounds in bytes
LEAST, MOST = 256 << 20, 4 << 30
FILL = 2 << 30  # bytes/s at which a core touches fresh pages: 1 to 3 GiB/s are common
SOONEST_S = 0.02
_HELD = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)


class HostMemoryExhausted(Exception):
    """Next to no memory is left on the host."""

    def __init__(self, memory: HostMemory) -> None:
        super().__init__("next to no host memory is left")
        self.memory = memory


class HostMemoryGuard:
    """Looks on behalf of one attempt, from its beginning; `processes` are the attempt's, `neighbours` those of each of
    the others that run beside it: of all of them only the one that holds most is ended."""

    def __init__(
        self,
        processes: Callable[[], Iterable[int]],
        neighbours: Callable[[], Iterable[Iterable[int]]] = tuple,
        room: Callable[[], host_memory.Room] | None = None,
    ) -> None:
        self._processes, self._neighbours, self._room = processes, neighbours, room or host_memory.memory_room
        total, available = self._room()
        self._before = total - available

    def look(self) -> float:
        """Seconds until the next look. Raises HostMemoryExhausted."""
        total, available = self._room()
        least = max(LEAST, min(MOST, total // SHARE))
        if available < least:
            used, own = total - available, resident_bytes(self._processes())
            if all(resident_bytes(others) <= own for others in self._neighbours()):
                raise HostMemoryExhausted(HostMemory(min(used, own), used, total, min(used, self._before)))
            return SOONEST_S
        return max(SOONEST_S, min(LOOK_S, (available - least) / (FILL * (os.cpu_count() or 1))))


def resident_bytes(pids: Iterable[int]) -> int:
    """Bytes that the processes hold beside files: their own, and those that are shared or page-locked (CUDA's count as
    shared), which count for each process that has them. Source: proc_pid_status(5), RssAnon and RssShmem."""
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            sizes = _HELD.findall(Path(f"/proc/{pid}/status").read_text())
            found += sum(int(size) for size in sizes) * 1024
    return found
