"""Before a trial: are its cards ours alone, and is their memory back from the trial before?

A driver frees a killed process's memory some time after the process has gone, and what a trial leaves behind it never
frees; the next trial would run out of memory sooner than on a card of its own. So the memory in use must be down at
the least that was seen on the card between trials of this sweep; else it is waited for, then said who holds it.

Not covered: what was there before the sweep began (the flag high_baseline, harness/rows/quality_flags.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from vramsweep.harness.machine import machine
from vramsweep.harness.messages.units import format_size

MIB, GIB = 1 << 20, 1 << 30
BACK_BYTES = 256 * MIB  # less than a CUDA context takes: one that is left behind is seen
PROCESSES_S = (0.2, 0.5, 1.0)  # between looks at processes: those of the last trial may take a moment to go
MEMORY_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)  # and at memory: a driver clears tens of GiB


@dataclass(frozen=True)
class GpuTaken:
    """Why a trial cannot have its cards now: other processes on them, or in words who holds memory that is not back."""

    processes: tuple[int, ...] = ()
    held: str | None = None


class Occupancy:
    """Remembers the least memory in use on each card, by uuid, when none of our trials ran."""

    def __init__(self) -> None:
        self._least: dict[str, int] = {}

    def taken(
        self, cards: Sequence[machine.Gpu], own: Callable[[], set[int]], sleep: Callable[[float], None]
    ) -> GpuTaken | None:
        """None once the cards are free; else, after waiting, why they are not. `own` are our processes' ids."""
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
        """The first card with more in use than before, if any; what it has at the least is remembered."""
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
        who = ", ".join(holders) or "no process that can be seen (another container's, or the driver's own)"
        return f"{more:.1f} GiB more than before are in use on GPU {card.index}, held by {who}"


def _computing(card: machine.Gpu) -> int:
    """Bytes in use on a card, without what only draws: a desktop's windows come and go."""
    assert card.memory_used is not None
    return card.memory_used - sum(one.bytes or 0 for one in machine.holders(card) if not one.computes)


def _holder(pid: int, size: int | None) -> str:
    name = ""
    with contextlib.suppress(psutil.Error):
        name = f" {psutil.Process(pid).name()}"
    return f"process {pid}{name}" + ("" if size is None else f" ({format_size(size)})")
