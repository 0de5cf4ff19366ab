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

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["fits", "full", "inferred", "beyond", "failed"]


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


def next_probe(
    values: Sequence[int], known: Mapping[int, Probe], predicted: int | None = None, margin: int = 1
) -> int | Edge:
    """The value to try next, or the edge.

    `values` go up; `known` is what came of those that were tried. `predicted` is the largest number that is predicted
    to fit, of the list or not (0: none fits), and `margin` the first stride beside it, in values of the list.
    """
    at = {value: number for number, value in enumerate(values)}
    came = {at[value]: one for value, one in known.items() if value in at}
    low = max((number for number, one in came.items() if one.kind == "fits"), default=-1)
    above = [number for number, one in came.items() if number > low and one.kind in ("full", "inferred", "beyond")]
    high = min(above, default=len(values))
    if high - low > 1:
        start = None if predicted is None else bisect_right(values, predicted) - 1
        bounded = low >= 0, high in came and came[high].kind != "beyond"
        tried = sum(one.kind != "beyond" for one in came.values())
        number = _within(_wish(low, high, bounded, start, margin), low, high, _count_left(len(values)) - tried)
        if number not in came:
            return values[number]
        unknown = came[number].reason or f"{values[number]} has no answer"
    else:
        unknown = None
    below = [number for number, one in came.items() if number < low and one.kind == "full"]
    return Edge(
        values[low] if low >= 0 else None,
        values[high] if high < len(values) else None,
        came.get(high),
        unknown,
        (values[min(below)], values[low]) if below else None,
    )


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
