"""What each step leaves behind: what is allocated at the end of a step beyond what was at the end of the one before.

Not covered: measured runs, whose counters know how much but not of what (harness/flags.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np

from vramsweep.runners.program import IntArray, Program, program
from vramsweep.runners.trace import Trace

MIB = 1 << 20
FEWEST = 3  # steps: the first makes the optimizer's state, so the next two are what is compared


@dataclass(frozen=True)
class Growth:
    """`bytes` more are held after the last step than after the one before (fewer, where it is negative): what has grown
    most is of storages that `operator` of `module` asked for in `phase`."""

    bytes: int
    module: str
    operator: str
    phase: str

    def note(self) -> str | None:
        """A note for the row; None where nothing is left behind."""
        if self.bytes <= 0:
            return None
        who = " ".join(filter(None, (self.module, self.operator)))
        more = f"{self.bytes / MIB:,.1f} MiB" if self.bytes >= MIB else f"{self.bytes:,} bytes"
        return f"memory leaks: each step leaves {more} more allocated than the one before, most by {who} ({self.phase})"


def growth(trace: Trace) -> Growth | None:
    """What the last step leaves beyond the one before; None where too few steps were traced."""
    order = program(trace)
    ends = _ends(order)
    if len(ends) < FEWEST:
        return None
    sizes = np.asarray(trace.sizes, dtype=np.int64)
    before, after = (np.flatnonzero((order.born < end) & (order.gone >= end)) for end in ends[-2:])
    if not after.size:
        return Growth(-int(sizes[before].sum()), "", "", "")
    kinds = _by_maker(trace, order, after)
    kinds.subtract(_by_maker(trace, order, before))
    [((origin, phase), _)] = kinds.most_common(1)
    return Growth(int(sizes[after].sum() - sizes[before].sum()), *trace.makers[origin], phase)


def _ends(order: Program) -> list[int]:
    """How many operations there are until the end of each step."""
    ends = itertools.accumulate(len(operations) for _, operations in order.phases)
    steps = {mark.step: end for (mark, _), end in zip(order.phases, ends, strict=True) if mark.step is not None}
    return [steps[step] for step in sorted(steps)]


def _by_maker(trace: Trace, order: Program, storages: IntArray) -> Counter[tuple[int, str]]:
    """Bytes of the storages by who asked for them (its number) and in which phase."""
    ends = np.cumsum([len(operations) for _, operations in order.phases])
    phases = np.searchsorted(ends, order.born[storages], side="right")
    found: Counter[tuple[int, str]] = Counter()
    for storage, phase in zip(storages, phases, strict=True):
        found[trace.origins[storage], order.phases[phase][0].phase] += trace.sizes[storage]
    return found
