"""Bisection: the search for the largest of a list of values that fits, in few trials. Pure.

The search starts at the predicted value and goes outward in doubling strides, until one value fits and one does not.
Then it halves the interval. Strides are limited so that halving can still end within this number of trials:

    prediction                              trials at most, of n values
    right                                   2, with a margin of 1
    one or two values off                   4, with a margin of 1
    none                                    floor(log2 n) + 1
    wrong                                   ceil(log2 n) + 3

Fitting is not always monotonic (fragmentation, alignment). A search then ends at one of several limits, and says
between which values trials contradict it. `Bisection` names values; its caller runs their trials.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vramsweep.harness.search.fit_knowledge import Bracket, find_bracket

Kind = Literal["fits", "full", "inferred", "beyond", "failed"]
FULL: tuple[Kind, ...] = ("full", "inferred", "beyond")  # what does not fit


@dataclass(frozen=True)
class Probe:
    """The result of a value: it fits, memory is full, or no answer (failed). Two kinds are not tried: a trial needing
    no more did not fit (inferred), or the value is impossible (beyond), as with more tokens than the model allows."""

    kind: Kind
    reason: str | None = None


@dataclass(frozen=True)
class Edge:
    """The largest value that fits, None if none is known to, and the next one of the list, which does not fit.

    `bound` is the result of the latter; None if the list ends. `unknown` says why the search could not go on; then the
    limit is between the two. `either_way`: from the first to the second of these values, some fit and some did not.
    """

    largest: int | None
    smallest: int | None
    bound: Probe | None
    unknown: str | None = None
    either_way: tuple[int, int] | None = None

    @property
    def confirmed(self) -> bool:
        """Return whether trials on both sides have shown the limit."""
        shown = self.bound is not None and self.bound.kind == "full"
        return shown and self.unknown is None and self.either_way is None


@dataclass
class Bisection:
    """The search along ascending `values`; `known` holds the results of those that were tried.

    `predicted` is the largest number that is predicted to fit, of the list or not (0: none fits). `margin` is the first
    stride next to it, in values of the list.
    """

    values: Sequence[int]
    predicted: int | None = None
    margin: int = 1
    known: dict[int, Probe] = field(default_factory=dict)

    def ask(self) -> list[int]:
        """Return the value to try next, in a list; [] if the search has ended or that value's trial gave no answer."""
        value = self._between()
        return [] if value is None or value in self.known else [value]

    def tell(self, answers: Mapping[int, Probe]) -> None:
        """Learn the results of values."""
        self.known.update(answers)

    def found(self) -> Edge:
        """Return the largest value that fits and the next one, as far as they are known."""
        bracket, value = self._bracket(*FULL), self._between()
        reason = self.known[value].reason if value in self.known else None
        unknown = None if value is None else reason or f"the trial of {value} did not finish"
        bound = None if bracket.above is None else self.known[bracket.above]
        return Edge(bracket.largest, bracket.above, bound, unknown, self._bracket("full").either_way)

    def _bracket(self, *kinds: Kind) -> Bracket:
        """Return the bracket between values that fit and values of these kinds."""
        values = sorted(self.known)
        fitting = [value for value in values if self.known[value].kind == "fits"]
        return find_bracket(fitting, [value for value in values if self.known[value].kind in kinds])

    def _between(self) -> int | None:
        """Return the next value between the largest that fits and the next that does not; None if there is none."""
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
    """Return how many trials a search of so many values takes at most, by the module's table."""
    return _count_left(values) if predicted else values.bit_length()


def _count_left(values: int) -> int:
    return max(values - 1, 0).bit_length() + 3


def _wish(low: int, high: int, bounded: tuple[bool, bool], start: int | None, margin: int) -> int:
    """Return the next index between `low`, which fits or is -1, and `high`, which does not. Strides from `start` are
    margin, 2 margin, 4 margin, ... until trials bound the search on both sides; then take the middle."""
    middle = (low + high) // 2
    if start is None or all(bounded):
        return middle
    if bounded == (False, False):
        return min(max(start, low + 1), high - 1)
    stride = 2 * low - start + margin if bounded[0] else 2 * high - start - margin
    return stride if low < stride < high else middle


def _within(number: int, low: int, high: int, left: int) -> int:
    """Return the index, or the nearest one from which halving still ends within `left` trials, this one included."""
    reach = 1 << max(left - 1, 0)
    least, most = max(high - reach, low + 1), min(low + reach, high - 1)
    return min(max(number, least), most) if least <= most else (low + high) // 2
