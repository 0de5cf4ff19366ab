"""How far a run gets along an axis before it does not fit: a bracket, then secants, on a grid of rounded values. Pure.

What is predicted is bytes needed at a value; nothing is assumed of its course but that what is too much stays so. Found
is a value that fits, with the next of the grid that does not. Not covered: the edge of every single length, which jumps
(runners/worker/largest_server.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

FINE = 32  # values of the grid between a power of two and the next: 3 % apart, at most
LEAST, MOST = 1.25, 4  # a step beyond all that is known is so many times that, or a part of it
Need = int | None  # bytes; None where nothing is known, which counts as too much
Predict = Callable[[Mapping[int, int]], Mapping[int, Need]]  # of some runs, by number, the need at a value


@dataclass
class Line:
    """What is known of a run along the axis: bytes needed, by value."""

    needs: dict[int, Need] = field(default_factory=dict)

    def largest(self, limit: int) -> int | None:
        """The largest value that is known to fit; None where none is."""
        return max((value for value, need in self.needs.items() if _fits(need, limit)), default=None)

    def ask(self, start: int, most: int, limit: int) -> int | None:
        """The value to predict next; None where the edge is known."""
        if not self.needs:
            return start
        below = self.largest(limit)
        above = min((value for value, need in self.needs.items() if not _fits(need, limit)), default=None)
        if below is not None and above is not None and below > above:
            above = min((v for v, need in self.needs.items() if v > below and not _fits(need, limit)), default=None)
        first = 1 if below is None else grid_next(below)
        last = most if above is None else back(above)
        if first > last:
            return None
        guess = self._secant(below, above, limit)
        if below is not None and above is not None:
            wanted = guess if guess is not None and len(self.needs) % 3 else (below + above) // 2
        elif below is not None:
            wanted = min(max(guess or 2 * below, round(below * LEAST)), below * MOST)
        else:
            wanted = max(min(guess or last // 2, round(last / LEAST)), last // MOST)
        return min(max(grid_floor(wanted), first), last)

    def _secant(self, below: int | None, above: int | None, limit: int) -> int | None:
        """Where the line through both ends, or the two nearest known values, meets the limit."""
        known = {value: need for value, need in self.needs.items() if need is not None}
        ends = [value for value in (below, above) if value in known]
        near = sorted(known, key=lambda value: (value not in ends, abs(known[value] - limit)))[:2]
        if len(near) < 2 or known[near[0]] == known[near[1]]:
            return None
        one, other = near
        return round(one + (limit - known[one]) * (other - one) / (known[other] - known[one]))


def find_reach(predict: Predict, lines: Sequence[Line], start: int, most: int, limit: int) -> list[int | None]:
    """The largest value, from 1 to `most`, at which each run fits in `limit` bytes; what it asks is added to `lines`.

    Of runs that are still open one value each is predicted at a time, all in one call.
    """
    while True:
        wanted = {number: line.ask(start, most, limit) for number, line in enumerate(lines)}
        asked = {number: value for number, value in wanted.items() if value is not None}
        if not asked:
            return [line.largest(limit) for line in lines]
        for number, need in predict(asked).items():
            lines[number].needs[asked[number]] = need


def grid_floor(value: int) -> int:
    """The value of the grid at or below."""
    step = _step(value)
    return max(1, value // step * step)


def grid_next(value: int) -> int:
    """The next value of the grid."""
    return (value // _step(value) + 1) * _step(value)


def back(value: int) -> int:
    """The value of the grid before; 0 before the first."""
    return 0 if value <= 1 else grid_floor(value - 1)


def _step(value: int) -> int:
    return max(1, (1 << max(0, value.bit_length() - 1)) // FINE)


def _fits(need: Need, limit: int) -> bool:
    return need is not None and need <= limit
