"""What a trace asks of the allocator, in order, sizes apart: the same for every length, so it is worked out once.

Here it is settled when a block that another stream uses comes back (streams.py).

A step asks for what the one before asked for, but a replay cannot leave it out: after two steps the allocator does not
stand where it stood after one (the small blocks of a batch lie elsewhere, and reserved may have grown).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vramsweep.runners.storages import Mark
from vramsweep.runners.streams import Ahead
from vramsweep.runners.trace import Trace

EMPTY_CACHE = 0
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Program:
    """`phases` are the operations of each phase, in order. With S storages, an operation is a number:

    0 empties the cache; n > 0 asks for storage n - 1, or, beyond S, tells that no stream uses storage n - S - 1 any
    more; n < 0 frees storage -n - 1, or, beyond -S, lets go of storage -n - S - 1, which another stream still uses.
    Storage i exists from operation `born[i]` to before `gone[i]`, over all phases.
    """

    phases: tuple[tuple[Mark, tuple[int, ...]], ...]
    born: IntArray
    gone: IntArray

    def alive(self, number: int) -> list[int]:
        """The storages that the program holds when it has asked for this one."""
        at = self.born[number]
        return [int(n) for n in np.flatnonzero((self.born <= at) & (at < self.gone))]


def program(trace: Trace, ahead: bool = False) -> Program:
    """The trace's program; with `ahead`, of a host that waits only where it must (streams.py).

    Traces that share their lists of events, as those made from one symbolic trace do, share it too.
    """
    return _program(_Same(trace), ahead)


class _Same:
    """A trace as far as its program goes, equal to another by identity of the lists."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._lists = (id(trace.events), id(trace.marks), id(trace.notes), id(trace.streams))

    def __hash__(self) -> int:
        return hash(self._lists)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._lists == other._lists


@lru_cache(maxsize=16)  # it holds the trace, so that no other list can get the same identity
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
