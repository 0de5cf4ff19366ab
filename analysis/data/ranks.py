"""Statistics over ranks: a row's memory is that of its worst rank, and its list of all shows the others."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from vramsweep.analysis.data.load import Table

HOW = ("worst", "min", "mean", "max")
LISTS = {name: f"rank_{name}" for name in ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")}


@dataclass(frozen=True)
class Spread:
    """Spread of a row's known ranks, at `x`, in bytes; `apart` is the median over rows of (max - min) / mean."""

    ranks: int
    x: float
    least: float
    mean: float
    most: float
    apart: float


def statistics(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return min, mean, max and number of the known ranks, one line a row; null if no rank is known."""
    lists = frame[LISTS[column]].dropna()
    known = [np.array([v for v in one if v is not None and np.isfinite(v)], float) for one in lists]
    made = [[v.min(), v.mean(), v.max(), len(v)] if len(v) else [np.nan] * 3 + [0] for v in known]
    found = pd.DataFrame(made, index=lists.index, columns=["min", "mean", "max", "ranks"], dtype=float)
    return found.reindex(frame.index)


def over_ranks(table: Table, how: str) -> Table:
    """Return the table with the min, mean or max memory of ranks, where known, instead of the worst rank's."""
    if how == "worst":
        return table
    frame = table.frame.copy()
    for column in LISTS:
        if LISTS[column] in frame and frame[LISTS[column]].notna().any():
            found = statistics(frame, column)[how]
            frame[column] = found.round().astype("Float64").astype("Int64").fillna(frame[column])
    return replace(table, frame=frame)


def spread(frame: pd.DataFrame, column: str, x: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Spread | None:
    """Return the spread of ranks at the largest x; None if no row has two of them. `x` has a value per row."""
    if column not in LISTS or not frame[LISTS[column]].notna().any():
        return None
    found = statistics(frame, column).assign(x=x)
    found = found[found["ranks"] > 1]
    if found.empty:
        return None
    last = found.sort_values("x").iloc[-1]
    apart = float(((found["max"] - found["min"]) / found["mean"]).median())
    least, mean, most = (float(last[name]) for name in ("min", "mean", "max"))
    return Spread(int(last["ranks"]), float(last["x"]), least, mean, most, apart)
