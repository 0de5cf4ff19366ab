"""Kriging: values between measured points, as a base plus a Gaussian process of what the base leaves.

The base is a prediction, or a curve through the points. Measured minus base is a constant, a share of the base, and a
part that changes smoothly with position. A part of each class of points (an alignment, a phase) and a part of each
point alone are added. Their sizes, and the distance over which they change, are unknown. Combinations of a grid are
weighted by their likelihood (Rasmussen and Williams 2006, ch. 2.7 and 5.4). Few points therefore leave the size of
errors open. Nothing here knows bytes, rows or what to measure next.

Between neighbours that differ by more than their base, a value may be anywhere between both: a jump's x is unknown.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vramsweep.analysis.model.curves import Array, Numbers
from vramsweep.analysis.model.residual_model import SMALL

SMOOTH = np.geomspace(1e-4, 0.3, 7)  # shares of the largest base: standard deviations of the smooth part
ALONE = np.array([1e-6, 1e-4, 1e-3, 3e-3, 1e-2])  # and scales of the part of each point alone
OF_CLASS = (0.1, 0.9)  # share of the class part in the smooth part
REACH = (0.03, 0.1, 0.3, 1.0)  # distance over which that changes, as a share of the range
SIZES = np.array(list(itertools.product(SMOOTH, ALONE, OF_CLASS, REACH)))
EXACT = 1e-4  # largest of ALONE where points that are close must be alike
FREEDOM = 4.0  # degrees of freedom of Student's t for the part of each point alone: now and then one is far off
TURNS = 4  # iterations of its weights
MOST = 16  # likeliest combinations that are used
BEFORE = np.array([[0.01, 1e-6, 0.5, 0.3]])  # sizes that a design assumes, before anything is measured


@dataclass(frozen=True)
class Places:
    """Positions of points, (n, axes), each axis from 0 to 1; the class of each, (n,); and its base, (n,)."""

    where: Array
    of_class: Numbers
    base: Array

    def take(self, at: Numbers) -> Places:
        """Return the points at these positions."""
        return Places(self.where[at], self.of_class[at], self.base[at])

    @cached_property
    def size(self) -> float:
        """Largest base."""
        return float(np.abs(self.base).max())


@dataclass(frozen=True)
class Between:
    """Values at every point, (n,), with the standard deviations of the curve and of a new run. `left` is each measured
    value (k,) minus what all others predict there."""

    value: Array
    curve: Array
    new: Array
    left: Array


def between(places: Places, at: Numbers, y: Array, resolution: float, exact: bool) -> Between:
    """Return values at all points from `y` (k,), measured at the positions `at`. `resolution` is the smallest
    difference in y that counts. `exact`: neighbours are alike, no point is far off alone."""
    size, over, seen = places.size, y - places.base[at], places.take(at)
    sizes = SIZES[SIZES[:, 1] <= EXACT] if exact else SIZES
    sizes = np.maximum(sizes, [0, resolution / size / np.sqrt(12), 0, 0])
    smooth, noise = _kernel(seen, seen, sizes, size), (size * sizes[:, 1, None]) ** 2
    weights = np.ones((len(sizes), len(at)))
    for turn in range(TURNS):
        inverse = np.linalg.inv(smooth + (noise / weights)[:, :, None] * np.eye(len(at)))
        solved = inverse @ over
        if exact:
            break
        if turn < TURNS - 1:  # expectation and maximisation of Student's t (Lange, Little and Taylor 1989)
            mean = noise / weights * solved
            spread = noise / weights * (1 - noise / weights * np.diagonal(inverse, axis1=1, axis2=2))
            weights = (FREEDOM + 1) / (FREEDOM + (mean**2 + spread) / noise)
    logs = (np.linalg.slogdet(inverse)[1] - solved @ over) / 2
    logs += ((FREEDOM / 2 - 1) * np.log(weights) - FREEDOM / 2 * (weights - 1)).sum(axis=1)
    kept = np.argsort(-logs)[:MOST]
    share = np.exp(logs[kept] - logs[kept[0]])
    share /= share.sum()
    means, spreads = np.empty((2, len(kept), len(places.base)))
    for turn, one in enumerate(kept):
        across = _kernel(places, seen, sizes[one : one + 1], size)[0]
        means[turn] = across @ solved[one]
        spreads[turn] = _diagonal(places, sizes[one], size) - ((across @ inverse[one]) * across).sum(axis=1)
    mean = share @ means
    curve = share @ (np.maximum(spreads, 0.0) + (means - mean) ** 2) + _gaps(places, at, mean[at])
    alone = float(share @ noise[kept, 0]) * FREEDOM / (FREEDOM - 2)
    value = places.base + mean
    value[at] = y
    left = share @ (solved[kept] / np.diagonal(inverse[kept], axis1=1, axis2=2))
    return Between(value, np.sqrt(curve), np.sqrt(curve + alone), left)


def spread_out(places: Places, first: list[int], count: int) -> list[int]:
    """Return `count` positions to begin with: `first`, then each time the one of which those before tell least.
    Measured values are not used."""
    chosen = list(first)
    own = _diagonal(places, BEFORE[0], places.size)
    rows = np.empty((0, len(own)))  # of a pivoted Cholesky decomposition
    left = own.copy()
    for turn in range(min(count, len(own))):
        if turn == len(chosen):
            chosen.append(int(np.argmax(left)))
        pivot = chosen[turn]
        across = _kernel(places.take(np.array([pivot])), places, BEFORE, places.size)[0, 0]
        row = (across - rows[:, pivot] @ rows) / np.sqrt(max(left[pivot], 1e-12 * own[pivot]))
        rows = np.vstack([rows, row])
        left = np.maximum(left - row**2, 0.0)
        left[chosen[: turn + 1]] = 0.0
    return chosen[:count]


def _kernel(one: Places, other: Places, sizes: Array, size: float) -> Array:
    """Return covariances (sizes, n, m) without the part of each point alone. The smooth part is Matérn's with 3/2."""
    distance = np.sqrt(((one.where[:, None] - other.where[None]) ** 2).sum(axis=-1))
    scaled = np.sqrt(3) * distance / sizes[:, 3, None, None]
    smooth = (1 + scaled) * np.exp(-scaled)
    same = one.of_class[:, None] == other.of_class[None]
    level = SMALL**2 * (size**2 + one.base[:, None] * other.base[None])
    shares = (1 - sizes[:, 2])[:, None, None] + sizes[:, 2, None, None] * same
    return np.asarray(level + (size * sizes[:, 0, None, None]) ** 2 * shares * smooth)


def _diagonal(places: Places, sizes: Array, size: float) -> Array:
    """Return the diagonal of `_kernel` for one combination of sizes, (n,)."""
    return np.asarray(SMALL**2 * (size**2 + places.base**2) + (size * sizes[0]) ** 2)


def _gaps(places: Places, at: Numbers, over: Array) -> Array:
    """Return the variance of a value that may be anywhere between its neighbours, (n,). Neighbours are on a line along
    one axis, with other axes and class equal. If a point has neighbours along several axes, the least counts."""
    least = np.full(len(places.base), np.inf)
    for axis in range(places.where.shape[1]):
        along = places.where[:, axis]
        lines = np.column_stack([np.delete(places.where, axis, axis=1), places.of_class])
        for line in np.unique(lines[at], axis=0):
            mine = np.flatnonzero(np.all(lines == line, axis=1))
            ends = np.isin(at, mine)
            order = np.argsort(along[at[ends]])
            x, y = along[at[ends]][order], over[ends][order]
            if len(x) < 2:
                continue
            inside = mine[(along[mine] > x[0]) & (along[mine] < x[-1])]
            gap = np.clip(np.searchsorted(x, along[inside]), 1, len(x) - 1)
            least[inside] = np.minimum(least[inside], np.diff(y)[gap - 1] ** 2 / 12)
    least[at] = 0.0
    return np.where(np.isfinite(least), least, 0.0)
