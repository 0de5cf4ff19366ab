"""How a measured quantity depends on sequence length, batch or tokens: what it rests on, the curve, and how sure it is.

One group of equal settings, one metric, one axis. Three things can say what lies between and beyond the observations,
and the first that there is is used:

- `prediction`: predicted rows of the same settings have the shape; what was measured stands on it by a small residual.
- `phases`: the rows know each phase's peak, over batch and length together (phases.py); reserved, active and device
  memory stand on allocated (standing.py).
- `points`: nothing but the observations: the kinds of curves.py, alone and per alignment class (lengths divisible by
  8, 16 or 64, and the others).

The kinds are always fitted to the points, so that a line and a parabola are there to see.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.polynomial import Polynomial
from scipy import stats

from vramsweep.analysis.data.groups import Group, groups
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import METRICS, Metric
from vramsweep.analysis.data.ranks import Spread, spread
from vramsweep.analysis.model.curves import FEWEST, KINDS, NAMES, STEP, Array, Curve, meet, powers
from vramsweep.analysis.model.estimate import DRAWS, SEED, Component, Data, Posterior, estimate
from vramsweep.analysis.model.observe import UNITS, Mask, Model, Points, along, members, observations
from vramsweep.analysis.model.phases import PHASES, Phases, fit_phases
from vramsweep.analysis.model.standing import (
    OVERHEAD,
    RESIDUAL,
    Bounded,
    Excess,
    Largest,
    Predictor,
    Standing,
    excesses,
)
from vramsweep.analysis.model.steps import Jump, Wavering, jumps, wavering
from vramsweep.analysis.model.times import CLOCK, OfParts, parts

MODULI = (8, 16, 64)
LEVEL = 0.95
CLEARLY = 5.0  # nats by which a curve per class must be more probable than one for all
ROUNDS = 5
MOST_POINTS = 400  # that an estimate looks at: more tell nothing new where neighbours err alike
MOST_ROWS = 400  # of a whole, for its phases: they are exact
FEW = 6  # lengths, below which points alone say nothing above the curve beyond them
HIDDEN = 0.1  # of the peak: a smaller rise over all points is not yet what activations make
PLAIN = ("linear", "quadratic")  # always shown
BASES = {
    "prediction": "on predicted rows of the same settings, and what was measured above or below them",
    "phases": "on the peak of each phase, over batch and length together",
    "points": "on these points alone",
}


@dataclass(frozen=True)
class Candidate:
    """A kind fitted to the points: how probable it is among all kinds, and its errors in the metric's unit."""

    model: Model
    probability: float
    rms: float
    worst: float


@dataclass(frozen=True)
class Residual:
    """What was measured beside what was predicted: the prediction, and the excess over it, of the phase that makes the
    peak at the longest where phases are known."""

    predicted: Predictor
    excess: Excess


@dataclass(frozen=True)
class Prediction:
    """Values at x with 95 % intervals: of the curve (low, high) and of one new observation (new_low, new_high).

    `extrapolated` marks x outside the measured range; such a value is a guess and must be shown as one. An upper end is
    infinite where nothing bounds it.
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
    """What is known about one metric in one group.

    `chosen` is of the kinds on the points; values and intervals are `predictor`'s, which rests on `basis`.
    `because` says why on that. `identified`: whether the kind is known and every piece has as many lengths as numbers.
    `phases` name what makes the peak on each piece of the first curve.
    """

    metric: Metric
    settings: Mapping[str, Any]
    label: str
    points: Points = field(repr=False)
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    why: str
    robust: bool
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
    residual: Residual | None = field(default=None, repr=False)
    ranks: Spread | None = None
    jumps: tuple[Jump, ...] = ()
    wavering: tuple[Wavering, ...] = ()

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest measured x."""
        return float(self.points.x[0]), float(self.points.x[-1])

    @property
    def lengths(self) -> int:
        """How many different x there are."""
        return len(np.unique(self.points.x))

    @property
    def one_sided(self) -> bool:
        """Whether nothing is said of how high the curve may go beyond the points: a run did not fit that should have;
        they are few; or it hardly rises over all of them, so that what grows with length is still hidden below what
        does not."""
        if self._contradicted:
            return True
        if self.basis != "points" or not self.metric.memory:
            return False
        first, last = self.chosen.model.predict(np.array(self.range))
        return self.lengths < FEW or float(last - first) < HIDDEN * abs(float(last))

    def candidate(self, kind: str, modulus: int | None = None) -> Candidate | None:
        """The candidate of a kind, if the data allowed one."""
        return next((c for c in self.candidates if (c.model.kind, c.model.modulus) == (kind, modulus)), None)

    @cached_property
    def intervals(self) -> dict[bool, dict[str, tuple[float, float]]]:
        """95 % interval of each parameter of each of the chosen model's curves, by name, given its kind."""
        return {key: _intervals(self.posteriors[key], curve) for key, curve in self.chosen.model.curves.items()}

    def value(self, x: Array) -> Array:
        """The most probable curve at x."""
        return self.predictor.value(x)

    def predict(self, x: Array) -> Prediction:
        """The curve at x with intervals; says where it extrapolates."""
        curve, new = self.predictor.draws(x)
        tail = 50 * (1 - LEVEL)
        low, high = np.percentile(curve, [tail, 100 - tail], axis=0)
        new_low, new_high = np.percentile(new, [tail, 100 - tail], axis=0)
        first, last = self.range
        value = self.value(x)  # of the most probable kind, where the interval is of all
        low, high, new_low, new_high = (
            np.minimum(low, value), np.maximum(high, value), np.minimum(new_low, value), np.maximum(new_high, value)
        )  # fmt: skip
        low, new_low = np.maximum(low, 0), np.maximum(new_low, 0)
        if self.one_sided:
            high, new_high = (np.where(x > last, np.inf, edge) for edge in (high, new_high))
        return Prediction(x, value, low, high, new_low, new_high, (x < first) | (x > last))

    @cached_property
    def _contradicted(self) -> bool:
        """Whether hardly any new run would not have fitted where one beyond the observations did not."""
        ahead = self.points.bound_x > self.range[1]
        if not ahead.any():
            return False
        _, new = self.predictor.draws(self.points.bound_x[ahead])
        return bool(np.all(new >= self.points.bound_y[ahead], axis=1).mean() < 1 - LEVEL)

    @cached_property
    def next_x(self) -> int | None:
        """The x whose measurement would narrow the curve most, if it is not known to 2 % everywhere up to half
        beyond the longest: in the middle of a gap, or beyond the last; never where a run did not fit."""
        different = np.unique(self.points.x)
        if len(different) < 2:
            return round(2 * float(different[-1]))
        middles = (different[1:] + different[:-1]) / 2
        step = 8 if np.all(different % 8 == 0) else 1
        inside = np.unique(np.round(middles / step) * step)
        out = self.points.bound_x[self.points.bound_x > different[-1]]  # did not fit: no use to ask again
        beyond = min(1.5 * different[-1], (different[-1] + out.min(initial=np.inf)) / 2)
        asked = np.append(inside[~np.isin(inside, different)], np.floor(beyond / step) * step)
        asked = asked[(asked >= 1) & ~np.isin(asked, [*different, *self.points.bound_x])]
        if not len(asked):
            return None
        curve, _ = self.predictor.draws(asked)
        wide = np.ptp(np.percentile(curve, [2.5, 97.5], axis=0), axis=0) / np.maximum(np.abs(self.value(asked)), 1e-300)
        if self.one_sided and asked[-1] > different[-1] and not (wide[:-1] > 0.02).any():
            return int(asked[-1])
        return int(asked[int(np.argmax(wide))]) if wide.max() > 0.02 else None


@dataclass(frozen=True)
class OfPoints:
    """The posterior of each alignment class."""

    posteriors: Mapping[bool, Posterior]
    modulus: int | None
    chosen: Model

    def value(self, x: Array) -> Array:
        """The chosen model's curve."""
        return self.chosen.predict(x)

    def draws(self, x: Array) -> tuple[Array, Array]:
        """Of all kinds, as probable as they are."""
        random = np.random.default_rng(SEED)
        found: list[tuple[Mask, Array, Array]] = []
        for key, at in members(x, self.modulus).items():
            if at.any():
                curve, noise = self.posteriors[key].draws(x[at], powers(x[at]))
                found.append((at, curve, curve + noise * random.standard_normal(curve.shape)))
        curves = np.empty((len(found[0][1]), len(x)))
        news = np.empty_like(curves)
        for at, curve, new in found:
            curves[:, at], news[:, at] = curve, new
        return curves, news


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


def fit_table(
    table: Table,
    metrics: Sequence[str] = tuple(METRICS),
    start: float | None = None,
    stop: float | None = None,
    robust: bool = False,
    limit: int = 200,
    found: Sequence[Group] | None = None,
    axis: str = "seq_len",
    beside: Callable[[Group], pd.DataFrame | None] | None = None,
) -> tuple[list[Fit], list[str]]:
    """Fits of every group and metric that has the data, and what a reader should know about the others.

    At most `limit` groups are fitted, those with most rows first; `found` are the groups if they are known already.
    `beside` gives the predicted rows, of any batch and length, of a group's settings.
    """
    fits: list[Fit] = []
    notes: list[str] = []
    short = 0
    found = groups(table, axis) if found is None else found
    wholes = Wholes(table)
    for group in found[:limit]:
        frame = group.frame
        rows = beside(group) if beside else None
        whole = wholes.of(group).within(start, stop, axis)
        knows = Knows(whole, None if rows is None else Whole(rows))
        any_points = False
        for name in metrics:
            points = observations(frame, METRICS[name], start, stop, axis)
            if len(points.x) == 0:
                continue
            any_points = True
            fit = fit_points(points, METRICS[name], group, robust, axis, knows)
            if fit is None:
                short += 1
            else:
                fits.append(fit)
        if not any_points:
            outcomes = ", ".join(f"{n} {o}" for o, n in frame["outcome"].value_counts().items())
            notes.append(f"{group.label}: no measured values to fit ({outcomes})")
    if short:
        of = "lengths" if axis == "seq_len" else f"values of {axis}"
        notes.append(f"{short} curve{'s' * (short != 1)} with fewer than {FEWEST} different {of} not fitted")
    if len(found) > limit:
        notes.append(f"{len(found):,} groups of equal settings; the {limit} with most rows were fitted")
    return fits, notes


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


def fit_points(
    points: Points,
    metric: Metric,
    group: Group | None = None,
    robust: bool = False,
    axis: str = "seq_len",
    knows: Knows | None = None,
) -> Fit | None:
    """What these observations and what is known beside them say; None with too few different x."""
    points = points.averaged()
    if len(np.unique(points.x)) < FEWEST:
        return None
    found = _of_points(points, metric, robust)
    candidates, chosen = _candidates(points, found)
    predictor: Predictor = OfPoints(found.posteriors, found.modulus, chosen.model)
    identified = all(posterior.identified for posterior in found.posteriors.values())
    basis, residual = "points", None
    better = _better(points, metric, group, axis, knows or Knows())
    if better.predictor is not None:
        basis, predictor, identified, residual = better.basis, better.predictor, better.identified, better.residual
    warnings = [*points.warnings, *_censoring_remarks(predictor, points, metric)]
    if robust and basis != "points":
        warnings.append(f"--robust is of the curves through the points; what values rest on here, {basis}, is not")
    left = points.y - chosen.model.predict(points.x)
    why = f"{chosen.probability:.0%} of the probability of all kinds" + found.remark
    samples = _samples(group.ok("tokens_per_s", "step_median_s", "seq_len")) if group and not metric.memory else None
    return Fit(
        metric=metric,
        settings=group.settings if group else {},
        label=group.label if group else "all rows",
        points=points,
        candidates=tuple(candidates),
        chosen=chosen,
        why=why,
        robust=robust,
        warnings=tuple(warnings),
        predictor=predictor,
        posteriors=found.posteriors,
        basis=basis,
        because=better.because,
        identified=identified,
        phases=_phases(chosen.model, group, axis) if group and metric.memory else (),
        samples_per_step=samples if axis == "seq_len" else None,
        axis=axis,
        group=group.id if group else "",
        residual=residual,
        ranks=spread(group.frame, metric.column, along(group.frame, axis)) if group and metric.memory else None,
        jumps=tuple(jumps(points.x, left, points.y)) if metric.limited else (),
        wavering=tuple(wavering(points.x, left, points.y)) if metric.limited else (),
    )


@dataclass(frozen=True)
class _Estimated:
    """What the points say: the alignment class, if one explains what is left, with its posteriors; the posterior of all
    points as one; each point's weight; and what was done, in words."""

    single: Posterior
    modulus: int | None
    posteriors: Mapping[bool, Posterior]
    weights: Array
    remark: str = ""


def _of_points(points: Points, metric: Metric, robust: bool) -> _Estimated:
    """The posterior of each class.

    Neighbours that err alike count in part: of n with correlation r between neighbours as n (1 - r) / (1 + r) (Bartlett
    1946). With fewer than thirty lengths that cannot be told.
    """
    seen = points.thinned(MOST_POINTS)
    weights, of_all = np.ones(len(seen.x)), np.ones(len(points.x))
    remark = "" if seen is points else f"; estimated from {len(seen.x):,} of {len(points.x):,} rows"
    if robust:
        for _ in range(ROUNDS):
            best = _curve_of(_posterior(seen, metric, weights, None)[True])
            weights, of_all = (_huber(p.y - best.predict(p.x), metric.resolution) for p in (seen, points))
        remark += f"; {int((of_all < 0.5).sum())} of {len(of_all)} points count less than half (Huber)"
    found = _aligned(seen, metric, weights, MODULI)
    if len(np.unique(seen.x)) >= 30:
        alike = _alike(seen, found.posteriors, found.modulus)
        if alike > 0.3:
            share = max((1 - alike) / (1 + alike), min(1.0, 20 / len(seen.x)))
            found = _aligned(seen, metric, weights * share, (found.modulus,) if found.modulus else ())
            remark += f"; neighbours err alike, so that these count as {len(seen.x) * share:,.0f}"
    return replace(found, weights=of_all, remark=remark)


def _aligned(points: Points, metric: Metric, weights: Array, moduli: Sequence[int]) -> _Estimated:
    """One curve for all, or one per class of these moduli where that is clearly more probable."""
    single = _posterior(points, metric, weights, None)
    best = _Estimated(single[True], None, single, weights)
    log = single[True].log + CLEARLY
    for modulus in moduli:
        counts = [len(np.unique(points.x[at])) for at in members(points.x, modulus).values()]
        if min(counts) < FEW or not _differ(points, _curve_of(single[True]), modulus):
            continue
        both = _posterior(points, metric, weights, modulus)
        if (together := sum(p.log for p in both.values())) > log:
            best, log = _Estimated(single[True], modulus, both, weights), together
    return best


def _differ(points: Points, curve: Curve, modulus: int) -> bool:
    """Whether alignment might explain what this curve leaves: Levene's test of spread, or Welch's of the mean."""
    aligned = points.x % modulus == 0
    residuals = points.y - curve.predict(points.x)
    if float(np.abs(residuals).max()) <= 1e-9 * float(np.abs(points.y).max()):
        return False
    means = stats.ttest_ind(residuals[aligned], residuals[~aligned], equal_var=False).pvalue
    spreads = stats.levene(residuals[aligned], residuals[~aligned]).pvalue
    return bool(min(means, spreads) < 0.001)


def _posterior(points: Points, metric: Metric, weights: Array, modulus: int | None) -> dict[bool, Posterior]:
    """Of each class. Repeats of memory that agree tell nothing new and count once."""
    found = {}
    bounds = members(points.bound_x, modulus)
    kinds = (*KINDS, STEP) if metric.limited else KINDS
    for key, at in members(points.x, modulus).items():
        x, y, w = points.x[at], points.y[at], weights[at]
        if metric.memory:
            _, first = np.unique(np.column_stack([x, y]), axis=0, return_index=True)
            x, y, w = x[first], y[first], w[first]
        bound_x, bound_y = points.bound_x[bounds[key]], points.bound_y[bounds[key]]
        noises = ("constant", "proportional") if metric.memory else ("proportional",)
        resolution = _quantum(x, y, metric.resolution) if metric.memory else CLOCK * float(y.min())
        data = Data(
            x, powers(x), y, resolution, bound_x, powers(bound_x), bound_y, None if np.all(w == 1) else w, noises
        )
        found[key] = estimate(data, kinds, every=True)
    return found


def _quantum(x: Array, y: Array, resolution: float) -> float:
    """The largest size that all values are multiples of, if larger than the resolution: what they were rounded to.

    Some values have a common factor by chance; nothing was rounded where all that rise lie on the lines between their
    neighbours, as 100, 120, 140 do.
    """
    whole = np.unique(np.round(y)).astype(np.int64)
    size = float(np.gcd.reduce(whole)) if len(whole) > 2 else resolution
    if size <= resolution:
        return resolution
    at, first = np.unique(x, return_index=True)
    known = y[first]
    chord = known[:-2] + (known[2:] - known[:-2]) * (at[1:-1] - at[:-2]) / (at[2:] - at[:-2])
    off = np.abs(known[1:-1] - chord)[known[2:] != known[:-2]]
    return resolution if len(off) > 1 and float(off.max()) < size / 20 else size


def _huber(residuals: Array, least: float) -> Array:
    """Huber's weights (1981, for 95 % efficiency), scale by the median absolute deviation; statsmodels'."""
    from statsmodels.robust import norms, scale

    spread = max(float(scale.mad(residuals, center=0)), least)
    weights: Array = np.asarray(norms.HuberT().weights(residuals / spread), dtype=float)
    return np.maximum(weights, 1e-6)


def _alike(points: Points, posteriors: Mapping[bool, Posterior], modulus: int | None) -> float:
    """How much what is left of neighbours correlates, the largest of the classes."""
    found = 0.0
    for key, at in members(points.x, modulus).items():
        left = points.y[at] - _curve_of(posteriors[key]).predict(points.x[at])
        if len(left) >= 30 and float(left.std()) > 0:
            found = max(found, float(np.corrcoef(left[1:], left[:-1])[0, 1]))
    return min(found, 0.99)


def _curve(component: Component) -> Curve:
    pieces = []
    for columns, coefficients in zip(component.kind.pieces, component.best, strict=True):
        numbers = dict(zip(columns, (float(c) for c in coefficients), strict=True))
        pieces.append((numbers.get(0, 0.0), numbers.get(1, 0.0), numbers.get(2, 0.0)))
    return Curve(component.kind.name, tuple(pieces), () if component.kind.joined else component.edges)


def _curve_of(posterior: Posterior, kind: str | None = None) -> Curve:
    return _curve(posterior.best(kind))


def _candidates(points: Points, found: _Estimated) -> tuple[list[Candidate], Candidate]:
    """Each kind that the points allow, for all points and for each class, plain ones first; and the most probable."""
    candidates = []
    ways: list[tuple[int | None, Mapping[bool, Posterior]]] = [(None, {True: found.single})]
    if found.modulus is not None:
        ways.append((found.modulus, found.posteriors))
    logs = np.array([sum(p.log for p in posteriors.values()) for _, posteriors in ways])
    for (modulus, posteriors), share in zip(ways, np.exp(logs - logs.max()), strict=True):
        best = {key: p.kinds()[0] for key, p in posteriors.items()}
        alike = [dict.fromkeys(posteriors, name) for name in NAMES]
        for names in alike if best in alike else [*alike, best]:
            if not all(name in posteriors[key].probability for key, name in names.items()):
                continue
            curves = {key: _curve_of(posteriors[key], name) for key, name in names.items()}
            inside = members(points.x, modulus)
            plain = {key: name for key, name in names.items() if name in PLAIN}
            curves |= {key: _least_squares(name, points, inside[key], found.weights) for key, name in plain.items()}
            model = Model(curves, modulus)
            left = points.y - model.predict(points.x)
            known = len(np.unique(points.x)) // len(posteriors)
            numbers = max(sum(map(len, posteriors[key].best(name).kind.pieces)) for key, name in names.items())
            if numbers >= known and names != best and not plain:
                continue  # as many numbers as lengths go through everything: worth a line only where most probable
            probable = float(share * np.prod([posteriors[key].probability[name] for key, name in names.items()]))
            candidates.append(Candidate(model, probable, float(np.sqrt(np.mean(left**2))), float(np.abs(left).max())))
    total = float(np.exp(logs - logs.max()).sum())
    candidates = [replace(c, probability=c.probability / total) for c in candidates]
    chosen = max((c for c in candidates if c.model.modulus == found.modulus), key=lambda c: c.probability)
    return candidates, chosen


def _least_squares(name: str, points: Points, at: Mask, weights: Array) -> Curve:
    """The line or parabola that everyone would draw: of all points, plainly."""
    degree = 1 if name == "linear" else 2
    numbers = Polynomial.fit(points.x[at], points.y[at], degree, w=np.sqrt(weights[at])).convert().coef
    padded = [*map(float, numbers), 0.0, 0.0, 0.0]
    return Curve(name, ((padded[0], padded[1], padded[2]),))


@dataclass(frozen=True)
class _Better:
    """What says more than the points, if anything does, and in words why that and nothing better."""

    because: str
    basis: str = "points"
    predictor: Predictor | None = None
    identified: bool = False
    residual: Residual | None = None


def _better(points: Points, metric: Metric, group: Group | None, axis: str, knows: Knows) -> _Better:
    """What a fit rests on."""
    if group is None or points.rows is None or (knows.predicted is None and knows.phases is None):
        return _Better("nothing is predicted of the same settings, and the peaks of the phases are not known of them")
    if axis == "tokens":
        return _Better("along tokens, rows of several batches and lengths are one curve")
    across = "micro_batch" if axis == "seq_len" else "seq_len"
    other = group.take(across)[across].to_numpy(float, na_value=np.nan)
    if not np.isfinite(other).all():
        return _Better(f"some of these rows do not know their {across}")
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
        return _Better(f"{why}, and phases say nothing of time")
    if group.resident and metric.column != "peak_allocated_bytes":
        return _Better(f"{why}, and phases say nothing of a resident set")
    return _on_phases(points, metric, group, axis, per_x, knows.phases, why)


def _on_prediction(
    points: Points, own: pd.DataFrame, metric: Metric, axis: str, per_x: float, same: Whole, whole: Whole
) -> _Better | None:
    """What `own` rows measured, on predicted rows of this batch (or length), `same`, of all of them; None with too
    few."""
    if not metric.memory:
        found_parts = parts(same.frame, axis)
        if found_parts is None:
            return None
        timed = OfParts(found_parts, points.x, points.y)
        return _Better(_these(found_parts.x, axis), "prediction", timed, timed.posterior.identified)
    phases = None if whole.phases is None else OfPhases(whole.phases, axis, per_x)
    base = _predicted(same, phases, metric, axis)
    if base is None:
        return None
    parts_of_it = _each_phase(points, own, same, phases, metric, axis, per_x) if phases else ()
    parts_of_it = parts_of_it or _above(points.x, [(points.y, base)], metric, per_x)
    at = np.append(np.unique(points.x), 2 * points.x[-1])
    most = np.argmax([part.value(at) for part in parts_of_it], axis=0)
    level = [float(np.ptp(part.base.value(at))) < 1e-3 * float(base.value(at).max()) for part in parts_of_it]
    identified = all(level[i] or parts_of_it[i].excess.posterior.identified for i in set(most))  # of a level all agree
    predictor = Bounded(Largest(parts_of_it), points.bound_x, points.bound_y)
    residual = Residual(Largest(tuple(part.base for part in parts_of_it)), parts_of_it[most[-2]].excess)
    return _Better(_these(base.x, axis), "prediction", predictor, identified, residual)


def _above(x: Array, on: Sequence[tuple[Array, Predicted]], metric: Metric, per_x: float) -> tuple[Standing, ...]:
    """Measured values at x, each on its prediction."""
    found = excesses(x * per_x, [(y, base.value(x)) for y, base in on], metric.resolution, RESIDUAL, small=True)
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
        base = Predicted(x, own_points.y[first], partial(phases.of, name))
        found.append((y, base))
    return _above(points.x, found, metric, per_x)


def _these(x: Array, axis: str) -> str:
    return f"{len(x)} of them, {x.min():,.0f} to {x.max():,.0f} {UNITS[axis]}"


def _on_phases(
    points: Points, metric: Metric, group: Group, axis: str, per_x: float, peaks: Phases | None, why: str
) -> _Better:
    """On the phases' peaks, where they are known; `why` says why on nothing better."""
    if peaks is None:
        return _Better(f"{why}, and the peaks of the phases are not known of them")
    phases = OfPhases(peaks, axis, per_x)
    known = peaks.identified(*phases._where(np.unique(points.x)))
    if metric.column == "peak_allocated_bytes":
        return _Better(why, "phases", phases, known)
    if metric.above is None:
        return _Better(f"{why}, and phases say nothing of it")
    base = group.take(metric.above)[metric.above].to_numpy(float, na_value=np.nan)[points.rows]
    if not (base > 0).all():
        return _Better(f"{why}, and what it stands on is not known of all rows")
    (over,) = excesses(points.x * per_x, [(points.y, base)], metric.resolution, OVERHEAD)
    standing = Bounded(Standing(phases, over, per_x, True), points.bound_x, points.bound_y)
    return _Better(why, "phases", standing, known and over.posterior.identified)


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
    curve = _curve_of(_posterior(own, metric, np.ones(len(own.x)), None)[True])
    return Predicted(x, own.y[first], curve.predict, phases)


def _intervals(posterior: Posterior, curve: Curve) -> dict[str, tuple[float, float]]:
    """Of the parameters of this kind, 95 %: of its draws, as probable as their components are."""
    mine = [c for c in posterior.components if c.kind.name == curve.kind]
    logs = np.array([c.log for c in mine])
    shares = np.exp(logs - logs.max())
    drawn: dict[str, list[Array]] = {}
    for component, share in zip(mine, shares / shares.sum(), strict=True):
        count = round(2000 * float(share))
        if not count:
            continue
        at = np.arange(count) % len(component.size)
        whole = [np.zeros((3, count)) for _ in component.kind.pieces]
        for piece, columns, draws in zip(whole, component.kind.pieces, component.draws, strict=True):
            piece[list(columns)] = draws[at].T
        for i, piece in enumerate(whole, 1):
            for letter, values in zip("abc", piece, strict=True):
                drawn.setdefault(f"{letter}{i}", []).append(values)
        for i, (one, other) in enumerate(itertools.pairwise(whole), 1):
            knots = np.array([_meet(p, q) for p, q in zip(one.T, other.T, strict=True)])
            drawn.setdefault(f"k{i}", []).append(np.full(count, curve.edges[i - 1]) if curve.edges else knots)
    found = {}
    for name in curve.parameters:
        low, high = np.nanpercentile(np.concatenate(drawn[name]), [2.5, 97.5])
        found[name] = (float(low), float(high))
    return found


def _meet(one: Array, other: Array) -> float:
    return meet(tuple(one), tuple(other))


def _censoring_remarks(predictor: Predictor, points: Points, metric: Metric) -> list[str]:
    """Where the curve contradicts a bound."""
    if not len(points.bound_x):
        return []
    below = predictor.value(points.bound_x) < points.bound_y - metric.resolution
    if not below.any():
        return []
    return [
        f"the curve stays below {int(below.sum())} of {len(below)} lower bounds (rows that ran out of memory, or whose "
        "allocator tried again): something else may have held memory there, or more grows than these points show"
    ]


def _samples(rows: pd.DataFrame) -> float | None:
    """Sequences per step over all ranks, from what the rows say about speed; null if they disagree."""
    ratio = (rows["tokens_per_s"] * rows["step_median_s"] / rows["seq_len"]).to_numpy(float)
    if not len(ratio):
        return None
    middle = float(np.median(ratio))
    whole = round(middle)
    return float(whole) if whole >= 1 and abs(middle - whole) < 0.1 * whole else None


def _phases(model: Model, group: Group, axis: str) -> tuple[str, ...]:
    """For each piece of the first curve, the phase whose peak is largest in most of its rows; "" where unknown."""
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
