"""The parts of whole jobs (protocol=job): what each took at its peak, and by how much one exceeds the steps.

A row's other peaks are of load and steps alone, so whatever rests on them (fits, what fits) says too little there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from vramsweep.analysis.data.groups import Group, label
from vramsweep.analysis.data.metrics import show_bytes

PARTS = ("load", "resume", "first_step", "steps", "evaluation", "save")
TRAINED = ("load", "first_step", "steps")  # what a row's other peaks are of


@dataclass(frozen=True)
class Job:
    """One whole job: the peak of each part that was seen, reserved on a card, else allocated; what it is, in words."""

    name: str
    base: str
    peaks: Mapping[str, int]
    trial_id: str

    @property
    def largest(self) -> str:
        """The part that needs most."""
        return max(self.peaks, key=lambda part: self.peaks[part])

    @property
    def beyond(self) -> int:
        """By how much another part exceeds what the row's own peaks are of; 0 where none does."""
        return max(0, self.peaks[self.largest] - max(self.peaks.get(part, 0) for part in TRAINED))


def jobs(groups: Sequence[Group]) -> list[Job]:
    """Every whole job of the groups whose parts are known, the one that most exceeds its steps first."""
    found = []
    names = ("part_peak_reserved_bytes", "part_peak_allocated_bytes")
    for group in groups:
        for _, row in group.take(*names, "seq_len", "micro_batch", "trial_id").iterrows():
            name = next((name for name in names if not pd.isna(row[name]) and json.loads(row[name])), None)
            if name is None:
                continue
            known = {key: int(row[key]) for key in ("seq_len", "micro_batch") if not pd.isna(row[key])}
            rest = {key: value for key, value in group.settings.items() if key not in known}
            text = ("at most " if group.varies else "") + label(known | rest)
            peaks = {part: int(size) for part, size in json.loads(row[name]).items() if size is not None}
            base = name.removeprefix("part_peak_").removesuffix("_bytes")
            found.append(Job(text, base, peaks, str(row["trial_id"])))
    return sorted(found, key=lambda job: -job.beyond)


def called(part: str) -> str:
    """A part in a sentence."""
    return part.replace("_", " ")


def sentences(found: Sequence[Job]) -> list[str]:
    """Which part needs most, in how many jobs, and at worst how much more than the steps."""
    if not found:
        return []
    total = f"{len(found):,} job{'s' * (len(found) != 1)}"
    said = []
    for part in dict.fromkeys(job.largest for job in found):
        mine = [job for job in found if job.largest == part]
        if part == "steps":
            continue
        worst = mine[0] if part not in TRAINED else max(mine, key=lambda job: job.peaks[part])
        steps = f" where the steps need {show_bytes(worst.peaks['steps'])}" if "steps" in worst.peaks else ""
        need = f"needs most ({worst.base}): {'at worst ' * (len(mine) > 1)}{show_bytes(worst.peaks[part])}"
        said.append(f"In {len(mine):,} of {total} {called(part)} {need}{steps} ({worst.name}).")
    if not said:
        most = max(found, key=lambda job: job.peaks["steps"])
        others = {part: size for part, size in most.peaks.items() if part not in TRAINED}
        after = max(others, key=lambda part: others[part], default="")
        next_ = f"; {called(after)}, the next, {show_bytes(others[after])}" if after else ""
        said = [
            f"In {'each of ' * (len(found) > 1)}{total} the steps need most ({most.base}):"
            f" {'up to ' * (len(found) > 1)}{show_bytes(most.peaks['steps'])}{next_} ({most.name})."
        ]
    return said


def remark(found: Sequence[Job]) -> str:
    """What to say beside anything that rests on a row's own peaks; "" where no job exceeds them."""
    beyond = [job for job in found if job.beyond]
    if not beyond:
        return ""
    worst = beyond[0]
    more = " and ".join(dict.fromkeys(called(job.largest) for job in beyond))
    need = "need" if " and " in more else "needs"
    return (
        f"peaks of fits and of what fits are those of load and steps; in {len(beyond):,} of {len(found):,} whole jobs"
        f" {more} {need} more, by up to {show_bytes(worst.beyond)} ({worst.name})"
    )
