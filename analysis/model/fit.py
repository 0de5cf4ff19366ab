"""How a measured quantity depends on sequence length: fits, the choice between them, and how sure they are.

For one group of equal settings: every kind of curve.py, alone and per alignment class (lengths divisible by 8, 16 or
64, and the others), compared by AICc and by held-out error; intervals by wild bootstrap. Rows that ran out of memory
are censored observations of quantities that the device's memory limits: the curve must not stay below that limit there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from vramsweep.analysis.data.groups import Group, groups
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import METRICS, Metric
from vramsweep.analysis.model import bootstrap
from vramsweep.analysis.model.curves import NEEDS, Array, Curve, evaluate, fit_curve, huber
from vramsweep.analysis.model.observe import Mask, Model, Points, observations

MODULI = (8, 16, 64)


@dataclass(frozen=True)
class Candidate:
    """A fitted model and how good it is. `rms`, `worst` and `held_out` are in the metric's unit."""

    model: Model
    rms: float
    worst: float
    aicc: float
    held_out: float
    block_errors: Array = field(repr=False)


@dataclass(frozen=True)
class Prediction:
    """Values at x with 95 % intervals: of the curve (low, high) and of one new observation (new_low, new_high).

    `extrapolated` marks x outside the measured range; such a value is a guess and must be shown as one.
    """

    x: Array
    value: Array
    low: Array
    high: Array
    new_low: Array
    new_high: Array
    extrapolated: Mask


@dataclass(frozen=True)
class Fit:
    """What is known about one metric in one group: all candidates, the chosen one, its bootstrap and remarks."""

    metric: Metric
    settings: Mapping[str, Any]
    label: str
    points: Points = field(repr=False)
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    why: str
    robust: bool
    warnings: tuple[str, ...]
    phases: tuple[str, ...] = ()
    samples_per_step: float | None = None

    @cached_property
    def _drawn(self) -> tuple[dict[bool, Array], dict[bool, Array]]:
        return bootstrap.draw(self.chosen.model, self.points, self.metric)

    @property
    def draws(self) -> Mapping[bool, Array]:
        """Bootstrap draws of each curve's parameters, (draws, parameters); computed when first asked for."""
        return self._drawn[0]

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest measured x."""
        return float(self.points.x[0]), float(self.points.x[-1])

    def candidate(self, kind: str, modulus: int | None = None) -> Candidate | None:
        """The candidate of a kind, if the data allowed one."""
        return next((c for c in self.candidates if (c.model.kind, c.model.modulus) == (kind, modulus)), None)

    def intervals(self) -> dict[bool, list[tuple[float, float]]]:
        """95 % interval of each parameter of each of the chosen model's curves."""
        tail = 50 * (1 - bootstrap.LEVEL)
        return {
            key: [(float(low), float(high)) for low, high in np.percentile(draws, [tail, 100 - tail], axis=0).T]
            for key, draws in self.draws.items()
        }

    def predict(self, x: Array) -> Prediction:
        """The chosen model at x (tokens), with intervals; says where it extrapolates."""
        value = self.chosen.model.predict(x)
        curve = np.empty((2, len(x)))
        new = np.empty((2, len(x)))
        tail = 50 * (1 - bootstrap.LEVEL)
        random = np.random.default_rng(bootstrap.SEED)
        for key, at in self.chosen.model.members(x).items():
            if not at.any():
                continue
            drawn = evaluate(self.chosen.model.kind, self.draws[key], x[at])
            noise = random.choice(self._drawn[1][key], size=drawn.shape)
            curve[:, at] = np.percentile(drawn, [tail, 100 - tail], axis=0)
            new[:, at] = np.percentile(drawn + noise, [tail, 100 - tail], axis=0)
        low, high = self.range
        return Prediction(x, value, curve[0], curve[1], new[0], new[1], (x < low) | (x > high))


def fit_table(
    table: Table,
    metrics: Sequence[str] = tuple(METRICS),
    start: float | None = None,
    stop: float | None = None,
    robust: bool = False,
    limit: int = 200,
    found: Sequence[Group] | None = None,
) -> tuple[list[Fit], list[str]]:
    """Fits of every group and metric that has the data, and what a reader should know about the others.

    At most `limit` groups are fitted, those with most rows first; `found` are the groups if they are known already.
    """
    fits: list[Fit] = []
    notes: list[str] = []
    short = 0
    found = groups(table) if found is None else found
    for group in found[:limit]:
        any_points = False
        frame = group.take("outcome", "seq_len", "trial_id", "device_total_bytes", "memory_limit_bytes", *metrics)
        for name in metrics:
            points = observations(frame, METRICS[name], start, stop)
            if len(points.x) == 0:
                continue
            any_points = True
            if group.resident and name == "peak_reserved_bytes":  # a resident set need not repeat exactly
                points = replace(points, warnings=())
            fit = fit_points(points, METRICS[name], group, robust)
            if fit is None:
                short += 1
            else:
                fits.append(fit)
        if not any_points:
            outcomes = ", ".join(f"{n} {o}" for o, n in frame["outcome"].value_counts().items())
            notes.append(f"{group.label}: no measured values to fit ({outcomes})")
    if short:
        notes.append(
            f"{short} curve{'s' * (short != 1)} with fewer than {NEEDS['linear']} different lengths not fitted"
        )
    if len(found) > limit:
        notes.append(f"{len(found):,} groups of equal settings; the {limit} with most rows were fitted")
    return fits, notes


def fit_points(points: Points, metric: Metric, group: Group | None = None, robust: bool = False) -> Fit | None:
    """All candidates for these observations, and the chosen one; None with too few different x."""
    points = points.averaged()
    folds = _blocks(points.x)
    candidates = [
        candidate for kind in NEEDS if (candidate := _candidate(kind, None, points, metric, folds, robust)) is not None
    ]
    if not candidates:
        return None
    for modulus in MODULI:
        if _classes_differ(points, min(candidates, key=lambda c: c.rms), modulus):
            extra = [_candidate(kind, modulus, points, metric, folds, robust) for kind in NEEDS]
            candidates += [candidate for candidate in extra if candidate is not None]
    chosen, why = choose(candidates)
    warnings = [*points.warnings, *_censoring_remarks(chosen.model, points, metric)]
    return Fit(
        metric=metric,
        settings=group.settings if group else {},
        label=group.label if group else "all rows",
        points=points,
        candidates=tuple(candidates),
        chosen=chosen,
        why=why,
        robust=robust,
        warnings=tuple(warnings),
        samples_per_step=_samples(group.ok("tokens_per_s", "step_median_s", "seq_len"))
        if group and not metric.memory
        else None,
        phases=_phases(chosen.model, group) if group and metric.memory else (),
    )


def choose(candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
    """The simplest model that neither held-out error nor AICc speaks against, and why in words.

    Held-out error speaks against a model whose squared error is larger than the best one's by more than one standard
    error of that difference over the held-out blocks (Breiman et al. 1984, paired). AICc speaks against one that lies
    more than 10 above the best (Burnham & Anderson 2002: essentially no support). A model whose held-out error is
    within 10 % of the best is as good in practice, whatever the two say: memory has no noise, so that with thousands
    of lengths any further parameter is significant.
    """
    scored = [c for c in candidates if np.isfinite(c.held_out)]
    if not scored:
        best = min(candidates, key=lambda c: (c.model.parameters, c.aicc))
        return best, "too few lengths to hold any out; the simplest"
    first = min(scored, key=lambda c: (c.held_out, c.model.parameters))
    lowest = min(c.aicc for c in scored)
    good = []
    for candidate in scored:
        worse = candidate.block_errors - first.block_errors
        margin = float(np.std(worse, ddof=1) / np.sqrt(len(worse))) if len(worse) > 1 else 0.0
        unclear = float(worse.mean()) <= margin and candidate.aicc - lowest <= 10
        if unclear or candidate.held_out <= 1.1 * first.held_out:
            good.append(candidate)
    best = min(good, key=lambda c: (c.model.parameters, c.held_out))
    if best is first:
        return best, "smallest held-out error"
    return best, f"simpler than the {first.model.name} and about as good on held-out lengths"


def aicc(squares: float, n: int, parameters: int) -> float:
    """AICc of a least-squares fit: n ln(squares/n) + 2k + 2k(k+1)/(n−k−1), k = parameters + 1 for the variance.

    Hurvich & Tsai 1989. Infinite when n is too small for it.
    """
    k = parameters + 1
    if n - k - 1 <= 0:
        return float("inf")
    return float(n * np.log(squares / n) + 2 * k + 2 * k * (k + 1) / (n - k - 1))


def _fit_model(
    kind: str, modulus: int | None, points: Points, metric: Metric, robust: bool, keep: Mask | None = None
) -> Model | None:
    """A model fitted to the points (those of `keep`), each class on its own; censored points pull only upwards."""
    mask = np.ones(len(points.x), dtype=bool) if keep is None else keep
    x, y = points.x[mask], points.y[mask]
    model = Model(kind, {}, modulus)
    curves: dict[bool, Curve] = {}
    bounds = model.members(points.bound_x)
    for key, at in model.members(x).items():
        curve = _censored(kind, x[at], y[at], points.bound_x[bounds[key]], points.bound_y[bounds[key]], metric, robust)
        if curve is None:
            return None
        curves[key] = curve
    return Model(kind, curves, modulus)


def _censored(
    kind: str, x: Array, y: Array, bound_x: Array, bound_y: Array, metric: Metric, robust: bool
) -> Curve | None:
    """Least squares in which a censored point counts only while the curve lies below its bound.

    The limit of the Tobit likelihood (Tobin 1958) for residuals that are small against the distance to the bound.
    """

    def once(xs: Array, ys: Array) -> Curve | None:
        def weighted(weights: Array) -> Curve | None:
            return fit_curve(kind, xs, ys, weights)

        return huber(weighted, xs, ys) if robust else fit_curve(kind, xs, ys, None)

    curve = once(x, y)
    pulled = np.zeros(len(bound_x), dtype=bool)
    for _ in range(10):
        if curve is None or not len(bound_x):
            break
        below = curve.predict(bound_x) < bound_y - metric.resolution
        if not (below & ~pulled).any():
            break
        pulled |= below
        curve = once(np.concatenate([x, bound_x[pulled]]), np.concatenate([y, bound_y[pulled]]))
    return curve


def _candidate(
    kind: str, modulus: int | None, points: Points, metric: Metric, folds: list[Mask], robust: bool
) -> Candidate | None:
    model = _fit_model(kind, modulus, points, metric, robust)
    if model is None:
        return None
    residuals = points.y - model.predict(points.x)
    floor = max(metric.resolution, 1e-9 * float(np.abs(points.y).max()))
    n = len(np.unique(points.x)) if metric.memory else len(points.x)  # exact repeats of memory tell nothing new
    squares = max(float(np.mean(residuals**2)), floor**2) * n
    errors: list[float] = []
    for fold in folds:
        held = _fit_model(kind, modulus, points, metric, robust, np.logical_not(fold))
        if held is None:
            errors = []
            break
        errors.append(max(float(np.mean((points.y[fold] - held.predict(points.x[fold])) ** 2)), floor**2))
    block_errors = np.array(errors)
    return Candidate(
        model=model,
        rms=float(np.sqrt(np.mean(residuals**2))),
        worst=float(np.abs(residuals).max()),
        aicc=aicc(squares, n, model.parameters),
        held_out=float(np.sqrt(block_errors.mean())) if errors else float("nan"),
        block_errors=block_errors,
    )


def _blocks(x: Array, count: int = 10) -> list[Mask]:
    """Masks of neighbouring lengths to hold out together; none for fewer than four different lengths.

    Neighbours share what the model misses, so holding out single points would flatter it (Roberts et al. 2017). The
    two ends stay in: leaving them out would test extrapolation, which the fits do not claim.
    """
    different = np.unique(x)
    if len(different) < 4:
        return []
    parts = np.array_split(different[1:-1], min(count, len(different) - 2))
    return [np.isin(x, part) for part in parts if len(part)]


def _classes_differ(points: Points, best: Candidate, modulus: int) -> bool:
    """Whether alignment explains residuals of the best plain model: Levene's test of spread, or Welch's of the mean."""
    aligned = points.x % modulus == 0
    if min(len(np.unique(points.x[aligned])), len(np.unique(points.x[~aligned]))) < NEEDS["hinge"]:
        return False
    residuals = points.y - best.model.predict(points.x)
    if float(np.abs(residuals).max()) <= 1e-9 * float(np.abs(points.y).max()):
        return False
    means = stats.ttest_ind(residuals[aligned], residuals[~aligned], equal_var=False).pvalue
    spreads = stats.levene(residuals[aligned], residuals[~aligned]).pvalue
    return bool(min(means, spreads) < 0.001)


def _censoring_remarks(model: Model, points: Points, metric: Metric) -> list[str]:
    if not len(points.bound_x):
        return []
    below = model.predict(points.bound_x) < points.bound_y - metric.resolution
    if not below.any():
        return []
    text = (
        f"at {int(below.sum())} of {len(below)} rows that ran out of memory the curve stays below the device's memory"
    )
    return [text]


def _samples(rows: pd.DataFrame) -> float | None:
    """Sequences per step over all ranks, from what the rows say about speed; null if they disagree."""
    ratio = (rows["tokens_per_s"] * rows["step_median_s"] / rows["seq_len"]).to_numpy(float)
    if not len(ratio):
        return None
    middle = float(np.median(ratio))
    whole = round(middle)
    return float(whole) if whole >= 1 and abs(middle - whole) < 0.1 * whole else None


def _phases(model: Model, group: Group) -> tuple[str, ...]:
    """For each piece of the first curve, the phase whose peak is largest in most of its rows; "" where unknown."""
    curve: Curve = next(iter(model.curves.values()))
    names = ("load", "forward", "backward", "optimizer")
    columns = [f"{name}_peak_allocated_bytes" for name in names]
    rows = group.ok("seq_len", *columns[1:], also=columns[:1])
    peaks = rows[columns].to_numpy(float, na_value=-1.0)
    largest = np.argmax(peaks, axis=1) if len(rows) else np.empty(0, dtype=int)
    x = rows["seq_len"].to_numpy(float)
    pick: Callable[[float, float], Any] = lambda start, stop: largest[(x >= start) & (x <= stop)]  # noqa: E731
    phases = []
    for start, stop, _, _ in curve.lines() or [(-np.inf, np.inf, 0.0, 0.0)]:
        inside = pick(start, stop)
        phases.append(names[int(np.bincount(inside).argmax())] if len(inside) else "")
    return tuple(phases)
