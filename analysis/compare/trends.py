"""Trends of a difference between two sides along an axis: how it grows, and where it changes.

Pairs that agree in every setting but the axis make a line. A trend is a straight line's slope. It is claimed only if
its 95 % interval excludes 0 and it moves more than the tolerance over the measured range.

Neighbours along a sweep may be alike (drifting clocks, an allocator's segments), so they count as fewer than they are.
Intervals are wider by the autocorrelation that the residuals show.

A change has a position on the axis: one change of level with its interval, and positions where it steps or dips.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import ndimage, stats

from vramsweep.analysis.compare.verdicts import MARGIN, Comparison, Pair, Single, allowed
from vramsweep.analysis.data.groups import FREE
from vramsweep.analysis.model.curves import Array
from vramsweep.analysis.model.observations import jumps
from vramsweep.harness.messages.errors import UserError

SPEED = "tokens_per_s"
FEWEST = 5  # values of the axis: with 4 no order is rare enough for 95 % (Kendall's tau: 2 of 24)
BLOCKS = 32  # medians of neighbours, at most, that a slope is found from
FEWEST_SINGLE = 30  # pairs of single runs, at least, whose own scatter tells the noise
FEWEST_ALIKE = 12  # values of the axis, at least, that tell how alike neighbours are; fewer usually lie far apart
FEWEST_SIDE = 8  # values of the axis on each side of a change, if their own scatter is the noise
FEWEST_BESIDE = 2  # values of the axis on each side of a change, if the noise is known
SURE = 12.0  # log likelihood that a change must add, neighbours discounted: it is one position of thousands
WITHIN = 3.68  # log likelihood below the best: 95 % of a position (Hansen 2000, table I: 7.35 of twice that)
UNDONE = 0.5  # share of a step's size that may be left after the next one takes it back
SMOOTH, BLOCK = 10, 10  # least values to smooth over, and values that are drawn together
CLEAR = 3.0  # standard errors by which the mean of a side differs from 0
DRAWS, SEED = 400, 20_240_917
SHORT = 0.1  # share of the axis's values: a step that is taken back within it is a dip or a bump

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Trend:
    """The slope of the difference B − A along the axis, on one line of pairs.

    `quantity` is a column of memory, or tokens_per_s. The `unit` of memory is "bytes" for B − A or "ratio" for B/A − 1;
    of speed it is "log_ratio", the natural logarithm of B/A. `slope` is in that unit per token (of the micro-batch: per
    sample), with its 95 % interval. `at_start` and `at_stop` are medians of the pairs around the axis's values `start`
    and `stop`. `claimed`: the interval excludes 0, the line moves more than the tolerance over the measured range, and
    from `at_start` to `at_stop` it moves the same way.
    """

    quantity: str
    unit: str
    settings: Mapping[str, Any]
    pairs: int
    slope: float
    low: float
    high: float
    start: float
    stop: float
    at_start: float
    at_stop: float
    claimed: bool


@dataclass(frozen=True)
class Level:
    """A new level of B/A − 1 from about `at` on (95 % `low` to `high`; `exact`: between these two neighbours). `before`
    and `after` are medians; eight tenths of the pairs above `at` lie from `after_low` to `after_high`."""

    quantity: str
    settings: Settings
    at: float
    low: float
    high: float
    before: float
    after: float
    after_low: float
    after_high: float
    exact: bool = False


@dataclass(frozen=True)
class Place:
    """The difference steps by `size` at `start`, and back at `stop` if any; `unit`: "bytes", or "ratio" for ln(B/A)."""

    quantity: str
    settings: Settings
    start: float
    stop: float | None
    size: float
    unit: str


@dataclass(frozen=True)
class Along:
    """Changes along one axis, the longest line of pairs first. `axis` is None if no axis varies."""

    axis: str | None
    trends: tuple[Trend, ...] = ()
    levels: tuple[Level, ...] = ()
    places: tuple[Place, ...] = ()

    def ratios(self, trend: Trend) -> tuple[float, float]:
        """Return B/A − 1 at both ends of a trend of memory."""
        line = (trend.quantity, "ratio", trend.settings)
        same = next(t for t in self.trends if (t.quantity, t.unit, t.settings) == line)
        return same.at_start, same.at_stop


def along(comparison: Comparison, axis: str | None = None) -> Along:
    """Return trends and changes along `axis`: one of `FREE`, by default length or batch, whichever has more values.

    Raises UserError for an axis that the pairs do not vary in.
    """
    if (axis := chosen(comparison.pairs, axis)) is None:
        return Along(None)
    trends: list[Trend] = []
    levels: list[Level] = []
    places: list[Place] = []
    for settings, pairs in lines(comparison.pairs, axis):
        for metric in dict.fromkeys(m.metric for pair in pairs for m in pair.memory):
            known = [(position(p, axis), m) for p in pairs for m in p.memory if m.metric == metric]
            sizes = np.array([(x, m.a, m.b) for x, m in known if m.a and m.b], dtype=float).reshape(-1, 3)
            trends += memory_trends(metric, settings, sizes, comparison.tolerance)
            x, a, b = sizes.T
            beyond = np.maximum([allowed(metric, size, comparison.tolerance) for size in a], 0.5)  # bytes are whole
            levels += filter(None, [find_turn(metric, settings, x, np.log(b / a), np.abs(b - a) > beyond)])
            places += find_places(metric, settings, x, b - a, a, "bytes")
        speeds = [(position(p, axis), np.log(p.speed.b / p.speed.a), p.speed.error or np.nan)
                  for p in pairs if p.speed.a and p.speed.b and not p.speed.host_bound]  # fmt: skip
        found = np.array(speeds, dtype=float).reshape(-1, 3)
        trends += [t for t in [_trend(SPEED, "log_ratio", settings, found[:, 0], found[:, 1], MARGIN)] if t]
        x, logs, errors = found.T
        crossing = find_crossing(SPEED, settings, x, logs, MARGIN)
        levels += filter(None, [crossing or find_level(SPEED, settings, x, logs, errors, MARGIN)])
        places += find_places(SPEED, settings, x, logs, np.ones(len(x)), "ratio")
    return Along(axis, tuple(trends), tuple(levels), tuple(places))


def position(pair: Pair | Single, axis: str) -> float:
    """Return the position of a pair along the axis; NaN if it is not known."""
    length, batch = (np.nan if v is None else float(v) for v in (pair.seq_len, pair.micro_batch))
    return {"seq_len": length, "micro_batch": batch, "tokens": length * batch}[axis]


def chosen(pairs: Sequence[Pair], axis: str | None = None) -> str | None:
    """Return the given axis, else length or batch, whichever has more values; None if neither varies.

    Raises UserError for one that does not vary or is not known.
    """
    counts = {name: len({x for p in pairs if not np.isnan(x := position(p, name))}) for name in FREE}
    if axis is None:
        best = max(FREE["tokens"], key=lambda name: counts[name])
        return best if counts[best] > 1 else None
    if counts[axis] < 2:
        varying = [name for name in FREE if counts[name] > 1]
        instead = f"use --axis {' or '.join(varying)}" if varying else "no axis varies, so leave --axis out"
        all_one = "the same" if counts[axis] else "unknown"
        raise UserError(f"--axis {axis}: {axis} is {all_one} in all pairs; {instead}")
    return axis


def lines(pairs: Sequence[Pair], axis: str) -> list[tuple[dict[str, Any], list[Pair]]]:
    """Return lines of pairs that agree in all but the axis, sorted along it, with their settings; the longest first."""
    found: dict[str, tuple[dict[str, Any], list[Pair]]] = {}
    for pair in pairs:
        if not np.isnan(position(pair, axis)):
            rest = {key: value for key, value in pair.settings.items() if key not in FREE[axis]}
            found.setdefault(repr(rest), (rest, []))[1].append(pair)
    for _, mine in found.values():
        mine.sort(key=lambda pair: position(pair, axis))
    return sorted(found.values(), key=lambda line: -len(line[1]))


def memory_trends(metric: str, settings: Mapping[str, Any], sizes: Array, tolerance: float) -> list[Trend]:
    """Return the trends of B − A in bytes and of B/A − 1. `sizes` (n, 3): axis, A, B in bytes."""
    if not len(sizes):
        return []
    x, a, b = sizes.T
    least = allowed(metric, float(np.median(a)), tolerance)
    ratio = _trend(metric, "ratio", settings, x, b / a - 1, least / float(np.median(a)))
    return [one for one in (_trend(metric, "bytes", settings, x, b - a, least), ratio) if one is not None]


def _trend(quantity: str, unit: str, settings: Mapping[str, Any], x: Array, y: Array, least: float) -> Trend | None:
    """Return Theil and Sen's slope (Sen 1968) of the medians of blocks of neighbours.

    Its interval is by Kendall's tau. The variance of tau is larger by the autocorrelation of the residuals from a
    parabola. None with fewer than `FEWEST` values of the axis.
    """
    pairs = len(x)
    x, y = _blocks(*once(x, y))
    if len(x) < FEWEST:
        return None
    slope = float(stats.theilslopes(y, x)[0])
    curve = np.polyfit(x - x.mean(), y, 2)  # because curvature is no noise
    wider = np.sqrt(inflation(y - np.polyval(curve, x - x.mean()), 2))
    level = 2 * stats.norm.sf(stats.norm.ppf(0.975) * wider)
    low, high = stats.theilslopes(y, x, level)[2:]
    span = float(x[-1] - x[0])
    claimed = bool((low > 0 or high < 0) and abs(slope) * span > least and slope * (y[-1] - y[0]) > 0)
    return Trend(quantity, unit, settings, pairs, slope, float(low), float(high),
                 float(x[0]), float(x[-1]), float(y[0]), float(y[-1]), claimed)  # fmt: skip


def _blocks(x: Array, y: Array) -> tuple[Array, Array]:
    """Return the medians of at most `BLOCKS` runs of neighbours."""
    if len(x) <= BLOCKS:
        return x, y
    both = zip(np.array_split(x, BLOCKS), np.array_split(y, BLOCKS), strict=True)
    middles = np.array([(np.median(mine), np.median(theirs)) for mine, theirs in both])
    return middles[:, 0], middles[:, 1]


def find_level(quantity: str, settings: Settings, x: Array, logs: Array, errors: Array, least: float) -> Level | None:
    """Return the one position where ln(B/A), (n,) at x (n,), changes its level most; None if unclear or less than
    `least`.

    The model is two levels with normal noise, whose neighbours count as fewer than they are. `errors` (n,) are standard
    errors from repeats, NaN if not known: they tell the noise of few values.
    """
    (x, y), (_, spreads) = once(x, logs), once(x, errors)
    n = len(x)
    single = n >= FEWEST_SINGLE
    if n <= 2 * FEWEST_BESIDE or (not single and np.isnan(spreads).any()):
        return None
    k = np.arange(1, n)
    sums = np.cumsum(y)[:-1]
    apart = sums / k - (y.sum() - sums) / (n - k)
    gain = k * (n - k) / n * apart**2  # in the sum of squares
    side = FEWEST_SIDE if single else FEWEST_BESIDE
    inside = (k >= side) & (k <= n - side)
    best = int(np.argmax(np.where(inside, gain, -np.inf)))
    left = y - np.where(np.arange(n) < k[best], sums[best] / k[best], (y.sum() - sums[best]) / (n - k[best]))
    variance = float(np.mean(left**2)) * inflation(left, 2) if single else float(np.mean(spreads**2))
    variance = max(variance, 1e-18)
    near = np.flatnonzero(inside & (gain[best] - gain < 2 * WITHIN * variance))
    if gain[best] / (2 * variance) < SURE:
        return None
    ends = float(x[k[near[0]] - 1]), float(x[k[near[-1]]])
    found = _level(quantity, settings, (float(x[k[best]]), *ends), y[: k[best]], y[k[best] :])
    return found if abs(found.after - found.before) >= least else None


def find_crossing(quantity: str, settings: Settings, x: Array, logs: Array, least: float) -> Level | None:
    """Return the one position from which on ln(B/A), (n,) at x (n,), has the other sign, however it gets there. None if
    a side is not clear, the sides are less than `least` apart, or there are fewer than `FEWEST_SINGLE` values.

    The split has most below 0 on one side and most above it on the other. Its interval is that of splits of the
    smoothed values plus resampled blocks of the rest (Künsch 1989).
    """
    x, y = once(x, logs)
    n = len(x)
    if n < FEWEST_SINGLE:
        return None
    smooth = ndimage.gaussian_filter1d(y, max(n / 60, SMOOTH), mode="nearest")
    left, steps, random = y - smooth, np.arange(BLOCK), np.random.default_rng(SEED)
    starts = random.integers(n, size=(DRAWS, n // BLOCK + 1, 1))
    turns = [_split(smooth + left[(one + steps).ravel()[:n] % n]) for one in starts]
    (low, high), at = np.percentile(turns, [2.5, 97.5]).astype(int), _split(y)
    if not FEWEST_SIDE <= low <= at <= high <= n - FEWEST_SIDE:
        return None
    sides = y[:at], y[at:]
    noise = float(left.std()) * np.sqrt(inflation(left))
    clear = all(abs(side.mean()) > CLEAR * noise / np.sqrt(len(side)) for side in sides)
    if not clear or sides[0].mean() * sides[1].mean() > 0 or abs(sides[1].mean() - sides[0].mean()) < least:
        return None
    return _level(quantity, settings, (float(x[at]), float(x[low - 1]), float(x[high])), *sides)


def _split(y: Array) -> int:
    """Return how many values come before the position at which they get the other sign."""
    sums = np.cumsum(y)
    return int(np.argmax(np.abs(2 * sums - sums[-1]))) + 1


def find_turn(quantity: str, settings: Settings, x: Array, logs: Array, differ: Any) -> Level | None:
    """Return the position where a difference that repeats exactly begins, or ends, to exceed the tolerance (`differ`,
    (n,)). None unless that happens once, with two values or more on each side."""
    order = np.argsort(x, kind="stable")
    x, logs = x[order], logs[order]
    state = np.where(np.asarray(differ)[order], np.sign(logs), 0.0)
    at = np.flatnonzero(np.diff(state)) + 1
    if len(at) != 1 or not FEWEST_BESIDE <= at[0] <= len(x) - FEWEST_BESIDE or x[at[0] - 1] == x[at[0]]:
        return None
    low, high = float(x[at[0] - 1]), float(x[at[0]])
    return replace(_level(quantity, settings, (high, low, high), logs[: at[0]], logs[at[0] :]), exact=True)


def _level(quantity: str, settings: Settings, place: tuple[float, float, float], before: Array, after: Array) -> Level:
    low, middle, high = (float(np.expm1(one)) for one in np.percentile(after, [10, 50, 90]))
    return Level(quantity, settings, *place, float(np.expm1(np.median(before))), middle, low, high)


def find_places(
    quantity: str, settings: Settings, x: Array, difference: Array, values: Array, unit: str
) -> list[Place]:
    """Return where a difference (n,) of `values` (n,) at x (n,) steps; one that is soon taken back is one `Place`."""
    order = np.argsort(x, kind="stable")
    found = jumps(x[order], difference[order], values[order], most=8)
    different = np.unique(x)
    pairs = []  # neighbouring steps that go back within a few values; those that undo each other best come first
    for at, (one, after) in enumerate(pairwise(found)):
        near = np.sum((different >= one.x) & (different < after.x)) <= SHORT * len(different)
        left = abs(one.size + after.size) / max(abs(one.size), abs(after.size))
        pairs += [(left, at)] if near and left < UNDONE else []
    back: dict[int, int] = {}
    for _, at in sorted(pairs):
        if not {at, at + 1} & {*back, *back.values()}:
            back[at] = at + 1
    return [
        Place(quantity, settings, one.x, found[back[at]].x if at in back else None, one.size, unit)
        for at, one in enumerate(found)
        if at not in back.values()
    ]


def once(x: Array, y: Array) -> tuple[Array, Array]:
    """Return the distinct x in ascending order, and the median of y at each."""
    values, codes = np.unique(x, return_inverse=True)
    if len(values) == len(x):
        order = np.argsort(x)
        return x[order], y[order]
    return values, np.array([np.median(y[codes == code]) for code in range(len(values))])


def inflation(residuals: Array, parameters: int = 1) -> float:
    """Return how many neighbours count as one: (1 + r) / (1 − r) of their autocorrelation r at lag 1, at least 1.

    The formula is that of a first-order autoregression (Bayley and Hammersley 1946). r is corrected for its bias in
    short series (Marriott and Pope 1954) and for the parameters taken out. Fewer than `FEWEST_ALIKE` residuals give 1.
    """
    n = len(residuals)
    centred = residuals - residuals.mean()
    total = float(centred @ centred)
    if n < FEWEST_ALIKE or total == 0:
        return 1.0
    r = float(centred[1:] @ centred[:-1]) / total
    r = min((n * r + 1) / (n - 3 - parameters), 0.95)
    return (1 + r) / (1 - r) if r > 0 else 1.0
