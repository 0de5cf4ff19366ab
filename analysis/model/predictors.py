"""What values between and beyond the observations rest on, where something tells more than the observations do.

Predicted rows of the same settings have the shape, and what was measured stands on it by a small residual; or the rows
know each phase's peak, over batch and length together (phases.py), and reserved, active and device memory stand on
allocated (residual_model.py). The first that there is is taken, with the reason in words.
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
from vramsweep.analysis.model.phases import PHASES, Phases, fit_phases
from vramsweep.analysis.model.pointwise_fit import curve_of, estimate_classes
from vramsweep.analysis.model.residual_model import Bounded, Excess, Largest, Predictor, Standing
from vramsweep.analysis.model.times import OfParts, parts

MOST_ROWS = 400  # of a whole, for its phases: they are exact
BASES = {
    "prediction": "on predicted rows of the same settings, and what was measured above or below them",
    "phases": "on the peak of each phase, over batch and length together",
    "points": "on these points alone",
}


@dataclass(frozen=True)
class Residual:
    """What was measured beside what was predicted: the prediction, and the excess over it, of the phase that makes the
    peak at the longest where phases are known."""

    predicted: Predictor
    excess: Excess


@dataclass(frozen=True)
class Whole:
    """Rows of equal settings but for batch and length."""

    frame: pd.DataFrame = field(repr=False)

    def within(self, start: float | None, stop: float | None, axis: str) -> Whole:
        """Only rows with `start <= x <= stop`."""
        if start is None and stop is None:
            return self
        x = along(self.frame, axis)
        low, high = -np.inf if start is None else start, np.inf if stop is None else stop
        return Whole(self.frame[(x >= low) & (x <= high)])

    @cached_property
    def phases(self) -> Phases | None:
        """The phases' model; None where some phase is not known."""
        frame = self.frame
        if len(frame) > MOST_ROWS:
            frame = frame.iloc[np.unique(np.linspace(0, len(frame) - 1, MOST_ROWS).astype(int))]
        return fit_phases(frame)


class Wholes:
    """The whole that each group of a table is part of; each is made once."""

    def __init__(self, table: Table) -> None:
        self._of_row: dict[int, Whole] = {}
        for group in groups(table, "tokens"):
            whole = Whole(group.frame.sort_values(["micro_batch", "seq_len"]))
            self._of_row |= dict.fromkeys((int(row) for row in group.rows), whole)

    def of(self, group: Group) -> Whole:
        """The whole of a group of the same table."""
        return self._of_row[int(group.rows[0])]


@dataclass(frozen=True)
class Knows:
    """What else there is to a group's points. `whole` are rows of its settings at any batch and length, with their
    phases if those are known; `predicted` the same of predicted rows."""

    whole: Whole | None = None
    predicted: Whole | None = None

    @property
    def phases(self) -> Phases | None:
        """Of the group's own rows; made when first asked for."""
        return self.whole.phases if self.whole else None


@dataclass(frozen=True)
class OfPhases:
    """Phases at one batch along length, at one length along batch, or along tokens (then of one sample)."""

    phases: Phases
    axis: str
    other: float

    def value(self, x: Array) -> Array:
        """The largest phase."""
        return self.phases.value(*self._where(x))

    def draws(self, x: Array) -> tuple[Array, Array]:
        """The largest phase, drawn."""
        return self.phases.draws(*self._where(x))

    def of(self, name: str, x: Array) -> Array:
        """The most probable peak of one phase."""
        return self.phases.of(name, *self._where(x))

    def largest(self, x: Array) -> list[str]:
        """The phase that makes the peak, for each."""
        return self.phases.largest(*self._where(x))

    def _where(self, x: Array) -> tuple[Array, Array]:
        other = np.full(len(x), self.other)
        return (x, other) if self.axis == "micro_batch" else (other, x)


@dataclass(frozen=True)
class Predicted:
    """Predicted rows: as they are, and beyond them as `curve` has it. `phases` are theirs, if known."""

    x: Array
    y: Array
    curve: Callable[[Array], Array]
    phases: OfPhases | None = None

    def value(self, x: Array) -> Array:
        """Linear between rows; beyond them the curve's shape from the last row on."""
        edge = np.clip(x, self.x[0], self.x[-1])
        return np.asarray(np.interp(edge, self.x, self.y) + self.curve(x) - self.curve(edge))

    def unseen(self, x: Array, seen: Array) -> Array:
        """What runs at these other x do not tell of it: what it differs by from the nearest of them, and all where a
        phase makes the peak that made it at none of them."""
        more = np.abs(self.value(x)[:, None] - self.value(seen)).min(axis=1)
        if self.phases is None:
            return np.asarray(more)
        there = set(self.phases.largest(seen))
        return np.where([name in there for name in self.phases.largest(x)], more, self.value(x))

    @cached_property
    def _errors(self) -> Array:
        """What interpolation misses: each inner row against the line between its neighbours."""
        x, y = self.x, self.y
        between = y[:-2] + (y[2:] - y[:-2]) * (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
        return y[1:-1] - between

    def draws(self, x: Array) -> tuple[Array, Array]:
        """At a predicted x the prediction, which is not drawn: how far off it is is the residual's. Elsewhere with what
        interpolation misses."""
        random = np.random.default_rng(SEED + 4)
        missed = random.choice(self._errors, (DRAWS, len(x))) * random.choice([-1.0, 1.0], (DRAWS, len(x)))
        value = self.value(x) + np.where(np.isin(x, self.x), 0.0, missed)
        return value, value


@dataclass(frozen=True)
class Better:
    """What says more than the points, if anything does, and in words why that and nothing better."""

    because: str
    basis: str = "points"
    predictor: Predictor | None = None
    identified: bool = False
    residual: Residual | None = None


def best_basis(points: Points, metric: Metric, group: Group | None, axis: str, knows: Knows) -> Better:
    """What a fit rests on."""
    if group is None or points.rows is None or (knows.predicted is None and knows.phases is None):
        return Better("nothing is predicted of the same settings, and the peaks of the phases are not known of them")
    if axis == "tokens":
        return Better("along tokens, rows of several batches and lengths are one curve")
    across = "micro_batch" if axis == "seq_len" else "seq_len"
    other = group.take(across)[across].to_numpy(float, na_value=np.nan)
    if not np.isfinite(other).all():
        return Better(f"some of these rows do not know their {across}")
    per_x = float(other[0])
    why = "nothing is predicted of the same settings"
    if knows.predicted is not None:
        same = knows.predicted.frame[knows.predicted.frame[across].eq(per_x).fillna(False)]
        own = group.frame.iloc[points.rows]
        found = _on_prediction(points, own, metric, axis, per_x, replace(knows.predicted, frame=same), knows.predicted)
        if found is not None:
            return found
        count = observations(same, metric, axis=axis).x if metric.memory else same[axis].dropna().unique()
        why = f"{len(count)} predicted rows at {across} {per_x:g} know it; {FEWEST} are the fewest"
    if not metric.memory:
        return Better(f"{why}, and phases say nothing of time")
    if group.resident and metric.column != "peak_allocated_bytes":
        return Better(f"{why}, and phases say nothing of a resident set")
    return _on_phases(points, metric, group, axis, per_x, knows.phases, why)


def _on_prediction(
    points: Points, own: pd.DataFrame, metric: Metric, axis: str, per_x: float, same: Whole, whole: Whole
) -> Better | None:
    """What `own` rows measured, on predicted rows of this batch (or length), `same`, of all of them; None with too
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
    identified = all(level[i] or parts_of_it[i].excess.posterior.identified for i in set(most))  # of a level all agree
    predictor = Bounded(Largest(parts_of_it), points.bound_x, points.bound_y)
    residual = Residual(Largest(tuple(part.base for part in parts_of_it)), parts_of_it[most[-2]].excess)
    return Better(_these(base.x, axis), "prediction", predictor, identified, residual)


def _predicted(same: Whole, phases: OfPhases | None, metric: Metric, axis: str) -> Predicted | None:
    """The predicted rows of this batch (or length) as a base; None with fewer than three."""
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
    """Measured values at x, each on its prediction."""
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
    """Each phase on its own prediction, where both sides know all that make the peak: one may be off by more than
    another, and a few rows tell of each. Empty where they do not."""
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
    """On the phases' peaks, where they are known; `why` says why on nothing better."""
    if peaks is None:
        return Better(f"{why}, and the peaks of the phases are not known of them")
    phases = OfPhases(peaks, axis, per_x)
    known = peaks.identified(*phases._where(np.unique(points.x)))
    if metric.column == "peak_allocated_bytes":
        return Better(why, "phases", phases, known)
    if metric.above is None:
        return Better(f"{why}, and phases say nothing of it")
    base = group.take(metric.above)[metric.above].to_numpy(float, na_value=np.nan)[points.rows]
    if not (base > 0).all():
        return Better(f"{why}, and what it stands on is not known of all rows")
    (over,) = residual_model.excesses(points.x * per_x, [(points.y, base)], metric.resolution, residual_model.OVERHEAD)
    bounded = Bounded(Standing(phases, over, per_x, True), points.bound_x, points.bound_y)
    return Better(why, "phases", bounded, known and over.posterior.identified)
