"""Model of a quantity as a better known base plus an excess: reserved on allocated, measured on predicted.

The excess is small and simple: a constant, a line in tokens or a share of the base, with a spread of its own. The
spread is constant or grows with the base, whichever explains the observations better. Survey statistics call fitting
the excess instead of a second free curve a difference estimator. Monte Carlo methods call it a control variate
(Glasserman 2003, ch. 4.1).

`Unaligned` predicts memory of the alignment class with no, or only a few, measured rows; its base is the other class.
Kernels and attention masks pad lengths that 8 does not divide, and copies of what is padded stay alive. Such a length
may need more than the curve through multiples of 8, by a share of what grows with the length. Those multiples do not
show the share, so it has a prior. With even odds the classes do not differ. Replays under torch 2.13 of gpt2,
Qwen1.5-0.5B, Llama-3.2-1B and phi-1.5 (results/reference/replayed_lengths.csv) differ only by what unsplit blocks make,
up to 1 % either way. Else the share is half-normal: the public Qwen1.5-0.5B sweep, of torch 2.2, has 1.6 to 3.2 %.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from scipy import special

from vramsweep.analysis.model.curves import Array, Kind, Numbers, read_kinds
from vramsweep.analysis.model.estimate import DRAWS, FEWEST_DRAWS, SEED, SIZES, Data, Posterior, estimate
from vramsweep.analysis.model.observations import Mask, members
from vramsweep.harness.search.fit_knowledge import PADDED_TO

# Features: 1, tokens, the base.
OVERHEAD, RESIDUAL = read_kinds("overhead"), read_kinds("residual")
SHAPE = 0.02  # share of `unseen`: how far a prediction's shape may be off there, one standard deviation
SMALL = 0.03  # share of the base: expected size of a residual's line or share, one standard deviation
MORE = 0.02  # share of what grows with length: extra of the others if classes differ, one standard deviation
WAVERS = 0.2  # share of that: how far lengths less round than all measured ones stray, one standard deviation


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


def classes(x: Array) -> set[bool]:
    """Return the classes present: True for lengths that `PADDED_TO` divides, False for the others."""
    return {key for key, at in members(x, PADDED_TO).items() if at.any()}


def as_round(x: Array, measured: Array) -> Mask:
    """Return the mask of x (n,) divisible by the gcd of `measured`: of its multiples of `PADDED_TO`, if it has any."""
    even = measured % PADDED_TO == 0
    return np.asarray(x % np.gcd.reduce(measured[even if even.any() else ~even].astype(int)) == 0)


@dataclass(frozen=True)
class Unaligned:
    """Predictor of both classes. `free` goes through `measured` lengths of one of them; `x`, `y` (n,) are the few of
    the other, if any."""

    free: Predictor
    measured: Array
    x: Array = field(default_factory=lambda: np.empty(0))
    y: Array = field(default_factory=lambda: np.empty(0))

    @property
    def divisible(self) -> bool:
        """Return whether the measured ones are those that 8 divides; if not, the others need less."""
        return True in classes(self.measured)

    def of_other_class(self, x: Array) -> Array:
        """Return the x of the other class at or next to these, (n,)."""
        above = np.floor(x) % PADDED_TO
        return np.asarray(np.floor(x) + ((above == 0) if self.divisible else -above))

    def value(self, x: Array) -> Array:
        """Return the most probable curve, (n,), one for both classes where nothing tells of the other."""
        shift = self.share * self._rise(x, self.free.value(self._with_longer(x))) if len(self.x) else 0.0
        return np.asarray(self.free.value(x) + np.where(self.of_other_class(x) == np.floor(x), shift, 0.0))

    def draws(self, x: Array) -> tuple[Array, Array]:
        """Return draws of the curve and of a new run, (draws, n) each."""
        count = 2 * len(x)
        curve, new = self.free.draws(np.concatenate([self._with_longer(x), self._with_longer(self.x)]))
        kept, share, _ = self._learn(curve[:, count:], new[:, count:])  # from these draws: their number may vary
        curve, new = curve[kept, :count], new[kept, :count]
        shift = np.where(self.of_other_class(x) == np.floor(x), share[:, None] * self._rise(x, curve), 0.0)
        wavers = WAVERS * self._rise(x, curve) * np.random.default_rng(SEED + 7).standard_normal(shift.shape)
        return curve[:, : len(x)] + shift, new[:, : len(x)] + shift + np.where(as_round(x, self.measured), 0.0, wavers)

    @property
    def share(self) -> float:
        """Mean extra need of the others, in standard deviations of what is expected."""
        return float(self._learned[1].mean())

    @property
    def alike(self) -> float:
        """Probability that the classes do not differ."""
        return self._learned[2]

    def _with_longer(self, x: Array) -> Array:
        """Return x, then x so much longer that what grows has grown by two standard deviations of the extra."""
        return np.concatenate([x, x * (1 + 2 * MORE)])

    def _rise(self, x: Array, values: Array) -> Array:
        """Return one standard deviation of the others' extra, (..., n), from values at `_with_longer`."""
        rise = np.maximum(values[..., len(x) :] - values[..., : len(x)], 0.0) / 2
        return np.asarray(rise if self.divisible else -rise)

    @cached_property
    def _learned(self) -> tuple[Numbers, Array, float]:
        return self._learn(*self.free.draws(self._with_longer(self.x)))

    def _learn(self, curve: Array, new: Array) -> tuple[Numbers, Array, float]:
        """Return which draws of `free` at the own x to take, each one's share in standard deviations, and `alike`.

        Given a draw of the curve, the few observations are normal about it plus a share of its rise. The posterior of
        that share is 0, or a normal distribution truncated at 0, with odds in closed form.
        """
        random = np.random.default_rng(SEED + 6)
        x, y = self.x, self.y
        rise, over = self._rise(x, curve), y - curve[:, : len(x)]
        noise = np.maximum(1.4826 * np.median(np.abs(new - curve), axis=0)[: len(x)], 1e-9 * np.abs(y))
        precise = 1 / (noise**2 + (WAVERS * rise) ** 2)
        known = 1 + np.sum(rise**2 * precise, axis=1)
        mean = np.sum(rise * over * precise, axis=1) / known
        same = -0.5 * np.sum(over**2 * precise + np.log(noise**2 + (WAVERS * rise) ** 2), axis=1)
        apart = same + 0.5 * mean**2 * known - 0.5 * np.log(known) + special.log_ndtr(mean * np.sqrt(known)) + np.log(2)
        each = np.logaddexp(same, apart)
        odds = np.exp(each - each.max())
        kept = random.choice(len(odds), len(odds), p=odds / odds.sum()) if len(self.x) else np.arange(len(odds))
        never = special.ndtr(-mean * np.sqrt(known))[kept]
        normal = special.ndtri(never + (1 - never) * random.uniform(1e-9, 1, len(kept)))
        share = np.maximum(mean[kept] + normal / np.sqrt(known[kept]), 0.0)
        differ = random.random(len(kept)) < np.exp(apart - each)[kept]
        return kept, np.where(differ & np.isfinite(share), share, 0.0), float(odds @ np.exp(same - each) / odds.sum())
