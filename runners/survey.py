"""Which of many points fit, for several settings and cards at once, without replaying each of them.

What fits is not monotone: reserved jumps from one length to the next, and some alignment classes take more. So points
are looked at from coarse to fine, and all of those near an edge: between two neighbours that fit (or do not) nothing
more is looked at only where both are further from the limit than the margin, twice the most that any point seen was off
a straight line between its neighbours, and 2 % at least. Each question (a setting and a card) has points and a margin
of its own: a point is looked at only for those that it may decide.

Pure: what one point needs is asked of `evaluate`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
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
Asked = Mapping[int, Collection[str]]  # questions by the number of a point
Evaluate = Callable[[Asked], Mapping[int, Verdicts]]  # unknown points are missing; what else comes for free may be told


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
    wanted: dict[int, set[str]] = {
        number: set(limits) for number in (range(points) if every else {*range(0, points, step), points - 1})
    }
    seen: dict[str, dict[int, Verdict]] = {name: {} for name in limits}
    asked: dict[str, set[int]] = {name: set() for name in limits}
    looks: set[int] = set()  # points that anything was asked of
    while wanted and (not looks or len(looks) < most):
        if looks:
            wanted = dict(list(wanted.items())[: most - len(looks)])
        looks |= wanted.keys()
        for number, names in wanted.items():
            for name in names:
                asked[name].add(number)
        for number, verdicts in evaluate(wanted).items():
            for name, verdict in verdicts.items():
                seen[name][number] = verdict
                asked[name].add(number)
        wanted = defaultdict(set)
        for name, limit in limits.items():
            for number in set(_undecided(seen[name], limit, _margin(seen[name]))) - asked[name]:
                wanted[number].add(name)
    undecided = {name for names in wanted.values() for name in names}
    return {name: _edge(seen[name], len(asked[name]), name not in undecided) for name in limits}


def _edge(seen: Mapping[int, Verdict], asked: int, whole: bool) -> Edge:
    order = sorted(seen)
    fits = [number for number in order if seen[number].fits]
    refused = next((number for number in order if not seen[number].fits), None)
    below = [number for number in fits if refused is None or number < refused]
    return Edge(
        below[-1] if below else None,
        fits[-1] if fits else None,
        len(order),
        asked - len(order),
        _margin(seen),
        whole and asked == len(order),
    )


def _margin(seen: Mapping[int, Verdict]) -> float:
    order, most = sorted(seen), 0.0
    for low, middle, high in zip(order, order[1:], order[2:], strict=False):
        three = [seen[n] for n in (low, middle, high)]
        if all(one.reserved for one in three):
            a, b, c = (one.need for one in three)
            straight = a + (c - a) * (middle - low) / (high - low)
            most = max(most, abs(b - straight) / b if b else 0.0)
    return max(2 * most, LEAST_MARGIN)


def _undecided(seen: Mapping[int, Verdict], limit: int, margin: float) -> list[int]:
    """The points in the middle between neighbours that do not settle what lies between them."""
    return [
        (low + high) // 2
        for low, high in pairwise(sorted(seen))
        if high - low > 1 and not _settled(seen[low], seen[high], limit, margin)
    ]


def _settled(low: Verdict, high: Verdict, limit: int, margin: float) -> bool:
    if low.fits != high.fits:
        return False
    nearest = max(low.need, high.need) if low.fits else min(low.need, high.need)
    return nearest <= limit * (1 - margin) if low.fits else nearest * (1 - margin) > limit
