"""Which of many points fit, for several settings and cards at once, without replaying each of them.

What fits is not monotone: reserved jumps from one length to the next, and some alignment classes take more. So points
are looked at from coarse to fine, and all of those near an edge: between two neighbours that fit (or do not) nothing
more is looked at only where both are further from the limit than the margin, twice the most that any point seen was off
a straight line between its neighbours, and 2 % at least.

Pure: what one point needs is asked of `evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

SAMPLES = 48  # points of the first look
LEAST_MARGIN = 0.02


@dataclass(frozen=True)
class Verdict:
    """Whether a point fits, and bytes to compare with the limit: reserved without one or, where it is not `reserved`,
    what is asked for at least."""

    fits: bool
    need: int
    reserved: bool


Verdicts = Mapping[str, Verdict]  # of one point, by the name of a question: a setting and a card
Evaluate = Callable[[Sequence[int]], Mapping[int, Verdicts]]  # of these points, by number; unknown ones are missing


@dataclass(frozen=True)
class Edge:
    """Of one question: up to which point (number) every one that was looked at fits, and the last that fits at all.

    None where the first does not fit, or none does. `looked_at` is how many points were, `unanswered` how many more
    were asked for in vain (both edges leave them out), `margin` the share of the limit within which all were,
    `complete` whether that is true: looks are bounded, and some points may be unknown.
    """

    all_up_to: int | None
    largest: int | None
    looked_at: int
    unanswered: int
    margin: float
    complete: bool


def survey(points: int, limits: Mapping[str, int], evaluate: Evaluate, every: bool, most: int) -> dict[str, Edge]:
    """The edge of each question, by name; `limits` are in bytes. Without `every`, about `most` points are looked at."""
    step = max(1, points // SAMPLES) | 1  # odd: so all alignments have their turn
    first = range(points) if every else sorted({*range(0, points, step), points - 1})
    seen: dict[int, Verdicts] = dict(evaluate(list(first)))
    asked = set(first)
    while True:
        margins = {name: _margin(name, seen) for name in limits}
        more = [n for n in _undecided(sorted(seen), seen, limits, margins) if n not in asked]
        if not more or len(asked) >= most:
            break
        more = more[: max(1, most - len(asked))]
        asked.update(more)
        seen |= evaluate(more)
    whole = every or not more
    return {name: _edge(name, sorted(seen), seen, len(asked), margins[name], whole) for name in limits}


def _edge(
    name: str, order: Sequence[int], seen: Mapping[int, Verdicts], asked: int, margin: float, whole: bool
) -> Edge:
    fits = [number for number in order if seen[number][name].fits]
    refused = next((number for number in order if not seen[number][name].fits), None)
    below = [number for number in fits if refused is None or number < refused]
    return Edge(
        below[-1] if below else None,
        fits[-1] if fits else None,
        len(order),
        asked - len(order),
        margin,
        whole and asked == len(order),
    )


def _margin(name: str, seen: Mapping[int, Verdicts]) -> float:
    order, most = sorted(seen), 0.0
    for low, middle, high in zip(order, order[1:], order[2:], strict=False):
        three = [seen[n][name] for n in (low, middle, high)]
        if all(one.reserved for one in three):
            a, b, c = (one.need for one in three)
            straight = a + (c - a) * (middle - low) / (high - low)
            most = max(most, abs(b - straight) / b if b else 0.0)
    return max(2 * most, LEAST_MARGIN)


def _undecided(
    order: Sequence[int], seen: Mapping[int, Verdicts], limits: Mapping[str, int], margins: Mapping[str, float]
) -> list[int]:
    """The points in the middle between neighbours that do not settle what lies between them."""
    found = []
    for low, high in pairwise(order):
        if high - low > 1 and not all(
            _settled(seen[low][name], seen[high][name], limit, margins[name]) for name, limit in limits.items()
        ):
            found.append((low + high) // 2)
    return found


def _settled(low: Verdict, high: Verdict, limit: int, margin: float) -> bool:
    if low.fits != high.fits:
        return False
    nearest = max(low.need, high.need) if low.fits else min(low.need, high.need)
    return nearest <= limit * (1 - margin) if low.fits else nearest * (1 - margin) > limit
