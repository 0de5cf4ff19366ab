"""Trends of a difference between two sides along an axis: how it grows, and where it changes (changes.py).

Pairs that agree in every setting but the axis make a line. A trend is a straight line's slope. It is claimed only if
its 95 % interval excludes 0 and it moves more than the tolerance over the measured range.

Neighbours along a sweep may be alike (drifting clocks, an allocator's segments), so they count as fewer than they are.
Intervals are wider by the autocorrelation that the residuals show.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from vramsweep.analysis.compare import changes
from vramsweep.analysis.compare.changes import Level, Place, inflation, once
from vramsweep.analysis.compare.verdicts import MARGIN, Comparison, Pair, Single, allowed
from vramsweep.analysis.data.groups import FREE
from vramsweep.analysis.model.curves import Array
from vramsweep.harness.messages.errors import UserError

SPEED = "tokens_per_s"
FEWEST = 5  # values of the axis: with 4 no order is rare enough for 95 % (Kendall's tau: 2 of 24)
BLOCKS = 32  # medians of neighbours, at most, that a slope is found from


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
            levels += filter(None, [changes.find_turn(metric, settings, x, np.log(b / a), np.abs(b - a) > beyond)])
            places += changes.find_places(metric, settings, x, b - a, a, "bytes")
        speeds = [(position(p, axis), np.log(p.speed.b / p.speed.a), p.speed.error or np.nan)
                  for p in pairs if p.speed.a and p.speed.b]  # fmt: skip
        found = np.array(speeds, dtype=float).reshape(-1, 3)
        trends += [t for t in [_trend(SPEED, "log_ratio", settings, found[:, 0], found[:, 1], MARGIN)] if t]
        x, logs, errors = found.T
        crossing = changes.find_crossing(SPEED, settings, x, logs, MARGIN)
        levels += filter(None, [crossing or changes.find_level(SPEED, settings, x, logs, errors, MARGIN)])
        places += changes.find_places(SPEED, settings, x, logs, np.ones(len(x)), "ratio")
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
