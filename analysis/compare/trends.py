"""What changes along an axis between two sides: how a difference grows, and where its sign turns.

Pairs that are alike in every setting but the axis make a line. A trend of a line is a straight one, and only claimed
where its 95 % interval excludes 0 and it moves more than the tolerance over the measured range. A crossover is where a
difference that had one sign gets the other, and is only claimed where both sides are clear.

Neighbours along a sweep may be alike (drifting clocks, an allocator's segments), so they count as fewer than they are:
intervals are wider by the autocorrelation that the residuals show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import ndimage, stats

from vramsweep.analysis.compare.changes import Level, Place, find_level, find_places
from vramsweep.analysis.compare.series import FEWEST_SINGLE, inflation, once
from vramsweep.analysis.compare.verdicts import MARGIN, Comparison, Pair, Single, allowed
from vramsweep.analysis.data.groups import FREE
from vramsweep.analysis.model.curves import Array
from vramsweep.harness.messages.errors import UserError

SPEED = "tokens_per_s"
FEWEST = 5  # values of the axis: with 4 no order is rare enough for 95 % (Kendall's tau: 2 of 24)
BLOCKS = 32  # neighbours are taken together to at most so many medians before a slope is looked for
DRAWS = 99_999
SEED = 20_240_917


@dataclass(frozen=True)
class Trend:
    """How the difference B − A moves along the axis, on one line of pairs.

    `quantity` is a column of memory, with `unit` "bytes" for B − A or "ratio" for B/A − 1, or tokens_per_s with
    "log_ratio", the natural logarithm of B/A. `slope` is in that unit per token (of the micro-batch: per sample), with
    its 95 % interval. `at_start` and `at_stop` are medians of the pairs around the axis's values `start` and `stop`.
    `claimed`: the interval excludes 0, the line moves more than the tolerance over the measured range, and from
    `at_start` to `at_stop` the difference moves the same way.
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
class Crossover:
    """Where along the axis a verdict on B begins to hold, or ends to.

    `verdict` (SMALLER, LARGER, FASTER, SLOWER) holds from `at` on, or up to `at` where `onward` is false; `low` and
    `high` are the 95 % interval of where that turns, or (`exact`) the neighbours between which it does. `before` and
    `after` are the geometric means of B/A, less 1, of the pairs below and above.
    """

    quantity: str
    settings: Mapping[str, Any]
    pairs: int
    verdict: str
    onward: bool
    at: float
    low: float
    high: float
    before: float
    after: float
    exact: bool = False


@dataclass(frozen=True)
class Along:
    """What changes along one axis, the longest line of pairs first. `axis` is None where no axis varies."""

    axis: str | None
    trends: tuple[Trend, ...] = ()
    crossovers: tuple[Crossover, ...] = ()
    levels: tuple[Level, ...] = ()
    places: tuple[Place, ...] = ()

    def ratios(self, trend: Trend) -> tuple[float, float]:
        """B/A − 1 at both ends of a trend of memory."""
        line = (trend.quantity, "ratio", trend.settings)
        same = next(t for t in self.trends if (t.quantity, t.unit, t.settings) == line)
        return same.at_start, same.at_stop


def along(comparison: Comparison, axis: str | None = None) -> Along:
    """Trends and crossovers along `axis`: one of `FREE`, or that of length and batch with more values.

    Raises UserError for an axis that the pairs do not vary in.
    """
    if (axis := chosen(comparison.pairs, axis)) is None:
        return Along(None)
    trends: list[Trend] = []
    crossovers: list[Crossover] = []
    levels: list[Level] = []
    places: list[Place] = []
    for settings, pairs in lines(comparison.pairs, axis):
        for metric in dict.fromkeys(m.metric for pair in pairs for m in pair.memory):
            known = [(position(p, axis), m) for p in pairs for m in p.memory if m.metric == metric]
            sizes = np.array([(x, m.a, m.b) for x, m in known if m.a and m.b], dtype=float).reshape(-1, 3)
            trends += memory_trends(metric, settings, sizes, comparison.tolerance)
            crossovers += memory_crossovers(metric, settings, sizes, comparison.tolerance)
            x, a, b = sizes.T
            places += find_places(metric, settings, x, b - a, a, "bytes")
        speeds = [(position(p, axis), np.log(p.speed.b / p.speed.a), p.speed.error or np.nan)
                  for p in pairs if p.speed.a and p.speed.b]  # fmt: skip
        found = np.array(speeds, dtype=float).reshape(-1, 3)
        trends += [t for t in [_trend(SPEED, "log_ratio", settings, found[:, 0], found[:, 1], MARGIN)] if t]
        crossovers += speed_crossover(settings, *found.T)
        levels += [one for one in [find_level(SPEED, settings, found[:, 0], found[:, 1], MARGIN)] if one]
        places += find_places(SPEED, settings, found[:, 0], found[:, 1], np.ones(len(found)), "ratio")
    return Along(axis, tuple(trends), tuple(crossovers), tuple(levels), tuple(places))


def position(pair: Pair | Single, axis: str) -> float:
    """Where a pair lies along the axis; NaN where that is not known."""
    length, batch = (np.nan if v is None else float(v) for v in (pair.seq_len, pair.micro_batch))
    return {"seq_len": length, "micro_batch": batch, "tokens": length * batch}[axis]


def chosen(pairs: Sequence[Pair], axis: str | None = None) -> str | None:
    """The axis asked for, else that of length and batch which has more values, None where neither varies.

    Raises UserError for one that does not vary or is not known.
    """
    counts = {name: len({x for p in pairs if not np.isnan(x := position(p, name))}) for name in FREE}
    if axis is None:
        best = max(FREE["tokens"], key=lambda name: counts[name])
        return best if counts[best] > 1 else None
    if counts[axis] < 2:
        varying = [name for name in FREE if counts[name] > 1]
        instead = f"take --axis {' or '.join(varying)}" if varying else "none of them varies, so leave --axis out"
        all_one = "all pairs have one" if counts[axis] else "no pair knows its"
        raise UserError(f"--axis {axis}: {all_one} {axis}; {instead}")
    return axis


def lines(pairs: Sequence[Pair], axis: str) -> list[tuple[dict[str, Any], list[Pair]]]:
    """Pairs that are alike in every setting but the axis, sorted along it, with what is alike; the longest first."""
    found: dict[str, tuple[dict[str, Any], list[Pair]]] = {}
    for pair in pairs:
        if not np.isnan(position(pair, axis)):
            rest = {key: value for key, value in pair.settings.items() if key not in FREE[axis]}
            found.setdefault(repr(rest), (rest, []))[1].append(pair)
    for _, mine in found.values():
        mine.sort(key=lambda pair: position(pair, axis))
    return sorted(found.values(), key=lambda line: -len(line[1]))


def memory_trends(metric: str, settings: Mapping[str, Any], sizes: Array, tolerance: float) -> list[Trend]:
    """Of B − A in bytes, and of B/A − 1. `sizes`: axis, A, B in bytes, shape (n, 3)."""
    if not len(sizes):
        return []
    x, a, b = sizes.T
    least = allowed(metric, float(np.median(a)), tolerance)
    found = (
        _trend(metric, "bytes", settings, x, b - a, least),
        _trend(metric, "ratio", settings, x, b / a - 1, least / float(np.median(a))),
    )
    return [trend for trend in found if trend is not None]


def _trend(quantity: str, unit: str, settings: Mapping[str, Any], x: Array, y: Array, least: float) -> Trend | None:
    """Theil and Sen's slope (Sen 1968) of the medians of blocks of neighbours.

    Its interval is the one by Kendall's tau, with the variance of tau larger by what the autocorrelation beside a
    parabola makes of it. None with fewer than `FEWEST` values of the axis.
    """
    pairs = len(x)
    x, y = _blocks(*once(x, y))
    if len(x) < FEWEST:
        return None
    slope = float(stats.theilslopes(y, x)[0])
    curve = np.polyfit(x - x.mean(), y, 2)  # as being no straight line is no noise
    wider = np.sqrt(inflation(y - np.polyval(curve, x - x.mean()), 2))
    level = 2 * stats.norm.sf(stats.norm.ppf(0.975) * wider)
    low, high = stats.theilslopes(y, x, level)[2:]
    span = float(x[-1] - x[0])
    claimed = bool((low > 0 or high < 0) and abs(slope) * span > least and slope * (y[-1] - y[0]) > 0)
    return Trend(quantity, unit, settings, pairs, slope, float(low), float(high),
                 float(x[0]), float(x[-1]), float(y[0]), float(y[-1]), claimed)  # fmt: skip


def _blocks(x: Array, y: Array) -> tuple[Array, Array]:
    """Medians of at most `BLOCKS` runs of neighbours."""
    if len(x) <= BLOCKS:
        return x, y
    both = zip(np.array_split(x, BLOCKS), np.array_split(y, BLOCKS), strict=True)
    middles = np.array([(np.median(mine), np.median(theirs)) for mine, theirs in both])
    return middles[:, 0], middles[:, 1]


def memory_crossovers(metric: str, settings: Mapping[str, Any], sizes: Array, tolerance: float) -> list[Crossover]:
    """Where B begins, or ceases, to be SMALLER, and LARGER, than A by more than the tolerance."""
    if len(sizes) < 4:
        return []
    x, a, b = sizes[np.argsort(sizes[:, 0], kind="stable")].T
    beyond = np.maximum([allowed(metric, size, tolerance) for size in a], 0.5)  # half a byte: bytes are whole
    found = []
    for verdict, sign in (("SMALLER", -1.0), ("LARGER", 1.0)):
        holds = sign * (b - a) - beyond
        if (turn := _exact_turn(x, holds) or turning(*once(x, holds), None)) is not None:
            found.append(_crossover(metric, settings, x, np.log(b / a), verdict, turn))
    return found


def speed_crossover(settings: Mapping[str, Any], x: Array, logs: Array, errors: Array) -> list[Crossover]:
    """Where B begins to be FASTER, or SLOWER, than A.

    `logs` are ln(B/A) of tokens/s; `errors` their standard errors from repeats, NaN where not known. Both sides must be
    clear: the 95 % intervals of their means exclude 0, and the means lie further apart than `MARGIN`.
    """
    (places, middles), (_, spreads) = once(x, logs), once(x, errors)
    single = len(places) >= FEWEST_SINGLE  # then neighbours tell the noise, and also what is not from run to run
    if (turn := turning(places, middles, None if single or np.isnan(spreads).any() else spreads)) is None:
        return []
    below = places < turn.at
    noise = turn.noise * np.sqrt(turn.inflation)
    means, margins = np.array([
        (middles[side].mean(), stats.norm.ppf(0.975) * np.sqrt(np.sum(noise[side] ** 2)) / side.sum())
        for side in (below, ~below)
    ]).T  # fmt: skip
    if np.any(np.abs(means) <= margins) or abs(means[1] - means[0]) <= MARGIN:
        return []
    return [_crossover(SPEED, settings, x, logs, "FASTER" if turn.rising else "SLOWER", turn)]


@dataclass(frozen=True)
class Turn:
    """Where values turn from below 0 to above it (or back, if not `rising`), with a 95 % interval; their noise."""

    at: float
    low: float
    high: float
    rising: bool
    noise: Array
    inflation: float
    exact: bool = False


def _crossover(
    quantity: str, settings: Mapping[str, Any], x: Array, logs: Array, verdict: str, turn: Turn
) -> Crossover:
    below = x < turn.at
    before, after = (float(np.expm1(logs[side].mean())) for side in (below, ~below))
    onward = turn.rising or quantity == SPEED  # of speed the verdict is that of what comes after
    return Crossover(quantity, settings, len(x), verdict, onward, turn.at, turn.low, turn.high, before, after,
                     turn.exact)  # fmt: skip


def _exact_turn(x: Array, y: Array) -> Turn | None:
    """The turn of values that have one sign up to some x and the other from there on, two or more on each side.

    For what repeats exactly: it then lies between those two x.
    """
    above = y > 0
    changes = np.flatnonzero(above[1:] != above[:-1])
    if len(changes) != 1 or not 2 <= changes[0] + 1 <= len(x) - 2:
        return None
    low, high = float(x[changes[0]]), float(x[changes[0] + 1])
    return None if low == high else Turn(high, low, high, bool(above[-1]), np.zeros(len(x)), 1.0, exact=True)


def turning(x: Array, y: Array, errors: Array | None) -> Turn | None:
    """Where y turns from one sign to the other, if it does so once; x ascends, each once.

    No shape is assumed but that. A turn at some place is refuted where a run of neighbours that ends there has a mean
    above 0, or one that starts there a mean below 0, by more than noise makes of any such run in 2.5 % of draws; the
    places that are not refuted are the interval (a confidence set by inverting tests). Where it reaches an end no turn
    is claimed; nor where it is empty, or a run elsewhere has the wrong sign, as the sign then turns more than once.
    `at` is the split with the most below 0 before and above 0 after it, each point weighted by its precision.

    `errors` are standard errors of y; without, the noise is what is left beside the running median. Points further than
    three of these from that are moved there, as a single odd run says nothing about a turn.
    """
    n = len(x)
    if n < FEWEST or (errors is None and n < FEWEST_SINGLE):
        return None
    alike = 1.0
    if errors is None:
        errors, smooth = _noise(y)
        alike = inflation((y - smooth) / errors)
        y = smooth + np.clip(y - smooth, -3 * errors, 3 * errors)
    weights = errors**-2.0
    sums = np.concatenate([[0.0], np.cumsum(weights * y)])
    rising = bool(sums[-1] - 2 * sums.min() >= 2 * sums.max() - sums[-1])
    sign = 1.0 if rising else -1.0
    split = int(np.argmin(sign * sums))
    if not 0 < split < n:
        return None
    standing = np.ones(n + 1, dtype=bool)
    parts = np.concatenate([[0.0], np.cumsum(sign * y)])
    variance = np.concatenate([[0.0], np.cumsum(errors**2 * alike)])
    means = {}  # of every run of neighbours, as z: by its length, from where it starts
    for length in (2**k for k in range(n.bit_length())):
        means[length] = z = (parts[length:] - parts[:-length]) / np.sqrt(variance[length:] - variance[:-length])
        standing[length:] &= z <= _critical(n)
        standing[:-length] &= z >= -_critical(n)
    places = np.flatnonzero(standing)
    if not len(places) or places[0] == 0 or places[-1] == n:
        return None
    never = stats.norm.isf(0.025 / n / len(means))  # of all runs on one side, wherever they are (Bonferroni)
    for length, z in means.items():
        if np.any(z[: max(0, places[0] - length + 1)] > never) or np.any(z[places[-1] :] < -never):
            return None
    low, high = float(x[places[0] - 1]), float(x[places[-1]])
    at = float(np.clip((x[split - 1] + x[split]) / 2, low, high))
    return Turn(at, low, high, rising, errors, alike)


def _noise(y: Array) -> tuple[Array, Array]:
    """The standard deviation of each value around the running median, from its neighbours, and that median."""
    n = len(y)
    width = min(31, 2 * (n // 8) + 1)
    smooth: Array = ndimage.median_filter(y, width, mode="reflect")
    off = np.abs(y - smooth)
    spread: Array = 1.4826 * ndimage.median_filter(off, min(101, 2 * (n // 2) + 1), mode="reflect")
    # what a median of so many leaves of their own noise
    spread = spread / np.sqrt(1 - 1 / width)
    return np.maximum(spread, 1e-9 + 1e-9 * float(off.max())), smooth


@lru_cache(maxsize=64)
def _critical(n: int) -> float:
    """What the mean of any run of 1, 2, 4, ... up to n normal values from one point exceeds in 2.5 % of draws, as z."""
    values = np.random.default_rng(SEED).standard_normal((DRAWS, n.bit_length()))
    z = most = values[:, 0]
    for step in values.T[1:]:  # a run of twice the length is the one before and as much again
        z = (z + step) / np.sqrt(2)
        most = np.maximum(most, z)
    return float(np.percentile(most, 97.5))
