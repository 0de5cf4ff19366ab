"""Guard of the host's memory: it ends an attempt that takes all memory before the kernel ends another process.

The guard looks more often the less memory is left, and so catches an attempt that fills memory at the full speed of all
cores. A faster one meets the kernel's killer, which takes a worker before the launcher (runners/worker/worker.py).

Not covered: the device's memory (gpu_readiness.py), swap.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from vramsweep.harness.machine import host_memory
from vramsweep.harness.process.waiting import LOOK_S
from vramsweep.harness.rows.outcome import HostMemory

SHARE = 64  # almost none is left below 1/SHARE of the memory, within these bounds in bytes
LEAST, MOST = 256 << 20, 4 << 30
FILL = 2 << 30  # bytes/s at which a core touches fresh pages: 1 to 3 GiB/s are common
SOONEST_S = 0.02
_HELD = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)


class HostMemoryExhausted(Exception):
    """Almost no memory is left on the host."""

    def __init__(self, memory: HostMemory) -> None:
        super().__init__("almost no host memory is left")
        self.memory = memory


class HostMemoryGuard:
    """The guard of one attempt, from its beginning. `processes` lists its pids, `neighbours` those of each concurrent
    attempt. Only the attempt that holds most memory is ended."""

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
        """Return the seconds until the next look. Raises HostMemoryExhausted if the attempt is to be ended."""
        total, available = self._room()
        least = max(LEAST, min(MOST, total // SHARE))
        if available < least:
            used, own = total - available, resident_bytes(self._processes())
            if all(resident_bytes(others) <= own for others in self._neighbours()):
                raise HostMemoryExhausted(HostMemory(min(used, own), used, total, min(used, self._before)))
            return SOONEST_S
        return max(SOONEST_S, min(LOOK_S, (available - least) / (FILL * (os.cpu_count() or 1))))


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the bytes that processes hold apart from files. Shared and page-locked ones (CUDA's count as shared) count
    for each process that has them. Source: proc_pid_status(5), RssAnon and RssShmem."""
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            sizes = _HELD.findall(Path(f"/proc/{pid}/status").read_text())
            found += sum(int(size) for size in sizes) * 1024
    return found
