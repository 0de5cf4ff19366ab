"""Whether a trace that was read from a file can be believed: every list of its type, length and range.

What is predicted from it would else be wrong without a word, or fail far from here. Not covered: whether the storages
are those of any program (tracing.py keeps a checksum beside them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, get_args

from vramsweep.harness.links import Collective
from vramsweep.harness.roofline import Work
from vramsweep.runners import streams
from vramsweep.runners.storages import CATEGORIES, HOST_CATEGORIES, Phase, Storages
from vramsweep.runners.symbolic import Point, compiled, following
from vramsweep.runners.trace import Trace

MOST = 1 << 63  # of any number


def check(trace: Trace, sized: bool = True) -> None:
    """Raises ValueError, with what of the trace is wrong. `sized`: it has sizes, kernels and collectives of its own."""
    for storages, categories in ((trace, CATEGORIES), (trace.host, HOST_CATEGORIES)):
        _storages(storages, categories, sized)
    count = len(trace.categories)
    _need(len(trace.streams) == len(trace.origins) == count, "streams and origins are not one a storage")
    _need(len(trace.host.pinned) == len(trace.host.categories) and _all(trace.host.pinned, bool), "pinned is wrong")
    _need(_numbers(trace.streams), "streams are no numbers")
    _need(_numbers(trace.origins, len(trace.makers)), "origins are not among the makers")
    _need(all(len(maker) == 2 and _all(maker, str) for maker in trace.makers), "makers are not two texts each")
    _need(_counted(trace.kernels, _is_work), "kernels are wrong")
    _need(_counted(trace.collectives, _is_collective), "collectives are wrong")
    _need(all(_is_stepwise(trace, sized, *one) for one in trace.stepwise), "stepwise is wrong")
    _need(all(len(note) == 4 and _is_note(*note) for note in trace.notes), "notes are wrong")


def _storages(storages: Storages, categories: Sequence[str], sized: bool) -> None:
    count, events = len(storages.categories), len(storages.events)
    _need(set(storages.categories) <= set(categories), "a category is unknown")
    _need(len(storages.sizes) == count * sized and _numbers(storages.sizes), "sizes are not one number a storage")
    _need(_numbers(map(abs, storages.events), count + 1) and _all(storages.events, int), "events are of no storage")
    marks = storages.marks
    _need(
        _numbers([mark.end for mark in marks], events + 1)
        and _numbers([mark.step for mark in marks if mark.step is not None])
        and all(before.end <= after.end for before, after in pairwise(marks))
        and {mark.phase for mark in marks} <= set(get_args(Phase)),
        "marks are wrong",
    )


def _is_work(work: Any) -> bool:
    return isinstance(work, Work) and _all([work.kind], str) and _numbers([work.flops, work.nbytes, work.launches])


def _is_collective(one: Any) -> bool:
    return isinstance(one, Collective) and _all([one.kind], str) and _numbers([one.nbytes])


def _is_stepwise(trace: Trace, sized: bool, storage: Any, text: Any, of: Any) -> bool:
    """Whether the storage has the size that its formula gives, where the trace has sizes."""
    if not _numbers([storage], len(trace.categories)) or not _numbers([of]) or type(text) is not str:
        return False
    return not sized or compiled(following(text, str(of)))(Point(0, 0)) == trace.sizes[storage]


def _is_note(at: Any, kind: Any, one: Any, other: Any) -> bool:
    return kind in streams.KINDS and _numbers([at, one, other])


def _counted(values: Sequence[tuple[Any, int]], fits: Callable[[Any], bool]) -> bool:
    return all(fits(value) for value, _ in values) and _numbers([count for _, count in values])


def _all(values: Iterable[Any], kind: type) -> bool:
    """Whether they all are of that very type: a bool is no number."""
    return set(map(type, values)) <= {kind}


def _numbers(values: Iterable[Any], below: int = MOST) -> bool:
    listed = list(values)
    return _all(listed, int) and (not listed or (min(listed) >= 0 and max(listed) < below))


def _need(well: bool, what: str) -> None:
    if not well:
        raise ValueError(f"a trace that cannot be believed: {what}")
