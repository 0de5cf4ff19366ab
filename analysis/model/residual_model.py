"""Model of a quantity as a better known base plus an excess: reserved on allocated, measured on predicted.

The excess is small and simple: a constant, a line in tokens or a share of the base, with a spread of its own. The
spread is constant or grows with the base, whichever explains the observations better. Survey statistics call fitting
the excess instead of a second free curve a difference estimator. Monte Carlo methods call it a control variate
(Glasserman 2003, ch. 4.1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from vramsweep.analysis.model.curves import Array, Kind, read_kinds
from vramsweep.analysis.model.estimate import DRAWS, FEWEST_DRAWS, SEED, SIZES, Data, Posterior, estimate

# Features: 1, tokens, the base.
OVERHEAD, RESIDUAL = read_kinds("overhead"), read_kinds("residual")
SHAPE = 0.02  # share of `unseen`: how far a prediction's shape may be off there, one standard deviation
SMALL = 0.03  # share of the base: expected size of a residual's line or share, one standard deviation


class Predictor(Protocol):
    """Source of values and intervals of a quantity along an axis."""

    def value(self, x: Array) -> Array:
        """Return the most probable curve, (n,)."""
        ...

    def draws(self, x: Array) -> tuple[Array, Array]:
        """Return draws of the curve and of a new run, (draws, n) each."""
        ...


@dataclass(frozen=True)
class Excess:
    """The fitted excess. `relative`: it is a share of the base, so that its spread grows with the base."""

    posterior: Posterior
    relative: bool

    def value(self, tokens: Array, base: Array) -> Array:
        """Return the most probable excess, in the unit of the base, (n,)."""
        found = self.posterior.value(tokens, _features(tokens, base, self.relative))
        return found * base if self.relative else found

    def draws(self, tokens: Array, base: Array) -> tuple[Array, Array]:
        """Return draws of the excess, and its standard deviation from run to run, both (draws, n)."""
        curve, noise = self.posterior.draws(tokens, _features(tokens, base, self.relative))
        return (curve * base, noise * base) if self.relative else (curve, noise)


def _features(tokens: Array, base: Array, relative: bool) -> Array:
    """Return the features, (n, 3): of bytes, or of shares if `relative`."""
    found = np.column_stack([np.ones_like(base), tokens, base])
    return np.asarray(found / base[:, None] if relative else found)


def excesses(
    tokens: Array, over: Sequence[tuple[Array, Array]], resolution: float, kinds: tuple[Kind, ...], small: bool = False
) -> list[Excess]:
    """Return the excess of each y over its base, both (n,), at ascending tokens. They are of one quantity, or of the
    phases of one set of runs, whose spreads inform each other. `small`: the base is nearly right, so what grows with it
    is a few percent."""
    plain, log = _fit_noise([_data(tokens, y, base, resolution, small, False) for y, base in over], kinds)
    shares, log_shares = _fit_noise([_data(tokens, y, base, resolution, small, True) for y, base in over], kinds)
    relative = log_shares - sum(float(np.sum(np.log(base))) for _, base in over) > log
    return [Excess(found, relative) for found in (shares if relative else plain)]


def _data(tokens: Array, y: Array, base: Array, resolution: float, small: bool, relative: bool) -> Data:
    over, size = y - base, float(np.abs(base).max())
    scales = None
    if small:
        constant = max(2 * float(np.abs(over).max()), resolution)
        scales = np.array([constant, SMALL * size / float(tokens.max()), SMALL])
    if relative:
        over, resolution = over / base, resolution / size
    features = _features(tokens, base, relative)
    return Data(tokens, features, over, resolution, noises=("constant",), given_scales=scales)


def _fit_noise(of: Sequence[Data], kinds: tuple[Kind, ...]) -> tuple[list[Posterior], float]:
    """Return each posterior, and the log evidence of all: with one size of noise for all, or with one for each.

    The noise of each is as large as that of each other one or is not, with equal odds. From a few rows alone its size
    is hardly known.
    """
    if len(of) == 1:
        alone = estimate(of[0], kinds)
        return [alone], alone.log
    every = np.concatenate([data.sizes("constant") for data in of])
    sizes = np.geomspace(every.min(), every.max(), SIZES)
    of = [replace(data, given_sizes=sizes) for data in of]
    first = [estimate(data, kinds) for data in of]
    likely = SIZES * np.array([found.sizes for found in first])  # relative to equal odds of all sizes
    log = sum(found.log for found in first) + float(np.log((1 + likely.prod(axis=0).mean()) / 2))
    told = np.log((1 + likely) / 2)
    odds = told.sum(axis=0) - told
    return [estimate(replace(data, size_odds=own), kinds) for data, own in zip(of, odds, strict=True)], log


@dataclass(frozen=True)
class Standing:
    """A base and its excess as one predictor. `per_x` are the tokens of a micro-batch per unit of x.

    `positive`: the quantity is never less than its base. `unseen` returns at x, (n,), how much of the base the excess
    was not observed on: its shape is uncertain there.
    """

    base: Predictor
    excess: Excess
    per_x: float
    positive: bool
    unseen: Callable[[Array], Array] | None = None

    def value(self, x: Array) -> Array:
        """Return the most probable curve, (n,)."""
        base = self.base.value(x)
        over = self.excess.value(x * self.per_x, base)
        return np.asarray(base + (np.maximum(over, 0.0) if self.positive else over))

    def draws(self, x: Array) -> tuple[Array, Array]:
        """Return draws of the curve and of a new run, (draws, n) each."""
        random = np.random.default_rng(SEED + 1)
        base, base_new = self.base.draws(x)
        over, noise = self.excess.draws(x * self.per_x, self.base.value(x))
        count = min(len(base), len(over))
        at, other = random.permutation(len(base))[:count], random.permutation(len(over))[:count]
        over, noise = over[other], noise[other]
        if self.unseen is not None:
            over = over + SHAPE * self.unseen(x) * random.standard_normal((len(over), 1))
        more = over + noise * random.standard_normal(over.shape)
        if self.positive:
            over, more = np.maximum(over, 0.0), np.maximum(more, 0.0)
        return base[at] + over, base_new[at] + more


@dataclass(frozen=True)
class Largest:
    """The largest of several predictors, drawn independently: a peak of its phases."""

    parts: tuple[Predictor, ...]

    def value(self, x: Array) -> Array:
        """Return the most probable curve, (n,)."""
        return np.asarray(np.maximum.reduce([part.value(x) for part in self.parts]))

    def draws(self, x: Array) -> tuple[Array, Array]:
        """Return draws of the curve and of a new run, (draws, n) each."""
        random = np.random.default_rng(SEED + 5)
        curves, news = [], []
        for curve, new in (part.draws(x) for part in self.parts):
            at = random.integers(len(curve), size=DRAWS)
            curves.append(curve[at])
            news.append(new[at])
        return np.maximum.reduce(curves), np.maximum.reduce(news)


@dataclass(frozen=True)
class Bounded:
    """A predictor with lower bounds `at_least` at `bound_x`: draws below them are dropped if enough remain."""

    free: Predictor
    bound_x: Array
    at_least: Array

    def value(self, x: Array) -> Array:
        """Return the most probable curve, (n,)."""
        return self.free.value(x)

    def draws(self, x: Array) -> tuple[Array, Array]:
        """Return draws of the curve and of a new run, (draws, n) each."""
        curve, new = self.free.draws(np.concatenate([x, self.bound_x]))
        holds = np.all(new[:, len(x) :] >= self.at_least, axis=1)
        if holds.sum() >= FEWEST_DRAWS:
            curve, new = curve[holds], new[holds]
        return curve[:, : len(x)], new[:, : len(x)]
