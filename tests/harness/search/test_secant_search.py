"""Test the search for the largest value that fits against a check of every value, on curves that are not lines."""

import itertools
import math
from collections.abc import Callable, Mapping

import pytest

from vramsweep.harness.search.secant_search import SecantSearch, back, grid_floor, grid_next
from vramsweep.harness.search.strategy import drive

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
