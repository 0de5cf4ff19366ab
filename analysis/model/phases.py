"""The peak of a run as what it is: the largest of its phases, each fitted over batch and length together.

Load, forward and optimizer are affine in tokens; where attention stores its scores also in tokens times length.
Backward is the larger of its start, when every activation is held, and its end, when every gradient is. The start is
where forward ended and what the loss adds: a line close to forward's, whose points lie above the end's level only from
some length on, so that forward tells of it what few points of its own cannot.

Not covered: what a run's other steps peak at beyond the probed one; it is carried along as seen (`beyond`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from vramsweep.analysis.model.curves import Array, Kind
from vramsweep.analysis.model.estimate import SEED, Data, Posterior, estimate

# Every tensor is rounded up to 512 B on its own; of those held at a peak, hundreds, the sum is this far off a line.
RESOLUTION = 512 * 16.0
PHASES = ("load", "forward", "backward", "optimizer")
_STORES_SCORES = ("eager",)
_ONE, _TOKENS, _BATCH, _LENGTH, _SCORES, _MASK, _FORWARD, _MORE, _MORE_TOKENS, _MORE_SCORES = range(10)


@dataclass(frozen=True)
class Phases:
    """A posterior of each phase, over samples and tokens of length. `beyond` is peak − largest phase of each row."""

    posteriors: Mapping[str, Posterior]
    beyond: Array

    def draws(self, batch: Array, length: Array) -> tuple[Array, Array]:
        """Peak allocated of the curve and of a new run, (draws, n) each, for samples and lengths (n,)."""
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
        """The most probable peak, (n,)."""
        return np.asarray(np.max(self._values(batch, length), axis=0) + float(np.median(self.beyond)))

    def of(self, name: str, batch: Array, length: Array) -> Array:
        """The most probable peak of one phase, (n,)."""
        return self.posteriors[name].value(batch * length, self._features(batch, length))

    def largest(self, batch: Array, length: Array) -> list[str]:
        """The phase that makes the peak, for each (n,)."""
        return [self.names[i] for i in np.argmax(self._values(batch, length), axis=0)]

    def identified(self, batch: Array, length: Array) -> bool:
        """Whether every phase that makes a peak somewhere there is of a known kind."""
        return all(self.posteriors[name].identified for name in set(self.largest(batch, length)))

    @property
    def names(self) -> list[str]:
        """The phases that are known, in order."""
        return [name for name in PHASES if name in self.posteriors]

    def _values(self, batch: Array, length: Array) -> list[Array]:
        """Those of each phase that is known, in order."""
        features = self._features(batch, length)
        return [self.posteriors[name].value(batch * length, features) for name in self.names]

    def _features(self, batch: Array, length: Array) -> Array:
        plain = _features(batch, length, np.zeros_like(batch))
        return _features(batch, length, self.posteriors["forward"].value(batch * length, plain))


def fit_phases(frame: pd.DataFrame) -> Phases | None:
    """From rows of equal settings but for batch and length; None where a phase of a step is unknown or 0, or there
    are too few.

    Needs the columns of the phases' peaks, `peak_allocated_bytes`, `attention_effective`, `seq_len`, `micro_batch`,
    `device`. What loading took is not known of every row, and left out then.
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
    plain_kernels = ok["device"].eq("cpu").fillna(False).any()  # on a CPU sdpa may store them too
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
    one, tokens = np.ones_like(batch), batch * length
    return np.column_stack(
        [one, tokens, batch, length, tokens * length, length**2, forward, one, tokens, tokens * length]
    )


def _kinds(several: bool, scores: bool | None, backward: bool) -> tuple[Kind, ...]:
    """What a phase may be. `several` batches and lengths tell samples from tokens; `scores` of attention are stored,
    are not, or it is not known."""
    plane: tuple[int, ...] = (_ONE, _TOKENS, _BATCH, _LENGTH) if several else (_ONE, _TOKENS)
    curved = (*plane, _SCORES, _MASK) if several else (*plane, _SCORES)
    straight, bent = {None: (0.5, 0.5), True: (0.01, 1.0), False: (1.0, 0.01)}[scores]
    odds = 0.02 if backward else 1.0  # a backward pass that is not at least what forward left is a rare one
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
        one_moment = "scores" if _MORE_SCORES in start else "affine"  # no end that is seen
        found.append(Kind(one_moment, (start,), weight, rising=(_MORE_TOKENS,), fixed=_FORWARD))
        found += [Kind("two moments", (e, start), weight, rising=(_MORE_TOKENS,), fixed=_FORWARD) for e in ends]
    return tuple(found)
