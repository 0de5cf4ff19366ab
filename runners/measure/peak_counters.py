"""CUDA's peak counters for two readers in one process, neither of which sees the other's resets.

torch has one set of peaks per GPU, and a reset takes the peak from every reader. A script that logs
`max_memory_allocated()` and a meter that takes the peak of every step would falsify each other. The Trainer's
`skip_memory_metrics=False` and DeepSpeed's `see_memory_usage` reset the peaks too. This module keeps what a reset
throws away, once for each of the two readers.

    the script   torch.cuda.*, torch.accelerator.*, by whatever name   ->   functions of torch._C: ours, once installed
    the meter    `take`                                                ->   the functions that were there before

All of torch's Python calls end in these functions, so they are replaced there. The replacement costs nothing without
CUDA, and needs only torch. A script's process installs it before its first line (observer.py).

Not covered: `torch.cuda.memory_snapshot`, without peaks; other counters (only `reset_accumulated_memory_stats` resets).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

Stats = dict[str, Any]
Peaks = dict[tuple[str, ...], int]  # by the path of names to each
READ, RESET = "_cuda_memoryStats", "_cuda_resetPeakMemoryStats"
READS = (READ, "_accelerator_getDeviceStats")  # torch.accelerator has them since 2.9
RESETS = (RESET, "_accelerator_resetPeakStats")


class SharedPeaks:
    """The counters of every GPU, shared with a script that reads and resets them, from `install` to `uninstall`."""

    def __init__(self) -> None:
        self._taken = False  # a meter takes peaks
        self._ours: dict[int, Peaks] = {}  # by GPU: peaks since our last take, from before the script's resets
        self._theirs: dict[int, Peaks] = {}  # by GPU: peaks since the script's last reset, from before our resets
        self._undo: list[tuple[str, Any]] = []
        self._before: dict[int, Stats] = {}  # by GPU: statistics when `forget` was called

    def install(self) -> None:
        """Let the script read and reset through us from now on. A torch built without CUDA has nothing to share."""
        self._taken = hasattr(torch._C, READ)
        if self._undo or not self._taken:
            return
        self._read: Callable[[int], Stats] = getattr(torch._C, READ)
        self._reset: Callable[[int], None] = getattr(torch._C, RESET)
        for names, shared in ((READS, self._read_by), (RESETS, self._reset_by)):
            for name in names:
                if hasattr(torch._C, name):
                    self._undo.append((name, getattr(torch._C, name)))
                    setattr(torch._C, name, shared(getattr(torch._C, name)))

    def forget(self) -> None:
        """Exclude all until now, because an earlier training in this process made it and may have run out of memory."""
        if self._taken and torch.cuda.is_initialized():
            for card in range(torch.cuda.device_count()):
                self._before[card] = self.take(torch.device("cuda", card))

    def counted(self, device: torch.device, name: str) -> int:
        """Return one of the GPU's counters that only rise, such as `num_ooms`; since `forget`, if that was called."""
        card = _index(device)
        return int(self._read(card)[name]) - int(self._before.get(card, {}).get(name, 0))

    def uninstall(self) -> None:
        """Stop taking peaks. A script whose peaks we have reset still reads them here until its own next reset. Only
        then torch's counters are right for it."""
        self._taken = False
        self._ours.clear()
        self._before.clear()
        self._give_back()

    def take(self, device: torch.device) -> Stats:
        """Return the GPU's statistics, with the peaks since the last call."""
        card = _index(device)
        now = self._read(card)
        self._theirs[card] = _most(now, self._theirs.get(card, {}))
        self._reset(card)
        return _raised(now, self._ours.pop(card, {}))

    def _read_by(self, function: Callable[[int], Stats]) -> Callable[[int], Stats]:
        """Return the reading function that the script gets, with the peaks from before our resets."""
        return lambda card: _raised(function(card), self._theirs.get(card, {}))

    def _reset_by(self, function: Callable[[int], None]) -> Callable[[int], None]:
        """Return the resetting function that the script gets, which first keeps the meter's peaks."""

        def reset(card: int) -> None:
            if self._taken:
                self._ours[card] = _most(self._read(card), self._ours.get(card, {}))
            function(card)
            self._theirs.pop(card, None)
            self._give_back()

        return reset

    def _give_back(self) -> None:
        if not self._taken and not self._theirs:
            for name, function in self._undo:
                setattr(torch._C, name, function)
            self._undo.clear()


SHARED = SharedPeaks()  # of this process, as torch's counters are


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _peaks(stats: Stats, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    for name, value in stats.items():
        if isinstance(value, dict):
            yield from _peaks(value, (*path, name))
        elif name == "peak":
            yield (*path, name), value


def _most(stats: Stats, before: Peaks) -> Peaks:
    """Return every peak: the larger of its present and its earlier value."""
    return before | {path: max(peak, before.get(path, peak)) for path, peak in _peaks(stats)}


def _raised(stats: Stats, before: Peaks) -> Stats:
    """Raise peaks to earlier values that were larger, in place, because torch makes new statistics for each caller."""
    for path, peak in before.items():
        place = stats
        for name in path[:-1]:
            place = place.get(name, {})
        if "peak" in place:
            place["peak"] = max(place["peak"], peak)
    return stats
