"""Parts of whole jobs (protocol=job): the peak of each, and by how much one exceeds the steps.

A row's other peaks are of load and steps alone, so what depends on them (fits, limits) is too low there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from vramsweep.analysis.data.groups import Group, label
from vramsweep.harness.messages.units import format_size
from vramsweep.harness.rows.schema import OF_TRAINING

_PEAKS = {base: f"part_peak_{base}_bytes" for base in ("allocated", "reserved")}  # the deciding one first


@dataclass(frozen=True)
class Job:
    """One whole job: its name in words; peaks of observed parts, by counter; the part that needs most, by its row.

    That part is of allocated if known: what an evaluation left in the cache stays reserved in the steps after it.
    """

    name: str
    known: Mapping[str, Mapping[str, int]]
    largest: str
    trial_id: str

    @property
    def base(self) -> str:
        """Counter that decides which part needs most."""
        return next(iter(self.known))

    @property
    def peaks(self) -> Mapping[str, int]:
        """Peak of each part, of that counter."""
        return self.known[self.base]

    @property
    def excess(self) -> Excess:
        """Largest excess, by any counter, of another part over load, first step and steps, which the row's own peaks
        cover. Each counter has fits of its own, and a part may need more of reserved alone."""
        found = [Excess(0, self.largest, self.base)]
        for base, peaks in self.known.items():
            trained = [peaks[part] for part in OF_TRAINING if part in peaks]
            found += [Excess(peak - max(trained), part, base) for part, peak in peaks.items() if trained]
        return max(found, key=lambda one: one.size)


class Excess(NamedTuple):
    """Bytes by which a part exceeds the steps; 0 if none does."""

    size: int
    part: str
    base: str


def jobs(groups: Sequence[Group]) -> list[Job]:
    """Return every whole job of the groups whose parts are known, the one that most exceeds its steps first."""
    found = []
    for group in groups:
        for _, row in group.take(*_PEAKS.values(), "largest_part", "seq_len", "micro_batch", "trial_id").iterrows():
            known = {base: peaks for base, name in _PEAKS.items() if (peaks := read_peaks(row[name]))}
            if not known:
                continue
            peaks = next(iter(known.values()))
            largest = str(row["largest_part"])
            if largest not in peaks:  # of an imported row
                largest = max(peaks, key=lambda part: peaks[part])
            told = {key: int(row[key]) for key in ("seq_len", "micro_batch") if not pd.isna(row[key])}
            rest = {key: value for key, value in group.settings.items() if key not in told}
            text = ("at most " if group.varies else "") + label(told | rest)
            found.append(Job(text, known, largest, str(row["trial_id"])))
    return sorted(found, key=lambda job: -job.excess.size)


def read_peaks(text: Any) -> dict[str, int]:
    """Return the known peaks in a column's JSON text; none if it holds something else."""
    try:
        told = {} if pd.isna(text) else dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return {}
    return {part: int(size) for part, size in told.items() if type(size) in (int, float) and 0 <= size < math.inf}


def called(part: str) -> str:
    """Return a part's name as words of a sentence."""
    return part.replace("_", " ")


def sentences(found: Sequence[Job]) -> list[str]:
    """Say which part needs most, in how many jobs, and at worst how much more than the steps."""
    if not found:
        return []
    total = f"{len(found):,} job{'s' * (len(found) != 1)}"
    said = []
    for part in dict.fromkeys(job.largest for job in found):
        mine = [job for job in found if job.largest == part]
        if part == "steps":
            continue
        worst = max(mine, key=lambda job: job.peaks[part] - (0 if part in OF_TRAINING else job.peaks.get("steps", 0)))
        steps = f" where the steps need {format_size(worst.peaks['steps'])}" if "steps" in worst.peaks else ""
        need = f"needs most ({worst.base}): {'at worst ' * (len(mine) > 1)}{format_size(worst.peaks[part])}"
        said.append(f"In {len(mine):,} of {total} {called(part)} {need}{steps} ({worst.name}).")
    if not said:
        most = max(found, key=lambda job: job.peaks["steps"])
        others = {part: size for part, size in most.peaks.items() if part not in OF_TRAINING}
        after = max(others, key=lambda part: others[part], default="")
        next_ = f"; {called(after)} comes next with {format_size(others[after])}" if after else ""
        said = [
            f"In {'each of ' * (len(found) > 1)}{total} the steps need most ({most.base}):"
            f" {'up to ' * (len(found) > 1)}{format_size(most.peaks['steps'])}{next_} ({most.name})."
        ]
    return said


def remark(found: Sequence[Job]) -> str:
    """Return a warning for anything based on a row's own peaks, if jobs exceed these; "" if none does."""
    if not (beyond := [job for job in found if job.excess.size]):
        return ""
    worst = beyond[0]
    more = " and ".join(dict.fromkeys(called(job.excess.part) for job in beyond))
    need = "need" if " and " in more else "needs"
    return (
        f"fits and limits use the peaks of load and steps; in {len(beyond):,} of {len(found):,} whole jobs"
        f" {more} {need} more, by up to {format_size(worst.excess.size)} {worst.excess.base} ({worst.name})"
    )
