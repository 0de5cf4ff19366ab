"""The largest of a list of values that fits, in few trials: which value to try next, or what the edge is.

A search starts where the edge is predicted and goes outward in doubling strides until it has a value that fits and one
that does not, then halves what is between. It never strides so far or so little that halving could not end in time:

    prediction                              trials at most, of n values
    right                                   2, with a margin of 1
    one or two values beside the edge       4, with a margin of 1
    none                                    floor(log2 n) + 1
    wrong                                   ceil(log2 n) + 3

What fits is not always monotone (fragmentation, alignment). A search then ends at one of several edges, and says of
those trials that it knows which of them contradict it. Pure: what comes of a value is for others to find out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vramsweep.harness.search.fit_knowledge import Bracket, find_bracket

Kind = Literal["fits", "full", "inferred", "beyond", "failed"]
FULL: tuple[Kind, ...] = ("full", "inferred", "beyond")  # what does not fit


@dataclass(frozen=True)
class Probe:
    """What came of a value: it fits; memory is full; not tried, as what needs no less did not fit (inferred); there is
    no such trial (beyond), as where a model has no more positions; or no answer (failed)."""

    kind: Kind
    reason: str | None = None


@dataclass(frozen=True)
class Edge:
    """The largest value that fits, None where none is known to, and the next one of the list, which does not.

    `bound` is what came of the latter; None where the list ends. `unknown` says why the search could not go on; then
    the edge is between the two. `either_way`: from the first to the second of these values some fit and some did not.
    """

    largest: int | None
    smallest: int | None
    bound: Probe | None
    unknown: str | None = None
    either_way: tuple[int, int] | None = None

    @property
    def confirmed(self) -> bool:
        """Whether trials of both sides have shown it."""
        shown = self.bound is not None and self.bound.kind == "full"
        return shown and self.unknown is None and self.either_way is None


@dataclass
class Bisection:
    """The search along `values`, which go up; `known` is what came of those that were tried.

    `predicted` is the largest number that is predicted to fit, of the list or not (0: none fits), and `margin` the
    first stride beside it, in values of the list.
    """

    values: Sequence[int]
    predicted: int | None = None
    margin: int = 1
    known: dict[int, Probe] = field(default_factory=dict)

    def ask(self) -> list[int]:
        """Return the value to try next; none where the edge is known, or what came of that value says nothing."""
        value = self._between()
        return [] if value is None or value in self.known else [value]

    def tell(self, answers: Mapping[int, Probe]) -> None:
        """Learn what came of values."""
        self.known.update(answers)

    def found(self) -> Edge:
        """Return the edge, as far as it is known."""
        bracket, value = self._bracket(*FULL), self._between()
        reason = self.known[value].reason if value in self.known else None
        unknown = None if value is None else reason or f"{value} has no answer"
        bound = None if bracket.above is None else self.known[bracket.above]
        return Edge(bracket.largest, bracket.above, bound, unknown, self._bracket("full").either_way)

    def _bracket(self, *kinds: Kind) -> Bracket:
        """The bracket of what fits and what is of these kinds."""
        values = sorted(self.known)
        fitting = [value for value in values if self.known[value].kind == "fits"]
        return find_bracket(fitting, [value for value in values if self.known[value].kind in kinds])

    def _between(self) -> int | None:
        """The next value between the largest that fits and the next that does not; None where there is none."""
        values, bracket = self.values, self._bracket(*FULL)
        low = -1 if bracket.largest is None else bisect_left(values, bracket.largest)
        high = len(values) if bracket.above is None else bisect_left(values, bracket.above)
        if high - low <= 1:
            return None
        start = None if self.predicted is None else bisect_right(values, self.predicted) - 1
        bounded = low >= 0, bracket.above is not None and self.known[bracket.above].kind != "beyond"
        tried = sum(one.kind != "beyond" for one in self.known.values())
        wish = _wish(low, high, bounded, start, self.margin)
        return values[_within(wish, low, high, _count_left(len(values)) - tried)]


def most_trials(values: int, predicted: bool) -> int:
    """How many trials a search of so many values takes at most: see above."""
    return _count_left(values) if predicted else values.bit_length()


def _count_left(values: int) -> int:
    return max(values - 1, 0).bit_length() + 3


def _wish(low: int, high: int, bounded: tuple[bool, bool], start: int | None, margin: int) -> int:
    """The next number between `low`, which fits (or is none), and `high`, which does not: strides of margin,
    2 margin, 4 margin, ... from the start, until it is bounded on both sides by what was tried."""
    middle = (low + high) // 2
    if start is None or all(bounded):
        return middle
    if bounded == (False, False):
        return min(max(start, low + 1), high - 1)
    stride = 2 * low - start + margin if bounded[0] else 2 * high - start - margin
    return stride if low < stride < high else middle


def _within(number: int, low: int, high: int, left: int) -> int:
    """The number, or the nearest to it from which halving still ends in the trials left, this one among them."""
    reach = 1 << max(left - 1, 0)
    least, most = max(high - reach, low + 1), min(low + reach, high - 1)
    return min(max(number, least), most) if least <= most else (low + high) // 2
