"""Secant search for how far a run gets along an axis before it does not fit, on a grid of rounded values. Pure.

In: predicted bytes at a value. A bracket comes first, then secants. The only assumption is that once a value does not
fit, no larger value fits. Out: a value that fits, of which the next on the grid does not.
runners/worker/largest_server.py searches every single length, whose need jumps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vramsweep.harness.search.fit_knowledge import Bracket, find_bracket

FINE = 32  # values of the grid between a power of two and the next: 3 % apart, at most
LEAST, MOST = 1.25, 4  # a step outside all known values multiplies or divides by at least and at most this
Need = int | None  # bytes; None if not known, which counts as too much


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
