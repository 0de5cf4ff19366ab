"""Observations of one metric, a model of one curve or of one per alignment class, and where observations leave it.

Reserved memory comes in blocks, and a layer's may vanish from one length to the next. No curve has a jump, so medians
of residuals before and after a length are compared. A jump stands out of all such differences, is more than 2 % of the
value, and has its two sides apart. Lengths, alone or in short runs, that go as far and return are wavering.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import ndimage

from vramsweep.analysis.data.groups import FREE
from vramsweep.analysis.data.metrics import Metric
from vramsweep.analysis.model.curves import NAMES, Array, Curve, Numbers
from vramsweep.harness.hardware.gpu_lookup import CONTEXT_BYTES

SEED = 20_240_917
Mask = np.ndarray[Any, np.dtype[np.bool_]]
# The x axes of curves; texts on a table's own axis have the words of lengths, which `own_axis.reword` replaces.
AXES = defaultdict(lambda: "sequence length", micro_batch="micro-batch", tokens="tokens")
UNITS = defaultdict(lambda: "tokens", micro_batch="samples")
NOUNS = defaultdict(
    lambda: ("length", "lengths"), micro_batch=("batch", "batches"), tokens=("token count", "token counts")
)
LEAST_JUMP = 0.02  # share of the value
FEWEST_LENGTHS = 40  # below which neither jumps nor wavering are looked for
WINDOW = 15  # lengths on each side, at most
ENDS = 8  # lengths on each side, at least
APART = 0.5  # share of the jump that must lie between the nearest quartiles of its two sides
MANY = 8  # wavering lengths; fewer are not reported
OUT = 5.0  # robust standard deviations (median absolute deviation, Hampel 1974)


@dataclass(frozen=True)
class Points:
    """Observations of one metric: x (tokens or samples) and y (the column's unit), both (n,), sorted by x.

    `rows` are their positions in the source frame. `bound_x` and `bound_y` are censored: at bound_x the value is at
    least bound_y. `bound_rows` are the positions of these. The last `retried` of them freed their cache and tried
    again; the others ran out of memory.
    """

    x: Array
    y: Array
    ids: tuple[str, ...]
    bound_x: Array
    bound_y: Array
    warnings: tuple[str, ...] = ()
    rows: Numbers | None = None
    bound_rows: Numbers | None = None
    retried: int = 0

    def averaged(self, most: int = 5000) -> Points:
        """Average y per x if there are more than `most` rows, so that a fit's cost depends on lengths alone."""
        if len(self.x) <= most:
            return self
        x, first = np.unique(self.x, return_index=True)
        means = np.asarray(pd.Series(self.y).groupby(self.x).mean(), dtype=float)
        note = f"{len(self.x):,} rows were averaged per length for the fit"
        rows = None if self.rows is None else self.rows[first]
        ids = tuple(self.ids[i] for i in first)
        return replace(self, x=x, y=means, ids=ids, rows=rows, warnings=(*self.warnings, note))

    def thinned(self, most: int) -> Points:
        """Return about `most` points, spread evenly with random offsets; both ends are always included."""
        if len(self.x) <= most:
            return self
        random = np.random.default_rng(SEED)
        at = np.floor((np.arange(most) + random.random(most)) * len(self.x) / most).astype(int)
        return self.taken(np.unique([0, *at, len(self.x) - 1]))

    def taken(self, at: Numbers) -> Points:
        """Return the points at these positions, with all bounds."""
        rows = None if self.rows is None else self.rows[at]
        return replace(self, x=self.x[at], y=self.y[at], ids=tuple(self.ids[i] for i in at), rows=rows)


@dataclass(frozen=True)
class Model:
    """One curve for all x, or one per alignment class: key True is x divisible by `modulus`, False the others."""

    curves: Mapping[bool, Curve]
    modulus: int | None = None

    @property
    def name(self) -> str:
        """Names of the kinds of curve, for tables."""
        kinds = dict.fromkeys(NAMES[curve.kind] for curve in self.curves.values())
        return " and ".join(kinds) + (f", per class of {self.modulus}" if self.modulus else "")

    @property
    def kind(self) -> str:
        """Kind of the first curve."""
        return next(iter(self.curves.values())).kind

    def predict(self, x: Array) -> Array:
        """Return y at x, both (n,)."""
        y = np.empty(len(x))
        for key, at in members(x, self.modulus).items():
            y[at] = self.curves[key].predict(x[at])
        return y


def members(x: Array, modulus: int | None) -> dict[bool, Mask]:
    """Return the mask of x (n,) for each alignment class; a null `modulus` makes one class of all."""
    if modulus is None:
        return {True: np.ones(len(x), dtype=bool)}
    aligned = np.asarray(x % modulus == 0)
    return {True: aligned, False: ~aligned}


def along(frame: pd.DataFrame, axis: str) -> Array:
    """Return each row's value on an axis of `AXES`, NaN where unknown; tokens are those of one micro-batch."""
    free = FREE.get(axis, FREE["seq_len"])
    return np.asarray(np.prod([frame[name].to_numpy(float, na_value=np.nan) for name in free], axis=0))


def observations(
    frame: pd.DataFrame, metric: Metric, start: float | None = None, stop: float | None = None, axis: str = "seq_len"
) -> Points:
    """Return the observations of one metric in rows of equal settings, `start <= x <= stop`; invent none.

    A row whose allocator emptied its cache and tried again (`alloc_retries`) wanted more than it reserved. It counts as
    a lower bound of quantities that the device's memory limits.
    """
    x = along(frame, axis)
    y = frame[metric.column].to_numpy(float, na_value=np.nan)
    outcome = frame["outcome"].astype("string")
    inside = np.isfinite(x) & (x >= (-np.inf if start is None else start)) & (x <= (np.inf if stop is None else stop))
    measured = inside & np.isfinite(y) & (outcome == "ok").to_numpy(bool, na_value=False)
    squeezed = np.zeros(len(frame), dtype=bool)
    if metric.limited and "alloc_retries" in frame:
        squeezed = measured & (frame["alloc_retries"].to_numpy(float, na_value=0.0) > 0)
    plain = np.flatnonzero(measured & ~squeezed)
    rows = plain[np.argsort(x[plain], kind="stable")]
    xs, ys = x[rows], y[rows]
    ids = tuple(frame["trial_id"].to_numpy()[rows].astype(str))
    warnings: list[str] = []
    if metric.memory and len(xs) and axis == "seq_len":
        repeats = pd.Series(ys).groupby(xs)
        spread = repeats.max() - repeats.min()
        if len(unequal := spread[spread > 0]):
            warnings.append(
                f"{metric.label} differs between repeats of {len(unequal)} length{'s' * (len(unequal) != 1)}, "
                f"by up to {metric.show(float(unequal.max()))} at {unequal.idxmax():,.0f} tokens; "
                "memory should repeat exactly"
            )
    if squeezed.any():
        n = int(squeezed.sum())
        warnings.append(
            f"{n} row{'s count as lower bounds' if n != 1 else ' counts as a lower bound'} of {metric.label}, because "
            "the device was nearly full and the allocator had to free its cache and retry"
        )
    failed = full = np.empty(0, dtype=np.int64)
    limit = allocator_limits(frame)
    if metric.limited:
        failed = np.flatnonzero(inside & (outcome == "oom").to_numpy(bool, na_value=False) & np.isfinite(limit))
        full = np.flatnonzero(squeezed)
    bound_rows = np.concatenate([failed, full])
    bound_y = np.concatenate([limit[failed], y[full]])
    return Points(xs, ys, ids, x[bound_rows], bound_y, tuple(warnings), rows, bound_rows, len(full))


def allocator_limits(frame: pd.DataFrame) -> Array:
    """Return the bytes that the allocator could use on each row's device; a row that ran out needed more.

    A simulated row states its limit. For a measured row it is the device's memory minus the CUDA context. A row without
    either (its worker died) gets the largest limit of the others; NaN if none has one.
    """
    total = frame["device_total_bytes"].to_numpy(float, na_value=np.nan) - CONTEXT_BYTES
    stated = frame["memory_limit_bytes"].to_numpy(float, na_value=np.nan)
    limit = np.where(np.isfinite(stated), stated, total)
    known = limit[np.isfinite(limit)]
    return np.where(np.isfinite(limit), limit, known.max() if len(known) else np.nan)


@dataclass(frozen=True)
class Jump:
    """A jump at `x`, the first length after it, by `size` (negative: a drop), in the unit of y."""

    x: float
    size: float


def jumps(x: Array, left: Array, y: Array, most: int = 4) -> list[Jump]:
    """Return the `most` largest jumps, in order of x, from the residuals `left` (n,) of y (n,) at ascending x (n,)."""
    different, first = np.unique(x, return_index=True)
    left, y = left[first], y[first]
    if len(different) < FEWEST_LENGTHS:
        return []
    window = min(WINDOW, len(different) // 6)
    places = np.arange(ENDS, len(different) - ENDS + 1)
    sizes = np.array([np.median(left[at : at + window]) - np.median(left[max(at - window, 0) : at]) for at in places])
    scale = 1.4826 * float(np.median(np.abs(sizes - np.median(sizes))))
    found: list[Jump] = []
    for at in np.argsort(-np.abs(sizes)):
        place, size = int(places[at]), float(sizes[at])
        if len(found) == most or abs(size) < max(OUT * scale, LEAST_JUMP * float(y[place])):
            break
        near = any(abs(np.searchsorted(different, one.x) - place) <= window for one in found)
        if not near and _apart(left, place, window, size):
            found.append(Jump(float(different[_sharpest(left, place, window, size)]), size))
    return sorted(found, key=lambda one: one.x)


@dataclass(frozen=True)
class Wavering:
    """`count` lengths from `start` to `stop` that lie off those around them, by a median `size` (unit of y)."""

    start: float
    stop: float
    count: int
    size: float


def wavering(x: Array, left: Array, y: Array) -> list[Wavering]:
    """Find runs of many single lengths off their neighbours' median; arguments as in `jumps`."""
    different, first = np.unique(x, return_index=True)
    left, y = left[first], y[first]
    if len(different) < FEWEST_LENGTHS:
        return []
    off = left - ndimage.median_filter(left, 2 * WINDOW + 1, mode="nearest")
    out = np.flatnonzero(np.abs(off) > np.maximum(OUT * 1.4826 * float(np.median(np.abs(off))), LEAST_JUMP * y))
    runs = np.split(out, np.flatnonzero(np.diff(out) > 6 * WINDOW) + 1)
    return [
        Wavering(float(different[run[0]]), float(different[run[-1]]), len(run), float(np.median(off[run])))
        for run in runs
        if len(run) >= MANY
    ]


def _apart(left: Array, place: int, window: int, size: float) -> bool:
    """Return whether three quarters of either side lie clear of three quarters of the other."""
    before, after = (np.sign(size) * side for side in (left[max(place - window, 0) : place], left[place:][:window]))
    return bool(np.percentile(after, 25) - np.percentile(before, 75) > APART * abs(size))


def _sharpest(left: Array, place: int, window: int, size: float) -> int:
    """Return the largest step of this sign within the window, because medians do not find a jump's exact length."""
    low, high = max(place - window // 2, 1), min(place + window // 2 + 1, len(left))
    steps = (left[low:high] - left[low - 1 : high - 1]) * np.sign(size)
    return low + int(np.argmax(steps))
