"""What is known of what fits in memory, and what follows from it for other points. Pure.

Kernels pad lengths that `PADDED_TO` does not divide, so a length that it divides may need less than a shorter one that
it does not divide. Apart from that, more tokens of either axis never make do with less.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PADDED_TO = 8  # lengths that it divides need no padding
Numbers = Any  # a whole number, or an array of them; of numpy, without which the command line starts
Truth = Any  # a bool, or an array of them


def needs_no_less(length: Numbers, batch: Numbers, than_length: Numbers, than_batch: Numbers) -> Truth:
    """Whether a point certainly needs no less memory than another one; of arrays, for each of them."""
    padded_alike = (than_length % PADDED_TO == 0) | (length % PADDED_TO != 0)
    return (batch >= than_batch) & ((length == than_length) | ((length > than_length) & padded_alike))


@dataclass(frozen=True)
class TriedPoint:
    """A point that was tried: whether it fits, and the trial that showed it."""

    length: int
    batch: int
    fits: bool
    trial_id: str = ""

    def decides(self, length: Numbers, batch: Numbers) -> Truth:
        """Whether another point fits as this one does, or does not as this one does not; of arrays, for each."""
        own = self.length, self.batch
        return needs_no_less(*own, length, batch) if self.fits else needs_no_less(length, batch, *own)


class FitKnowledge:
    """Points that were tried, to be asked about others: a point's own trial counts most, then one that fits."""

    def __init__(self, points: Iterable[TriedPoint] = ()) -> None:
        self.points = list(points)

    def decide(self, length: int, batch: int, without: str = "") -> TriedPoint | None:
        """Return the tried point that decides whether this one fits, the first of equals; None where none does.

        `without` leaves out the trial with this id.
        """
        deciding = (one for one in self.points if one.trial_id != without and one.decides(length, batch))
        return min(deciding, key=lambda one: ((one.length, one.batch) != (length, batch), not one.fits), default=None)

    def decide_all(self, lengths: Numbers, batches: Numbers) -> list[bool | None]:
        """Return for each point of two arrays whether it fits, by the same order; None where nothing decides it."""
        fits, order = lengths.astype(object), sorted(self.points, key=lambda one: one.fits)
        fits[:] = None
        for one in order:
            fits[one.decides(lengths, batches)] = one.fits
        for one in order:
            fits[(lengths == one.length) & (batches == one.batch)] = one.fits
        return list(fits)


@dataclass(frozen=True)
class Bracket:
    """Where what fits ends along one axis; None where there is no such value.

    `below` is the last that fits below `smallest`, the first that does not; `above` is the first that does not fit
    above `largest`, the last that does. Where fitting is monotonic, both pairs are the same.
    """

    below: int | None
    smallest: int | None
    largest: int | None
    above: int | None

    @property
    def proven(self) -> int | None:
        """The largest value that fits, where nothing smaller, nor a trial of the same, does not."""
        return self.largest if self.largest == self.below else None

    @property
    def either_way(self) -> tuple[int, int] | None:
        """The first value that does not fit and the last that does, where that one is larger."""
        first, last = self.smallest, self.largest
        return None if first is None or last is None or last <= first else (first, last)


def find_bracket(fitting: Numbers, full: Numbers) -> Bracket:
    """Return the bracket of values that fit and values that do not, lists or arrays in ascending order."""
    below = bisect_left(fitting, full[0]) if len(full) else len(fitting)
    above = bisect_right(full, fitting[-1]) if len(fitting) else 0
    ends = (fitting[max(below - 1, 0) : below], full[:1], fitting[-1:], full[above : above + 1])
    return Bracket(*(int(end[0]) if len(end) else None for end in ends))
