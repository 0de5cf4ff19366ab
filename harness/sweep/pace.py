"""The time left of a sweep, by what its rows, and the traces that predictions wait for, took so far."""

from __future__ import annotations

import time
from collections.abc import Callable

from vramsweep.harness.sweep.budget import PREDICTED_S


class Pace:
    """A counter of rows and traced families, and of the seconds by `clock` that went by with each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._heard = clock, clock()
        self._counted = self._heard  # when a row or a family was counted last
        self._rows = self._traced = self._families = 0
        self._rows_s = self._traces_s = self._family_s = 0.0
        self._tracing = False

    def count_row(self) -> None:
        """Count another row."""
        self._counted = self._pass_time()
        self._rows += 1

    def count_traced(self, traced: int, families: int, tracing: bool) -> None:
        """Note that `traced` of the `families` are traced, and whether another one is being traced."""
        now = self._pass_time()
        if traced < self._traced or not self._families:  # a worker has finished its imports and begins
            self._traces_s, self._rows_s, self._traced = 0.0, self._rows_s if self._rows else 0.0, 0
        if traced > self._traced:
            self._counted, self._traced, self._family_s = now, traced, self._traces_s / traced
        self._families, self._tracing = families, tracing

    def seconds_left(self, rows: int) -> float | None:
        """Return the seconds that `rows` more rows will take; None if unknown, or if the estimate turned out wrong.

        Before the first row, each is assumed to need `PREDICTED_S` if each has a trace, which takes most time.
        """
        untraced = self._families - self._traced
        if (untraced and not self._traced) or not (self._rows or (self._traced and rows <= self._families)):
            return None if rows else 0.0
        each = self._rows_s / self._rows if self._rows else PREDICTED_S
        left = rows * each + untraced * self._family_s - (self._clock() - self._counted)
        return left if left > 0 else None if rows else 0.0

    def _pass_time(self) -> float:
        now = self._clock()
        if self._tracing:
            self._traces_s += now - self._heard
        else:
            self._rows_s += now - self._heard
        self._heard = now
        return now
