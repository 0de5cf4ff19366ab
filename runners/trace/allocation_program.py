"""A trace's operations on the allocator, in order and without sizes. Every length has the same, so they are made once.

This module decides when a block that another stream uses comes back (stream_lag.py).

A step requests what the one before requested, but a replay cannot leave it out. After two steps the allocator's state
differs from that after one: the small blocks of a batch lie elsewhere, and reserved may have grown.

`growth` is what a step leaves behind: bytes allocated at its end beyond the end of the step before. Counters of
measured runs know how much is left, but not of what (harness/rows/quality_flags.py).
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vramsweep.runners.trace.stream_lag import Ahead
from vramsweep.runners.trace.trace_data import Mark, Trace

EMPTY_CACHE = 0
MIB = 1 << 20
BLOCK = 512  # bytes: the allocator rounds up to multiples of it
FEWEST = 3  # steps: the first makes the optimizer's state, so the next two are compared
BOUNDED = ("parameters", "gradients", "optimizer_state")  # may still grow, as with experts that had no tokens so far
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Program:
    """A trace's operations on the allocator, as numbers; `phases` has those of each phase, in order. With S storages:

    0 empties the cache; n > 0 requests storage n - 1 or, if n > S, says that no stream uses storage n - S - 1 any more;
    n < 0 frees storage -n - 1 or, if -n > S, releases storage -n - S - 1, which another stream still uses.
    Storage i exists from operation `born[i]` to before operation `gone[i]`, counted over all phases.
    """

    phases: tuple[tuple[Mark, tuple[int, ...]], ...]
    born: IntArray
    gone: IntArray

    def alive(self, number: int) -> list[int]:
        """Return the numbers of the storages that exist once this one has been requested."""
        at = self.born[number]
        return [int(n) for n in np.flatnonzero((self.born <= at) & (at < self.gone))]


def build_program(trace: Trace, ahead: bool = False) -> Program:
    """Return the trace's program; with `ahead`, that of a host that waits only where it must (stream_lag.py).

    Traces that share their lists of events, as those of one symbolic trace do, share their program.
    """
    return _program(_Same(trace, (id(trace.events), id(trace.marks), id(trace.notes), id(trace.streams))), ahead)


@dataclass(frozen=True)
class _Same:
    """A trace as a cache key for its program: equal to another if both have the same list objects."""

    trace: Trace = field(compare=False)
    lists: tuple[int, ...]


@lru_cache(maxsize=16)  # the cache keeps the trace alive, so that no other list can get the same identity
def _program(same: _Same, ahead: bool) -> Program:
    trace = same.trace
    operations = list(_operations(trace, Ahead(trace.notes if ahead else ())))
    return Program(tuple(zip(trace.marks, operations, strict=True)), *_lives(operations, len(trace.streams)))


def _lives(operations: Sequence[Sequence[int]], storages: int) -> tuple[IntArray, IntArray]:
    born, gone = np.full(storages, np.iinfo(np.int64).max), np.full(storages, np.iinfo(np.int64).max)
    for at, operation in enumerate(itertools.chain.from_iterable(operations)):
        if 0 < operation <= storages:
            born[operation - 1] = at
        elif operation < 0:
            gone[(-operation - 1) % storages] = at
    return born, gone


def _operations(trace: Trace, host: Ahead) -> Iterator[tuple[int, ...]]:
    storages, start = len(trace.streams), 0
    for mark in trace.marks:
        found: list[int] = []
        for index in range(start, mark.end):
            event = trace.events[index]
            host.advance(index)
            if event < 0:
                found.append(event - storages if host.freed(-event - 1) else event)
            elif event == 0:
                found.append(EMPTY_CACHE)
            else:
                found += [storages + number + 1 for number in host.returned()]
                found.append(event)
        yield tuple(found)
        start = mark.end


@dataclass(frozen=True)
class Growth:
    """Growth of memory: `bytes` more are allocated after the last step than after the one before, fewer if negative.
    It is largest for storages that `operator` of `module` requested in `phase`."""

    bytes: int
    module: str
    operator: str
    phase: str

    def note(self) -> str | None:
        """Return a note for the row, or None if nothing is left behind."""
        if self.bytes <= 0:
            return None
        who = " ".join(filter(None, (self.module, self.operator)))
        more = f"{self.bytes / MIB:,.1f} MiB" if self.bytes >= MIB else f"{self.bytes:,} bytes"
        return f"memory leaks: each step leaves {more} more allocated than the one before, most by {who} ({self.phase})"


def growth(trace: Trace) -> Growth | None:
    """Return what the last step leaves beyond the one before, or None if fewer than FEWEST steps were traced."""
    order = build_program(trace)
    ends = _ends(order)
    if len(ends) < FEWEST:
        return None
    sizes = -(-np.asarray(trace.sizes, dtype=np.int64) // BLOCK) * BLOCK  # as the allocator rounds and counts
    leaks = ~np.isin(trace.categories, BOUNDED)
    before, after = (np.flatnonzero(leaks & (order.born < end) & (order.gone >= end)) for end in ends[-2:])
    if not after.size:
        return Growth(-int(sizes[before].sum()), "", "", "")
    kinds = _by_maker(trace, order, after)
    kinds.subtract(_by_maker(trace, order, before))
    [((origin, phase), _)] = kinds.most_common(1)
    return Growth(int(sizes[after].sum() - sizes[before].sum()), *trace.makers[origin][:2], phase)


def _ends(order: Program) -> list[int]:
    """Return, for each step, the number of operations up to its end."""
    ends = itertools.accumulate(len(operations) for _, operations in order.phases)
    steps = {mark.step: end for (mark, _), end in zip(order.phases, ends, strict=True) if mark.step is not None}
    return [steps[step] for step in sorted(steps)]


def _by_maker(trace: Trace, order: Program, storages: IntArray) -> Counter[tuple[int, str]]:
    """Return the bytes of the storages by (number of the maker that requested them, phase)."""
    ends = np.cumsum([len(operations) for _, operations in order.phases])
    phases = np.searchsorted(ends, order.born[storages], side="right")
    found: Counter[tuple[int, str]] = Counter()
    for storage, phase in zip(storages, phases, strict=True):
        found[trace.origins[storage], order.phases[phase][0].phase] += trace.sizes[storage]
    return found
