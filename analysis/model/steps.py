"""Jumps and wavering of a quantity along an axis, found in the residuals of its curve.

Reserved memory comes in blocks, and a layer's may vanish from one length to the next. No curve has a jump, so medians
of residuals before and after a length are compared. A jump stands out of all such differences, is more than 2 % of the
value, and has its two sides apart. Lengths, alone or in short runs, that go as far and return are wavering.
"""

from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from vramsweep.analysis.model.curves import Array

LEAST = 0.02  # share of the value
FEWEST = 40  # lengths
WINDOW = 15  # lengths on each side, at most
ENDS = 8  # lengths on each side, at least
APART = 0.5  # share of the jump that must lie between the nearest quartiles of its two sides
MANY = 8  # wavering lengths; fewer are not reported
OUT = 5.0  # robust standard deviations (median absolute deviation, Hampel 1974)


@dataclass(frozen=True)
class Jump:
    """A jump at `x`, the first length after it, by `size` (negative: a drop), in the unit of y."""

    x: float
    size: float


def jumps(x: Array, left: Array, y: Array, most: int = 4) -> list[Jump]:
    """Return the `most` largest jumps, in order of x, from the residuals `left` (n,) of y (n,) at ascending x (n,)."""
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
    """`count` lengths from `start` to `stop` that lie off those around them, by a median `size` (unit of y)."""

    start: float
    stop: float
    count: int
    size: float


def wavering(x: Array, left: Array, y: Array) -> list[Wavering]:
    """Find runs of many single lengths off their neighbours' median; arguments as in `jumps`."""
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
    """Return whether three quarters of either side lie clear of three quarters of the other."""
    before, after = (np.sign(size) * side for side in (left[max(place - window, 0) : place], left[place:][:window]))
    return bool(np.percentile(after, 25) - np.percentile(before, 75) > APART * abs(size))


def _sharpest(left: Array, place: int, window: int, size: float) -> int:
    """Return the largest step of this sign within the window, because medians do not find a jump's exact length."""
    low, high = max(place - window // 2, 1), min(place + window // 2 + 1, len(left))
    steps = (left[low:high] - left[low - 1 : high - 1]) * np.sign(size)
    return low + int(np.argmax(steps))
