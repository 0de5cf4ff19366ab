"""What lies between measured points, of which a base says most: kriging of what the base leaves.

The base is a prediction, or a curve through the points. What was measured less its base is a Gaussian process: a
constant, a share of the base, something that changes smoothly with the place, something of each class of points (an
alignment, a phase), and what is of each point alone. How large each is, and over what distance it changes, is not
known: every combination of a grid counts as much as it makes the observations likely (Rasmussen and Williams 2006, ch.
2.7 and 5.4), so that few points leave the size of errors open. Nothing here knows bytes, rows or what to measure next.

Between neighbours that differ by more than their base a value may also be anywhere between both: a jump has no place.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vramsweep.analysis.model.curves import Array, Numbers
from vramsweep.analysis.model.residual_model import SMALL

SMOOTH = np.geomspace(1e-4, 0.3, 7)  # of the largest base: standard deviations of what changes smoothly,
ALONE = np.array([1e-6, 1e-4, 1e-3, 3e-3, 1e-2])  # the scale of what is of each point alone,
OF_CLASS = (0.1, 0.9)  # and of what is of a class, as a share of what changes smoothly
REACH = (0.03, 0.1, 0.3, 1.0)  # distance over which it changes, of the range
SIZES = np.array(list(itertools.product(SMOOTH, ALONE, OF_CLASS, REACH)))
EXACT = 1e-4  # of those, the largest where points that are close must be alike
FREEDOM = 4.0  # of Student's t, which what is of each point alone follows: now and then one is far off
TURNS = 4  # of its weights
MOST = 16  # of the combinations, the likeliest, are looked at
BEFORE = np.array([[0.01, 1e-6, 0.5, 0.3]])  # what a design reckons with, before anything is measured


@dataclass(frozen=True)
class Places:
    """Where points are, (n, axes), each axis from 0 to 1; the class of each, (n,); and its base, (n,)."""

    where: Array
    of_class: Numbers
    base: Array

    def take(self, at: Numbers) -> Places:
        """Those of these positions."""
        return Places(self.where[at], self.of_class[at], self.base[at])

    @cached_property
    def size(self) -> float:
        """The largest base."""
        return float(np.abs(self.base).max())


@dataclass(frozen=True)
class Between:
    """Values at every place, (n,), with the standard deviation of the curve and of a new run there. `left` is what each
    measured one (k,) is above what all others say of it."""

    value: Array
    curve: Array
    new: Array
    left: Array


def between(places: Places, at: Numbers, y: Array, resolution: float, exact: bool) -> Between:
    """Values at all places from `y` (k,), measured at the positions `at`. `resolution` is the smallest difference in y
    that means anything; `exact`: neighbours are alike, no point is far off alone."""
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
    """Positions to begin with: `first`, then the one that those before tell least of, to `count` in all. What is
    measured there is not looked at."""
    chosen = list(first)
    own = _diagonal(places, BEFORE[0], places.size)
    rows = np.empty((0, len(own)))  # of a Cholesky decomposition that pivots
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
    """(sizes, n, m): covariances without what is of each point alone. The smooth part is Matérn's with 3/2."""
    distance = np.sqrt(((one.where[:, None] - other.where[None]) ** 2).sum(axis=-1))
    scaled = np.sqrt(3) * distance / sizes[:, 3, None, None]
    smooth = (1 + scaled) * np.exp(-scaled)
    same = one.of_class[:, None] == other.of_class[None]
    level = SMALL**2 * (size**2 + one.base[:, None] * other.base[None])
    shares = (1 - sizes[:, 2])[:, None, None] + sizes[:, 2, None, None] * same
    return np.asarray(level + (size * sizes[:, 0, None, None]) ** 2 * shares * smooth)


def _diagonal(places: Places, sizes: Array, size: float) -> Array:
    """The diagonal of the same, (n,)."""
    return np.asarray(SMALL**2 * (size**2 + places.base**2) + (size * sizes[0]) ** 2)


def _gaps(places: Places, at: Numbers, over: Array) -> Array:
    """The variance of what may be anywhere between its neighbours, (n,): in lines along each axis of equal others and
    of its own class; of a point that lies between some along several axes, the least."""
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
