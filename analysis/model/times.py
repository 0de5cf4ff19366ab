"""Step time as a sum of parts of a roofline, each scaled by how much slower it is than the roofline.

A predicted row states how long the GPU would take at its peaks for arithmetic, memory traffic and launches. A measured
step is modelled as these three parts, times one common factor or a factor each. With few lengths the common factor
wins, with more the three. Errors are proportional to the time.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.polynomial import Polynomial

from vramsweep.analysis.model.curves import Array, read_kinds
from vramsweep.analysis.model.estimate import SEED, Data, Posterior, estimate

PARTS = (("estimated_compute_s", "estimated_attention_s"), ("estimated_memory_s",), ("estimated_launch_s",))
CLOCK = 1e-3  # share of a time: no step repeats more closely
KINDS = read_kinds("time")


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts at the predicted x, (n,) and (n, 3): linear between these x, a parabola beyond."""

    x: Array
    seconds: Array

    def features(self, x: Array) -> Array:
        """Return the parts and their sum at x, (n, 4)."""
        found = np.column_stack([self._one(x, column) for column in self.seconds.T])
        return np.column_stack([found, found.sum(axis=1)])

    def _one(self, x: Array, column: Array) -> Array:
        beyond = Polynomial.fit(self.x, column, min(2, len(self.x) - 1))(x)
        return np.where((x < self.x[0]) | (x > self.x[-1]), beyond, np.interp(x, self.x, column))


def parts(rows: pd.DataFrame, axis: str) -> Parts | None:
    """Return the parts of predicted rows of one batch (or length); None with several ranks or below three known x."""
    names = [name for part in PARTS for name in part]
    known = rows.dropna(subset=[axis, *names]).drop_duplicates(axis).sort_values(axis)
    if len(known) < 3 or known["world_size"].gt(1).any():
        return None
    seconds = np.column_stack([known[list(part)].to_numpy(float).sum(axis=1) for part in PARTS])
    return Parts(known[axis].to_numpy(float), seconds)


@dataclass(frozen=True)
class OfParts:
    """Predictor of step time in seconds, from the parts and the times y (n,) measured at x."""

    parts: Parts
    x: Array
    y: Array

    @cached_property
    def posterior(self) -> Posterior:
        """Posterior of the factors."""
        resolution = CLOCK * float(self.y.min())
        return estimate(Data(self.x, self.parts.features(self.x), self.y, resolution, noises=("proportional",)), KINDS)

    def value(self, x: Array) -> Array:
        """Return the most probable time at x, (n,)."""
        return self.posterior.value(x, self.parts.features(x))

    def draws(self, x: Array) -> tuple[Array, Array]:
        """Return draws of the time and of a new run's time, (draws, n) each."""
        curve, noise = self.posterior.draws(x, self.parts.features(x))
        return curve, curve + noise * np.random.default_rng(SEED + 3).standard_normal(curve.shape)
