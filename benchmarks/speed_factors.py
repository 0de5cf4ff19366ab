"""Fit estimates to published speeds: factors by GPU and kind of arithmetic, judged by leaving out sources or GPUs.

The model is in harness/hardware/roofline.py; analysis/compare/calibrate.py fits factors to a user's own
rows. The fit is robust (soft L1), to logarithms of measured over estimated seconds. Every source has the same weight,
however many readings it has. A GPU's factors are drawn towards those of all GPUs, because one GPU's readings rarely
tell five factors apart. A roofline cannot be beaten, so the factors of compute, attention and memory are at least 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares
from validation import SPEED, percent, size

from vramsweep.analysis.model.curves import Array
from vramsweep.harness.hardware.roofline import PARTS, arithmetic_kind

SECONDS = tuple(f"estimated_{part}_s" for part in PARTS)
LAUNCHES = "estimated_launches"
START = np.array([1.5, 2.0, 1.3, 1.5, 0.5, 8e-6])  # without readings; the last is the host's seconds per launch
LEAST = np.array([1.0, 1.0, 1.0, 0.1, 0.01, 1e-6])
MOST = np.array([20.0, 20.0, 20.0, 20.0, 20.0, 1e-4])
LOOSE, TIGHT = 0.02, 0.2  # how strongly all GPUs' factors are drawn to START, and one GPU's to those of all


def readings(found: pd.DataFrame) -> pd.DataFrame:
    """Return the readings of speed that have an estimate: seconds measured and estimated by part, GPU, kind, source."""
    speed = found[found["quantity"].isin(SPEED) & found["error"].notna()].copy()
    for name in SECONDS:
        speed[name] = speed[name].astype(float)
    speed[SECONDS[-1]] = speed[SECONDS[-1]].fillna(0.0)
    speed[LAUNCHES] = speed[LAUNCHES].astype(float)
    speed["kind"] = [arithmetic_kind(str(precision)) for precision in speed["precision"]]
    return speed[
        ["title", "run", "gpu", "kind", "world_size", "measured", "predicted", *SECONDS, LAUNCHES]
    ].reset_index(drop=True)


def predicted(speed: pd.DataFrame, known: Array) -> Array:
    """Predict the seconds per step by the factors `known`."""
    card = speed[list(SECONDS)].to_numpy(float) @ known[:-1]
    found: Array = np.maximum(card, known[-1] * speed[LAUNCHES].to_numpy(float))
    return found


def factors(speed: pd.DataFrame, towards: Array, strength: float) -> Array:
    """Fit the factors, and the host's seconds per launch, to these readings."""
    step = speed["measured"].to_numpy(float)
    of_source = speed.groupby("title")["measured"].transform("size").to_numpy(float)
    weights = np.sqrt(1 / of_source)

    def residuals(logs: Array) -> Array:
        off = weights * np.log(predicted(speed, np.exp(logs)) / step)
        return np.concatenate([off, np.sqrt(strength) * (logs - np.log(towards))])

    start = np.clip(towards, LEAST * 1.001, MOST * 0.999)
    bounds = (np.log(LEAST), np.log(MOST))
    fitted = least_squares(residuals, np.log(start), bounds=bounds, loss="soft_l1", f_scale=0.3)
    found: Array = np.exp(fitted.x)
    return found


def of_card(speed: pd.DataFrame, gpu: str, of: str) -> Array | None:
    """Fit a GPU's factors for a kind to its own readings, drawn to all GPUs'; else all GPUs'; None without readings."""
    same = speed[speed["kind"].eq(of)]
    if same.empty:
        return None
    pooled = factors(same, START, LOOSE)
    own = same[same["gpu"].eq(gpu)]
    return pooled if own.empty else factors(own, pooled, TIGHT)


def left_out(speed: pd.DataFrame) -> pd.DataFrame:
    """Add `calibrated`, the relative error by factors of all other sources, and `own`, whether those have readings of
    the same GPU; `calibrated` is null if no other source has this kind of arithmetic."""
    found = speed.assign(calibrated=np.nan, own=False)
    for title in speed["title"].unique():
        rest, mine = speed[speed["title"].ne(title)], speed[speed["title"].eq(title)]
        for (gpu, of), part in mine.groupby(["gpu", "kind"]):
            known = of_card(rest, str(gpu), str(of))
            if known is not None:
                at = list(part.index)
                found.loc[at, "calibrated"] = predicted(part, known) / part["measured"].to_numpy(float) - 1
                found.loc[at, "own"] = bool((rest["gpu"].eq(str(gpu)) & rest["kind"].eq(str(of))).any())
    return found


def of_speed(found: pd.DataFrame) -> pd.DataFrame:
    """Tabulate errors of seconds per step by source, GPU and kind: as estimated, and calibrated by other sources."""
    speed = readings(found)
    if speed.empty:
        return pd.DataFrame()
    judged = left_out(speed)
    judged["plain"] = judged["predicted"].astype(float) / judged["measured"].astype(float) - 1
    lines = []
    groups: list[tuple[Any, pd.DataFrame]] = [*judged.groupby(["title", "gpu", "kind"], sort=False)]
    for names, mine in [*groups, (("all", "", ""), judged)]:
        off = mine["calibrated"].dropna()
        lines.append(
            dict(zip(("source", "GPU", "arithmetic"), map(str, names), strict=True))
            | {
                "readings": str(len(mine)),
                "estimated: median, signed": percent(mine["plain"].median()),
                "median": size(float(mine["plain"].abs().median())),
                "calibrated by other sources: median, signed": percent(off.median()),
                "median ": size(float(off.abs().median())),
                "90th percentile": size(float(off.abs().quantile(0.9))),
            }
        )
    return pd.DataFrame(lines)
