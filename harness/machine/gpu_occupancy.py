"""The check before a trial that its GPUs are ours alone, and that they have the last trial's memory back.

A driver frees a killed process's memory some time after the process has gone, and never frees that of an orphan. The
next trial would run out of memory too early. So the memory in use must be down to the least seen on the GPU between
trials of this sweep. Otherwise we wait for it, then report which processes hold it.

Memory in use before the sweep began is the flag high_baseline's (harness/rows/quality_flags.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from vramsweep.harness.machine import machine
from vramsweep.harness.messages.units import format_size

MIB, GIB = 1 << 20, 1 << 30
BACK_BYTES = 256 * MIB  # less than a CUDA context takes, so that an orphan's is noticed
PROCESSES_S = (0.2, 0.5, 1.0)  # between checks of processes, because those of the last trial may take a moment to end
MEMORY_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)  # and of memory, because a driver clears tens of GiB


@dataclass(frozen=True)
class GpuTaken:
    """Why a trial cannot have its GPUs now: ids of other processes there, or a text on who holds their memory."""

    processes: tuple[int, ...] = ()
    held: str | None = None


class Occupancy:
    """The least memory in use on each GPU while none of our trials ran, by uuid, and a wait until it is back there."""

    def __init__(self) -> None:
        self._least: dict[str, int] = {}

    def taken(
        self, cards: Sequence[machine.Gpu], own: Callable[[], set[int]], sleep: Callable[[float], None]
    ) -> GpuTaken | None:
        """Wait until the GPUs are free. Return None, or why they are not. `own` returns our processes' ids."""
        if not cards:
            return None
        waits = iter(PROCESSES_S)
        while seen := [pid for card in machine.again(cards) for pid in card.processes or ()]:
            ours = own()
            if not (foreign := tuple(pid for pid in seen if pid not in ours)):
                break
            wait = next(waits, None)
            if wait is None:
                return GpuTaken(processes=foreign)
            sleep(wait)
        waits = iter(MEMORY_S)
        while (card := self._not_back(machine.again(cards))) is not None:
            wait = next(waits, None)
            if wait is None:
                return GpuTaken(held=self._said(card))
            sleep(wait)
        return None

    def _not_back(self, cards: Sequence[machine.Gpu]) -> machine.Gpu | None:
        """Return the first GPU with more memory in use than before, if any; update the least seen on each."""
        for card in cards:
            if card.uuid is None or card.memory_used is None:
                continue
            used = _computing(card)
            least = self._least[card.uuid] = min(used, self._least.get(card.uuid, used))
            if used > least + BACK_BYTES:
                return card
        return None

    def _said(self, card: machine.Gpu) -> str:
        assert card.memory_used is not None and card.uuid is not None
        more = (_computing(card) - self._least[card.uuid]) / GIB
        holders = [_holder(one.pid, one.bytes) for one in machine.holders(card) if one.computes]
        who = ", ".join(holders) or "no visible process (one in another container, or the driver itself)"
        return f"{more:.1f} GiB more than before are in use on GPU {card.index}, held by {who}"


def _computing(card: machine.Gpu) -> int:
    """Return the bytes in use on a GPU, without processes that only draw, because a desktop's windows come and go."""
    assert card.memory_used is not None
    return card.memory_used - sum(one.bytes or 0 for one in machine.holders(card) if not one.computes)


def _holder(pid: int, size: int | None) -> str:
    name = ""
    with contextlib.suppress(psutil.Error):
        name = f" {psutil.Process(pid).name()}"
    return f"process {pid}{name}" + ("" if size is None else f" ({format_size(size)})")
