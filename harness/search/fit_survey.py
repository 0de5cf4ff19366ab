"""Survey: the search for which of many points fit, for several settings and GPUs at once, with few replays. Pure.

Fitting is not monotonic: reserved jumps from one length to the next, and some alignment classes take more. But a
symbolic trace gives each point's floor, what a run requests at least. No setting needs less, so a point whose floor
exceeds a GPU's limit does not fit.

- For each setting, replays with memory to spare find what some points need. Some of these need somewhat more than any
  GPU has. Else all measures near its limit would come from points that fit.
- For each GPU, more and more points are tried at its limit, until the first that does not fit and the last that fits
  are known.
- Points that fit by a margin are skipped. Such a point's need is estimated as its floor, times the larger need / floor
  of the nearest measured points on both sides. The margin is twice the most that any of these nearby needs more than
  both its neighbours, and at least 1 %. Close to the limit not many in a row are skipped.
- The ends are tried before they are believed, with a whole stretch below the first that does not fit. One point in 64
  may need more and be in no sample.

What fits in some limit is taken to fit in a larger one, and what does not fit, not to fit in a smaller one. A floor
that is not known without tracing is taken from the neighbours. Then the margin is twice the most that any point was off
a straight line between its neighbours. A point without an answer is neither tried again nor estimated.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vramsweep.harness.search.fit_knowledge import find_bracket

SAMPLES = 48  # points of the first round
FEW = 6  # in a row, all are tried; of more, first the middle one closely, because what needs more is rarely alone
MANY = 24  # undecided points that are tried at a time, at least, if there are as many
REACH = 1.25  # of the largest limit: up to here needs are found, as measures for what may fit
NEARBY = 8  # points on each side whose scatter makes the margin
LEAST_MARGIN = 0.01
NARROW = 0.05  # of the limit: of points estimated to fit by less than this,
DENSE = 16  # no more than these in a row are estimated
STRETCH = 64  # points right below the first that does not fit, all of which are tried
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RequiredBytes:
    """The memory that a point needs, in bytes: at least `least`, and at most `enough` (infinite: not known).

    `floor` is what it requests at one time, under any setting; `close`: `enough` was searched for.
    """

    floor: float
    least: float
    enough: float
    close: bool


Asked = Mapping[int, Mapping[str, Collection[int]]]  # by point and setting, limits to try; none: find what it needs


@dataclass(frozen=True)
class Card:
    """A question: what fits under a setting, given by its name, with a limit in bytes."""

    setting: str
    limit: int


@dataclass(frozen=True)
class Edge:
    """The answer to one question: up to which point (number) all fit, and the last that fits at all.

    Each is None if there is no such point. `looked_at` is how many points were tried under the setting. `unanswered` is
    how many more had no answer; both ends leave them out. `margin` is the least margin of an estimate (None: no
    estimate). `complete`: both ends were reached. Tries are bounded, so else the ends are those of what is known.
    """

    all_up_to: int | None
    largest: int | None
    looked_at: int
    unanswered: int
    margin: float | None
    complete: bool


@dataclass(frozen=True)
class _Estimate:
    """Bytes that each point needs at least and at most, and the margins in these (NaN: it is known, not estimated)."""

    least: Floats
    most: Floats
    least_margins: Floats
    most_margins: Floats


class _Setting:
    """Knowledge of each point under a setting: floors (NaN: not known), and the bytes needed, at least and at most."""

    def __init__(self, floors: Sequence[float | None]) -> None:
        self.floors = np.array([np.nan if floor is None else floor for floor in floors], dtype=np.float64)
        self.least = self.floors.copy()
        self.enough = np.full(len(floors), np.inf)
        self.looked, self.close, self.missed = np.zeros((3, len(floors)), dtype=np.bool_)

    def tell(self, number: int, need: RequiredBytes | None) -> None:
        """Take the answer about a point that was asked for; None if there is no answer."""
        self.looked[number] |= need is not None
        self.missed[number] = need is None
        if need is not None:
            self.floors[number] = need.floor
            self.least[number] = np.fmax(self.least[number], need.least)
            self.enough[number] = min(self.enough[number], need.enough)
            self.close[number] |= need.close and math.isfinite(need.enough)

    def judged(self, every: bool) -> _Estimate:
        """Return what each point needs, estimated by its neighbours if not known; with `every`, nothing is."""
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
        """Return the points to try first, of those whose floor is not known or at most `REACH` times the limit."""
        points = len(self.floors)
        step = max(1, points // SAMPLES) | 1  # odd, so that all alignments have their turn
        chosen = sorted({*range(0, points, step), points - 1})
        return [number for number in chosen if not self.floors[number] > REACH * limit]

    def _lowest(self) -> Floats:
        """Estimate floors: the lower of both neighbours' floors, less a margin; 0 if one of these is not known."""
        order = np.flatnonzero(~np.isnan(self.floors))
        low, high = _sides(order, self.floors[order], len(self.floors))
        lowest = np.minimum(low, high) * (1 - max(LEAST_MARGIN, self._bend_of_floors()))
        return np.where(np.isnan(lowest), 0, lowest)

    def _bend_of_floors(self) -> float:
        order = np.flatnonzero(~np.isnan(self.floors))
        return _curvature(order, self.floors[order])

    def _most(self) -> Floats:
        """Estimate each point's need from the nearest on both sides; infinite if one of these is not known."""
        order = np.flatnonzero(self.close)
        enough = self.enough[order]
        ratio = np.maximum(*_sides(order, enough / np.maximum(self.floors[order], 1), len(self.floors)))
        highest = np.maximum(*_sides(order, enough, len(self.floors)))
        most = np.where(np.isnan(self.floors), highest, self.floors * ratio)
        return np.where(np.isnan(most), np.inf, most)

    def _margins(self) -> Floats:
        """Return the share by which each point may need more than estimated."""
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
    """The search for the answer to each question, by name. `floors` are those of each setting, in bytes: what each
    point requests at least, None if not known, infinite if it cannot fit.

    With `every`, nothing is estimated. `most` bounds the tries (a point under a setting is one) and is counted down.
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
        """Return the points to try next, and for each setting the limits to try; none once the ends are known."""
        return self._wanted

    def tell(self, answers: Mapping[int, Mapping[str, RequiredBytes]]) -> None:
        """Learn the needs of the points that were asked for; a missing point has no answer."""
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
        """Return the answer to each question, by name; call it only after `tell`."""
        return {name: view.edge(self.every) for name, view in self._views.items()}


class _View:
    """A setting at one GPU's limit: what fits and what does not, as far as that is known."""

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
        """Return the points to try next, and whether to find closely what they need. These may move an end; if there
        are none, they are points at the ends that are only estimated to fit."""
        return list(self._open(every)) or list(self._supposed_at_the_ends())

    def _supposed_at_the_ends(self) -> Iterator[tuple[int, bool]]:
        """Yield points only estimated to fit: the last, and the stretch below the first that does not fit. If all fit,
        yield of the stretch below the end only what fits narrowly."""
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
        """Yield the points, divided by those whose need is known closely."""
        before = np.searchsorted(np.flatnonzero(self._setting.close), numbers)
        yield from (numbers[before == one] for one in np.unique(before))

    def edge(self, every: bool) -> Edge:
        """Return the answer as far as it is known; complete if nothing is wanted any more and no answer is missing."""
        ends = find_bracket(np.flatnonzero(self.within), np.flatnonzero(~(self.within | self._missed)))
        judged = self._judged
        margins = np.concatenate((judged.most_margins[self.within], judged.least_margins[self.beyond]))
        margin = None if np.isnan(margins).all() else float(np.nanmin(margins))
        looked, missed = int(self._setting.looked.sum()), int(self._missed.sum())
        return Edge(ends.below, ends.largest, looked, missed, margin, not missed and not self.wanted(every))


def _spread(numbers: Ints) -> list[int]:
    """Return some of the numbers, evenly; all, if they are few."""
    count = max(MANY, len(numbers) // 8)
    chosen = numbers if len(numbers) <= count else numbers[np.linspace(0, len(numbers) - 1, count).round().astype(int)]
    return [int(n) for n in chosen]


def _sides(order: Ints, values: Floats, points: int) -> tuple[Floats, Floats]:
    """Return for each point the values of the nearest in `order` at or before it and at or after it; NaN if none."""
    padded = np.concatenate(([np.nan], values, [np.nan]))
    numbers = np.arange(points)
    return padded[np.searchsorted(order, numbers, side="right")], padded[np.searchsorted(order, numbers) + 1]


def _curvature(order: Ints, values: Floats) -> float:
    """Return twice the most that a value is off a straight line between its neighbours, as a share of the value."""
    kept = np.isfinite(values)
    order, values = order[kept], values[kept]
    straight = values[:-2] + (values[2:] - values[:-2]) * (order[1:-1] - order[:-2]) / (order[2:] - order[:-2])
    return 2 * float((np.abs(values[1:-1] - straight) / np.maximum(values[1:-1], 1)).max(initial=0))
