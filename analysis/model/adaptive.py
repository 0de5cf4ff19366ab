"""Adaptive search over one configuration: the points to measure next, and inferred values of the others.

Points are lengths and batches. The search begins with a design: the largest, the smallest, both sides of each predicted
phase change, then points about which these tell least. It continues where values are least certain, or where it is
unknown what fits. It ends once everything wanted is known within the tolerance and check points agree. Check points are
drawn at random, compared with what was inferred before they were measured, and only then learnt from.

To decide what fits, memory is taken to grow with length and with batch (harness/search/fit_knowledge.py). Pure: no
processes, no rows; the caller measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from vramsweep.analysis.data.metrics import METRICS, Metric, highest_of
from vramsweep.analysis.model.curves import FEWEST, Array, Numbers
from vramsweep.analysis.model.kriging import Places, between, spread_out
from vramsweep.analysis.model.observations import Mask, Points, members
from vramsweep.analysis.model.phases import PHASES
from vramsweep.analysis.model.pointwise_fit import OfPoints, candidates_of, estimate_points
from vramsweep.harness.search.fit_knowledge import PADDED_TO, TriedPoint, decide_all

FIRST, FIRST_ALONE = 6, 9  # fewest points of a design: with a prediction, without one
CERTAIN = 1.96  # standard deviations on each side of a 95 % interval
SPREADS = 60  # x at which the spread of a curve is computed
JUMPS = 2  # predicted jumps whose sides are in the design
RUNS = 4  # runs of predicted phases along a line: with more, their ends are not in the design


@dataclass(frozen=True)
class Tolerance:
    """Largest error of a value, as a share of it, and the share of the points that must keep to it."""

    within: float
    of_points: float


TOLERANCES = {"peak_allocated_bytes": Tolerance(0.01, 1.0), "peak_reserved_bytes": Tolerance(0.02, 0.95)}


@dataclass(frozen=True)
class Grid:
    """The points to be known: tokens and samples, (n,). `predicted` are values by column, NaN where not predicted.
    `phase` is predicted to make the peak, "" if unknown; `fits` is whether a point is predicted to fit. Both are None
    without a prediction."""

    length: Array
    batch: Array
    predicted: Mapping[str, Array] = field(default_factory=dict)
    phase: tuple[str, ...] | None = None
    fits: Mask | None = None

    @classmethod
    def of(cls, length: Array, batch: Array, rows: Sequence[Mapping[str, Any] | None]) -> Grid:
        """Build the grid with the predicted row of each point, None where there is none."""

        def column(name: str) -> Array:
            return np.array([np.nan if row is None or not row.get(name) else row[name] for row in rows], dtype=float)

        if sum(row is not None and row["outcome"] == "ok" for row in rows) < FEWEST:
            return cls(length, batch)
        peaks = np.column_stack([column(f"{phase}_peak_allocated_bytes") for phase in PHASES])
        phase = tuple(highest_of(peaks, PHASES))
        fits = np.array([row is None or row["outcome"] != "oom" for row in rows])
        reserved = np.where(fits, column("peak_reserved_bytes"), column("unlimited_peak_reserved_bytes"))
        allocated = np.where(fits, column("peak_allocated_bytes"), np.nan)
        return cls(length, batch, {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved}, phase, fits)

    @property
    def tokens(self) -> Array:
        """Tokens of a micro-batch, (n,)."""
        return self.length * self.batch


@dataclass(frozen=True)
class Answer:
    """Result of a point: its values by column if it ran. `fits` is None if it failed in another way. `limit` is what
    the allocator may use there, in bytes. `measured` is False if it follows from another sweep's rule."""

    fits: bool | None
    values: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    measured: bool = True


@dataclass(frozen=True)
class Check:
    """A check point: by column the value inferred before it was measured, and the measured one. `full`: it did not fit
    although it was inferred to."""

    at: int
    inferred: Mapping[str, float]
    measured: Mapping[str, float]
    full: bool = False

    def off(self, column: str) -> float:
        """Return inferred over measured, minus 1; NaN where either is unknown."""
        return self.inferred.get(column, np.nan) / self.measured.get(column, np.nan) - 1


@dataclass(frozen=True)
class Inferred:
    """One column at every point, (n,): measured values if known, else inferred ones with 95 % intervals of a run.
    `unsure` is half the interval of the curve, which more points narrow, as a share of the value. `basis` is
    "prediction" or "curve"."""

    value: Array
    low: Array
    high: Array
    unsure: Array
    basis: str


@dataclass
class Search:
    """State of the search on a grid. Ask for points, measure them and tell the answers, until it asks for none.

    At most `most` points are measured. `checks` check points in a row have to agree. `together` uncertain points are
    asked for at once. With equal seeds and answers it asks equal questions.
    """

    grid: Grid
    most: int = 40
    checks: int = 3
    together: int = 3
    seed: int = 0
    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: TOLERANCES)
    answers: dict[int, Answer] = field(default_factory=dict)
    compared: list[Check] = field(default_factory=list)
    _surprised: list[int] = field(default_factory=list)
    _checking: set[int] = field(default_factory=set)
    _known: dict[str, Inferred] | None = None

    def ask(self) -> list[int]:
        """Return the positions to measure next; none if enough is known, `most` are measured, or nothing could run."""
        done = sum(answer.measured for answer in self.answers.values())
        left = min(self.most - done, len(self.grid.length) - len(self.answers))
        if left <= 0:
            return []
        if not self.answers:
            return self._design()[:left]
        if not any(answer.fits is not None for answer in self.answers.values()):
            return []  # all failed, so more of the kind would fail
        missing = self.checks - self.agreeing
        beside = [at for at in dict.fromkeys(self._edge() or self._surprised) if at not in self.answers]
        self._surprised = []
        if beside:
            return beside[:left]
        if not any(answer.fits for answer in self.answers.values()):
            return []
        if left > missing and not self.certain():
            found = self._uncertain(min(self.together, left - max(missing, 0)))
            if found:
                return found
        if missing <= 0:
            return []
        drawn = self._drawn(min(missing, left))
        self._checking |= set(drawn)
        return drawn

    def tell(self, answers: Mapping[int, Answer]) -> None:
        """Learn the answers of points. First compare check points with what was inferred from all others."""
        drawn = {at: answer for at, answer in answers.items() if at in self._checking}
        self._learn({at: answer for at, answer in answers.items() if at not in drawn})
        fits = self.fits() if drawn else []
        for at, answer in drawn.items():
            full = answer.fits is False and fits[at] is True
            if answer.fits or full:
                inferred = {column: float(known.value[at]) for column, known in self.inferred().items()}
                self.compared.append(Check(at, inferred, answer.values, full))
                if not self._agrees(self.compared[-1]):
                    self._surprised += self._beside(at)
        self._learn(drawn)

    def _learn(self, answers: Mapping[int, Answer]) -> None:
        if answers:
            self.answers |= answers
            self._known = None

    def _agrees(self, check: Check) -> bool:
        off = any(abs(check.off(column)) > limit.within for column, limit in self.tolerances.items())
        return not off and not check.full

    def _beside(self, at: int) -> list[int]:
        """Return points half-way from a point to the next measured ones of its batch, or of its length if alone in its
        batch. They show whether the point stands for a stretch or for itself."""
        length, batch = self.grid.length, self.grid.batch
        line = batch == batch[at] if np.sum(batch == batch[at]) > 1 else length == length[at]
        order = np.flatnonzero(line)[np.argsort(self.grid.tokens[line], kind="stable")]
        done = np.isin(order, [*self.answers])
        here = int(np.flatnonzero(order == at)[0])
        sides = [*np.flatnonzero(done[:here])[-1:], *(here + 1 + np.flatnonzero(done[here + 1 :])[:1])]
        return [int(order[(side + here) // 2]) for side in sides if abs(side - here) > 1]

    @property
    def agreeing(self) -> int:
        """Number of the last check points in a row that agree."""
        return sum(1 for _ in takewhile(self._agrees, reversed(self.compared)))

    @property
    def enough(self) -> bool:
        """Return whether all is known within the tolerance, as far as the model and check points tell."""
        everywhere = all(at in self.answers for at in range(len(self.grid.length)))
        return everywhere or (not self._edge() and self.certain() and self.agreeing >= self.checks)

    def certain(self) -> bool:
        """Return whether every column is within its tolerance at as many points as it requires."""
        known = self.inferred()
        return bool(known) and not any(self._lacking(column) for column in known)

    def _lacking(self, column: str) -> bool:
        tolerance = self.tolerances[column]
        within = self.inferred()[column].unsure <= tolerance.within
        return bool(np.mean(within[self._asked()]) < tolerance.of_points)

    def fits(self) -> list[bool | None]:
        """Return whether each point fits in memory, as measured or as follows from that; None if unknown."""
        length, batch = self.grid.length, self.grid.batch
        tried = {at: one.fits for at, one in self.answers.items()}
        known = [TriedPoint(int(length[at]), int(batch[at]), fits) for at, fits in tried.items() if fits is not None]
        return [tried.get(at, fits) for at, fits in enumerate(decide_all(known, length, batch))]

    def inferred(self) -> dict[str, Inferred]:
        """Return inferred values by column, for columns known at some point."""
        if self._known is None:
            self._known = {}
            for column in self.tolerances:
                at = [at for at, answer in self.answers.items() if np.isfinite(answer.values.get(column, np.nan))]
                if at:
                    y = np.array([self.answers[one].values[column] for one in at])
                    bounds, within = self._bounds(column), self.tolerances[column].within
                    self._known[column] = _infer(self.grid, METRICS[column], np.array(at), y, bounds, within)
        return self._known

    found = inferred

    def _bounds(self, column: str) -> tuple[Array, Array]:
        """Return tokens and bytes of points that ran out of memory: these would have needed more."""
        full = [
            (self.grid.tokens[at], answer.limit)
            for at, answer in self.answers.items()
            if answer.fits is False and answer.limit and METRICS[column].limited
        ]
        return np.array([x for x, _ in full]), np.array([y for _, y in full])

    def _asked(self) -> Mask:
        """Return the mask of points whose values are wanted: all but those that do not fit."""
        return np.array([fits is not False for fits in self.fits()])

    def _design(self) -> list[int]:
        grid = self.grid
        order = np.lexsort((grid.length, grid.tokens))
        if grid.fits is not None and grid.fits.any() and not grid.fits.all():
            # the largest that is predicted to fit, and the smallest that is not
            first = [int(order[grid.fits[order]][-1]), int(order[~grid.fits[order]][0])]
        else:
            first = [int(order[-1])]
        first.append(int(order[0]))
        if grid.phase is not None and len(np.unique(grid.batch)) == 1:
            changes = [n for n in range(1, len(order)) if grid.phase[order[n]] != grid.phase[order[n - 1]]]
            if len(changes) < RUNS:
                first += [int(order[n + side]) for n in changes for side in (-1, 0)]
        for column in self.tolerances:
            if METRICS[column].limited:
                first += [at for pair in _jumps(grid, column) for at in pair]
        first = list(dict.fromkeys(first))
        places = _make_places(grid, _predicted(grid, grid.predicted.get("peak_allocated_bytes")))
        return spread_out(places, first, max(len(first), FIRST if grid.predicted else FIRST_ALONE))

    def _edge(self) -> list[int]:
        """Return points at the border of what fits; none if enough points are decided. Alternate between the border
        that values show and the middle of the open points."""
        fits = self.fits()
        open_ = np.array([at for at, one in enumerate(fits) if one is None and at not in self.answers], dtype=int)
        full = [at for at, answer in self.answers.items() if answer.fits is False]
        least = min((limit.of_points for limit in self.tolerances.values()), default=1.0)
        if not len(open_) or not full or len(open_) <= (1 - least) * len(fits):
            return []
        open_ = open_[np.argsort(self.grid.tokens[open_], kind="stable")]
        known, limits = self.inferred().get("peak_reserved_bytes"), [a.limit for a in self.answers.values() if a.limit]
        if known is not None and limits and len(full) % 2:
            over = np.flatnonzero(known.value[open_] > min(limits))
            if len(over):
                return list(dict.fromkeys([int(open_[max(over[0] - 1, 0)]), int(open_[over[0]])]))
        return [int(open_[len(open_) // 2])]

    def _uncertain(self, count: int) -> list[int]:
        """Return up to `count` points: the least certain one, relative to the tolerance, around each of some measured
        points. Measured points come first around which the uncertainty exceeds the tolerance most."""
        done = np.array(list(self.answers))
        score = np.zeros(len(self.grid.length))
        for column, one in self.inferred().items():
            if self._lacking(column):
                score = np.maximum(score, one.unsure / self.tolerances[column].within)
        score[~self._asked()] = score[done] = 0.0
        where = _unit_coordinates(self.grid)
        nearest = np.argmin(((where[:, None] - where[done][None]) ** 2).sum(axis=-1), axis=1)
        around = np.bincount(nearest, weights=np.maximum(score - 1, 0.0), minlength=len(done))
        best = [one for one in np.argsort(-around)[:count] if around[one] > 0]
        return [int(np.argmax(np.where(nearest == one, score, 0.0))) for one in best]

    def _drawn(self, count: int) -> list[int]:
        """Draw check points at random, one in each part of the remaining points, in order of tokens."""
        free = np.flatnonzero(self._asked() & ~np.isin(np.arange(len(self.grid.length)), list(self.answers)))
        if not len(free):
            return []
        free = free[np.argsort(self.grid.tokens[free], kind="stable")]
        random = np.random.default_rng([self.seed, len(self.answers)])
        return [int(random.choice(part)) for part in np.array_split(free, min(count, len(free)))]


def _jumps(grid: Grid, column: str) -> list[tuple[int, int]]:
    """Return both sides of those jumps predicted within a batch on which most points depend."""
    if (values := _predicted(grid, grid.predicted.get(column))) is None:
        return []
    order = np.lexsort((grid.length, grid.tokens))
    found: list[tuple[float, int, int]] = []
    for batch in np.unique(grid.batch):
        line = order[grid.batch[order] == batch]
        jump = np.abs(np.diff(values[line])) / values[line][1:]
        places = [-1, *np.flatnonzero(jump > TOLERANCES[column].within), len(line) - 1]
        for before, here, after in zip(places, places[1:], places[2:], strict=False):
            found.append((-float(jump[here]) * min(here - before, after - here), int(line[here]), int(line[here + 1])))
    return [(one, other) for _, one, other in sorted(found)[:JUMPS]]


def _stretches(grid: Grid, metric: Metric) -> Numbers:
    """Return the number of each point's stretch between predicted jumps, (n,): a jump may be elsewhere."""
    found = np.zeros(len(grid.length), dtype=np.int64)
    for one, _ in _jumps(grid, metric.column):
        found += (grid.batch == grid.batch[one]) & (grid.length > grid.length[one])
    return found


def _infer(grid: Grid, metric: Metric, at: Numbers, y: Array, bounds: tuple[Array, Array], within: float) -> Inferred:
    """Infer one column at every point from its measured values `y` at the positions `at`."""
    base = _predicted(grid, grid.predicted.get(metric.column))
    basis = "curve" if base is None else "prediction"
    unsure = np.zeros(len(grid.length))
    if base is None:
        base, unsure = _curve(grid, metric, at, y, bounds)
    places = _make_places(grid, base, _stretches(grid, metric) if basis == "prediction" and metric.limited else None)
    found = between(places, at, y, metric.resolution, not metric.limited)
    value = found.value
    if metric.limited:
        value = value * (1 + _middle(found.left / y, within))
        value[at] = y
    curve, new = (CERTAIN * np.sqrt(spread**2 + unsure**2) for spread in (found.curve, found.new))
    curve[at] = new[at] = 0.0
    return Inferred(value, np.maximum(value - new, 0.0), value + new, curve / value, basis)


def _middle(left: Array, within: float) -> float:
    """Return how far to move values so that most of what is `left` (k,), as shares, is within the tolerance. It is 0
    unless a move brings more within it, and then the middle of those."""
    left = np.sort(left)
    counts = np.searchsorted(left, left + 2 * within, side="right") - np.arange(len(left))
    if counts.max() <= np.sum(np.abs(left) <= within):
        return 0.0
    first = int(np.argmax(counts))
    return float(left[first] + left[first + counts[first] - 1]) / 2


def _curve(grid: Grid, metric: Metric, at: Numbers, y: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the most probable curve along tokens, and its standard deviation."""
    tokens = grid.tokens
    if len(np.unique(tokens[at])) < FEWEST:
        return np.full(len(tokens), float(y.mean())), np.full(len(tokens), float(y.max()))
    order = np.argsort(tokens[at], kind="stable")
    points = Points(tokens[at][order], y[order], tuple(map(str, at)), *bounds)
    found = estimate_points(points, metric)
    predictor = OfPoints(found.posteriors, found.modulus, candidates_of(points, found)[1].model)
    unsure = np.zeros(len(tokens))
    for mine in members(tokens, found.modulus).values():  # at some of them: it changes little between
        some = np.quantile(tokens[mine], np.linspace(0, 1, SPREADS), method="nearest")
        asked = np.unique(np.append(some, tokens[at]))
        asked = asked[np.isin(asked, tokens[mine])]
        low, high = np.percentile(predictor.draws(asked)[0], [2.5, 97.5], axis=0)
        unsure[mine] = np.interp(tokens[mine], asked, (high - low) / 2 / CERTAIN)
    return predictor.value(tokens), unsure


def _predicted(grid: Grid, values: Array | None) -> Array | None:
    """Return a prediction at every point. Where it is unknown, interpolate in tokens; beyond the last (out of memory)
    follow the line through those before. Return None if too few are known."""
    if values is None:
        return None
    if (known := np.isfinite(values) & (values > 0)).sum() < FEWEST:
        return None
    if known.all():
        return values
    tokens = grid.tokens
    most = np.argsort(tokens[known])[-max(FEWEST, int(known.sum()) // 4) :]
    x, y = tokens[known][most], values[known][most]
    slope = float(np.polyfit(x - x.mean(), y, 1)[0]) if np.ptp(x) > 0 else 0.0
    order = np.argsort(tokens[known], kind="stable")
    within = np.interp(tokens, tokens[known][order], values[known][order])
    return np.where(known, values, within + slope * np.maximum(tokens - x[-1], 0.0))


def _make_places(grid: Grid, base: Array | None, stretches: Numbers | None = None) -> Places:
    phases = np.unique(grid.phase, return_inverse=True)[1] if grid.phase is not None else np.zeros(len(grid.length))
    told = [phases, grid.length % PADDED_TO == 0, np.zeros(len(phases)) if stretches is None else stretches]
    of_class: Any = np.unique(np.column_stack(told), axis=0, return_inverse=True)[1]
    return Places(_unit_coordinates(grid), np.ravel(of_class), np.ones(len(phases)) if base is None else base)


def _unit_coordinates(grid: Grid) -> Array:
    """Return length and batch, each from 0 to 1, (n, 2)."""
    both = np.column_stack([grid.length, grid.batch])
    return np.asarray((both - both.min(axis=0)) / np.maximum(np.ptp(both, axis=0), 1))
