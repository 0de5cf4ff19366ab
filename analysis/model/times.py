"""The time of a step as what its estimate is made of: how much slower each part is than the roofline has it.

A predicted row says how long the card would take for its arithmetic, its memory traffic and its launches, were it to
reach its peaks. A measured step is taken to be these three, each times a factor of its own, or all times one: with few
lengths the one factor wins, with more the three. Errors are in proportion to the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.polynomial import Polynomial

from vramsweep.analysis.model.curves import Array, Kind
from vramsweep.analysis.model.estimate import SEED, Data, Posterior, estimate

PARTS = (("estimated_compute_s", "estimated_attention_s"), ("estimated_memory_s",), ("estimated_launch_s",))
CLOCK = 1e-3  # of a time: no step repeats more closely
KINDS = (Kind("one factor", ((3,),), 0.5), Kind("parts", ((0, 1, 2),), 0.5, rising=(0, 1, 2)))


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts at the predicted x, (n,) and (n, 3): linear between, a parabola beyond."""

    x: Array
    seconds: Array

    def features(self, x: Array) -> Array:
        """The parts and their sum at x, (n, 4)."""
        found = np.column_stack([self._one(x, column) for column in self.seconds.T])
        return np.column_stack([found, found.sum(axis=1)])

    def _one(self, x: Array, column: Array) -> Array:
        beyond = Polynomial.fit(self.x, column, min(2, len(self.x) - 1))(x)
        return np.where((x < self.x[0]) | (x > self.x[-1]), beyond, np.interp(x, self.x, column))


def parts(rows: pd.DataFrame, axis: str) -> Parts | None:
    """Of predicted rows of one batch (or length); None where a part is not known or there are fewer than three."""
    names = [name for part in PARTS for name in part]
    known = rows.dropna(subset=[axis, *names]).drop_duplicates(axis).sort_values(axis)
    if len(known) < 3 or known["world_size"].gt(1).any():
        return None
    seconds = np.column_stack([known[list(part)].to_numpy(float).sum(axis=1) for part in PARTS])
    return Parts(known[axis].to_numpy(float), seconds)


@dataclass(frozen=True)
class OfParts:
    """Step time from the parts and what was measured at x, y (n,) in seconds."""

    parts: Parts
    x: Array
    y: Array

    @cached_property
    def posterior(self) -> Posterior:
        """Of the factors."""
        resolution = CLOCK * float(self.y.min())
        return estimate(Data(self.x, self.parts.features(self.x), self.y, resolution, noises=("proportional",)), KINDS)

    def value(self, x: Array) -> Array:
        """The most probable time."""
        return self.posterior.value(x, self.parts.features(x))

    def draws(self, x: Array) -> tuple[Array, Array]:
        """Of the time and of a new run."""
        curve, noise = self.posterior.draws(x, self.parts.features(x))
        return curve, curve + noise * np.random.default_rng(SEED + 3).standard_normal(curve.shape)
