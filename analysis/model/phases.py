"""Models of a step from its parts: its peak is the largest of its phases, its time the sum of a roofline's parts.

Each phase is fitted over batch and length together. Load, forward and optimizer are affine in tokens; if attention
stores its scores, also in tokens times length. Backward is the larger of its start, when every activation is held,
and its end, when every gradient is. The start is where forward ended plus what the loss adds, a line close to
forward's. Its points exceed the end's level only from some length on, so forward tells what its own few points
cannot.

Other steps than the probed one may peak higher; the difference is carried along as observed (`beyond`).

A predicted row states how long the GPU would take at its peaks for arithmetic, memory traffic and launches. A measured
step is modelled as these three parts, times one common factor or a factor each. With few lengths the common factor
wins, with more the three. Errors are proportional to the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.polynomial import Polynomial

from vramsweep.analysis.model.curves import Array, Kind, read_kinds
from vramsweep.analysis.model.estimate import SEED, Data, Posterior, estimate

# Every tensor is rounded up to 512 B. A peak holds hundreds of them, so that their sum is this far off a line.
RESOLUTION = 512 * 16.0
PHASES = ("load", "forward", "backward", "optimizer")
PARTS = (("estimated_compute_s", "estimated_attention_s"), ("estimated_memory_s",), ("estimated_launch_s",))
CLOCK = 1e-3  # share of a time: no step repeats more closely
TIME_KINDS = read_kinds("time")
_STORES_SCORES = ("eager",)
_ONE, _TOKENS, _BATCH, _LENGTH, _SCORES, _MASK, _FORWARD, _MORE, _MORE_TOKENS, _MORE_SCORES = range(10)


@dataclass(frozen=True)
class Phases:
    """Posterior of each phase, over samples and tokens of length. `beyond` is peak − largest phase of each row."""

    posteriors: Mapping[str, Posterior]
    beyond: Array

    def draws(self, batch: Array, length: Array) -> tuple[Array, Array]:
        """Return draws of peak allocated and of a new run's, (draws, n) each, for samples and lengths (n,)."""
        random = np.random.default_rng(SEED + 2)
        curves, news = [], []
        for name in self.names:
            curve, noise = self.posteriors[name].draws(batch * length, self._features(batch, length))
            at = random.permutation(len(curve))
            curves.append(curve[at])
            news.append(curve[at] + noise[at] * random.standard_normal(curve.shape))
        beyond = random.choice(self.beyond, (len(curves[0]), 1))
        return np.maximum.reduce(curves) + float(self.beyond.mean()), np.maximum.reduce(news) + beyond

    def value(self, batch: Array, length: Array) -> Array:
        """Return the most probable peak, (n,)."""
        return np.asarray(np.max(self._values(batch, length), axis=0) + float(np.median(self.beyond)))

    def of(self, name: str, batch: Array, length: Array) -> Array:
        """Return the most probable peak of one phase, (n,)."""
        return self.posteriors[name].value(batch * length, self._features(batch, length))

    def largest(self, batch: Array, length: Array) -> list[str]:
        """Return the phase that makes the peak, for each of n points."""
        return [self.names[i] for i in np.argmax(self._values(batch, length), axis=0)]

    def identified(self, batch: Array, length: Array) -> bool:
        """Return whether every phase that makes the peak at some of these points is of a known kind."""
        return all(self.posteriors[name].identified for name in set(self.largest(batch, length)))

    @property
    def names(self) -> list[str]:
        """Known phases, in order."""
        return [name for name in PHASES if name in self.posteriors]

    def _values(self, batch: Array, length: Array) -> list[Array]:
        """Return the most probable peaks of each known phase, in order."""
        features = self._features(batch, length)
        return [self.posteriors[name].value(batch * length, features) for name in self.names]

    def _features(self, batch: Array, length: Array) -> Array:
        plain = _features(batch, length, np.zeros_like(batch))
        return _features(batch, length, self.posteriors["forward"].value(batch * length, plain))


def fit_phases(frame: pd.DataFrame) -> Phases | None:
    """Fit phases to rows equal but for batch and length; None with a step's phase unknown or 0, or too few rows.

    Needs the columns of the phases' peaks, `peak_allocated_bytes`, `attention_effective`, `seq_len`, `micro_batch`,
    `device`, `outcome`. Load is left out if a finished row does not know it.
    """
    told = frame["load_peak_allocated_bytes"].notna() | frame["outcome"].ne("ok").fillna(True)
    phases = [phase for phase in PHASES if phase != "load" or told.all()]
    names = [f"{phase}_peak_allocated_bytes" for phase in phases]
    known = frame[[*names, "peak_allocated_bytes", "seq_len", "micro_batch"]].notna().all(axis=1)
    ok = frame[known & frame["outcome"].eq("ok").fillna(False)]
    tokens = (ok["seq_len"] * ok["micro_batch"]).to_numpy(float)
    order = np.argsort(tokens, kind="stable")
    ok, tokens = ok.iloc[order], tokens[order]
    if len(np.unique(tokens)) < 3:
        return None
    batch, length = ok["micro_batch"].to_numpy(float), ok["seq_len"].to_numpy(float)
    peaks = ok[names].to_numpy(float)
    if not (peaks > 0).all():
        return None
    several = len(np.unique(batch)) > 1 and len(np.unique(length)) > 1
    attention = ok["attention_effective"].dropna()
    plain_kernels = ok["device"].eq("cpu").fillna(False).any()  # on a CPU sdpa may store scores too
    scores = None if plain_kernels or not len(attention) else bool(attention.isin(_STORES_SCORES).any())
    ahead = peaks[:, phases.index("forward")]
    plain = Data(tokens, _features(batch, length, np.zeros_like(batch)), ahead, RESOLUTION)
    scales = plain.scales.copy()
    scales[[_FORWARD, _MORE, _MORE_TOKENS, _MORE_SCORES]] = 1.0  # not used yet
    plain = replace(plain, given_scales=scales)
    posteriors = {"forward": estimate(plain, _kinds(several, scores, False))}
    forward = posteriors["forward"].value(tokens, plain.features)
    features = _features(batch, length, forward)
    rise = max(float(np.ptp(forward)), 0.02 * float(forward.max()))
    for phase, y in zip(phases, peaks.T, strict=True):
        if phase == "forward":
            continue
        own = Data(tokens, features, y, RESOLUTION)
        scales = own.scales.copy()
        scales[_MORE] = 0.2 * float(forward.max())
        scales[_MORE_TOKENS] = 0.5 * rise / float(np.ptp(tokens))
        scales[_MORE_SCORES] = 0.3 * rise / features[:, _SCORES].max()
        own = replace(own, given_scales=scales)
        posteriors[phase] = estimate(own, _kinds(several, scores, phase == "backward"))
    return Phases(posteriors, ok["peak_allocated_bytes"].to_numpy(float) - peaks.max(axis=1))


def _features(batch: Array, length: Array, forward: Array) -> Array:
    moment = [np.ones_like(batch), batch * length, batch, length, batch * length * length, length**2]
    return np.column_stack([*moment, forward, moment[0], moment[1], moment[4]])


def _kinds(several: bool, scores: bool | None, backward: bool) -> tuple[Kind, ...]:
    """Return the kinds that a phase may be. `several` batches and lengths tell samples from tokens. `scores` of
    attention are stored, are not, or it is unknown."""
    plane: tuple[int, ...] = (_ONE, _TOKENS, _BATCH, _LENGTH) if several else (_ONE, _TOKENS)
    curved = (*plane, _SCORES, _MASK) if several else (*plane, _SCORES)
    straight, bent = {None: (0.5, 0.5), True: (0.01, 1.0), False: (1.0, 0.01)}[scores]
    odds = 0.02 if backward else 1.0  # a backward pass below what forward left is rare
    found = [
        Kind("level", ((_ONE,),), 0.2 * odds),  # weights alone: no activation is counted in it
        Kind("affine", ((_ONE, _TOKENS),), 0.3 * odds * straight),
        Kind("scores", (curved,), 0.3 * odds * bent),
    ]
    if several:
        found.append(Kind("affine", (plane,), 0.1 * odds * straight))
    ends: list[tuple[int, ...]] = [(_ONE,), (_ONE, _TOKENS)]
    if not backward:
        found += [Kind("two moments", (end, (_ONE, _TOKENS)), 0.02 * straight) for end in ends]
        return (*found, *(Kind("two moments", (end, curved), 0.02 * bent) for end in ends))
    starts: list[tuple[tuple[int, ...], float]] = [((_MORE, _MORE_TOKENS), 0.1 * straight)]
    if several:
        starts.append(((_MORE, _MORE_TOKENS, _BATCH, _LENGTH), 0.1 * straight))
    if scores is not False:
        starts.append(((_MORE, _MORE_TOKENS, _MORE_SCORES), 0.1 * bent))
    for start, weight in starts:
        one_moment = "scores" if _MORE_SCORES in start else "affine"  # its end does not show
        found.append(Kind(one_moment, (start,), weight, rising=(_MORE_TOKENS,), fixed=_FORWARD))
        found += [Kind("two moments", (e, start), weight, rising=(_MORE_TOKENS,), fixed=_FORWARD) for e in ends]
    return tuple(found)


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts at the predicted x, (n,) and (n, 3): linear between these x, a parabola beyond."""

    x: Array
    seconds: Array

    def features(self, x: Array) -> Array:
        """Return the parts and their sum at x, (n, 4)."""
        found = np.column_stack([self._one(x, column) for column in self.seconds.T])
        return np.column_stack([found, found.sum(axis=1)])

    def _one(self, x: Array, column: Array) -> Array:
        beyond = Polynomial.fit(self.x, column, min(2, len(self.x) - 1))(x)
        return np.where((x < self.x[0]) | (x > self.x[-1]), beyond, np.interp(x, self.x, column))


def parts(rows: pd.DataFrame, axis: str) -> Parts | None:
    """Return the parts of predicted rows of one batch (or length); None with several ranks or below three known x."""
    names = [name for part in PARTS for name in part]
    known = rows.dropna(subset=[axis, *names]).drop_duplicates(axis).sort_values(axis)
    if len(known) < 3 or known["world_size"].gt(1).any():
        return None
    seconds = np.column_stack([known[list(part)].to_numpy(float).sum(axis=1) for part in PARTS])
    return Parts(known[axis].to_numpy(float), seconds)


@dataclass(frozen=True)
class OfParts:
    """Predictor of step time in seconds, from the parts and the times y (n,) measured at x."""

    parts: Parts
    x: Array
    y: Array

    @cached_property
    def posterior(self) -> Posterior:
        """Posterior of the factors."""
        features, resolution = self.parts.features(self.x), CLOCK * float(self.y.min())
        return estimate(Data(self.x, features, self.y, resolution, noises=("proportional",)), TIME_KINDS)

    def value(self, x: Array) -> Array:
        """Return the most probable time at x, (n,)."""
        return self.posterior.value(x, self.parts.features(x))

    def draws(self, x: Array) -> tuple[Array, Array]:
        """Return draws of the time and of a new run's time, (draws, n) each."""
        curve, noise = self.posterior.draws(x, self.parts.features(x))
        return curve, curve + noise * np.random.default_rng(SEED + 3).standard_normal(curve.shape)
