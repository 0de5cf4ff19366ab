"""Quantities that can be fitted, compared and drawn, each with its label, unit and behaviour.

Fits use the column's own unit (bytes, seconds); `scale` turns it into the unit that people read.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

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
