"""Searches for the largest value along an axis that fits: their interface and loop, bisection, secants. Pure.

Bisection searches a list of values by trials. It starts at the predicted value and goes outward in doubling strides,
until one value fits and one does not. Then it halves the interval. Strides are limited so that halving can still end
within this number of trials:

    prediction                              trials at most, of n values
    right                                   2, with a margin of 1
    one or two values off                   4, with a margin of 1
    none                                    floor(log2 n) + 1
    wrong                                   ceil(log2 n) + 3

Fitting is not always monotonic (fragmentation, alignment). A bisection then ends at one of several limits, and says
between which values trials contradict it. Its caller runs the trials of the values that it names.

Secants search a grid of rounded values by predicted bytes. A bracket comes first, then secants. The only assumption is
that once a value does not fit, no larger value fits. runners/worker/largest_server.py searches every single length,
whose need jumps.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from vramsweep.harness.search.fit_knowledge import Bracket, find_bracket

Kind = Literal["fits", "full", "inferred", "beyond", "failed"]
FULL: tuple[Kind, ...] = ("full", "inferred", "beyond")  # what does not fit
FINE = 32  # values of the grid between a power of two and the next: 3 % apart, at most
LEAST, MOST = 1.25, 4  # a step outside all known values multiplies or divides by at least and at most this
Need = int | None  # bytes; None if not known, which counts as too much

Question = TypeVar("Question", bound=Collection[int], covariant=True)
Answer = TypeVar("Answer", contravariant=True)
Result = TypeVar("Result", covariant=True)


class Strategy(Protocol[Question, Answer, Result]):
    """A search that asks for points to try next, and learns their results.

    Points are whole numbers: values along an axis, or positions in a list.
    """

    def ask(self) -> Question:
        """Return the points to try next; none once the search is over."""

    def tell(self, answers: Mapping[int, Answer]) -> None:
        """Learn the results of the points that were asked for; a missing point has no answer."""

    def found(self) -> Result:
        """Return what the search has found so far."""


def drive(
    strategies: Sequence[Strategy[Question, Answer, Any]],
    evaluate: Callable[[Mapping[int, Question]], Mapping[int, Mapping[int, Answer]]],
    after_round: Callable[[], object] = lambda: None,
) -> bool:
    """Ask all open searches, evaluate all their points in one call, tell each, until none asks for more.

    `evaluate` takes and returns points by the search's number. If it returns nothing at all, nothing more can be tried.
    Then the searches are told so, and it is the last round. Returns whether all searches are over.
    """
    while asked := {number: points for number, one in enumerate(strategies) if (points := one.ask())}:
        answers = evaluate(asked)
        for number in asked:
            strategies[number].tell(answers.get(number, {}))
        after_round()
        if not answers:
            return False
    return True


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


@dataclass
class SecantSearch:
    """The search for the largest value, from 1 to `most`, at which a run fits in `limit` bytes; `needs` by value."""

    start: int
    most: int
    limit: int
    needs: dict[int, Need] = field(default_factory=dict)

    def ask(self) -> list[int]:
        """Return the value to predict next; none once the largest is known."""
        if not self.needs:
            return [self.start]
        bracket = self._bracket()
        below, above = bracket.largest, bracket.above
        first = 1 if below is None else grid_next(below)
        last = self.most if above is None else back(above)
        if first > last:
            return []
        guess = self._secant(below, above)
        if below is not None and above is not None:
            wanted = guess if guess is not None and len(self.needs) % 3 else (below + above) // 2
        elif below is not None:
            wanted = min(max(guess or 2 * below, round(below * LEAST)), below * MOST)
        else:
            wanted = max(min(guess or last // 2, round(last / LEAST)), last // MOST)
        return [min(max(grid_floor(wanted), first), last)]

    def tell(self, answers: Mapping[int, Need]) -> None:
        """Learn the bytes needed at values."""
        self.needs.update(answers)

    def found(self) -> int | None:
        """Return the largest value that is known to fit; None if there is none."""
        return self._bracket().largest

    def _bracket(self) -> Bracket:
        values = sorted(self.needs)
        fitting = [value for value in values if (need := self.needs[value]) is not None and need <= self.limit]
        return find_bracket(fitting, [value for value in values if value not in fitting])

    def _secant(self, below: int | None, above: int | None) -> int | None:
        """Return where the line through both ends, or the two nearest known values, meets the limit."""
        known = {value: need for value, need in self.needs.items() if need is not None}
        ends = [value for value in (below, above) if value in known]
        near = sorted(known, key=lambda value: (value not in ends, abs(known[value] - self.limit)))[:2]
        if len(near) < 2 or known[near[0]] == known[near[1]]:
            return None
        one, other = near
        return round(one + (self.limit - known[one]) * (other - one) / (known[other] - known[one]))


def grid_floor(value: int) -> int:
    """Return the value of the grid at or below."""
    step = _step(value)
    return max(1, value // step * step)


def grid_next(value: int) -> int:
    """Return the next value of the grid."""
    return (value // _step(value) + 1) * _step(value)


def back(value: int) -> int:
    """Return the value of the grid before; 0 before the first."""
    return 0 if value <= 1 else grid_floor(value - 1)


def _step(value: int) -> int:
    return max(1, (1 << max(0, value.bit_length() - 1)) // FINE)
