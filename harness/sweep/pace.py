"""How long the rest of a sweep takes, by what its traces and its rows took so far: predictions wait for traces."""

from __future__ import annotations

import time
from collections.abc import Callable

from vramsweep.harness.sweep.budget import PREDICTED_S


class Pace:
    """Counts rows and traces, and the seconds that each took, by `clock`. All that runs while something is traced goes
    by as tracing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seen = clock, clock()
        self._rows = self._traced = self._traces = 0
        self._later: int | None = 0
        self._rows_s = self._traces_s = 0.0

    def count_row(self) -> None:
        """Another row is there."""
        self._pass_time()
        self._rows += 1

    def count_traces(self, done: int, total: int, later: int | None) -> None:
        """So many of `total` traces are made, and about `later` more will be asked for; None if nobody knows."""
        self._pass_time()
        if not self._traces or total < self._traces:  # a worker has imported what it needs, and begins
            self._traces_s, self._rows_s = 0.0, self._rows_s if self._rows else 0.0
        self._traced, self._traces, self._later = done, total, later

    def seconds_left(self, rows: int) -> float | None:
        """How long so many more rows will take; None where that is not known."""
        self._pass_time()
        traces = None if self._later is None else self._traces - self._traced + self._later
        if traces is None or (traces and not self._traced):
            return None
        each = self._rows_s / self._rows if self._rows else None
        if each is None and self._traced and rows <= self._traces:  # a trace for each, which takes most of its time
            each = PREDICTED_S
        if each is None:
            return None
        return rows * each + (traces * self._traces_s / self._traced if traces else 0.0)

    def _pass_time(self) -> None:
        now = self._clock()
        spent, self._seen = now - self._seen, now
        if self._traced < self._traces:
            self._traces_s += spent
        else:
            self._rows_s += spent
