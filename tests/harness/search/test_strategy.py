"""Every search through the one loop, against looking at every point, where what is needed goes up and down."""

import random
from collections.abc import Mapping

import pytest

from vramsweep.harness.search.bisection import Bisection, Probe
from vramsweep.harness.search.fit_survey import Card, RequiredBytes, Survey
from vramsweep.harness.search.secant_search import SecantSearch, grid_next
from vramsweep.harness.search.strategy import drive

Asked = Mapping[int, list[int]]


def curves(seed: int, count: int = 3) -> list[list[int]]:
    """Return the needs of values 0 to 599 for some runs: growing, with dips, jumps and classes that need more."""
    dice = random.Random(seed)
    every = []
    for _ in range(count):
        slope, start, extra, jitter = (
            dice.randint(1, 9),
            dice.randint(1, 900),
            dice.randint(0, 500),
            dice.randint(0, 99),
        )
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
