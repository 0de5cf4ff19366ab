"""Quantities that can be fitted, compared and drawn, each with its label, unit and behaviour; and their ranks.

A row's memory is that of its worst rank, and its list of all ranks shows the others.
Fits use the column's own unit (bytes, seconds); `scale` turns it into the unit that people read.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from vramsweep.analysis.data.load import Table
from vramsweep.harness.messages.units import format_size

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Metric:
    """One measured column.

    `resolution` is the smallest difference that means anything, in the column's unit. `limited` is true if the device's
    memory is an upper limit of the value. `above` is the column that this one is never less than.
    """

    column: str
    label: str
    unit: str
    scale: float
    resolution: float
    memory: bool = True
    limited: bool = False
    above: str | None = None

    @property
    def column_unit(self) -> str:
        """Unit of the column itself."""
        return "bytes" if self.memory else self.unit

    def show(self, value: float) -> str:
        """Return a value of the column in words: number and unit."""
        if self.memory:
            return format_size(value)
        return f"{value / self.scale:,.4g} {self.unit}"


# The allocator rounds every block up to 512 bytes and requests at least 2 MiB from the driver. Blocks that
# several streams used become free late. NVML counts pages of 2 MiB.
_LINES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("metrics.json").read_text("utf-8"))
METRICS = {one["column"]: Metric(**one) for one in _LINES}


@dataclass(frozen=True)
class Unit:
    """A unit of memory: its bytes, its name, and how many digits after the point a size has in it."""

    bytes: int
    name: str
    digits: int


UNITS = (Unit(GIB, "GiB", 2), Unit(MIB, "MiB", 1), Unit(1024, "KiB", 1), Unit(1, "B", 0))


def unit_of(largest: float) -> Unit:
    """Return the unit for sizes up to `largest` bytes, of either sign."""
    return next((unit for unit in UNITS if abs(largest) >= unit.bytes), UNITS[-1])


def highest_of(peaks: npt.NDArray[np.float64], phases: Sequence[str]) -> Any:
    """Return the phase of the highest peak of each row, "" if no phase is known. `peaks`: (rows, phases)."""
    filled = np.where(np.isnan(peaks), -1.0, peaks)
    return np.where(filled.max(axis=1) < 0, "", np.array(phases)[filled.argmax(axis=1)])


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


def spread(frame: pd.DataFrame, column: str, x: npt.NDArray[np.float64]) -> Spread | None:
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
