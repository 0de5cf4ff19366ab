"""Where a quantity jumps or wavers: reserved memory comes in blocks, and from one length to the next a layer's may go.

No curve has a jump, so they are looked for in what a curve leaves: the median of the lengths after a place against that
of the lengths before it. A jump is one that stands out of all such differences, is more than 2 % of the value, and has
its two sides apart. Single lengths, and short runs of them, that go as far and come back are told as what they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from vramsweep.analysis.model.curves import Array

LEAST = 0.02  # of the value
FEWEST = 40  # lengths
WINDOW = 15  # lengths on each side, as many as there are
ENDS = 8  # lengths that there must be at least
APART = 0.5  # of the jump, which must lie between the quarters of the two sides that are nearest to each other
MANY = 8  # lengths that waver, below which it is not said
OUT = 5.0  # robust standard deviations (median absolute deviation, Hampel 1974)


@dataclass(frozen=True)
class Jump:
    """At `x`, the first length after it, by `size` (negative: a drop), in the unit of y."""

    x: float
    size: float


def jumps(x: Array, left: Array, y: Array, most: int = 4) -> list[Jump]:
    """The largest, at most so many, in order of x: what a curve leaves (n,) of y (n,) at x (n,), ascending."""
    different, first = np.unique(x, return_index=True)
    left, y = left[first], y[first]
    if len(different) < FEWEST:
        return []
    window = min(WINDOW, len(different) // 6)
    places = np.arange(ENDS, len(different) - ENDS + 1)
    sizes = np.array([np.median(left[at : at + window]) - np.median(left[max(at - window, 0) : at]) for at in places])
    scale = 1.4826 * float(np.median(np.abs(sizes - np.median(sizes))))
    found: list[Jump] = []
    for at in np.argsort(-np.abs(sizes)):
        place, size = int(places[at]), float(sizes[at])
        if len(found) == most or abs(size) < max(OUT * scale, LEAST * float(y[place])):
            break
        near = any(abs(np.searchsorted(different, one.x) - place) <= window for one in found)
        if not near and _apart(left, place, window, size):
            found.append(Jump(float(different[_sharpest(left, place, window, size)]), size))
    return sorted(found, key=lambda one: one.x)


@dataclass(frozen=True)
class Wavering:
    """`count` lengths from `start` to `stop` that lie off those around them, the middle one by `size` (unit of y)."""

    start: float
    stop: float
    count: int
    size: float


def wavering(x: Array, left: Array, y: Array) -> list[Wavering]:
    """Where many single lengths lie off their neighbours' median: as `jumps`."""
    different, first = np.unique(x, return_index=True)
    left, y = left[first], y[first]
    if len(different) < FEWEST:
        return []
    off = left - ndimage.median_filter(left, 2 * WINDOW + 1, mode="nearest")
    out = np.flatnonzero(np.abs(off) > np.maximum(OUT * 1.4826 * float(np.median(np.abs(off))), LEAST * y))
    runs = np.split(out, np.flatnonzero(np.diff(out) > 6 * WINDOW) + 1)
    return [
        Wavering(float(different[run[0]]), float(different[run[-1]]), len(run), float(np.median(off[run])))
        for run in runs
        if len(run) >= MANY
    ]


def _apart(left: Array, place: int, window: int, size: float) -> bool:
    """Whether three quarters of either side lie clear of three quarters of the other."""
    before, after = (np.sign(size) * side for side in (left[max(place - window, 0) : place], left[place:][:window]))
    return bool(np.percentile(after, 25) - np.percentile(before, 75) > APART * abs(size))


def _sharpest(left: Array, place: int, window: int, size: float) -> int:
    """The step within the window that goes the same way and farthest: medians find a jump, but not its very length."""
    low, high = max(place - window // 2, 1), min(place + window // 2 + 1, len(left))
    steps = (left[low:high] - left[low - 1 : high - 1]) * np.sign(size)
    return low + int(np.argmax(steps))
