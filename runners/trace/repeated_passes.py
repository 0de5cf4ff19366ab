"""Accumulated passes that are alike: traced once, and recorded again for each that follows.

The first pass of a step makes the gradients, to which the others add; the last may be the one that sends them. Passes
between are alike if only their batches differ. This is checked: a pass is recorded again only after two passes ran the
same operators, which requested and freed the same, in the same order. Kernels and collectives are recorded in the last
step alone, and follow from the operators. The last pass is recorded again only on one GPU, and if it was alike in an
earlier step. A pass always runs if it adds notes about streams. So does one that leaves a tensor in memory which the
next pass does not free, unless that is its loss. make_trace.py decides which trials have such passes.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramsweep.runners.trace.step_tracer import Tracer
from vramsweep.runners.trace.storage_log import MemoryLog, expression
from vramsweep.runners.trace.trace_data import Mark

Pass = Callable[[], torch.Tensor]  # runs forward and backward; returns the loss
Left = dict[tuple[Any, ...], int]  # numbers of storages that a pass left, by size, maker and rank


@dataclass(frozen=True)
class _Noted:
    """One pass in the trace: its begin and end in each list, its form for comparisons, and its loss's number."""

    begin: list[int]
    end: list[int]
    form: list[Any]
    loss: int
    before: list[Left]  # left in either memory by the pass before
    left: list[Left]  # left by this one
    keeps_loss: bool  # the loss of the pass before is freed between the two passes, not in this one


class RepeatedPasses:
    """Runs each step's passes, or records one again. A step has `count` passes; if it `sends`, the last differs."""

    def __init__(self, tracer: Tracer, count: int, sends: bool) -> None:
        self._tracer, self._count, self._sends = tracer, count, sends
        self._index = 0  # of the step's next pass
        self._last: _Noted | None = None  # the pass before
        self._left: list[Left] = []  # left by it
        self._middle: Any = None  # form of a pass that is neither the first nor the last of its step
        self._ready = self._ends_alike = False
        self._loss: weakref.ref[torch.Tensor] | None = None

    def run(self, one: Pass) -> torch.Tensor:
        """Run a pass, or record the one before again; return its loss either way."""
        index, last = self._index, self._index == self._count - 1
        self._index = 0 if last else index + 1
        if index == 0:
            self._ready, self._last = False, None
        if self._ready and self._last is not None and (not last or self._ends_alike):
            return self._note_again(self._last)
        begin, before = self._ends(), self._left
        loss = one()
        self._left = [self._find_left(at, begin[3 * at]) for at in range(2)]
        noted = self._last = self._compare(begin, before, loss) if index else None
        alike = noted is not None and noted.form == self._middle
        if last:
            self._ends_alike = alike and not self._sends
        elif index:
            self._ready, self._middle = alike, None if noted is None else noted.form
        self._loss = weakref.ref(loss)
        return loss

    def _ends(self) -> list[int]:
        """Return the lengths of the lists that a pass adds to: each memory's sizes, events, marks; then the others."""
        trace = self._tracer.trace
        ends = [len(one) for book in self._tracer.books for one in (book.kept.sizes, book.kept.events, book.kept.marks)]
        ran = [len(trace.kernels), len(trace.collectives), len(self._tracer.operators)]
        return [*ends, len(trace.stepwise), *ran, len(trace.notes)]

    def _find_left(self, at: int, first: int) -> Left:
        """Return the living storages of memory `at` from number `first` on, by size, maker (GPU only) and rank."""
        book, found = self._tracer.books[at], Left()
        for number in sorted(number for number in book.numbers.values() if number >= first):
            who = (expression(book.kept.sizes[number]), *([] if at else [self._tracer.trace.origins[number]]))
            found[*who, sum(key[:-1] == who for key in found)] = number
        return found

    def _compare(self, begin: list[int], before: list[Left], loss: torch.Tensor) -> _Noted | None:
        """Return the record of the pass that ran, or None if it cannot be recorded again."""
        end, trace, number = self._ends(), self._tracer.trace, self._tracer.books[0].number(loss)
        if end[-1] > begin[-1] or number is None or number < begin[0]:
            return None
        form: list[Any] = self._tracer.operators[begin[9] :]
        freed: list[Any] = []
        for at, book in enumerate(self._tracer.books):
            first, events, marks = begin[3 * at : 3 * at + 3]
            keys = {of: key for key, of in before[at].items()}
            for event in book.kept.events[events:]:
                of = abs(event) - 1
                if of < first and event and of not in keys:
                    return None
                form.append((event > 0, of - first) if of >= first else keys.get(of))
                if of in keys:
                    freed.append(keys[of])
            form += map(expression, book.kept.sizes[first:])
            form += [(mark.end - events, mark.phase) for mark in book.kept.marks[marks:]]
            form += [sorted(of - first for of in known if of >= first) for known in book.known.values()]
        form += [trace.origins[begin[0] :], trace.streams[begin[0] :], trace.host.pinned[begin[3] :], number - begin[0]]
        form += [(of - begin[0], text, expression(other)) for of, text, other in trace.stepwise[begin[6] :]]
        kept = [key for left in self._left for key, of in left.items() if key not in freed]
        own = [key for key, of in self._left[0].items() if of == number]
        return _Noted(begin, end, form, number, before, self._left, kept == own) if kept in ([], own) else None

    def _note_again(self, noted: _Noted) -> torch.Tensor:
        """Record a pass like the one before: equal requests and frees, of storages of its own. Return its loss."""
        trace, begin, loss = self._tracer.trace, self._ends(), self._loss() if self._loss is not None else None
        assert loss is not None
        self._left = [_repeat(book, noted, at) for at, book in enumerate(self._tracer.books)]
        ours, its = slice(noted.begin[0], noted.end[0]), slice(noted.begin[3], noted.end[3])
        shift = begin[0] - noted.begin[0]
        trace.origins += trace.origins[ours]
        trace.streams += trace.streams[ours]
        trace.host.pinned += trace.host.pinned[its]
        trace.stepwise += [(of + shift, text, n) for of, text, n in trace.stepwise[noted.begin[6] : noted.end[6]]]
        trace.kernels += trace.kernels[noted.begin[7] : noted.end[7]]
        self._tracer.touched += self._tracer.touched[noted.begin[7] : noted.end[7]]  # none is a whole model's kernel
        trace.collectives += trace.collectives[noted.begin[8] : noted.end[8]]
        if noted.keeps_loss:
            with _disable_current_modes(), self._tracer.fake:
                loss = torch.empty_strided(loss.shape, loss.stride(), dtype=loss.dtype)
            self._tracer.books[0].hold_as(loss.untyped_storage(), noted.loss + shift)
            self._loss = weakref.ref(loss)
        own = [dict(one) for one in self._left]
        self._last = replace(noted, begin=begin, end=self._ends(), loss=noted.loss + shift, before=noted.left, left=own)
        return loss


def _repeat(book: MemoryLog, noted: _Noted, at: int) -> Left:
    """Repeat in one memory's log what a pass noted there, and return what it leaves.

    Tensors that the pass before left are freed in the log, but still live here: they stand for what is left now.
    """
    begin, end = noted.begin[3 * at : 3 * at + 3], noted.end[3 * at : 3 * at + 3]
    kept, shift, later = book.kept, len(book.kept.sizes) - begin[0], len(book.kept.events) - begin[1]
    now = {of: noted.left[at][key] for key, of in noted.before[at].items() if key in noted.left[at]}
    left = {key: of + shift for key, of in noted.left[at].items()}
    for known in book.known.values():
        known.update([of + shift for of in known if begin[0] <= of < end[0]])
    for event in kept.events[begin[1] : end[1]]:
        of = abs(event) - 1
        other = of + shift if of >= begin[0] else now.get(of, 0)
        if event < 0 and of in book.collected:
            book.collected.add(other)
        kept.events.append(event and (other + 1 if event > 0 else -(other + 1)))
    kept.sizes += kept.sizes[begin[0] : end[0]]
    book.sources += [()] * (end[0] - begin[0])  # only an optimizer's are read
    kept.marks += [Mark(mark.end + later, mark.step, mark.phase) for mark in kept.marks[begin[2] : end[2]]]
    stands = {of: left[key] for key, of in noted.left[at].items() if not noted.keeps_loss or of != noted.loss or at}
    book.numbers = {key: stands.get(of, of) for key, of in book.numbers.items()}
    return left
