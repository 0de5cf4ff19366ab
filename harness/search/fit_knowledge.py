"""Knowledge of what fits in memory, and what follows from it for other points. Pure.

Kernels pad lengths that `PADDED_TO` does not divide. So a length that it divides may need less than a shorter one that
it does not divide. Apart from that, more tokens of either axis never need less.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PADDED_TO = 8  # lengths that it divides need no padding
Numbers = Any  # a whole number, or a numpy array of them; the command line starts without numpy
Truth = Any  # a bool, or an array of them


def needs_no_less(length: Numbers, batch: Numbers, than_length: Numbers, than_batch: Numbers) -> Truth:
    """Return whether a point certainly needs no less memory than another one; elementwise for arrays."""
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
        """Return whether another point is sure to fit, or not to fit, just as this one; elementwise for arrays."""
        own = self.length, self.batch
        return needs_no_less(*own, length, batch) if self.fits else needs_no_less(length, batch, *own)


def decide(points: Iterable[TriedPoint], length: int, batch: int, without: str = "") -> TriedPoint | None:
    """Return the tried point that decides whether this one fits, the first of equals; None if none does.

    A point's own trial counts most, then one that fits. `without` leaves out the trial with this id.
    """
    deciding = (one for one in points if one.trial_id != without and one.decides(length, batch))
    return min(deciding, key=lambda one: ((one.length, one.batch) != (length, batch), not one.fits), default=None)


def decide_all(points: Iterable[TriedPoint], lengths: Numbers, batches: Numbers) -> list[bool | None]:
    """Return for each point of two arrays whether it fits, decided as in `decide`; None if nothing decides."""
    fits, order = lengths.astype(object), sorted(points, key=lambda one: one.fits)
    fits[:] = None
    for one in order:
        fits[one.decides(lengths, batches)] = one.fits
    for one in order:
        fits[(lengths == one.length) & (batches == one.batch)] = one.fits
    return list(fits)


@dataclass(frozen=True)
class Bracket:
    """The limit of what fits along one axis; a field is None if there is no such value.

    `below` is the last that fits below `smallest`, the first that does not fit. `above` is the first that does not fit
    above `largest`, the last that fits. If fitting is monotonic, both pairs are the same.
    """

    below: int | None
    smallest: int | None
    largest: int | None
    above: int | None

    @property
    def proven(self) -> int | None:
        """Largest value that fits; None if a smaller value, or another trial of it, did not fit."""
        return self.largest if self.largest == self.below else None

    @property
    def either_way(self) -> tuple[int, int] | None:
        """First value that does not fit and last that fits, if the latter is larger."""
        first, last = self.smallest, self.largest
        return None if first is None or last is None or last <= first else (first, last)


def find_bracket(fitting: Numbers, full: Numbers) -> Bracket:
    """Return the bracket of values that fit and values that do not, lists or arrays in ascending order."""
    below = bisect_left(fitting, full[0]) if len(full) else len(fitting)
    above = bisect_right(full, fitting[-1]) if len(fitting) else 0
    ends = (fitting[max(below - 1, 0) : below], full[:1], fitting[-1:], full[above : above + 1])
    return Bracket(*(int(end[0]) if len(end) else None for end in ends))
