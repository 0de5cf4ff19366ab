"""Calibration of the roofline estimate: four efficiencies per GPU and precision, fitted to measured rows.

A measured step is modelled as a / e_compute + b / e_attention + c / e_memory + d / e_launch. Here a, b, c and d are the
estimate's compute, attention, memory and launch seconds of the same trial. Non-negative least squares on relative
errors fits the factors 1 / e, so every step counts the same, long or short. The fit is judged by leaving out one
configuration at a time. Each precision is fitted alone, because tensor cores and other units reach different shares of
their peaks.

Rows of several ranks are left out, because how far their communication overlaps is a question of its own.

`fitted_step_s` comes from rows of the user's own GPU. `calibrated_step_s`, in every simulated row, comes from speeds
of other runs (harness/hardware/step_time.py). Both are estimates: they never enter a measured column, figure or fit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import nnls
from scipy.stats import t as student_t

from vramsweep.analysis.compare.residuals import pair
from vramsweep.analysis.data.groups import ASKED
from vramsweep.analysis.data.load import Table, from_frame, is_
from vramsweep.analysis.data.pairing import EXTRAS_APART, KEYS
from vramsweep.analysis.model.curves import Array

PARTS = ("compute", "attention", "memory", "launch")
SECONDS = tuple(f"estimated_{part}_s" for part in PARTS)
FEWEST = 5  # configurations: with one left out, as many as there are factors
NOISE = 0.01  # least standard error assumed of a measured step, relative; repeats agree to about that
WIDE = 0.5  # a factor counts as unknown if its margin is a larger share of it

# Leaves of the resolved trial that a key has already. The optimizer's is not one: fused AdamW is an AdamW too.
_HELD = {f"trial.{path}{key}" for key in ASKED for path in ("", "runner.")} | {"trial.model.name", "trial.runner.name"}


@dataclass(frozen=True)
class Calibration:
    """The calibration of a GPU and precision. `factors` are 1 / efficiency of the `PARTS`, None for parts no pair has.

    `margins` are half the widths of 95 % intervals; `range` bounds the pairs' estimated step seconds. Errors are
    relative, of configurations left out.
    """

    gpu: str
    precision: str
    rows: int
    configurations: int
    factors: tuple[float | None, ...]
    margins: tuple[float | None, ...]
    range: tuple[float, float]
    median_error: float
    worst_error: float

    def efficiencies(self) -> list[tuple[float, float] | None]:
        """Return each part's efficiency and half the width of its 95 % interval; None if these pairs do not tell it."""
        return [
            (1 / factor, margin / factor**2) if factor and margin is not None and margin <= WIDE * factor else None
            for factor, margin in zip(self.factors, self.margins, strict=True)
        ]

    def remark(self) -> str:
        """Say which efficiencies are not known, and why; their factors only serve for steps like those of the pairs."""
        reasons: dict[str, list[str]] = {}
        for part, factor, efficiency in zip(PARTS, self.factors, self.efficiencies(), strict=True):
            if efficiency is None:
                why = "no row has any" if factor is None else "too small a part, or not separable from the others"
                why = "fitted as 0 seconds" if factor == 0 else why
                reasons.setdefault(why, []).append(part)
        return "; ".join(f"{', '.join(parts)} not identifiable ({why})" for why, parts in reasons.items())

    def text(self) -> str:
        """Return the words that accompany each of its numbers."""
        return (
            f"estimate, calibrated from {self.rows:,} measured rows on {self.gpu} ({self.precision}), "
            f"leave-one-out median error {100 * self.median_error:.1f} %"
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain data with efficiencies, null if not known."""
        known = zip(PARTS, self.efficiencies(), strict=True)
        efficiencies = {f"{part}_efficiency": found[0] if found else None for part, found in known}
        return {**asdict(self), **efficiencies, "remark": self.remark()}


def calibrate(table: Table) -> tuple[list[Calibration], list[str]]:
    """Return a calibration for each GPU and precision with enough pairs, and the reasons why others have none."""
    found = pairs(table)
    calibrations: list[Calibration] = []
    notes: list[str] = []
    for (gpu, precision), mine in found.groupby(["gpu", "precision"], sort=True):
        if len(mine) < FEWEST:
            notes.append(
                f"{gpu}, {precision}: {len(mine)} configuration{'s' * (len(mine) != 1)} both measured and predicted; a "
                f"calibration needs {FEWEST} or more"
            )
        else:
            calibrations.append(_calibration(str(gpu), str(precision), mine))
    if found.empty:
        notes.append(
            "no measured CUDA row has a predicted row with equal settings and device.gpu set to its GPU; predict the "
            "measured trials, with the same axes and device=simulated"
        )
    return calibrations, notes


def pairs(table: Table) -> pd.DataFrame:
    """Return each estimate of a configuration that was measured on the same GPU, one line each.

    `step_s` is the median of the measured rows, and `rows` is their number. Allocator settings count as repeats,
    because an estimate does not depend on them.
    """
    both = pair(table, "step_median_s", "optimizer_effective", "bound_by", *SECONDS)
    both = both[~is_(both, "bound_by_measured", "host")]
    known = both[["step_median_s_measured", *(f"{name}_predicted" for name in SECONDS)]].notna().all(axis=1)
    ran = both["outcome_predicted"].eq("ok") & both["outcome_measured"].eq("ok") & both["world_size"].eq(1)
    both = both[known & ran & both["optimizer_effective_predicted"].eq(both["optimizer_effective_measured"])]
    both = both.rename(columns={f"{name}_predicted": name for name in SECONDS})
    shapes = both.groupby(["gpu", *(key for key in KEYS if key != "allocator_conf"), *SECONDS], dropna=False)
    found = shapes["step_median_s_measured"].agg(step_s="median", rows="size").reset_index()
    return found[["gpu", "precision", *SECONDS, "step_s", "rows"]].astype(dict.fromkeys(["step_s", *SECONDS], float))


def calibrated(table: Table, calibrations: Sequence[Calibration]) -> pd.DataFrame:
    """Return every row with an estimate: the roofline's, and the calibrated one if there is a calibration for it.

    `extrapolated`: its estimated step is shorter or longer than those of all pairs.
    """
    names = ("simulated_gpu", "precision", "seq_len", "micro_batch", "world_size", "estimated_step_s")
    rows = table.ok(*names, "estimated_tokens_per_s", *SECONDS).dropna(subset=list(SECONDS)).reset_index(drop=True)
    step = pd.Series(np.nan, index=rows.index)
    beyond = pd.Series(False, index=rows.index)
    for one in calibrations:
        mine = rows["simulated_gpu"].eq(one.gpu) & rows["precision"].eq(one.precision) & rows["world_size"].eq(1)
        parts = rows[list(SECONDS)].to_numpy(float)
        # NaN if one of its parts has no known factor
        fitted = np.where(parts > 0, parts * np.array(one.factors, float), 0.0).sum(axis=1)
        step = step.mask(mine, pd.Series(fitted, index=rows.index))
        beyond |= mine & ~rows["estimated_step_s"].astype(float).between(*one.range)
    step = step.where(step > 0)
    tokens = (rows["estimated_tokens_per_s"] * rows["estimated_step_s"]).astype(float)
    return rows.assign(fitted_step_s=step, fitted_tokens_per_s=tokens / step, extrapolated=beyond)


def together(measured: Table, simulated: Table) -> tuple[Table, list[str]]:
    """Return two tables as one, and a note for each setting that varies in only one of them and is not looked at."""
    frames = [measured.frame, simulated.frame]
    lone = {str(name) for name in set(frames[0]) ^ set(frames[1]) if not str(name).startswith(EXTRAS_APART)}
    both = pd.concat([frame.drop(columns=[n for n in frame if n in lone]) for frame in frames], ignore_index=True)
    unseen = sorted(lone - _HELD)
    notes = [f"{name} is ignored, because it varies in only one of the two sets of rows" for name in unseen]
    return from_frame(both, f"{measured.source} and {simulated.source}"), notes


def _calibration(gpu: str, precision: str, mine: pd.DataFrame) -> Calibration:
    whole, step = mine[list(SECONDS)].to_numpy(float), mine["step_s"].to_numpy(float)
    known = [bool(part.any()) for part in whole.T]
    seconds = whole[:, known]
    factors = _fit(seconds, step)
    errors = []
    for left_out in range(len(step)):
        rest = np.arange(len(step)) != left_out
        errors.append(abs(seconds[left_out] @ _fit(seconds[rest], step[rest]) / step[left_out] - 1))
    totals = seconds.sum(axis=1)
    return Calibration(
        gpu=gpu,
        precision=precision,
        rows=int(mine["rows"].sum()),
        configurations=len(mine),
        factors=_of_parts(factors, known),
        margins=_of_parts(_margins(seconds, step, factors), known),
        range=(float(totals.min()), float(totals.max())),
        median_error=float(np.median(errors)),
        worst_error=float(np.max(errors)),
    )


def _of_parts(values: Array, known: Iterable[bool]) -> tuple[float | None, ...]:
    """Return one value for each of the `PARTS`, None for those that are not known."""
    each = iter(values)
    return tuple(float(next(each)) if one else None for one in known)


def _fit(seconds: Array, step: Array) -> Array:
    """Return the non-negative factors with the least sum of squared relative errors."""
    return np.asarray(nnls(seconds / step[:, None], np.ones(len(step)))[0])


def _margins(seconds: Array, step: Array, factors: Array) -> Array:
    """Return half the widths of 95 % intervals (Student's t).

    They follow the singular values: parts that are small everywhere, or grow and shrink together, get wide ones.
    """
    design = seconds / step[:, None]
    residuals = design @ factors - 1
    freedom = len(step) - len(factors)
    scatter = max(NOISE, float(np.sqrt(residuals @ residuals / freedom)))
    _, singular, directions = np.linalg.svd(design, full_matrices=False)
    singular = np.maximum(singular, singular[0] * np.finfo(float).eps)
    errors: Array = scatter * np.sqrt(((directions / singular[:, None]) ** 2).sum(axis=0))
    return errors * float(student_t.ppf(0.975, freedom))
