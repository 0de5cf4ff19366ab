"""Which of many points fit, for several settings and cards at once, without replaying each of them.

What fits is not monotone: reserved jumps from one length to the next, and some alignment classes take more. But what a
run asks for at least (its floor) is known of every point of a symbolic trace, and no setting makes do with less, so
beyond a card's limit nothing fits. For each setting, the room that some points need is found by replays with room to
spare, also of some that need somewhat more than any card has: else the measures close to its edge would be of those
alone that fit. For each card, more and more points are then tried at its limit, until it is known which is the first
that does not fit, and which the last that does. Passed over on the way are those that fit by a margin: what such a
point needs is taken to be its floor, times what the nearest points on both sides whose need was found need per byte of
theirs; the margin is twice the most that any of these nearby needs more than both its neighbours, and 1 % at least.
Close to the limit not many in a row are passed over. The ends found so are looked at before they are believed, with all
of a stretch below the first that does not fit: one in 64 may need more, and no sample have been one of them. What fits
in some room is taken to fit in more, and what does not, not in less.

Where the floor is not known without tracing, it is taken to be that of the neighbours, and the margin is twice the most
that any point was off a straight line between its neighbours.

A point whose look is without an answer is not asked about again, nor judged.

Pure: what one point needs is for others to find out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vramsweep.harness.search.fit_knowledge import find_bracket

SAMPLES = 48  # points of the first look
FEW = 6  # in a row, all are looked at; of more, first the middle one closely: what needs more is rarely alone
MANY = 24  # undecided points that are looked at at a time, at least, where there are as many
REACH = 1.25  # of the largest limit: that far beyond it needs are found, as measures for what may fit
NEARBY = 8  # points on each side whose raggedness makes the margin
LEAST_MARGIN = 0.01
NARROW = 0.05  # of the limit: where points are judged to fit by less than this,
DENSE = 16  # no more than these in a row are judged
STRETCH = 64  # points right below the first that does not fit that are looked at, all of them
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RequiredBytes:
    """The room that a point needs, in bytes: not less than `least`, and not more than `enough` (infinite: not known).

    `floor` is what it asks for at one time, under any setting; `close`: `enough` was searched for.
    """

    floor: float
    least: float
    enough: float
    close: bool


Asked = Mapping[int, Mapping[str, Collection[int]]]  # by point and setting the rooms to try; none: find what it needs


@dataclass(frozen=True)
class Card:
    """A question: the edge under a setting, by its name, with a limit in bytes."""

    setting: str
    limit: int


@dataclass(frozen=True)
class Edge:
    """Of one question: up to which point (number) all fit, and the last that fits at all.

    None where the first does not fit, or none does. `looked_at` is how many points were under the setting, `unanswered`
    how many more were asked for in vain (both edges leave them out), `margin` the least by which others were judged
    (None: none was), `complete` whether both ends were reached: looks are bounded, and some points may be unknown. The
    edges are those of what is known, else.
    """

    all_up_to: int | None
    largest: int | None
    looked_at: int
    unanswered: int
    margin: float | None
    complete: bool


@dataclass(frozen=True)
class _Estimate:
    """Bytes that each point needs at least and at most, and the margins in these (NaN: it is known, not judged)."""

    least: Floats
    most: Floats
    least_margins: Floats
    most_margins: Floats


class _Setting:
    """What is known of each point under a setting: floors (NaN where not known), and the room needed, from and to."""

    def __init__(self, floors: Sequence[float | None]) -> None:
        self.floors = np.array([np.nan if floor is None else floor for floor in floors], dtype=np.float64)
        self.least = self.floors.copy()
        self.enough = np.full(len(floors), np.inf)
        self.looked, self.close, self.missed = np.zeros((3, len(floors)), dtype=np.bool_)

    def tell(self, number: int, need: RequiredBytes | None) -> None:
        """Take what evaluate tells of a point that it was asked about."""
        self.looked[number] |= need is not None
        self.missed[number] = need is None
        if need is not None:
            self.floors[number] = need.floor
            self.least[number] = np.fmax(self.least[number], need.least)
            self.enough[number] = min(self.enough[number], need.enough)
            self.close[number] |= need.close and math.isfinite(need.enough)

    def judged(self, every: bool) -> _Estimate:
        """What each point needs, judged by its neighbours where that is not known; with `every`, nothing is judged."""
        nothing = np.full(len(self.least), np.nan)
        if every:
            return _Estimate(np.where(np.isnan(self.least), 0, self.least), self.enough, nothing, nothing)
        margins, most, unknown = self._margins(), self._most(), np.isnan(self.least)
        disproved = self.least > most
        most = np.where(disproved | self.missed, np.inf, most * (1 + margins))
        return _Estimate(
            np.where(unknown, self._lowest(), self.least),
            np.minimum(self.enough, most),
            np.where(unknown, max(LEAST_MARGIN, self._bend_of_floors()), np.nan),
            np.where(most < self.enough, margins, np.nan),
        )

    def first(self, limit: float) -> list[int]:
        """The points to look at first, of those that may need no more than the limit, or not much more."""
        points = len(self.floors)
        step = max(1, points // SAMPLES) | 1  # odd: so all alignments have their turn
        chosen = sorted({*range(0, points, step), points - 1})
        return [number for number in chosen if not self.floors[number] > REACH * limit]

    def _lowest(self) -> Floats:
        """What both neighbours ask for, less a margin, or nothing: where the floor is not known."""
        order = np.flatnonzero(~np.isnan(self.floors))
        low, high = _sides(order, self.floors[order], len(self.floors))
        lowest = np.minimum(low, high) * (1 - max(LEAST_MARGIN, self._bend_of_floors()))
        return np.where(np.isnan(lowest), 0, lowest)

    def _bend_of_floors(self) -> float:
        order = np.flatnonzero(~np.isnan(self.floors))
        return _curvature(order, self.floors[order])

    def _most(self) -> Floats:
        """What each point needs, judged by the nearest on both sides; infinite where one of these is not known."""
        order = np.flatnonzero(self.close)
        enough = self.enough[order]
        ratio = np.maximum(*_sides(order, enough / np.maximum(self.floors[order], 1), len(self.floors)))
        highest = np.maximum(*_sides(order, enough, len(self.floors)))
        most = np.where(np.isnan(self.floors), highest, self.floors * ratio)
        return np.where(np.isnan(most), np.inf, most)

    def _margins(self) -> Floats:
        """The share by which each point may need more than judged."""
        order = np.flatnonzero(self.close)
        enough, points = self.enough[order], len(self.floors)
        bend = _curvature(order, enough) if np.isnan(self.floors).any() else 0.0
        if len(order) < 3:
            return np.full(points, max(LEAST_MARGIN, bend))
        ratios = enough / np.maximum(self.floors[order], 1)
        above = np.maximum(ratios[1:-1] / np.maximum(ratios[:-2], ratios[2:]) - 1, 0)
        padded = np.pad(above, NEARBY + 1)  # the first and the last have one neighbour
        nearby: Floats = np.lib.stride_tricks.sliding_window_view(padded, 2 * NEARBY + 1).max(axis=1)
        margins: Floats = np.fmax(2 * np.fmax(*_sides(order, nearby, points)), max(LEAST_MARGIN, bend))
        return margins


@dataclass
class Survey:
    """The search for the edge of each question, by name. `floors` are those of each setting, in bytes: of each point
    what it asks for at least, None where that is not known, infinite where it cannot fit.

    With `every`, nothing is judged. `most` looks, at a point under a setting, are the last; each counts it down.
    """

    floors: Mapping[str, Sequence[float | None]]
    cards: Mapping[str, Card]
    every: bool = False
    most: float = math.inf

    def __post_init__(self) -> None:
        self._settings = {name: _Setting(row) for name, row in self.floors.items()}
        self._wanted: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for name, setting in self._settings.items():
            for number in setting.first(max(card.limit for card in self.cards.values() if card.setting == name)):
                self._wanted[number][name] = set()
        if not self._wanted:
            self.tell({})

    def ask(self) -> Asked:
        """Return the points to look at next, and for each setting the rooms to try; none once the edges are known."""
        return self._wanted

    def tell(self, answers: Mapping[int, Mapping[str, RequiredBytes]]) -> None:
        """Learn what the points need that were asked for; what is missing has no answer."""
        asked, settings = self._wanted, self._settings
        self._wanted, closely = defaultdict(lambda: defaultdict(set)), set()
        self.most -= sum(map(len, asked.values()))
        for number, rooms in asked.items():
            for name in rooms:
                settings[name].tell(number, answers.get(number, {}).get(name))
        judged = {name: (setting, setting.judged(self.every)) for name, setting in settings.items()}
        self._views = {name: _View(*judged[card.setting], card.limit) for name, card in self.cards.items()}
        for name, card in self.cards.items() if self.most > 0 else ():
            for number, close in self._views[name].wanted(self.every):
                self._wanted[number][card.setting].add(card.limit)
                if close:
                    closely.add((number, card.setting))
        for number, setting_name in closely:
            self._wanted[number][setting_name].clear()

    def found(self) -> dict[str, Edge]:
        """Return the edge of each question, by name; to be asked for once the survey was told something."""
        return {name: view.edge(self.every) for name, view in self._views.items()}


class _View:
    """A setting as one card sees it: what fits and what does not, as far as that is known."""

    def __init__(self, setting: _Setting, judged: _Estimate, limit: int) -> None:
        self._setting, self._judged = setting, judged
        self.beyond = judged.least > limit
        self.within = (judged.most <= limit) & ~self.beyond
        ends = find_bracket(np.flatnonzero(self.within), np.flatnonzero(self.beyond))
        self.first = len(self.within) if ends.smallest is None else ends.smallest
        self.last = -1 if ends.largest is None else ends.largest
        self._missed = setting.missed & ~(self.within | self.beyond)
        self._undecided = ~(self.within | self.beyond | self._missed)
        self._supposed = self.within & (setting.enough > limit)
        self._narrowly = self.within & (judged.most * (1 + NARROW) > limit) & ~np.isnan(judged.most_margins)

    def wanted(self, every: bool) -> list[tuple[int, bool]]:
        """The points to look at next, and whether to find closely what they need: those that may move an end; where
        there are none, those at the ends that are judged, not known, to fit."""
        return list(self._open(every)) or list(self._supposed_at_the_ends())

    def _supposed_at_the_ends(self) -> Iterator[tuple[int, bool]]:
        """The last that fits, and the stretch below the first that does not, or below the end what fits narrowly."""
        if self.last >= 0 and self._supposed[self.last]:
            yield self.last, True
        start, points = max(0, self.first - STRETCH), len(self.within)
        supposed = self._supposed if self.first < points else self._supposed & self._narrowly
        yield from ((start + int(number), False) for number in np.flatnonzero(supposed[start : self.first]))

    def _open(self, every: bool) -> Iterator[tuple[int, bool]]:
        below = np.flatnonzero(self._undecided[: self.first])
        above = np.flatnonzero(self._undecided[self.last + 1 :]) + self.last + 1
        yield from ((number, False) for number in _spread(above))
        if every:
            yield from ((number, False) for number in _spread(below))
            return
        for run in self._runs(below):
            alone = len(run) <= FEW
            yield from ((int(number), not alone) for number in (run if alone else run[[len(run) // 2]]))
        for run in self._runs(np.flatnonzero(self._narrowly[: self.first])):
            if len(run) > DENSE:
                yield int(run[len(run) // 2]), True

    def _runs(self, numbers: Ints) -> Iterator[Ints]:
        """The points, divided by those whose need is known closely."""
        before = np.searchsorted(np.flatnonzero(self._setting.close), numbers)
        yield from (numbers[before == one] for one in np.unique(before))

    def edge(self, every: bool) -> Edge:
        """What is known of it, complete where nothing is wanted any more."""
        ends = find_bracket(np.flatnonzero(self.within), np.flatnonzero(~(self.within | self._missed)))
        judged = self._judged
        margins = np.concatenate((judged.most_margins[self.within], judged.least_margins[self.beyond]))
        margin = None if np.isnan(margins).all() else float(np.nanmin(margins))
        looked, missed = int(self._setting.looked.sum()), int(self._missed.sum())
        return Edge(ends.below, ends.largest, looked, missed, margin, not missed and not self.wanted(every))


def _spread(numbers: Ints) -> list[int]:
    """Some of the numbers, evenly; all, where they are few."""
    count = max(MANY, len(numbers) // 8)
    chosen = numbers if len(numbers) <= count else numbers[np.linspace(0, len(numbers) - 1, count).round().astype(int)]
    return [int(n) for n in chosen]


def _sides(order: Ints, values: Floats, points: int) -> tuple[Floats, Floats]:
    """For each point, the values of the nearest in `order` at or before it and at or after it; NaN where none is."""
    padded = np.concatenate(([np.nan], values, [np.nan]))
    numbers = np.arange(points)
    return padded[np.searchsorted(order, numbers, side="right")], padded[np.searchsorted(order, numbers) + 1]


def _curvature(order: Ints, values: Floats) -> float:
    """Twice the most that any of the values is off a straight line between its neighbours, as a share of it."""
    kept = np.isfinite(values)
    order, values = order[kept], values[kept]
    straight = values[:-2] + (values[2:] - values[:-2]) * (order[1:-1] - order[:-2]) / (order[2:] - order[:-2])
    return 2 * float((np.abs(values[1:-1] - straight) / np.maximum(values[1:-1], 1)).max(initial=0))
