"""Two readers of CUDA's peak counters in one process, neither of which sees the other's resets.

torch has one set of peaks, and whoever resets it takes the peak from everybody else: a script that logs
`max_memory_allocated()` and a meter that takes the peak of every step would falsify one another (so do the Trainer's
`skip_memory_metrics=False` and DeepSpeed's `see_memory_usage`, which reset them, too). What a reset throws away is kept
here, once for each of the two.

Not covered: `torch.cuda.memory_snapshot`, which has no peaks; counters other than peaks, which nobody resets but by
`reset_accumulated_memory_stats`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from vramsweep.runners.instruments import COUNTERS, CudaMemory, Peaks

Stats = dict[str, Any]


class SharedCudaMemory(CudaMemory):
    """CudaMemory beside a script that reads and resets the same counters, from `install` to `uninstall`."""

    def __init__(self) -> None:
        super().__init__()
        self._ours: Stats = {}  # peaks since our last take, of before resets of the script's
        self._theirs: Stats = {}  # peaks since the script's last reset, of before resets of ours
        memory = torch.cuda.memory
        self._read: Callable[..., Stats] = memory.memory_stats_as_nested_dict
        self._reset: Callable[..., None] = memory.reset_peak_memory_stats
        self._patches = [
            mock.patch.object(place, name, function)
            for name, function in (
                ("memory_stats_as_nested_dict", self._read_for_script),
                ("reset_peak_memory_stats", self._reset_for_script),
            )
            for place in (memory, torch.cuda)
            if hasattr(place, name)
        ]

    def install(self) -> None:
        """From now on the script reads and resets through us."""
        for patch in self._patches:
            patch.start()

    def uninstall(self) -> None:
        """Everything is as it was, but for peaks that our last take has reset."""
        for patch in reversed(self._patches):
            patch.stop()

    def take(self) -> Peaks:
        now = self._read()
        stats = _larger(now, self._ours)
        self._ours, self._theirs = {}, _larger(now, self._theirs)
        self._reset()
        self.held = now["allocated_bytes"]["all"]["current"]
        return {c: stats[f"{c}_bytes"]["all"]["peak"] if c in self.counters else None for c in COUNTERS}

    def _read_for_script(self, device: Any = None) -> Stats:
        now = self._read(device)
        return _larger(now, self._theirs) if _is_current(device) else now

    def _reset_for_script(self, device: Any = None) -> None:
        if _is_current(device):
            self._ours, self._theirs = _larger(self._read(), self._ours), {}
        self._reset(device)


def _is_current(device: Any) -> bool:
    """Whether it is the card that we look at, too: a rank has one."""
    if device is None:
        return True
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return place.index is None or place.index == torch.cuda.current_device()


def _larger(stats: Stats, before: Stats) -> Stats:
    """The same statistics with every peak that was larger before."""
    found = copy.deepcopy(stats)
    for name, pools in before.items():
        for pool, values in pools.items() if isinstance(pools, dict) else ():
            there = found.get(name, {}).get(pool)
            if isinstance(there, dict) and isinstance(values, dict) and "peak" in values:
                there["peak"] = max(there["peak"], values["peak"])
    return found
