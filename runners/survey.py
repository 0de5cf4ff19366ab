"""Which of many points fit, for several settings and cards at once, without replaying each of them.

What fits is not monotone: reserved jumps from one length to the next, and some alignment classes take more. But what a
run asks for at least (its floor) is known of every point of a symbolic trace, and no setting makes do with less, so
beyond a card's limit nothing is looked at. For each setting, the room that some points need is found by replays in less
and less room. For each card, points are then looked at from the last one down until one fits, and from the first one up
until one does not. Passed over on the way up are those that fit by a margin: what such a point needs is taken to be its
floor, times what the nearest points on both sides that were looked at need per byte of theirs; the margin is twice the
most that any point nearby needs more than both its neighbours, and 1 % at least. What fits in some room is taken to fit
in more, and what does not, not in less.

Where the floor is not known without tracing, it is taken to be that of the neighbours, and the margin is twice the most
that any point was off a straight line between its neighbours.

Pure: what one point needs is asked of `evaluate`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SAMPLES = 48  # points of the first look
FEW = 12  # points that are looked at one by one
NEARBY = 8  # points on each side whose raggedness makes the margin
LEAST_MARGIN = 0.01
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Need:
    """The room that a point needs, in bytes: not less than `least`, and not more than `enough` (infinite: not known).

    `floor` is what it asks for at one time, under any setting; `close`: `enough` is not just a room that was tried.
    """

    floor: float
    least: float
    enough: float
    close: bool


Asked = Mapping[int, Mapping[str, Collection[int]]]  # by point and setting the rooms to try; none: find what it needs
Evaluate = Callable[[Asked], Mapping[int, Mapping[str, Need]]]  # unknown points are missing


@dataclass(frozen=True)
class Card:
    """A question: the edge under a setting, by its name, with a limit in bytes."""

    setting: str
    limit: int


@dataclass(frozen=True)
class Edge:
    """Of one question: up to which point (number) all fit, and the last that fits at all.

    None where the first does not fit, or none does. `looked_at` is how many points were, `unanswered` how many more
    were asked for in vain (both edges leave them out), `margin` the least by which others fit that were passed over
    (None: none was), `complete` whether both ends were reached: looks are bounded, and some points may be unknown.
    """

    all_up_to: int | None
    largest: int | None
    looked_at: int
    unanswered: int
    margin: float | None
    complete: bool


class _Setting:
    """What is known of each point under a setting: floors (NaN where not known), and the room needed, from and to."""

    def __init__(self, floors: Sequence[float | None]) -> None:
        self.floors = np.array([np.nan if floor is None else floor for floor in floors], dtype=np.float64)
        self.least = self.floors.copy()
        self.enough = np.full(len(floors), np.inf)
        self.looked, self.close, self.missed = np.zeros((3, len(floors)), dtype=np.bool_)

    def told(self, number: int, need: Need | None) -> None:
        """Take what evaluate tells of a point that it was asked about."""
        self.looked[number], self.missed[number] = need is not None, need is None
        if need is not None:
            self.floors[number] = need.floor
            self.least[number] = np.fmax(self.least[number], need.least)
            self.enough[number] = min(self.enough[number], need.enough)
            self.close[number] |= need.close and math.isfinite(need.enough)

    def judged(self) -> tuple[Floats, Floats, Floats]:
        """What each point needs at least and at most, judged by its neighbours where that is not known; the margins."""
        margins = self._margins()
        most = np.minimum(self.enough, self._most() * (1 + margins))
        return np.where(np.isnan(self.least), self._lowest(), self.least), most, margins

    def first(self, limit: float) -> list[int]:
        """The points to look at first, of those that may fit into the limit."""
        points = len(self.floors)
        step = max(1, points // SAMPLES) | 1  # odd: so all alignments have their turn
        return [number for number in sorted({*range(0, points, step), points - 1}) if not self.floors[number] > limit]

    def _lowest(self) -> Floats:
        """What both neighbours ask for, less a margin, or nothing: where the floor is not known."""
        order = np.flatnonzero(~np.isnan(self.floors))
        low, high = _sides(order, self.floors[order], len(self.floors))
        return np.nan_to_num(np.minimum(low, high) * (1 - max(LEAST_MARGIN, _bend(order, self.floors[order]))))

    def _most(self) -> Floats:
        """What each point needs, judged by the nearest on both sides; infinite where one of these is not known."""
        order = np.flatnonzero(self.close)
        enough = self.enough[order]
        ratio = np.maximum(*_sides(order, enough / np.maximum(self.floors[order], 1), len(self.floors)))
        highest = np.maximum(*_sides(order, enough, len(self.floors)))
        return np.nan_to_num(np.where(np.isnan(self.floors), highest, self.floors * ratio), nan=np.inf)

    def _margins(self) -> Floats:
        """The share by which each point may need more than judged."""
        order = np.flatnonzero(self.close)
        enough, points = self.enough[order], len(self.floors)
        bend = _bend(order, enough) if np.isnan(self.floors).any() else 0.0
        if len(order) < 3:
            return np.full(points, max(LEAST_MARGIN, bend))
        ratios = enough / np.maximum(self.floors[order], 1)
        above = np.maximum(ratios[1:-1] / np.maximum(ratios[:-2], ratios[2:]) - 1, 0)
        padded = np.pad(above, NEARBY + 1)  # the first and the last have one neighbour
        nearby: Floats = np.lib.stride_tricks.sliding_window_view(padded, 2 * NEARBY + 1).max(axis=1)
        margins: Floats = np.fmax(2 * np.fmax(*_sides(order, nearby, points)), max(LEAST_MARGIN, bend))
        return margins


def survey(
    floors: Mapping[str, Sequence[float | None]],
    cards: Mapping[str, Card],
    evaluate: Evaluate,
    every: bool = False,
    most: float = math.inf,
) -> dict[str, Edge]:
    """The edge of each question, by name. `floors` are those of each setting, in bytes: of each point what it asks for
    at least, None where that is not known, infinite where it cannot fit.

    With `every`, no point is passed over. About `most` looks are taken, at a point under a setting.
    """
    settings = {name: _Setting(row) for name, row in floors.items()}
    asked: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name, setting in settings.items():
        for number in setting.first(max(card.limit for card in cards.values() if card.setting == name)):
            asked[number][name] = set()
    looks, undecided = 0, set[str]()
    while asked and looks < most:
        looks += sum(map(len, asked.values()))
        answers = evaluate(asked)
        for number, rooms in asked.items():
            for name in rooms:
                settings[name].told(number, answers.get(number, {}).get(name))
        asked, undecided = defaultdict(lambda: defaultdict(set)), set()
        judged = {name: setting.judged() for name, setting in settings.items()}
        for question, card in cards.items():
            for number, closely in _wanted(settings[card.setting], card.limit, *judged[card.setting][:2], every):
                undecided.add(question)
                asked[number][card.setting] |= set() if closely else {card.limit}
    return {name: _edge(settings[card.setting], card.limit, every, name in undecided) for name, card in cards.items()}


def _wanted(setting: _Setting, limit: int, least: Floats, most: Floats, every: bool) -> Iterator[tuple[int, bool]]:
    """The points to look at next, some of those that may move an end, and whether to find closely what they need."""
    within, beyond = _verdicts(setting, limit, least, most, every)
    undecided = ~(within | beyond | setting.missed)
    first, last = _ends(within, beyond)
    below, above = np.flatnonzero(undecided[:first]), np.flatnonzero(undecided[last + 1 :]) + last + 1
    yield from ((number, False) for number in _spread(above))
    if every:
        yield from ((number, False) for number in _spread(below))
        return
    before = np.searchsorted(np.flatnonzero(setting.close), below)
    for run in (below[before == one] for one in np.unique(before)):
        alone = len(run) <= FEW
        yield from ((int(number), not alone) for number in (run if alone else run[[len(run) // 2]]))


def _edge(setting: _Setting, limit: int, every: bool, bounded: bool) -> Edge:
    least, most, margins = setting.judged()
    within, beyond = _verdicts(setting, limit, least, most, every)
    first, last = _ends(within, beyond)
    below = np.flatnonzero(within[:first])
    passed = within & ~(setting.enough <= limit)
    return Edge(
        int(below[-1]) if len(below) else None,
        last if last >= 0 else None,
        int(setting.looked.sum()),
        int(setting.missed.sum()),
        float(margins[passed].min()) if passed.any() else None,
        not bounded and not setting.missed.any(),
    )


def _verdicts(setting: _Setting, limit: int, least: Floats, most: Floats, every: bool) -> tuple[Bools, Bools]:
    """Of each point whether it fits, and whether it does not, as far as that is known."""
    beyond = least > limit
    return ((setting.enough if every else most) <= limit) & ~beyond, beyond


def _ends(within: Bools, beyond: Bools) -> tuple[int, int]:
    """The first that is known not to fit (or how many there are), and the last that is known to (or -1)."""
    no, yes = np.flatnonzero(beyond), np.flatnonzero(within)
    return int(no[0]) if len(no) else len(within), int(yes[-1]) if len(yes) else -1


def _spread(numbers: Ints) -> list[int]:
    """Some of the numbers, evenly; all, where they are few."""
    count = max(FEW, len(numbers) // 8)
    chosen = numbers if len(numbers) <= count else numbers[np.linspace(0, len(numbers) - 1, count).round().astype(int)]
    return [int(n) for n in chosen]


def _sides(order: Ints, values: Floats, points: int) -> tuple[Floats, Floats]:
    """For each point, the values of the nearest in `order` at or before it and at or after it; NaN where none is."""
    padded = np.concatenate(([np.nan], values, [np.nan]))
    numbers = np.arange(points)
    return padded[np.searchsorted(order, numbers, side="right")], padded[np.searchsorted(order, numbers) + 1]


def _bend(order: Ints, values: Floats) -> float:
    """Twice the most that any of the values is off a straight line between its neighbours, as a share of it."""
    kept = np.isfinite(values)
    order, values = order[kept], values[kept]
    straight = values[:-2] + (values[2:] - values[:-2]) * (order[1:-1] - order[:-2]) / (order[2:] - order[:-2])
    return 2 * float((np.abs(values[1:-1] - straight) / np.maximum(values[1:-1], 1)).max(initial=0))
