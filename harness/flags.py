"""What speaks against using a row's numbers as they are: each flag is one test of a row. Pure.

Flags are for rows that measured something; nothing is ever left out for having one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vramsweep.harness.row import Row

GIB = 1 << 30
# NVML's clock event reasons that no steady load causes by itself; the power cap is normal for a card at work.
HEAT_AND_FAULTS = {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
CORRECTED = "corrected_since"  # only rows of earlier versions have it, and not by a test of what they hold
BASELINE_BYTES = GIB  # more than the driver keeps for itself on any card here


@dataclass(frozen=True)
class Flag:
    """A name, what it means, and whether a row has it; None where the row does not tell."""

    name: str
    meaning: str
    test: Callable[[Row], bool | None]


def _known(column: str, test: Callable[..., bool]) -> Callable[[Row], bool | None]:
    def found(row: Row) -> bool | None:
        value = row.get(column)
        return None if value is None else test(value)

    return found


def _still_rose(row: Row) -> bool | None:
    """Of an allocator's memory: the resident set of a process on a CPU always creeps up."""
    reached = row.get("plateau")
    return None if reached is None or row.get("memory_source") == "cpu_tensors_and_rss" else not reached


FLAGS = (
    Flag("contended", "other processes used the device before or after the steps", _known("foreign_processes", bool)),
    Flag(
        "high_baseline",
        "more than 1 GiB of the device was in use before the worker touched it: in a container others are not listed",
        _known("device_baseline_bytes", lambda used: used > BASELINE_BYTES),
    ),
    Flag(
        "throttled",
        "clocks were lowered for heat, or by the board",
        _known("throttle_reasons", lambda reasons: bool(HEAT_AND_FAULTS & set(reasons))),
    ),
    Flag("not_plateaued", "the peak reserved still rose in the second half of the steps", _still_rose),
    Flag(
        "leaks",
        "every step ended with more allocated than the one before",
        _known("step_growth_bytes", lambda n: n > 0),
    ),
    Flag(
        "allocation_retries",
        "the allocator had to give cached blocks back to find room, which costs time",
        _known("alloc_retries", lambda count: count > 0),
    ),
    Flag(
        "steps_skipped", "updates were skipped for an overflow (fp16)", _known("skipped_steps", lambda count: count > 0)
    ),
    Flag(
        CORRECTED,
        "measured by an earlier version, and something in it has been corrected since (CHANGELOG): fitted apart",
        lambda row: None,
    ),
    Flag("not_alone", "others of our own trials ran on the machine at the same time", _known("node_trials", bool)),
)


def flags(row: Row) -> list[str]:
    """The names of the flags that a row has, in the order of the table."""
    return [flag.name for flag in FLAGS if flag.test(row)]


def markdown_table() -> str:
    """The flags as a table for the documentation."""
    lines = ["**flags**", "", "| flag | meaning |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{flag.name}` | {flag.meaning} |" for flag in FLAGS)]) + "\n"
