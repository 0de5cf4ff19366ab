"""Fits of one measured quantity along sequence length, batch or tokens: basis, curve and uncertainty.

A fit has one group of equal settings, one metric and one axis. Values between and beyond the observations come from the
first available of three bases:

- `prediction`: predicted rows of the same settings give the shape; a small residual is added to match measurements.
- `phases`: the rows know each phase's peak, over batch and length together (phases.py). Reserved, active and device
  memory are modelled on allocated (residual_model.py).
- `points`: the observations alone (pointwise_fit.py).

The first two are in predictors.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from vramsweep.analysis.data.groups import Group, groups
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import METRICS, Metric, Spread, spread
from vramsweep.analysis.model import observations, pointwise_fit
from vramsweep.analysis.model.curves import FEWEST, PLAIN, Array, Curve
from vramsweep.analysis.model.estimate import Posterior
from vramsweep.analysis.model.observations import UNITS, Jump, Mask, Model, Points, Wavering, along
from vramsweep.analysis.model.phases import PHASES
from vramsweep.analysis.model.pointwise_fit import FEW, Candidate, OfPoints
from vramsweep.analysis.model.predictors import Knows, Residual, Whole, Wholes, best_basis
from vramsweep.analysis.model.residual_model import Predictor, Unaligned, as_round, classes
from vramsweep.harness.search.fit_knowledge import PADDED_TO

LEVEL = 0.95
FEWEST_TIMES = 5  # lengths: two lines (four numbers) would fit fewer step times exactly
ROUNDED = 32 * 1024  # bytes that blocks of 512 may add at lengths less round than the measured: to 28 KiB, eager 40
HIDDEN = 0.1  # share of the peak: if the curve rises less over all points, they do not show activations yet


@dataclass(frozen=True)
class Prediction:
    """Values at x with 95 % intervals: of the curve (low, high) and of one new observation (new_low, new_high).

    `extrapolated` marks x outside the measured range; such a value must be shown as a guess. The upper end of an
    interval is infinite where nothing bounds it.
    """

    x: Array
    value: Array
    low: Array
    high: Array
    new_low: Array
    new_high: Array
    extrapolated: Mask


@dataclass(frozen=True)
class Fit:
    """A fit of one metric in one group.

    `chosen` is the most probable kind of curve on the points. Values and intervals are `predictor`'s, on the `basis`
    that `because` explains. `identified`: the kind is known, and every piece has at least as many lengths as numbers.
    `phases` has the phase with the peak on each piece of the first curve. The model takes no x above `positions`, if
    that is known. `only` is True if all measured or predicted lengths are multiples of 8, False if none is, else None.
    The curve ignores the points at `outliers`.
    """

    metric: Metric
    settings: Mapping[str, Any]
    label: str
    points: Points = field(repr=False)
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    why: str
    warnings: tuple[str, ...]
    predictor: Predictor = field(repr=False)
    posteriors: Mapping[bool, Posterior] = field(repr=False)
    basis: str = "points"
    because: str = ""
    identified: bool = True
    phases: tuple[str, ...] = ()
    samples_per_step: float | None = None
    axis: str = "seq_len"
    group: str = ""
    positions: int | None = None
    residual: Residual | None = field(default=None, repr=False)
    ranks: Spread | None = None
    jumps: tuple[Jump, ...] = ()
    wavering: tuple[Wavering, ...] = ()
    only: bool | None = None
    outliers: tuple[float, ...] = ()

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest measured x."""
        return float(self.points.x[0]), float(self.points.x[-1])

    @property
    def lengths(self) -> int:
        """Number of different x."""
        return len(np.unique(self.points.x))

    @property
    def shown(self) -> tuple[Candidate, ...]:
        """Candidates that are always shown: the line and the parabola through all points, then the chosen one."""
        plain = (one for one in self.candidates if one.model.kind in PLAIN and one.model.modulus is None)
        return (*(one for one in plain if one is not self.chosen), self.chosen)

    @property
    def one_sided(self) -> bool:
        """Return whether the curve has no upper bound beyond the points. Either a run did not fit that should have, or
        points are few, or the curve hardly rises. In the last case, memory that does not grow with length may still
        hide the memory that does."""
        if self._contradicted:
            return True
        if self.basis != "points" or not self.metric.memory:
            return False
        first, last = self.chosen.model.predict(np.array(self.range))
        return self.lengths < FEW or float(last - first) < HIDDEN * abs(float(last))

    @property
    def modulus(self) -> int | None:
        """Divisor of the lengths in one of two alignment classes; None if there is only one class."""
        if isinstance(self.predictor, Unaligned):
            return PADDED_TO if len(self.predictor.x) else None
        return self.chosen.model.modulus if self.basis == "points" else None

    @cached_property
    def intervals(self) -> dict[bool, dict[str, tuple[float, float]]]:
        """95 % interval of each parameter, by curve of the chosen model and name, given the model's kind."""
        curves = self.chosen.model.curves.items()
        return {key: pointwise_fit.intervals_of(self.posteriors[key], curve) for key, curve in curves}

    @property
    def ahead(self) -> Prediction:
        """Prediction of a new run at the largest measured x, and at twice that if the model takes so much."""
        high = self.range[1]
        return self.predict(np.array([high] if 2 * high > (self.positions or np.inf) else [high, 2 * high]))

    def value(self, x: Array) -> Array:
        """Return the most probable curve at x."""
        return self.predictor.value(x)

    def predict(self, x: ArrayLike) -> Prediction:
        """Return the curve at x (a number, a list, a Series, an array) with intervals, each in the shape of x."""
        shape, found = np.shape(x), self._predict(np.asarray(x, dtype=float).ravel())
        return found if len(shape) == 1 else Prediction(*(one.reshape(shape)[()] for one in astuple(found)))

    def _predict(self, x: Array) -> Prediction:
        curve, new = self.predictor.draws(x)
        tail = 50 * (1 - LEVEL)
        low, high = np.percentile(curve, [tail, 100 - tail], axis=0)
        new_low, new_high = np.percentile(new, [tail, 100 - tail], axis=0)
        first, last = self.range
        value = self.value(x)  # of the most probable kind; the interval is over all kinds
        low, high, new_low, new_high = (
            np.minimum(low, value), np.maximum(high, value), np.minimum(new_low, value), np.maximum(new_high, value)
        )  # fmt: skip
        low, new_low = np.maximum(low, 0), np.maximum(new_low, 0)
        blocks = self.metric.memory and not self.metric.limited and self.settings.get("device") != "cpu"
        if blocks and self.axis == "seq_len" and self.basis != "prediction":
            new_high = new_high + np.where(as_round(x, self.points.x), 0, ROUNDED)
        if self.one_sided:
            high, new_high = (np.where(x > last, np.inf, edge) for edge in (high, new_high))
        return Prediction(x, value, low, high, new_low, new_high, (x < first) | (x > last))

    @cached_property
    def _contradicted(self) -> bool:
        """Return whether under 5 % of new runs reach the bounds beyond the points, where runs did not fit."""
        ahead = self.points.bound_x > self.range[1]
        if not ahead.any():
            return False
        _, new = self.predictor.draws(self.points.bound_x[ahead])
        return bool(np.all(new >= self.points.bound_y[ahead], axis=1).mean() < 1 - LEVEL)

    @cached_property
    def next_x(self) -> int | None:
        """Return the x whose measurement would narrow the curve most; None if it is known to 2 % up to 1.5 times the
        longest. It is in the middle of a gap or beyond the last, never where a run did not fit. It is of the alignment
        class without rows, if there is one, and then given in any case."""
        different = np.unique(self.points.x)
        if len(different) < 2:
            return round(2 * float(different[-1]))
        middles = (different[1:] + different[:-1]) / 2
        step = 1 if self.only or (self.only is None and np.any(different % PADDED_TO)) else PADDED_TO
        inside = np.unique(np.round(middles / step) * step)
        out = self.points.bound_x[self.points.bound_x > different[-1]]  # did not fit: no need to measure them again
        beyond = min(1.5 * different[-1], (different[-1] + out.min(initial=np.inf)) / 2, self.positions or np.inf)
        asked = np.append(inside[~np.isin(inside, different)], np.floor(beyond / step) * step)
        asked = asked - (asked % PADDED_TO == 0) if self.only else asked
        asked = asked[(asked >= 1) & ~np.isin(asked, [*different, *self.points.bound_x])]
        if not len(asked):
            return None
        curve, _ = (self.predictor.free if isinstance(self.predictor, Unaligned) else self.predictor).draws(asked)
        wide = np.ptp(np.percentile(curve, [2.5, 97.5], axis=0), axis=0) / np.maximum(np.abs(self.value(asked)), 1e-300)
        if self.one_sided and asked[-1] > different[-1] and not (wide[:-1] > 0.02).any():
            return int(asked[-1])
        if wide.max() > 0.02 or self.only is None:
            return int(asked[int(np.argmax(wide))]) if wide.max() > 0.02 else None
        return int(asked[asked < different[-1]].max(initial=asked[0]))  # most activations are there; the curve is known


def fit_table(
    table: Table,
    metrics: Sequence[str] = tuple(METRICS),
    start: float | None = None,
    stop: float | None = None,
    limit: int = 200,
    found: Sequence[Group] | None = None,
    axis: str = "seq_len",
    beside: Callable[[Group], pd.DataFrame | None] | None = None,
) -> tuple[list[Fit], list[str]]:
    """Fit every group and metric with enough data; return the fits, and notes on what was not fitted.

    At most `limit` groups are fitted, those with most rows first. `found` has the groups, if they are known already.
    `beside` returns the predicted rows of a group's settings, of any batch and length.
    """
    fits: list[Fit] = []
    notes: list[str] = []
    short = few = 0
    found = groups(table, axis) if found is None else found
    if varied := sum(group.varies for group in found):
        found = [group for group in found if not group.varies]
        notes.append(f"{varied} group{'s' * (varied != 1)} of varying lengths not fitted, as seq_len only cuts samples")
    wholes = Wholes(table)
    for group in found[:limit]:
        frame = group.frame
        rows = beside(group) if beside else None
        knows = Knows(wholes.of(group).within(start, stop, axis), None if rows is None else Whole(rows))
        any_points = False
        for name in metrics:
            points = observations.observations(frame, METRICS[name], start, stop, axis)
            if len(points.x) == 0:
                continue
            any_points = True
            if axis == "seq_len" and not METRICS[name].memory and FEWEST <= len(np.unique(points.x)) < FEWEST_TIMES:
                few += 1
                continue
            try:
                fit = fit_points(points, METRICS[name], group, axis, knows)
            except np.linalg.LinAlgError:
                notes.append(f"{group.label}: {METRICS[name].label} cannot be fitted, as its values are too far apart")
                continue
            if fit is None:
                short += 1
            else:
                fits.append(fit)
        if not any_points:
            outcomes = ", ".join(f"{n} {o}" for o, n in frame["outcome"].value_counts().items())
            within = "" if start is stop is None else f" from {start or 0:,g} to {stop or np.inf:,g}"
            notes.append(f"{group.label}: no measured values to fit{within} ({outcomes})")
    if short:
        of = "lengths" if axis == "seq_len" else f"values of {axis}"
        notes.append(f"{short} curve{'s' * (short != 1)} with fewer than {FEWEST} different {of} not fitted")
    if few:
        of = f"curve{'s' * (few != 1)} of step time"
        notes.append(f"{few} {of} with fewer than {FEWEST_TIMES} different lengths not fitted")
    if len(found) > limit:
        notes.append(f"{len(found):,} groups of equal settings; only the {limit} with most rows were fitted")
    return fits, notes


def fit_points(
    points: Points, metric: Metric, group: Group | None = None, axis: str = "seq_len", knows: Knows | None = None
) -> Fit | None:
    """Fit these observations, with what `knows` adds; return None if there are too few different x."""
    points = points.averaged()
    if len(np.unique(points.x)) < FEWEST:
        return None
    aligned = axis == "seq_len" and metric.memory  # in other cases the padding of kernels does not matter
    apart = pointwise_fit.estimate_apart(points, metric) if aligned else None
    found, few = apart or (pointwise_fit.estimate_points(points, metric), None)
    candidates, chosen = pointwise_fit.candidates_of(points, found)
    predictor: Predictor = few or OfPoints(found.posteriors, found.modulus, chosen.model)
    identified = all(p.identified for p in found.posteriors.values()) and (few is None or few.alike < 1 - LEVEL)
    odd = np.isin(points.ids, found.outliers)
    if odd.any() and knows and knows.whole:
        frame = knows.whole.frame
        knows = replace(knows, whole=Whole(frame[~frame["trial_id"].isin(found.outliers)]))
    better = best_basis(points.taken(np.flatnonzero(~odd)), metric, group, axis, knows or Knows())
    if better.predictor is not None:
        predictor, identified = better.predictor, better.identified
    only = _only_class(points, better.basis, knows) if aligned else None
    if only is not None:
        predictor, identified = Unaligned(predictor, points.x), False
    left = points.y - chosen.model.predict(points.x)
    warnings = [*points.warnings, *_censoring_remarks(predictor, points, metric)]
    for x, off in zip(points.x[odd], left[odd], strict=True):
        warnings.append(
            f"the curve ignores an outlier at {x:,.0f} {UNITS[axis]}, {metric.show(abs(off))} "
            f"{'above' if off > 0 else 'below'} it; something else may have been measured there"
        )
    why = f"probability {chosen.probability:.0%} among all kinds of curve" + found.remark
    samples = _samples(group.ok("tokens_per_s", "step_median_s", "seq_len")) if group and not metric.memory else None
    return Fit(
        metric=metric,
        settings=group.settings if group else {},
        label=group.label if group else "all rows",
        points=points,
        candidates=tuple(candidates),
        chosen=chosen,
        why=why,
        warnings=tuple(warnings),
        predictor=predictor,
        posteriors=found.posteriors,
        basis=better.basis,
        because=better.because,
        identified=identified,
        phases=_phases(chosen.model, group, axis) if group and metric.memory else (),
        samples_per_step=samples if axis == "seq_len" else None,
        axis=axis,
        group=group.id if group else "",
        positions=group.positions if group and axis == "seq_len" else None,
        residual=better.residual,
        ranks=spread(group.frame, metric.column, along(group.frame, axis)) if group and metric.memory else None,
        only=only,
        outliers=tuple(points.x[odd].tolist()),
        jumps=tuple(observations.jumps(points.x, left, points.y)) if metric.limited else (),
        wavering=tuple(observations.wavering(points.x, left, points.y)) if metric.limited else (),
    )


def _only_class(points: Points, basis: str, knows: Knows | None) -> bool | None:
    """Return the only alignment class with rows, or None if both have rows; predictions count if they are the basis."""
    told = classes(points.x)
    if basis == "prediction" and knows and knows.predicted:
        told |= classes(knows.predicted.frame["seq_len"].dropna().to_numpy(float))
    return next(iter(told)) if len(told) == 1 else None


def _censoring_remarks(predictor: Predictor, points: Points, metric: Metric) -> list[str]:
    """Return a warning if the curve lies below some of the lower bounds; none if it does not."""
    if not len(points.bound_x):
        return []
    below = predictor.value(points.bound_x) < points.bound_y - metric.resolution
    if not below.any():
        return []
    return [
        f"the curve is below {int(below.sum())} of {len(below)} lower bounds (rows that ran out of memory, or whose "
        "allocator retried); something else may have used memory there, or it grows more than these points show"
    ]


def _samples(rows: pd.DataFrame) -> float | None:
    """Return sequences per step over all ranks, derived from the rows' speed; None if the rows disagree."""
    ratio = (rows["tokens_per_s"] * rows["step_median_s"] / rows["seq_len"]).to_numpy(float)
    if not len(ratio):
        return None
    middle = float(np.median(ratio))
    whole = round(middle)
    return float(whole) if whole >= 1 and abs(middle - whole) < 0.1 * whole else None


def _phases(model: Model, group: Group, axis: str) -> tuple[str, ...]:
    """Return, for each piece of the first curve, the phase with the largest peak in most rows; "" if unknown."""
    curve: Curve = next(iter(model.curves.values()))
    columns = [f"{name}_peak_allocated_bytes" for name in PHASES]
    rows = group.ok("seq_len", *columns[1:], also=(columns[0], "micro_batch"))
    peaks = rows[columns].to_numpy(float, na_value=-1.0)
    largest = np.argmax(peaks, axis=1) if len(rows) else np.empty(0, dtype=int)
    x = along(rows, axis)
    phases = []
    for start, stop, *_ in curve.lines():
        inside = largest[(x >= start) & (x <= stop)]
        phases.append(PHASES[int(np.bincount(inside).argmax())] if len(inside) else "")
    return tuple(phases)
