"""Memory of lengths of the alignment class with no, or only a few, measured rows.

Kernels and attention masks pad lengths that 8 does not divide, and copies of what is padded stay alive. Such a length
may need more than the curve through multiples of 8, by a share of what grows with the length. Those multiples do not
show the share, so it has a prior. With even odds the classes do not differ. Replays under torch 2.13 of gpt2,
Qwen1.5-0.5B, Llama-3.2-1B and phi-1.5 (results/reference/replayed_lengths.csv) differ only by what unsplit blocks make,
up to 1 % either way. Else the share is half-normal: the public Qwen1.5-0.5B sweep, of torch 2.2, has 1.6 to 3.2 %.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy import special

from vramsweep.analysis.model.curves import Array, Numbers
from vramsweep.analysis.model.estimate import SEED
from vramsweep.analysis.model.observations import Mask, members
from vramsweep.analysis.model.residual_model import Predictor
from vramsweep.harness.search.fit_knowledge import PADDED_TO

MORE = 0.02  # share of what grows with length: extra of the others if classes differ, one standard deviation
WAVERS = 0.2  # share of that: how far lengths less round than all measured ones stray, one standard deviation


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
