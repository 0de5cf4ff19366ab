"""What a fit is made from and what it makes: observations of one metric, and a model as one or two curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.metrics import Metric
from vramsweep.analysis.model.curves import NAMES, Array, Curve
from vramsweep.harness.gpus import CONTEXT_BYTES

Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Points:
    """Observations of one metric: x (tokens), y (the column's unit), shape (n,), sorted by x; ids of their rows.

    `bound_x` and `bound_y` are the censored ones: at bound_x the value is at least bound_y.
    """

    x: Array
    y: Array
    ids: tuple[str, ...]
    bound_x: Array
    bound_y: Array
    warnings: tuple[str, ...] = ()

    def averaged(self, most: int = 5000) -> Points:
        """The same with the mean of each x if there are more than `most` rows: fits then cost what the lengths cost."""
        if len(self.x) <= most:
            return self
        x, first = np.unique(self.x, return_index=True)
        means = np.asarray(pd.Series(self.y).groupby(self.x).mean(), dtype=float)
        note = f"{len(self.x):,} rows were averaged per length for the fit"
        return replace(self, x=x, y=means, ids=tuple(self.ids[i] for i in first), warnings=(*self.warnings, note))


@dataclass(frozen=True)
class Model:
    """One curve for all x, or one per alignment class: key True for x divisible by `modulus`, False for the others."""

    kind: str
    curves: Mapping[bool, Curve]
    modulus: int | None = None

    @property
    def name(self) -> str:
        """In words, for tables."""
        return NAMES[self.kind] + (f", per class of {self.modulus}" if self.modulus else "")

    @property
    def parameters(self) -> int:
        """How many numbers were fitted."""
        return sum(len(curve.parameters) for curve in self.curves.values())

    def members(self, x: Array) -> dict[bool, Mask]:
        """Which x belong to which curve."""
        if self.modulus is None:
            return {True: np.ones(len(x), dtype=bool)}
        aligned = np.asarray(x % self.modulus == 0)
        return {True: aligned, False: ~aligned}

    def predict(self, x: Array) -> Array:
        """y at x, both of shape (n,)."""
        y = np.empty(len(x))
        for key, at in self.members(x).items():
            y[at] = self.curves[key].predict(x[at])
        return y


def observations(
    frame: pd.DataFrame, metric: Metric, start: float | None = None, stop: float | None = None, axis: str = "seq_len"
) -> Points:
    """The observations of one metric in rows of equal settings, `start <= x <= stop`; invents none."""
    x = frame[axis].to_numpy(float, na_value=np.nan)
    y = frame[metric.column].to_numpy(float, na_value=np.nan)
    outcome = frame["outcome"].astype("string")
    inside = np.isfinite(x) & (x >= (start or -np.inf)) & (x <= (stop or np.inf))
    measured = inside & np.isfinite(y) & (outcome == "ok").to_numpy(bool, na_value=False)
    order = np.argsort(x[measured], kind="stable")
    xs, ys = x[measured][order], y[measured][order]
    ids = tuple(frame["trial_id"].to_numpy()[measured][order].astype(str))
    warnings: list[str] = []
    if metric.memory and len(xs):
        repeats = pd.Series(ys).groupby(xs)
        spread = repeats.max() - repeats.min()
        unequal = spread[spread > 0]
        if len(unequal):
            warnings.append(
                f"{metric.label} differs between repeats of {len(unequal)} length{'s' * (len(unequal) != 1)}, "
                f"by up to {metric.show(float(unequal.max()))} at {unequal.idxmax():,.0f} tokens; "
                "memory should repeat exactly"
            )
    bound_x = bound_y = np.empty(0)
    if metric.limited:
        limit = allocator_limits(frame)
        failed = inside & (outcome == "oom").to_numpy(bool, na_value=False) & np.isfinite(limit)
        bound_x, bound_y = x[failed], limit[failed]
    return Points(xs, ys, ids, bound_x, bound_y, tuple(warnings))


def allocator_limits(frame: pd.DataFrame) -> Array:
    """What the allocator could have at most on each row's device, in bytes: a row that ran out of memory needed more.

    A simulated row says it; of a measured one it is the device's memory less the CUDA context. A row that knows neither
    (a worker that died) ran where the others did; NaN if none knows.
    """
    total = frame["device_total_bytes"].to_numpy(float, na_value=np.nan) - CONTEXT_BYTES
    stated = frame["memory_limit_bytes"].to_numpy(float, na_value=np.nan)
    limit = np.where(np.isfinite(stated), stated, total)
    known = limit[np.isfinite(limit)]
    return np.where(np.isfinite(limit), limit, known.max() if len(known) else np.nan)
