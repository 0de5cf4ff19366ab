"""Runs of one configuration in separate processes: memory must be byte-identical, speed gets an interval. Pure.

Repeats have equal settings and different repeat indices; a trial that was measured again counts too. Any difference in
memory is reported as a pair, because an allocator's counters follow from the requests, which are the same.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vramsweep.harness.rows.quality_flags import CORRECTED
from vramsweep.harness.rows.schema import Outcome, system_of

SURE = 0.95
WIDEST = 300.0  # of an interval of logarithms, so that the exponential is a number
# Columns that repeat exactly, by the source of memory's numbers; a resident set never does.
EXACT = {
    "cuda_allocator": ("peak_allocated_bytes", "peak_reserved_bytes"),
    "cpu_tensors_and_rss": ("peak_allocated_bytes",),
}
COLUMNS = EXACT["cuda_allocator"]  # all of them
Run = Mapping[str, Any]


@dataclass(frozen=True)
class Apart:
    """Two runs of one configuration that differ in a column of memory: the least and the most of all, in bytes."""

    column: str
    low_trial: str
    low: int
    high_trial: str
    high: int

    def text(self) -> str:
        """Return the pair in words."""
        same = self.low_trial == self.high_trial
        who = f"trial {self.low_trial}, measured again," if same else f"repeats {self.low_trial} and {self.high_trial}"
        return f"{self.column} of {who} differs by {self.high - self.low:,} B: {self.low:,} and {self.high:,}"


@dataclass(frozen=True)
class Interval:
    """The geometric mean of the speeds of `runs` runs and its confidence interval, in the speeds' unit."""

    mean: float
    low: float
    high: float
    runs: int

    @property
    def half_width(self) -> float:
        """Distance of the upper end from the mean, as a share of the mean."""
        return self.high / self.mean - 1


def configurations(rows: Iterable[Run]) -> list[list[Run]]:
    """Group the measured rows that finished by configuration and system, in the order of each group's first row.

    Trainings that somebody watched (runner=watch) are left out, because their data is their own. So are rows that have
    been corrected since, because they do not repeat what is measured today.
    """
    found: dict[Any, list[Run]] = {}
    for row in rows:
        measured = row.get("outcome") == Outcome.OK and row.get("device") != "simulated" and row.get("foreign") is None
        if not measured or row.get("runner") == "watch" or CORRECTED in (row.get("flags") or ()):
            continue
        trial = row.get("trial")
        settings = {name: value for name, value in trial.items() if name != "repeat"} if trial else row.get("trial_id")
        found.setdefault((json.dumps(settings, sort_keys=True), system_of(row)), []).append(row)
    return list(found.values())


def find_apart(runs: Sequence[Run]) -> list[Apart]:
    """Return where the memory of one configuration's runs is not byte-identical; one entry a column at most."""
    found = []
    for column in dict.fromkeys(name for run in runs for name in EXACT.get(str(run.get("memory_source")), ())):
        known = [(int(run[column]), str(run.get("trial_id"))) for run in runs if run.get(column) is not None]
        if len({value for value, _ in known}) > 1:
            (low, low_trial), (high, high_trial) = min(known), max(known)
            found.append(Apart(column, low_trial, low, high_trial, high))
    return found


def sentences(found: Sequence[Apart], most: int = 4) -> list[str]:
    """Return the pairs in words, those furthest apart first, and how many more there are."""
    worst = sorted(found, key=lambda one: one.low - one.high)
    more = len(worst) - most
    rest = [f"{more:,} more differences in memory that should be byte-identical"] if more > 0 else []
    return [f"memory should be byte-identical, but {one.text()}" for one in worst[:most]] + rest


def interval(speeds: Sequence[float]) -> Interval | None:
    """Return Student's interval of the mean of log speeds, one speed a process. Return None for fewer than two, or if
    it would be wider than any number.

    The sample is processes: steps of a process share memory layout, GPU temperature and neighbours (Kalibera and Jones
    2013, "Rigorous benchmarking in reasonable time").
    """
    logs = [math.log(speed) for speed in speeds if speed > 0]
    if len(logs) < 2:
        return None
    from scipy.special import stdtrit  # takes a third of a second that other verbs do not need

    mean = statistics.fmean(logs)
    half = float(stdtrit(len(logs) - 1, (1 + SURE) / 2)) * statistics.stdev(logs) / math.sqrt(len(logs))
    if half > WIDEST or abs(mean) > WIDEST:
        return None
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))
