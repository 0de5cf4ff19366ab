"""The search for an edge: it finds every edge in as few trials as it says, and hides nothing that contradicts it."""

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramsweep.harness.search.bisection import Bisection, Edge, Probe, most_trials

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
