"""How a sweep's cards are while it runs: use, memory and temperature as NVML has them, in a line.

A card is looked at every few seconds, by three cheap questions to NVML, which the launcher keeps open. Not covered:
what a row says of clocks and power (the workers read those), a CPU.
"""

from __future__ import annotations

import os
import time

from vramsweep.harness import machine

EVERY_S = 5.0  # whether more often would be seen in a step is not known: no card has been asked
GIB = 1 << 30


class CardState:
    """The cards that a sweep's trials see, until it is closed; without any, or without a driver, nothing is said."""

    def __init__(self) -> None:
        self._cards = [card for card in machine.visible_gpus(os.environ) if card.uuid is not None]
        self._present = bool(self._cards)
        self._looked, self._said = -EVERY_S, ""

    def text(self) -> str:
        """In words, as it was at the last look."""
        if self._present and time.monotonic() - self._looked >= EVERY_S:
            self._looked = time.monotonic()
            self._said = " · ".join(filter(None, [self._name(), *self._look()]))
        return self._said

    def close(self) -> None:
        """Nothing more is asked."""
        self._present = False

    def _name(self) -> str:
        names = [str(card.name) for card in self._cards]
        return f"{len(names)} x {names[0]}" if len(names) > 1 else names[0]

    def _look(self) -> list[str]:
        busy, used, heat = list[int](), list[int](), list[int]()
        for card in self._cards:
            rates, memory = machine.asked(card, "UtilizationRates"), machine.asked(card, "MemoryInfo")
            degrees = machine.asked(card, "Temperature", 0)
            busy += [] if rates is None else [int(rates.gpu)]
            used += [] if memory is None else [int(memory.used)]
            heat += [] if degrees is None else [int(degrees)]
        total = max((card.memory_total or 0 for card in self._cards), default=0)
        of = f" of {total / GIB:.1f}" if total else ""
        return [
            f"{_range(busy)} % busy" if busy else "",
            f"{_range([round(n / GIB, 1) for n in used])}{of} GiB used" if used else "",
            f"{_range(heat)} °C" if heat else "",
        ]


def _range(values: list[int] | list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
