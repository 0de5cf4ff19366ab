"""Fits to the observations alone: the kinds of curves.py, for all of them or per alignment class.

Lengths divisible by 8, 16 or 64 may follow another curve than the others. This module decides whether they do, how
probable each kind is, and how much each observation counts. The kinds are always fitted, so that a line and a parabola
can be shown whatever the values of a fit are based on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.polynomial import Polynomial
from scipy import special, stats

from vramsweep.analysis.data.metrics import Metric
from vramsweep.analysis.model.curves import FEWEST, KINDS, NAMES, PLAIN, STEP, Array, Curve, powers
from vramsweep.analysis.model.estimate import DRAWS, SEED, Component, Data, Posterior, estimate
from vramsweep.analysis.model.observations import Mask, Model, Points, members
from vramsweep.analysis.model.phases import CLOCK
from vramsweep.analysis.model.residual_model import Unaligned
from vramsweep.harness.search.fit_knowledge import PADDED_TO

MODULI = (8, 16, 64)
CLEARLY = 5.0  # nats by which a curve per class must be more probable than one for all
MOST_POINTS = 400  # most points in an estimate: more add nothing where neighbours have similar errors
ODD = 0.01  # chance that a point is unrelated to the curve: anything up to twice the largest value
FAR = 0.02  # share of the largest value: closer points are no outliers
BLOCKS = 0.013  # share of the value: RMS of reserved about a hinge, median of 18 public sweeps and replays (0.3 to 4 %)
UNSPLIT = 0.001  # share of the value: RMS of allocated if some blocks are unsplit, median of 7 replays (0.03 to 0.2 %)
OFTEN = 0.9  # prior probability of that, else any: expandable segments have none
ALIKE = 0.75  # probability that two classes do not differ, above which they have one curve
FARTHEST = 4.0  # standard deviations of the expected share: above that something else than alignment lifts a length
FEW = 6  # lengths: with fewer, points alone give no upper bound beyond them


@dataclass(frozen=True)
class Candidate:
    """A kind fitted to the points: its probability among all kinds, its errors in the column's unit, and R². R² is the
    share of the points' variance that it explains, NaN if they do not vary."""

    model: Model
    probability: float
    rms: float
    worst: float
    r2: float


@dataclass(frozen=True)
class OfPoints:
    """Predictor from the points alone: the posterior of each alignment class."""

    posteriors: Mapping[bool, Posterior]
    modulus: int | None
    chosen: Model

    def value(self, x: Array) -> Array:
        """Return the chosen model's curve."""
        return self.chosen.predict(x)

    def draws(self, x: Array) -> tuple[Array, Array]:
        """Return draws of the curve and of a new run, (draws, n) each, over all kinds by their probability."""
        random = np.random.default_rng(SEED)
        curves, news = np.empty((2, DRAWS, len(x)))
        for key, at in members(x, self.modulus).items():
            curves[:, at], noise = self.posteriors[key].draws(x[at], powers(x[at]))
            news[:, at] = curves[:, at] + noise * random.standard_normal(noise.shape)
        return curves, news


@dataclass(frozen=True)
class Estimated:
    """Estimate from the points: the `modulus` of the alignment classes, if these explain residuals, and their
    posteriors. `single` is the posterior of all points as one, `remark` says what was done. No curve follows the
    `outliers` (ids)."""

    single: Posterior
    modulus: int | None
    posteriors: Mapping[bool, Posterior]
    remark: str = ""
    outliers: tuple[str, ...] = ()

    @property
    def log(self) -> float:
        """Log evidence of all classes."""
        return sum(p.log for p in self.posteriors.values())

    def predict(self, x: Array) -> Array:
        """Return the most probable curve of each class at x."""
        return Model({key: curve_of(p) for key, p in self.posteriors.items()}, self.modulus).predict(x)


def estimate_points(points: Points, metric: Metric) -> Estimated:
    """Return the posterior of each class, without outliers.

    An outlier is a point that a distribution as wide as all values explains better than the curve it takes part in. The
    farthest from the curve is tried, then the next, up to a tenth of all. Points of the first and last x are kept,
    because something may begin there that no other shows. Neighbours with similar errors count in part: n with
    correlation r as n (1 - r) / (1 + r) (Bartlett 1946). Fewer than thirty lengths do not show r.
    """
    seen = points.thinned(MOST_POINTS)
    remark = "" if seen is points else f"; estimated from {len(seen.x):,} of {len(points.x):,} rows"
    chance = float(np.log(ODD / 2 / max(np.abs(seen.y).max(), 1e-300)) + np.log(2 * np.pi) / 2 - CLEARLY)
    rest, found = seen, _aligned(seen, metric, MODULI)
    while 10 * (len(seen.x) - len(rest.x)) < len(seen.x) and len(np.unique(rest.x)) >= FEW:
        off = np.abs(rest.y - found.predict(rest.x)) * ~np.isin(rest.x, rest.x[[0, -1]])
        if off.max() <= max(FAR * np.abs(seen.y).max(), 3 * float(np.median(off))):
            break
        others = rest.taken(np.delete(np.arange(len(off)), int(np.argmax(off))))
        without = _aligned(others, metric, MODULI)
        if without.log + chance < found.log:
            break
        rest, found = others, without
    if len(np.unique(rest.x)) >= 30 and (alike := _autocorrelation(rest, found)) > 0.3:
        share = max((1 - alike) / (1 + alike), min(1.0, 20 / len(rest.x)))
        found = _aligned(rest, metric, (found.modulus,) if found.modulus else (), share)
        remark += f"; errors of neighbours are correlated, so the rows count as {len(rest.x) * share:,.0f}"
    return replace(found, remark=remark, outliers=tuple({*seen.ids} - {*rest.ids}))


def estimate_apart(points: Points, metric: Metric) -> tuple[Estimated, Unaligned] | None:
    """Return an estimate where one class has too few lengths for a curve of its own. It is the curve of the other
    class, and how far these few lie off it. Return None if they lie on it, or too far off."""
    at = {key: np.flatnonzero(of) for key, of in members(points.x, PADDED_TO).items()}
    counts = {key: len(np.unique(points.x[of])) for key, of in at.items()}
    few = min(counts, key=lambda key: counts[key])
    if not 0 < counts[few] < FEW or counts[not few] < FEWEST:
        return None
    most = points.taken(at[not few])
    found = estimate_points(most, metric)
    free = OfPoints(found.posteriors, found.modulus, candidates_of(most, found)[1].model)
    apart = Unaligned(free, most.x, points.x[at[few]], points.y[at[few]])
    if apart.alike > ALIKE or apart.share > FARTHEST:
        return None
    return found, apart


def candidates_of(points: Points, found: Estimated) -> tuple[list[Candidate], Candidate]:
    """Return each kind that the points allow, of all and of each class, plain ones first; and the most probable."""
    candidates = []
    counted = ~np.isin(points.ids, found.outliers)
    ways: list[tuple[int | None, Mapping[bool, Posterior]]] = [(None, {True: found.single})]
    if found.modulus is not None:
        ways.append((found.modulus, found.posteriors))
    shares = special.softmax([found.single.log, found.log][: len(ways)])
    for (modulus, posteriors), share in zip(ways, shares, strict=True):
        best = {key: p.kinds()[0] for key, p in posteriors.items()}
        alike = [dict.fromkeys(posteriors, name) for name in NAMES]
        for names in alike if best in alike else [*alike, best]:
            if not all(name in posteriors[key].probability for key, name in names.items()):
                continue
            curves = {key: curve_of(posteriors[key], name) for key, name in names.items()}
            inside = members(points.x, modulus)
            plain = {key: name for key, name in names.items() if name in PLAIN}
            curves |= {key: _least_squares(name, points, inside[key] & counted) for key, name in plain.items()}
            model = Model(curves, modulus)
            left = (points.y - model.predict(points.x))[counted]
            known = len(np.unique(points.x)) // len(posteriors)
            numbers = max(sum(map(len, posteriors[key].best(name).kind.pieces)) for key, name in names.items())
            if numbers >= known and names != best and not plain:
                continue  # as many numbers as lengths fit anything: show such a curve only if most probable
            probable = float(share * np.prod([posteriors[key].probability[name] for key, name in names.items()]))
            rms, varies = float(np.sqrt(np.mean(left**2))), float(np.var(points.y))
            r2 = 1 - rms**2 / varies if varies else float("nan")
            candidates.append(Candidate(model, probable, rms, float(np.abs(left).max()), r2))
    chosen = max((c for c in candidates if c.model.modulus == found.modulus), key=lambda c: c.probability)
    return candidates, chosen


def curve_of(posterior: Posterior, kind: str | None = None) -> Curve:
    """Return the most probable curve, of one kind or of the most probable kind."""
    component = posterior.best(kind)
    return _curve(component, component.best)


def _curve(component: Component, coefficients: Iterable[Array]) -> Curve:
    """Return the curve of one draw of a component, from the coefficients of each piece."""
    pieces = []
    for columns, values in zip(component.kind.pieces, coefficients, strict=True):
        numbers = dict(zip(columns, values.tolist(), strict=True))
        pieces.append((numbers.get(0, 0.0), numbers.get(1, 0.0), numbers.get(2, 0.0)))
    return Curve(component.kind.name, tuple(pieces), () if component.kind.joined else component.edges)


def estimate_classes(
    points: Points, metric: Metric, modulus: int | None = None, share: float = 1.0
) -> dict[bool, Posterior]:
    """Return the posterior of each class; a null `modulus` makes one class of all. Repeats of memory that agree add
    nothing and count once; each observation counts as `share` of one."""
    found = {}
    bounds = members(points.bound_x, modulus)
    kinds = KINDS + STEP if metric.limited else KINDS
    for key, at in members(points.x, modulus).items():
        x, y = points.x[at], points.y[at]
        if metric.memory:
            _, first = np.unique(np.column_stack([x, y]), axis=0, return_index=True)
            x, y = x[first], y[first]
        bound_x, bound_y = points.bound_x[bounds[key]], points.bound_y[bounds[key]]
        noises = ("constant",) * metric.memory + ("proportional",) * bool(y.any() or not metric.memory)
        resolution = _quantum(x, y, metric.resolution) if metric.memory else CLOCK * float(y.min())
        data = Data(
            x, powers(x), y, resolution, bound_x, powers(bound_x), bound_y, share, noises,
            expected=(BLOCKS if metric.limited else UNSPLIT) * max(np.abs(y).max(), 1.0) if metric.memory else None,
            surely=1.0 if metric.limited else OFTEN,
        )  # fmt: skip
        found[key] = estimate(data, kinds, every=True)
    return found


def intervals_of(posterior: Posterior, curve: Curve) -> dict[str, tuple[float, float]]:
    """Return the 95 % interval of each parameter of this kind, from draws weighted by their components."""
    mine = [c for c in posterior.components if c.kind.name == curve.kind]
    drawn = [
        _curve(component, [draws[i % len(component.size)] for draws in component.draws]).parameters
        for component, share in zip(mine, special.softmax([c.log for c in mine]), strict=True)
        for i in range(round(2000 * float(share)))
    ]
    table = np.array([[one.get(name, 0.0) for name in curve.parameters] for one in drawn])
    low, high = np.nanpercentile(table, [2.5, 97.5], axis=0).tolist()
    return dict(zip(curve.parameters, zip(low, high, strict=True), strict=True))


def _aligned(points: Points, metric: Metric, moduli: Sequence[int], share: float = 1.0) -> Estimated:
    """Return one curve for all, or one per class of these moduli if that is clearly more probable."""
    single = estimate_classes(points, metric, None, share)
    best = Estimated(single[True], None, single)
    log = best.log + CLEARLY
    for modulus in moduli:
        counts = [len(np.unique(points.x[at])) for at in members(points.x, modulus).values()]
        if min(counts) < FEW or not _differ(points, curve_of(single[True]), modulus):
            continue
        both = estimate_classes(points, metric, modulus, share)
        if (found := Estimated(single[True], modulus, both)).log > log:
            best, log = found, found.log
    return best


def _differ(points: Points, curve: Curve, modulus: int) -> bool:
    """Return whether alignment might explain the residuals: Levene's test of spread, or Welch's of the mean."""
    aligned = points.x % modulus == 0
    residuals = points.y - curve.predict(points.x)
    if float(np.abs(residuals).max()) <= 1e-9 * float(np.abs(points.y).max()):
        return False
    means = stats.ttest_ind(residuals[aligned], residuals[~aligned], equal_var=False).pvalue
    spreads = stats.levene(residuals[aligned], residuals[~aligned]).pvalue
    return bool(min(means, spreads) < 0.001)


def _quantum(x: Array, y: Array, resolution: float) -> float:
    """Return the size to which all values were rounded: their common divisor if larger than the resolution, else that.

    Some values have a common factor by chance. Nothing was rounded if all that rise lie on the lines between their
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


def _autocorrelation(points: Points, found: Estimated) -> float:
    """Return the correlation of neighbouring residuals, the largest of the classes."""
    each = points.y - found.predict(points.x)
    of_class = [each[at] for at in members(points.x, found.modulus).values()]
    classes = [left for left in of_class if len(left) >= 30 and left.std() > 0]
    return min(max((float(np.corrcoef(left[1:], left[:-1])[0, 1]) for left in classes), default=0.0), 0.99)


def _least_squares(name: str, points: Points, at: Mask) -> Curve:
    """Fit the line or parabola that everyone would draw: of all points, plainly."""
    degree = 1 if name == "linear" else 2
    numbers = Polynomial.fit(points.x[at], points.y[at], degree).convert().coef
    padded = [*map(float, numbers), 0.0, 0.0, 0.0]
    return Curve(name, ((padded[0], padded[1], padded[2]),))
