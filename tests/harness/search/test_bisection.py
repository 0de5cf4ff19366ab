"""Every search, against looking at every point: it takes as few trials as it says, and hides no contradiction."""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramsweep.harness.search.axis_search import (
    Bisection,
    Edge,
    Probe,
    SecantSearch,
    back,
    drive,
    grid_floor,
    grid_next,
    most_trials,
)
from vramsweep.harness.search.fit_survey import Card, RequiredBytes, Survey

FITS, FULL = Probe("fits"), Probe("full")


def hunt(
    values: Sequence[int], of: Callable[[int], Probe], predicted: int | None = None, margin: int = 1
) -> tuple[Edge, dict[int, Probe]]:
    """The edge and what was tried on the way."""
    search = Bisection(values, predicted, margin)
    while asked := search.ask():
        [value] = asked
        assert value in values and value not in search.known
        search.tell({value: of(value)})
    return search.found(), search.known


def up_to(edge: int) -> Callable[[int], Probe]:
    return lambda value: FITS if value <= edge else FULL


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[int], int]:
    """Values, and the number of the largest that fits, -1 where none does."""
    if draw(st.booleans()):
        first, step, count = draw(st.integers(1, 99)), draw(st.integers(1, 64)), draw(st.integers(1, 3000))
        values = list(range(first, first + step * count, step))
    else:
        values = sorted(draw(st.sets(st.integers(1, 10**6), min_size=1, max_size=60)))
    return values, draw(st.integers(-1, len(values) - 1))


def truth(values: Sequence[int], edge: int) -> tuple[int | None, int | None]:
    return (values[edge] if edge >= 0 else None), (values[edge + 1] if edge + 1 < len(values) else None)


def number(values: Sequence[int], at: int) -> int:
    """A prediction that stands for the value at this place of the list: 0 where there is none."""
    return 0 if at < 0 else values[min(at, len(values) - 1)]


@given(grids())
def test_without_a_prediction(grid: tuple[list[int], int]) -> None:
    values, edge = grid
    found, tried = hunt(values, up_to(number(values, edge)))
    assert (found.largest, found.smallest) == truth(values, edge)
    assert len(tried) <= most_trials(len(values), predicted=False) <= math.log2(len(values)) + 2


@given(grids(), st.integers(-2, 2))
def test_a_good_prediction_takes_four_trials_a_right_one_two(grid: tuple[list[int], int], off: int) -> None:
    values, edge = grid
    found, tried = hunt(values, up_to(number(values, edge)), number(values, edge + off))
    assert (found.largest, found.smallest) == truth(values, edge)
    assert len(tried) <= (4 if off else 2)


@settings(max_examples=300)
@given(grids(), st.integers(-100, 10**7), st.integers(1, 5000))
def test_a_wrong_prediction_costs_little_more_than_none(
    grid: tuple[list[int], int], predicted: int, margin: int
) -> None:
    values, edge = grid
    found, tried = hunt(values, up_to(number(values, edge)), predicted, margin)
    assert (found.largest, found.smallest) == truth(values, edge)
    assert found.bound == (FULL if found.smallest is not None else None)
    assert found.confirmed == (found.smallest is not None) and found.either_way is None
    count = len(values)
    assert len(tried) <= most_trials(count, predicted=True) <= math.ceil(math.log2(count)) + 3


@given(grids(), st.integers(0, 40), st.integers(0, 40))
def test_a_prediction_within_the_margin_is_settled_within_it(
    grid: tuple[list[int], int], off: int, margin: int
) -> None:
    values, edge = grid
    margin = max(margin, off, 1)
    found, tried = hunt(values, up_to(number(values, edge)), number(values, edge - off), margin)
    assert (found.largest, found.smallest) == truth(values, edge)
    assert len(tried) <= 3 + math.ceil(math.log2(margin + 1))


@given(grids(), st.data())
def test_what_is_beyond_bounds_the_search_and_is_told_apart(grid: tuple[list[int], int], data: st.DataObject) -> None:
    values, edge = grid
    least = data.draw(st.integers(0, len(values) - 1))
    none = Probe("beyond", "no more positions")
    predicted = data.draw(st.none() | st.integers(0, values[-1] + 9))

    def of(value: int) -> Probe:
        return none if value >= values[least] else up_to(number(values, edge))(value)

    found, _ = hunt(values, of, predicted)
    assert (found.largest, found.smallest) == truth(values, min(edge, least - 1))
    if edge >= least - 1:
        assert found.bound == none and not found.confirmed
    search = Bisection(values, predicted, known={values[least]: none})
    while asked := search.ask():
        assert asked[0] < values[least]
        search.tell({asked[0]: of(asked[0])})
    assert (search.found().largest, search.found().smallest) == (found.largest, found.smallest)


@given(st.lists(st.sampled_from([FITS, FULL, Probe("inferred", "x"), Probe("beyond", "y"), Probe("failed", "z")]),
                min_size=1, max_size=200), st.none() | st.integers(0, 220))  # fmt: skip
def test_whatever_comes_it_ends_and_contradicts_no_trial(outcomes: list[Probe], predicted: int | None) -> None:
    values = range(1, len(outcomes) + 1)
    found, tried = hunt(values, lambda value: outcomes[value - 1], predicted)
    assert found.largest is None or tried[found.largest] == FITS
    assert found.largest == max((value for value, came in tried.items() if came == FITS), default=None)
    assert found.smallest is None or tried[found.smallest] is found.bound
    full = [value for value, came in tried.items() if came == FULL and value < (found.largest or 0)]
    assert found.either_way == ((min(full), found.largest) if full else None)
    if found.unknown is None:
        assert (found.smallest or len(values) + 1) - (found.largest or 0) == 1
    assert not (found.confirmed and (full or found.unknown))


def test_trials_of_before_count_and_those_that_contradict_each_other_are_told() -> None:
    """A length that 8 does not divide had no room where a longer one has."""
    known = {10: FULL, 20: FITS, 30: FULL}
    search = Bisection(range(10, 60, 10), 40, known=known)
    found = search.found()
    assert found == Edge(20, 30, FULL, either_way=(10, 20)) and not found.confirmed and not search.ask()
    bracketed = Bisection(range(1, 100), 10, known={50: FITS, 60: FULL})
    assert bracketed.ask() == [55]  # where the bracket is, whatever was predicted


@pytest.mark.parametrize(("predicted", "first"), [(64, 64), (100, 64), (63, 32), (10, 32), (None, 64), (9999, 128)])
def test_it_begins_at_the_value_that_is_predicted(predicted: int | None, first: int) -> None:
    assert Bisection([32, 64, 96, 128], predicted).ask() == [96 if predicted == 100 else first]


def test_one_that_fails_ends_the_search_with_what_is_known_by_then() -> None:
    found, tried = hunt(range(1, 101), lambda v: Probe("failed", "crash: x") if v == 41 else up_to(60)(v), 40)
    assert found == Edge(40, None, None, "crash: x") and len(tried) == 2 and not found.confirmed
    nothing = Bisection([5], known={5: Probe("failed")})
    assert nothing.found() == Edge(None, None, None, "the trial of 5 did not finish") and not nothing.ask()
    assert hunt([5, 6], lambda _: Probe("beyond", "no card"))[0] == Edge(None, 5, Probe("beyond", "no card"))


Asked = Mapping[int, list[int]]


def curves(seed: int, count: int = 3) -> list[list[int]]:
    """Return the needs of values 0 to 599 for some runs: growing, with dips, jumps and classes that need more."""
    dice = random.Random(seed)
    every = []
    for _ in range(count):
        slope, start, extra, jitter = (dice.randint(*ends) for ends in ((1, 9), (1, 900), (0, 500), (0, 99)))
        every.append([start + slope * n + extra * (n % 8 != 0) + dice.randint(0, jitter) for n in range(600)])
    return every


@pytest.mark.parametrize("seed", range(25))
def test_bisections_end_between_one_that_fits_and_the_next_that_does_not(seed: int) -> None:
    needs, dice = curves(seed), random.Random(-seed)
    values = sorted(dice.sample(range(600), dice.randint(1, 300)))
    searches = [Bisection(values, dice.choice([None, dice.randint(0, 700)]), dice.randint(1, 20)) for _ in needs]
    rounds: list[Asked] = []

    def evaluate(asked: Asked) -> dict[int, dict[int, Probe]]:
        rounds.append(asked)
        return {n: {v: Probe("fits" if needs[n][v] <= 2500 else "full") for v in own} for n, own in asked.items()}

    assert drive(searches, evaluate)
    assert [len(search.known) for search in searches] == [sum(n in asked for asked in rounds) for n in range(3)]
    for need, edge in zip(needs, (search.found() for search in searches), strict=True):
        assert edge.largest is None or need[edge.largest] <= 2500
        after = [value for value in values if value > (-1 if edge.largest is None else edge.largest)]
        assert edge.smallest == (after[0] if after else None)
        assert edge.smallest is None or need[edge.smallest] > 2500


@pytest.mark.parametrize("seed", range(25))
def test_secants_end_between_one_that_fits_and_the_next_of_the_grid(seed: int) -> None:
    needs = curves(seed)
    searches = [SecantSearch(random.Random(seed).randint(1, 599), 599, 2500) for _ in needs]
    assert drive(searches, lambda asked: {n: {v: needs[n][v] for v in own} for n, own in asked.items()})
    for need, found in zip(needs, (search.found() for search in searches), strict=True):
        assert need[found or 1] <= 2500 if found else need[1] > 2500
        after = grid_next(found or 0)
        assert after > 599 or need[after] > 2500


@pytest.mark.parametrize("seed", range(10))
def test_surveys_find_both_ends(seed: int) -> None:
    needs = curves(seed)
    searches = [Survey({"": [None] * 600}, {"card": Card("", 2500)}, every=True) for _ in needs]
    sure = [[RequiredBytes(need, need, need, True) for need in own] for own in needs]
    assert drive(searches, lambda asked: {n: {p: {"": sure[n][p]} for p in own} for n, own in asked.items()})
    for need, search in zip(needs, searches, strict=True):
        edge, fits = search.found()["card"], [n <= 2500 for n in need]
        first = fits.index(False) if False in fits else 600
        assert edge.all_up_to == (first - 1 if first else None) and edge.complete
        assert edge.largest == max((n for n, fit in enumerate(fits) if fit), default=None)


class Counting:
    """Asks for so many rounds, and keeps what it was told."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.told = rounds, list[Mapping[int, str]]()

    def ask(self) -> list[int]:
        return [len(self.told)] * (len(self.told) < self.rounds)

    def tell(self, answers: Mapping[int, str]) -> None:
        self.told.append(answers)

    def found(self) -> int:
        return len(self.told)


def test_open_searches_are_asked_together_until_all_are_over_or_nothing_is_answered() -> None:
    searches, calls, after = [Counting(n) for n in (1, 3, 0)], list[Asked](), list[int]()

    def evaluate(asked: Asked) -> dict[int, dict[int, str]]:
        calls.append(asked)
        return {n: dict.fromkeys(own, "yes") for n, own in asked.items()} if len(calls) < 6 else {}

    assert drive(searches, evaluate, lambda: after.append(len(calls)))
    assert calls == [{0: [0], 1: [0]}, {1: [1]}, {1: [2]}] and after == [1, 2, 3]
    assert [search.told for search in searches] == [[{0: "yes"}], [{0: "yes"}, {1: "yes"}, {2: "yes"}], []]
    tired = [Counting(9), Counting(9)]
    assert not drive(tired, evaluate)
    assert [search.found() for search in tired] == [3, 3] and tired[0].told[-1] == {}  # told so, and not asked again


COURSES: dict[str, Callable[[int], int]] = {
    "line": lambda v: 3_000 + 70 * v,
    "hinge": lambda v: max(9_000 + 10 * v, 3_000 + 70 * v),
    "square": lambda v: 2_000 + 20 * v + v * v // 40,
    "stairs": lambda v: 2_000 + 2_000 * (v * 11 // 400),
    "classes": lambda v: 2_000 + 60 * v + 300 * (v % 8 != 0),
    "flat": lambda v: 5_000,
    "too much": lambda v: 10**9,
    "root": lambda v: round(1_000 * math.sqrt(v)),
}


def looked(course: Callable[[int], int], start: int, most: int, limit: int) -> tuple[int | None, dict[int, int | None]]:
    search = SecantSearch(start, most, limit)
    assert drive([search], lambda asked: {0: {value: course(value) for value in asked[0]}})
    return search.found(), search.needs


@pytest.mark.parametrize("name", COURSES)
@pytest.mark.parametrize("start", [1, 100, 700])
@pytest.mark.parametrize("most", [700, 1024, 4096])
@pytest.mark.parametrize("limit", [2_100, 10_000, 40_000, 123_456])
def test_the_edge_is_found_with_few_looks(name: str, start: int, most: int, limit: int) -> None:
    course = COURSES[name]
    every = [value for value in range(1, most + 1) if course(value) <= limit]
    found, needs = looked(course, start, most, limit)
    assert len(needs) <= 20
    if not every:
        assert found is None and 1 in needs  # it was looked at
        return
    assert found is not None and needs[found] == course(found) <= limit
    if name != "classes":
        after = grid_next(found)
        assert after > most or course(after) > limit  # the next one on the grid does not fit
        assert found >= max(every) / (1 + 1 / 16) - 1
    else:  # not monotone: within a step and what the class costs
        assert found >= 0.9 * max(every) - 1


def test_runs_that_are_open_are_asked_together() -> None:
    calls: list[Mapping[int, list[int]]] = []

    def predict(asked: Mapping[int, list[int]]) -> dict[int, dict[int, int | None]]:
        calls.append(asked)
        return {n: {value: None if n == 2 else (n + 1) * 10 * value} for n, [value] in asked.items()}

    searches = [SecantSearch(8, 64, 320, needs) for needs in ({8: 80}, {8: 160}, {})]
    assert drive(searches, predict)
    assert [search.found() for search in searches] == [32, 16, None]  # of the last nothing can be told
    assert set(calls[0]) == {0, 1, 2}


def test_the_grid() -> None:
    values = [1]
    while values[-1] < 5_000:
        values.append(grid_next(values[-1]))
    assert values[:64] == list(range(1, 65))
    assert {128, 192, 1024, 1536, 2048, 4096} <= set(values)
    assert all(grid_floor(value) == value and back(after) == value for value, after in itertools.pairwise(values))
    assert all(after / value <= 1 + 1 / 32 for value, after in itertools.pairwise(values[32:]))
    assert back(1) == 0
