"""Bayesian estimator of the maximum of pieces that observations come from, its parameters and its uncertainty.

A model is a maximum of pieces, each linear in given features (1, x, x² of one axis; tokens, samples and length of two).
A peak is of this form because it is the largest of several moments, each affine in tokens or quadratic in length.
Observations in order of the axis are cut into as many runs as there are pieces. Given the cuts, a piece is a linear
regression of its run alone, with a Gaussian prior that is wide compared with the data. Evidence, parameters and
uncertainty then have closed forms for every size of noise (Murphy 2012, ch. 7.6). Draws in which another piece is
larger at an observation contradict the cut and are dropped. There is no search for knots and no derivative.

One posterior covers cuts, kinds, sizes of noise (down to the counter's resolution) and its shape (constant, or
proportional to the value). The choice of a kind, curves, intervals and the effect of censored observations (out of
memory) all follow from it. Nothing here knows bytes or rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

import numpy as np
from scipy import special

from vramsweep.analysis.model.curves import Array, Kind, Numbers

DRAWS = 2000  # of the whole posterior; the ends of a 95 % interval then have a standard error of 0.35 %
TRIES = 300  # draws of one component; those that contradict its cuts are dropped
MOST_TRIES = 64 * TRIES
MOST_CUTS = 40  # candidates for a cut; with more lengths they are thinned, then dense around the best
OTHERWISE = 1e-3  # chance that a bound tells nothing of the quantity, because something else held memory
BOUNDED = 4.0  # the prior's scale is at most this times the largest value, where a bound is larger still
FEWEST_DRAWS = 50  # effective number of different draws of a component (Kish 1965)
BEYOND = 1.5  # growth of noise for each range of the observations beyond them
KEPT = 10  # most components of a kind to draw from
CLEAR = 10.0  # nats below the best of all; components below that are ignored
NOISES = ("constant", "proportional")
SIZES = 48  # number of sizes of noise, evenly spaced in logarithm
UNSURE = 0.9  # standard deviation of the log of an expected size of noise: a factor of 2.5
SEED = 20_240_917


@dataclass(frozen=True)
class Data:
    """Observations in order of `axis` (n,): `features` (n, m), `y` (n,), and the least difference that matters.

    `given_scales` (m,) replace the prior's own, `given_sizes` (SIZES,) those of the noise. `size_odds` (SIZES,) are the
    log of the prior odds of these sizes, if unequal. A priori noise is near `expected` with the probability `surely`,
    else of any size. `bounds` (k, m), `bounds_axis` and `at_least` (k,) are censored: the value there is at least that.
    Each observation counts as `share` of one.
    """

    axis: Array
    features: Array
    y: Array
    resolution: float
    bounds_axis: Array = field(default_factory=lambda: np.empty(0))
    bounds: Array = field(default_factory=lambda: np.empty((0, 0)))
    at_least: Array = field(default_factory=lambda: np.empty(0))
    share: float = 1.0
    noises: tuple[str, ...] = NOISES
    given_scales: Array | None = None
    given_sizes: Array | None = None
    size_odds: Array | None = None
    expected: float | None = None
    surely: float = 1.0

    @functools.cached_property
    def ahead(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Mask of the bounds that lie beyond the last observation, (k,)."""
        return np.asarray(self.bounds_axis > self.axis.max(initial=-np.inf))

    @functools.cached_property
    def scales(self) -> Array:
        """Prior standard deviations of the coefficients, (m,): twice the largest value over the feature's largest."""
        if self.given_scales is not None:
            return self.given_scales
        everywhere = np.vstack([self.features, self.bounds]) if len(self.bounds) else self.features
        largest = np.abs(everywhere).max(axis=0)
        largest = np.where(largest > 0, largest, 1.0)
        size = max(float(np.abs(self.y).max()), self.resolution)
        size = min(max(size, float(np.abs(self.at_least).max(initial=0.0))), BOUNDED * size)
        return np.asarray(2.0 * size / largest)

    def sizes(self, noise: str) -> Array:
        """Return sizes of noise at the largest value, (SIZES,), up to the size of the values. At the smallest value,
        too, noise is not less than what rounding to the resolution makes."""
        if self.given_sizes is not None:
            return self.given_sizes
        top = max(float(np.abs(self.y).max()), 4 * self.resolution)
        least = self.resolution / np.sqrt(12) / float(self.shape(noise).min())
        return np.geomspace(min(least, top / 4), top, SIZES)

    def odds(self, noise: str) -> Array:
        """Return the log of the prior odds of each size of noise, (SIZES,); the odds are 1 on average."""
        if self.size_odds is not None or self.expected is None:
            return np.zeros(SIZES) if self.size_odds is None else self.size_odds
        logs = -0.5 * (np.log(self.sizes(noise) / self.expected) / UNSURE) ** 2
        logs += np.log(self.surely * SIZES) - _log_sum(logs)
        return np.logaddexp(logs, np.log(max(1 - self.surely, 1e-300)))

    def shape(self, noise: str) -> Array:
        """Return the noise of each observation relative to the size of noise, (n,)."""
        if noise == "constant":
            return np.ones(len(self.y))
        return np.asarray(np.maximum(np.abs(self.y), 1e-300) / max(float(np.abs(self.y).max()), 1e-300))


@dataclass(frozen=True)
class Run:
    """A regression of some observations that lie together, decomposed so that any size of noise is cheap.

    `evidence` is the log density of the observations at each size of noise, without terms common to all runs.
    """

    singular: Array
    projected: Array
    directions: Array
    evidence: Array
    scales: Array

    def mean(self, size: float) -> Array:
        """Return the coefficients at a size of noise, (parameters,)."""
        pulled = self.singular * self.projected / (self.singular**2 + size**2)
        return np.asarray(self.scales * (self.directions.T @ pulled))

    def draw(self, sizes: Array, random: np.random.Generator) -> Array:
        """Draw the coefficients once for each size of noise, (sizes, parameters)."""
        standard = random.standard_normal((len(sizes), len(self.scales)))
        spread = self.singular**2 + sizes[:, None] ** 2
        along = standard[:, : len(self.singular)]
        pulled = self.singular * self.projected / spread + along * sizes[:, None] / np.sqrt(spread)
        inside = pulled @ self.directions
        # directions that no observation determines: the prior
        outside = standard - (standard @ self.directions.T) @ self.directions
        return np.asarray(self.scales * (inside + outside))


@dataclass(frozen=True)
class Component:
    """A kind with its cuts and shape of noise. `log` is the logarithm of its weight, up to a common constant.

    `chances` are the probabilities of the sizes of noise, (SIZES,). `draws` hold each piece's coefficients, (draws,
    parameters of the piece). `size` is the noise of each draw, (draws,).
    """

    kind: Kind
    cuts: tuple[int, ...]
    noise: str
    log: float
    edges: tuple[float, ...]
    best: tuple[Array, ...]
    chances: Array
    draws: tuple[Array, ...] = ()
    size: Array = field(default_factory=lambda: np.empty(0))

    def values(self, coefficients: Sequence[Array], axis: Array, features: Array) -> Array:
        """Return the value at each point for each draw, (draws, n); coefficients are (draws, parameters) a piece."""
        each = pieces(self.kind, coefficients, features)
        if self.kind.joined:
            return np.asarray(np.maximum.reduce(each))
        which = np.searchsorted(np.array(self.edges), axis, side="right")
        return np.asarray(np.choose(which, each))


def pieces(kind: Kind, coefficients: Sequence[Array], features: Array) -> list[Array]:
    """Return the value of each piece at each point, (..., n), for coefficients (..., parameters)."""
    each = [c @ features[:, list(columns)].T for c, columns in zip(coefficients, kind.pieces, strict=True)]
    if kind.fixed is not None:
        each[-1] = each[-1] + features[:, kind.fixed]
    return each


@dataclass(frozen=True)
class Posterior:
    """Components with draws. `probability` is that of each kind by name, `log` the log evidence of all together."""

    data: Data
    components: tuple[Component, ...]
    probability: Mapping[str, float]
    log: float

    def best(self, kind: str | None = None) -> Component:
        """Return the component with the largest weight, of a kind or of the most probable kind."""
        name = kind or max(self.probability, key=lambda k: self.probability[k])
        return max((c for c in self.components if c.kind.name == name), key=lambda c: c.log)

    def value(self, axis: Array, features: Array) -> Array:
        """Return the most probable curve at each point, (n,)."""
        best = self.best()
        return np.asarray(best.values([b[None] for b in best.best], axis, features)[0])

    def kinds(self) -> list[str]:
        """Return the kinds that the observations allow, most probable first."""
        return sorted(self.probability, key=lambda name: -self.probability[name])

    @property
    def identified(self) -> bool:
        """Return whether one kind has 95 % and each of its pieces has as many different x as parameters."""
        name = self.kinds()[0]
        best = self.best(name)
        counts = np.diff([0, *best.cuts, len(np.unique(self.data.axis))])
        enough = all(n >= len(p) for n, p in zip(counts, best.kind.pieces, strict=True))
        return self.probability[name] >= 0.95 and enough

    @property
    def sizes(self) -> Array:
        """Probability of each size of noise, (SIZES,), for data with one shape of noise."""
        shares = special.softmax([c.log for c in self.components])
        return np.asarray(shares @ np.array([c.chances for c in self.components]))

    def draws(self, axis: Array, features: Array) -> tuple[Array, Array]:
        """Return draws of the curve, (draws, n), and the standard deviation of a new observation's noise there.

        Beyond the observations the noise grows with distance, because they only show within their range how far the
        truth strays from any such model.
        """
        curves, noises = [], []
        logs = np.array([c.log for c in self.components])
        weights = np.exp(logs - logs.max())
        random = np.random.default_rng(SEED)
        wanted = np.floor(DRAWS * weights / weights.sum()).astype(int)
        wanted[int(np.argmax(weights))] += DRAWS - int(wanted.sum())
        size = max(float(np.abs(self.data.y).max()), 1e-300)
        low, high = float(self.data.axis.min()), float(self.data.axis.max())
        outside = np.maximum(np.maximum(low - axis, axis - high), 0.0)
        farther = 1.0 + BEYOND * outside / max(high - low, 1e-300)
        for component, count in zip(self.components, wanted, strict=True):
            if not count:
                continue
            at = random.choice(len(component.size), count, replace=count > len(component.size))
            curve = component.values([c[at] for c in component.draws], axis, features)
            shape = np.abs(curve) / size if component.noise == "proportional" else np.ones_like(curve)
            curves.append(curve)
            noises.append(component.size[at][:, None] * shape * farther)
        return np.vstack(curves), np.vstack(noises)


def estimate(data: Data, kinds: Sequence[Kind], every: bool = False) -> Posterior:
    """Return the posterior over these kinds; `every` also returns kinds that are out of the question, to be shown.

    Raises ValueError without an observation.
    """
    if not len(data.y):
        raise ValueError("no observation to estimate from")
    random = np.random.default_rng(SEED)
    weighed = [
        _Weighed(data, kind, noise, runs)
        for noise in data.noises
        for runs in [functools.cache(functools.partial(_run, data, data.shape(noise), data.sizes(noise)))]
        for kind in kinds
    ]
    top = max((one.most for one in weighed), default=-np.inf)
    possible = [one for one in weighed if every or one.most > top - CLEAR]
    found = [component for one in possible for component in one.components(top, random)]
    if not found:  # the best candidates contradict themselves
        found = [component for one in weighed for component in one.components(top, random)]
    logs = np.array([component.log for component in found])
    total = float(_log_sum(logs))
    probability: dict[str, float] = {}
    for component, share in zip(found, np.exp(logs - total), strict=True):
        probability[component.kind.name] = probability.get(component.kind.name, 0) + float(share)
    return Posterior(data, tuple(found), probability, total)


def _log_sum(logs: Array) -> Array:
    """Return the log of the sum of exponentials along the last axis; scipy takes ten times as long on a few."""
    most = logs.max(axis=-1, keepdims=True)
    return np.asarray(most[..., 0] + np.log(np.sum(np.exp(logs - most), axis=-1)))


def _run(
    data: Data, shape: Array, sizes: Array, columns: tuple[int, ...], fixed: int | None, first: int, last: int
) -> Run:
    """Regress these observations on these features. Raises LinAlgError if a feature is not finite."""
    scale = np.sqrt(data.share) / shape[first:last]
    scales = data.scales[list(columns)]
    variance = sizes**2
    if last == first:
        return Run(np.empty(0), np.empty(0), np.empty((0, len(columns))), np.zeros(SIZES), scales)
    design = data.features[first:last][:, list(columns)] * scales * scale[:, None]
    y = (data.y[first:last] - (0.0 if fixed is None else data.features[first:last, fixed])) * scale
    if not np.isfinite(design).all():  # some LAPACKs never return from it
        raise np.linalg.LinAlgError("not finite")
    left, singular, right = np.linalg.svd(design, full_matrices=False)
    keep = singular > 1e-9 * max(float(singular[0]), 1e-300)
    left, singular, right = left[:, keep], singular[keep], right[keep]
    projected = left.T @ y
    rest = y - left @ projected
    rest -= left @ (left.T @ rest)  # twice, because the rest is ten million times smaller than y
    spread = variance[:, None] + singular**2
    free = data.share * (last - first) - len(singular)
    evidence = -0.5 * np.sum(np.log(spread) + projected**2 / spread, axis=1)
    evidence -= 0.5 * (free * np.log(variance) + float(rest @ rest) / variance)
    return Run(singular, projected, right, evidence, scales)


class _Weighed:
    """A kind with one shape of noise: the evidence of each way to cut."""

    def __init__(self, data: Data, kind: Kind, noise: str, runs: functools._lru_cache_wrapper[Run]) -> None:
        self.data, self.kind, self.noise, self._runs = data, kind, noise, runs
        self.different, first_of = np.unique(data.axis, return_index=True)
        self.starts = np.append(first_of, len(data.y))  # where the observations of each different x begin
        common = float(np.log(kind.weight / len(data.noises) / SIZES) - data.share * np.log(data.shape(noise)).sum())
        self.tried: dict[tuple[int, ...], Array] = {}
        beyond, count = bool(np.any(data.ahead)) or kind.fixed is not None, len(self.different)
        least = max(3, kind.share * count)
        for candidates in _ways_to_cut(count, len(kind.pieces) - 1, beyond, self.tried):
            for cuts in candidates:
                if cuts not in self.tried and (not kind.share or np.diff([0, *cuts, count]).min() >= least):
                    self.tried[cuts] = sum((run.evidence for run in self.cut(cuts)), common + data.odds(noise))
        each = list(self.tried)
        logs = _log_sum(np.array(list(self.tried.values()))) if each else np.empty(0)
        self.order = [(each[i], float(logs[i])) for i in np.argsort(-logs)]

    @property
    def most(self) -> float:
        """Largest evidence."""
        return self.order[0][1] if self.order else -np.inf

    def cut(self, cuts: tuple[int, ...]) -> list[Run]:
        """Return the regression of each piece."""
        edges = [0, *(int(self.starts[c]) for c in cuts), len(self.data.y)]
        last = len(self.kind.pieces) - 1
        fixed = [self.kind.fixed if i == last else None for i in range(last + 1)]
        runs = zip(self.kind.pieces, fixed, edges, edges[1:], strict=False)
        return [self._runs(columns, offset, a, b) for columns, offset, a, b in runs]

    def components(self, top: float, random: np.random.Generator) -> list[Component]:
        """Return components that count next to `top`, with draws; the first that fits its cuts is always kept."""
        places = sorted({c for cuts in self.tried for c in cuts})
        found: list[Component] = []
        for tries, (cuts, log) in enumerate(self.order):
            if len(found) == KEPT or (found and log < top - CLEAR) or tries == 4 * KEPT:
                break
            if (component := self._component(cuts, places, random)) is not None:
                found.append(replace(component, log=component.log + log))
        return found

    def _component(self, cuts: tuple[int, ...], places: Sequence[int], random: np.random.Generator) -> Component | None:
        """Draw a component without draws that contradict it; its `log` is that of the share kept. None if none is."""
        data, kind, runs, per_size = self.data, self.kind, self.cut(cuts), self.tried[cuts]
        chances = np.exp(per_size - _log_sum(per_size))
        known = data.sizes(self.noise)
        likely = float(known[int(np.argmax(per_size))])
        best = [run.mean(likely) for run in runs]
        ends = [*self.different, data.bounds_axis.max(initial=0.0)]
        edges = tuple(float((ends[c - 1] + ends[min(c, len(ends) - 1)]) / 2) for c in cuts)
        component = Component(kind, cuts, self.noise, 0.0, edges, tuple(best), chances)
        witnesses = _witnesses(cuts, self.starts, places) if kind.joined and len(kind.pieces) > 1 else None
        # the last of several pieces has fewer different x than parameters
        thin = cuts and kind.joined and kind.fixed is None and len(self.different) - cuts[-1] < len(kind.pieces[-1])
        tries = TRIES
        # few draws hold if a bound is far off, and few are likely if a piece is thin: then try more
        while True:
            sizes = random.choice(known, tries, p=chances)
            draws = [run.draw(sizes, random) for run in runs]
            share = _allowed(data, kind, draws, witnesses) * _bounded(data, component, draws, sizes)
            total = float(share.sum())
            chance = share * _anywhere(data, component, draws, self.different, self.starts) if thin else share
            enough = total and float(chance.sum()) ** 2 >= FEWEST_DRAWS * float(np.sum(chance**2))
            if enough or tries >= MOST_TRIES or not (len(data.at_least) or (thin and total)):
                break
            tries *= 8
        if total < 1e-12:
            return None
        kept = random.choice(tries, TRIES, p=chance / chance.sum())
        mine = [d[kept] for d in draws]
        counts = np.diff([0, *cuts, len(self.different)])
        known_pieces = all(n >= len(columns) for n, columns in zip(counts, kind.pieces, strict=True))
        if len(data.at_least) or not known_pieces or not _allowed(data, kind, [b[None] for b in best], witnesses)[0]:
            middle = _middle(mine)
            best = [d[middle] for d in mine]
        log = float(np.log(total / tries))
        return replace(component, log=log, best=tuple(best), draws=tuple(mine), size=sizes[kept])


def _ways_to_cut(
    count: int, cuts: int, beyond: bool, tried: Mapping[tuple[int, ...], Array]
) -> Iterator[list[tuple[int, ...]]]:
    """Yield positions of the cuts, as numbers of different x to the left; later rounds are dense around the best.

    `beyond`: the last run may have no observation, because bounds constrain it.
    """
    if not cuts:
        yield [()]
        return
    last = count + (1 if beyond else 0)
    most = MOST_CUTS if cuts == 1 else MOST_CUTS // 2
    every = np.unique(np.linspace(1, last - 1, min(most, last - 1)).round().astype(int)).tolist() if last > 1 else []
    yield list(combinations(every, cuts))
    if last - 1 > most and tried:
        best = max(tried, key=lambda c: float(tried[c].max()))
        step = int(np.ceil((last - 1) / most))
        for wide in (step, 3):
            near = {c + d for c in best for d in np.unique(np.linspace(-wide, wide, 13).round().astype(int)).tolist()}
            near = {c for c in near if 1 <= c < last}
            yield list(combinations(sorted(near), cuts))
            best = max(tried, key=lambda c: float(tried[c].max()))


def _allowed(data: Data, kind: Kind, draws: Sequence[Array], witnesses: tuple[Numbers, Numbers] | None) -> Array:
    """Return 1 for each draw that its kind and its cuts do not contradict, else 0."""
    good = np.ones(len(draws[0]), dtype=bool)
    for feature in kind.rising:
        good &= draws[-1][:, kind.pieces[-1].index(feature)] >= 0
    if witnesses is not None:
        rows, owner = witnesses
        values = pieces(kind, draws, data.features[rows])
        highest = np.maximum.reduce(values)
        good &= np.all(np.choose(owner, values) >= highest - np.abs(highest) * 1e-12, axis=1)
    return good.astype(float)


def _bounded(data: Data, component: Component, draws: Sequence[Array], sizes: Array) -> Array:
    """Return each draw's probability of the bounds: a new value reaches them, or they have another cause."""
    if not len(data.at_least):
        return np.ones(len(sizes))
    values = component.values(draws, data.bounds_axis, data.bounds)
    relative = np.abs(values) / max(float(np.abs(data.y).max()), 1e-300)
    spread = sizes[:, None] * (np.maximum(relative, 1e-300) if component.noise == "proportional" else 1.0)
    each = special.ndtr((values - data.at_least) / spread)
    return np.asarray(np.prod(OTHERWISE + (1 - OTHERWISE) * each, axis=1))


def _anywhere(data: Data, component: Component, draws: Sequence[Array], different: Array, starts: Array) -> Array:
    """Return a weight of each draw, (draws,), for the knot before a thin last piece and the rise behind it.

    It makes the knot equally likely anywhere in its gap, and the rise in any order of magnitude. The regression's prior
    is flat in the piece's a and b. With its knot k instead of a, that is b db dk. The steepest rise that the prior
    allows would then be the most likely of all rises through one observation. 1 / b² makes it db / b dk. The
    probabilities of kinds and cuts stay as they are.
    """
    cut = component.cuts[-1]
    alone = cut == len(different)  # no observation: only a bound constrains the piece
    nearest = int(np.argmin(np.where(data.ahead, data.bounds_axis, np.inf))) if alone else None
    after = data.features[starts[cut]] if nearest is None else data.bounds[nearest]
    values = pieces(component.kind, draws, np.vstack([data.features[starts[cut - 1]], after]))
    over = values[-1] - values[-2]
    rise = np.maximum(over[:, 1] - over[:, 0], data.resolution)
    if nearest is not None:  # less explains nothing: count it as the least that does
        rise = np.maximum(rise, data.at_least[nearest] - values[-2][:, 1])
    return np.asarray((float(rise.min()) / rise) ** 2)


def _middle(draws: Sequence[Array]) -> int:
    """Return the draw nearest to the mean of all, in units of their spread."""
    parts = [np.sum(((d - d.mean(axis=0)) / np.maximum(d.std(axis=0), 1e-300)) ** 2, axis=1) for d in draws]
    return int(np.argmin(np.sum(parts, axis=0)))


def _witnesses(cuts: tuple[int, ...], starts: Array, places: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Return observations at which the piece of their run must be the largest, and the number of that run.

    Where cuts were tried only here and there, observations next to a cut may be on either side and are omitted.
    """
    bounds = [0, *cuts, len(starts) - 1]
    rows: list[int] = []
    owner: list[int] = []
    for piece, (a, b) in enumerate(pairwise(bounds)):
        before = max((p for p in places if p < a), default=a - 1)
        after = min((p for p in places if p > b), default=b + 1)
        low = a if piece == 0 else a + (a - before - 1) // 2
        high = b if piece == len(bounds) - 2 else b - (after - b - 1) // 2
        for different in range(low, max(high, low)):
            rows += range(int(starts[different]), int(starts[different + 1]))
        owner += [piece] * (len(rows) - len(owner))
    if len(rows) > 80:
        keep = np.unique(np.linspace(0, len(rows) - 1, 80).round().astype(int))
        return np.array(rows)[keep], np.array(owner)[keep]
    return np.array(rows, dtype=np.int64), np.array(owner, dtype=np.int64)
