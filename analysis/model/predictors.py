"""Predictors of values between and beyond the observations, where more is known than the observations.

Predicted rows of the same settings give the shape, and a small residual leads from them to what was measured. Or the
rows know each phase's peak, over batch and length together (phases.py). Reserved, active and device memory are then
modelled on allocated (residual_model.py). The first available is used, with the reason in words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import Group, groups
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import Metric
from vramsweep.analysis.model import residual_model
from vramsweep.analysis.model.curves import FEWEST, Array
from vramsweep.analysis.model.estimate import DRAWS, SEED
from vramsweep.analysis.model.observations import UNITS, Points, along, observations
from vramsweep.analysis.model.phases import PHASES, OfParts, Phases, fit_phases, parts
from vramsweep.analysis.model.pointwise_fit import curve_of, estimate_classes
from vramsweep.analysis.model.residual_model import Bounded, Excess, Largest, Predictor, Standing

MOST_ROWS = 400  # of a whole, enough for its phases because they are exact


@dataclass(frozen=True)
class Residual:
    """Measured next to predicted: the prediction, and the excess over it. If phases are known, the excess is that of
    the phase which makes the peak at the longest x."""

    predicted: Predictor
    excess: Excess


@dataclass(frozen=True)
class Whole:
    """Rows whose settings are equal except batch and length."""

    frame: pd.DataFrame = field(repr=False)

    def within(self, start: float | None, stop: float | None, axis: str) -> Whole:
        """Return only the rows with `start <= x <= stop`."""
        if start is None and stop is None:
            return self
        x = along(self.frame, axis)
        low, high = -np.inf if start is None else start, np.inf if stop is None else stop
        return Whole(self.frame[(x >= low) & (x <= high)])

    @cached_property
    def phases(self) -> Phases | None:
        """Model of the phases; None if some phase is unknown."""
        frame = self.frame
        if len(frame) > MOST_ROWS:
            frame = frame.iloc[np.unique(np.linspace(0, len(frame) - 1, MOST_ROWS).astype(int))]
        return fit_phases(frame)


class Wholes:
    """The whole that each group of a table is part of; each is built once."""

    def __init__(self, table: Table) -> None:
        self._of_row: dict[int, Whole] = {}
        for group in groups(table, "tokens"):
            whole = Whole(group.frame.sort_values(["micro_batch", "seq_len"]))
            self._of_row |= dict.fromkeys((int(row) for row in group.rows), whole)

    def of(self, group: Group) -> Whole:
        """Return the whole of a group of the same table."""
        return self._of_row[int(group.rows[0])]


@dataclass(frozen=True)
class Knows:
    """Knowledge of a group in addition to its points. `whole` are rows of its settings at any batch and length, with
    their phases if known. `predicted` are predicted rows of this kind."""

    whole: Whole | None = None
    predicted: Whole | None = None

    @property
    def phases(self) -> Phases | None:
        """Model of the phases of the group's own rows, built on first use."""
        return self.whole.phases if self.whole else None


@dataclass(frozen=True)
class OfPhases:
    """Predictor from phases: at one batch along length, at one length along batch, or along tokens (of one sample)."""

    phases: Phases
    axis: str
    other: float

    def value(self, x: Array) -> Array:
        """Return the most probable peak of the largest phase at x, (n,)."""
        return self.phases.value(*self._where(x))

    def draws(self, x: Array) -> tuple[Array, Array]:
        """Return draws of the largest phase's peak and of a new run's, (draws, n) each."""
        return self.phases.draws(*self._where(x))

    def of(self, name: str, x: Array) -> Array:
        """Return the most probable peak of one phase."""
        return self.phases.of(name, *self._where(x))

    def largest(self, x: Array) -> list[str]:
        """Return the phase that makes the peak at each x."""
        return self.phases.largest(*self._where(x))

    def _where(self, x: Array) -> tuple[Array, Array]:
        other = np.full(len(x), self.other)
        return (x, other) if self.axis == "micro_batch" else (other, x)


@dataclass(frozen=True)
class Predicted:
    """Predictor from predicted rows; beyond them it follows `curve`. `phases` are those of the rows, if known."""

    x: Array
    y: Array
    curve: Callable[[Array], Array]
    phases: OfPhases | None = None

    def value(self, x: Array) -> Array:
        """Interpolate linearly between rows; beyond them follow the curve's shape from the last row on."""
        edge = np.clip(x, self.x[0], self.x[-1])
        return np.asarray(np.interp(edge, self.x, self.y) + self.curve(x) - self.curve(edge))

    def unseen(self, x: Array, seen: Array) -> Array:
        """Return what runs at `seen` leave open at other x: the difference from the nearest of them. It is all of the
        value where a phase makes the peak that makes it at none of them."""
        more = np.abs(self.value(x)[:, None] - self.value(seen)).min(axis=1)
        if self.phases is None:
            return np.asarray(more)
        there = set(self.phases.largest(seen))
        return np.where([name in there for name in self.phases.largest(x)], more, self.value(x))

    @cached_property
    def _errors(self) -> Array:
        """Interpolation errors: inner rows minus the line between their neighbours."""
        x, y = self.x, self.y
        between = y[:-2] + (y[2:] - y[:-2]) * (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
        return y[1:-1] - between

    def draws(self, x: Array) -> tuple[Array, Array]:
        """Return the prediction without noise at predicted x, because the residual model carries its error. Elsewhere
        add an interpolation error."""
        random = np.random.default_rng(SEED + 4)
        missed = random.choice(self._errors, (DRAWS, len(x))) * random.choice([-1.0, 1.0], (DRAWS, len(x)))
        value = self.value(x) + np.where(np.isin(x, self.x), 0.0, missed)
        return value, value


@dataclass(frozen=True)
class Better:
    """The basis that tells more than the points, if any, and in words why that one and no better one."""

    because: str
    basis: str = "points"
    predictor: Predictor | None = None
    identified: bool = False
    residual: Residual | None = None


def best_basis(points: Points, metric: Metric, group: Group | None, axis: str, knows: Knows) -> Better:
    """Choose what a fit is based on: predicted rows, phases, or its points alone."""
    if group is None or points.rows is None or (knows.predicted is None and knows.phases is None):
        return Better("no prediction has the same settings, and no peaks by phase are known of such rows")
    if axis == "tokens":
        return Better("along tokens, rows of several batches and lengths share one curve")
    across = "micro_batch" if axis == "seq_len" else "seq_len"
    other = group.take(across)[across].to_numpy(float, na_value=np.nan)
    if not np.isfinite(other).all():
        return Better(f"{across} is unknown in some of these rows")
    per_x = float(other[0])
    why = "no prediction has the same settings"
    if knows.predicted is not None:
        same = knows.predicted.frame[knows.predicted.frame[across].eq(per_x).fillna(False)]
        own = group.frame.iloc[points.rows]
        found = _on_prediction(points, own, metric, axis, per_x, replace(knows.predicted, frame=same), knows.predicted)
        if found is not None:
            return found
        count = observations(same, metric, axis=axis).x if metric.memory else same[axis].dropna().unique()
        why = f"{len(count)} predicted rows at {across} {per_x:g} have this value, and {FEWEST} are needed"
    if not metric.memory:
        return Better(f"{why}, and peaks of phases do not give times")
    if group.resident and metric.column != "peak_allocated_bytes":
        return Better(f"{why}, and peaks of phases do not give a resident set")
    return _on_phases(points, metric, group, axis, per_x, knows.phases, why)


def _on_prediction(
    points: Points, own: pd.DataFrame, metric: Metric, axis: str, per_x: float, same: Whole, whole: Whole
) -> Better | None:
    """Fit what `own` rows measured on predicted rows: `same` of this batch (or length), `whole` of all. None with too
    few."""
    if not metric.memory:
        if (found_parts := parts(same.frame, axis)) is None:
            return None
        timed = OfParts(found_parts, points.x, points.y)
        return Better(_these(found_parts.x, axis), "prediction", timed, timed.posterior.identified)
    phases = None if whole.phases is None else OfPhases(whole.phases, axis, per_x)
    if (base := _predicted(same, phases, metric, axis)) is None:
        return None
    parts_of_it = _each_phase(points, own, same, phases, metric, axis, per_x) if phases else ()
    parts_of_it = parts_of_it or _above(points.x, [(points.y, base)], metric, per_x)
    at = np.append(np.unique(points.x), 2 * points.x[-1])
    most = np.argmax([part.value(at) for part in parts_of_it], axis=0)
    level = [float(np.ptp(part.base.value(at))) < 1e-3 * float(base.value(at).max()) for part in parts_of_it]
    identified = all(level[i] or parts_of_it[i].excess.posterior.identified for i in set(most))  # kinds agree on levels
    predictor = Bounded(Largest(parts_of_it), points.bound_x, points.bound_y)
    residual = Residual(Largest(tuple(part.base for part in parts_of_it)), parts_of_it[most[-2]].excess)
    return Better(_these(base.x, axis), "prediction", predictor, identified, residual)


def _predicted(same: Whole, phases: OfPhases | None, metric: Metric, axis: str) -> Predicted | None:
    """Return the predicted rows of this batch (or length) as a base; None with fewer than three."""
    own = observations(same.frame, metric, axis=axis)
    known = own.y > 0
    own = replace(own, x=own.x[known], y=own.y[known])
    x, first = np.unique(own.x, return_index=True)
    if len(x) < FEWEST:
        return None
    if phases is not None and metric.column == "peak_allocated_bytes":
        return Predicted(x, own.y[first], phases.value, phases)
    curve = curve_of(estimate_classes(own, metric)[True])
    return Predicted(x, own.y[first], curve.predict, phases)


def _above(x: Array, on: Sequence[tuple[Array, Predicted]], metric: Metric, per_x: float) -> tuple[Standing, ...]:
    """Return measured values at x, each modelled on its prediction."""
    found = residual_model.excesses(
        x * per_x, [(y, base.value(x)) for y, base in on], metric.resolution, residual_model.RESIDUAL, small=True
    )
    seen = np.unique(x)
    return tuple(
        Standing(base, over, per_x, False, partial(base.unseen, seen=seen))
        for (_, base), over in zip(on, found, strict=True)
    )


def _each_phase(
    points: Points, own: pd.DataFrame, same: Whole, phases: OfPhases, metric: Metric, axis: str, per_x: float
) -> tuple[Standing, ...]:
    """Model each phase on its own prediction, if both sides know all that make the peak. One phase may be off by more
    than another, and a few rows show that of each. Return () if they do not know them."""
    if metric.column != "peak_allocated_bytes":
        return ()
    told = {name: f"{name}_peak_allocated_bytes" for name in PHASES}
    both = [c for c in told.values() if own[c].gt(0).fillna(False).all() and same.frame[c].gt(0).fillna(False).all()]
    peaks = own[both].to_numpy(float)
    if not {told[name] for name in PHASES[1:]} <= set(both) or np.any(peaks.max(axis=1) < points.y - metric.resolution):
        return ()
    found = []
    for (name, column), y in zip(((n, c) for n, c in told.items() if c in both), peaks.T, strict=True):
        if name not in phases.phases.posteriors:
            return ()
        own_points = observations(same.frame, replace(metric, column=column), axis=axis)
        x, first = np.unique(own_points.x, return_index=True)
        found.append((y, Predicted(x, own_points.y[first], partial(phases.of, name))))
    return _above(points.x, found, metric, per_x)


def _these(x: Array, axis: str) -> str:
    return f"{len(x)} of them, {x.min():,.0f} to {x.max():,.0f} {UNITS[axis]}"


def _on_phases(
    points: Points, metric: Metric, group: Group, axis: str, per_x: float, peaks: Phases | None, why: str
) -> Better:
    """Use the phases' peaks as the basis, if known; `why` is the reason for nothing better."""
    if peaks is None:
        return Better(f"{why}, and the peaks of the phases are unknown")
    phases = OfPhases(peaks, axis, per_x)
    known = peaks.identified(*phases._where(np.unique(points.x)))
    if metric.column == "peak_allocated_bytes":
        return Better(why, "phases", phases, known)
    if metric.above is None:
        return Better(f"{why}, and peaks of phases do not give it")
    base = group.take(metric.above)[metric.above].to_numpy(float, na_value=np.nan)[points.rows]
    if not (base > 0).all():
        return Better(f"{why}, and {metric.above} is unknown in some rows")
    (over,) = residual_model.excesses(points.x * per_x, [(points.y, base)], metric.resolution, residual_model.OVERHEAD)
    bounded = Bounded(Standing(phases, over, per_x, True), points.bound_x, points.bound_y)
    return Better(why, "phases", bounded, known and over.posterior.identified)
