"""What fits among many points: against looking at every one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from vramsweep.runners.survey import Asked, Edge, Evaluate, Verdict, Verdicts, survey

GIB = 1 << 30


def of(need: Callable[[int], int], limits: dict[str, int]) -> tuple[Evaluate, list[tuple[int, str]]]:
    """Answers from a function of the point, and the points and questions that were asked for."""
    asked: list[tuple[int, str]] = []

    def evaluate(wanted: Asked) -> dict[int, Verdicts]:
        asked.extend((number, name) for number, names in wanted.items() for name in names)
        return {
            n: {name: Verdict(need(n) <= limits[name], need(n), True) for name in names} for n, names in wanted.items()
        }

    return evaluate, asked


def jagged(seed: int) -> Callable[[int], int]:
    """Lines with a knee, blocks of 2 MiB, one class of eight that takes more, and jumps of up to 3 %."""
    dice = random.Random(seed)
    start, slope, knee, more = (
        dice.randint(2, 20) * GIB,
        dice.randint(1, 9) << 20,
        dice.randint(0, 2048),
        dice.random() / 20,
    )
    jumps = [1 + dice.random() * 0.03 for _ in range(64)]

    def need(number: int) -> int:
        plain = start + slope * max(number - knee, 0) + (slope // 8) * number
        return int(plain * (1 + more * (number % 8 != 7)) * jumps[number * 64 // 2048]) >> 21 << 21

    return need


def answer(edges: dict[str, Edge]) -> dict[str, tuple[int | None, int | None]]:
    return {name: (edge.all_up_to, edge.largest) for name, edge in edges.items()}


@pytest.mark.parametrize("seed", range(40))
def test_it_is_what_looking_at_every_point_says(seed: int) -> None:
    limits = {f"{size}": size * GIB for size in (4, 8, 12, 16, 24, 32, 48)}
    evaluate, asked = of(jagged(seed), limits)
    found = survey(2048, limits, evaluate, every=False, most=2048)
    assert answer(found) == answer(survey(2048, limits, of(jagged(seed), limits)[0], every=True, most=2048))
    assert len(set(asked)) == len(asked) == sum(edge.looked_at for edge in found.values())


def test_far_from_every_edge_few_points_are_looked_at() -> None:
    evaluate, asked = of(lambda n: GIB + (n << 20), {"card": 80 * GIB})
    found = survey(32_768, {"card": 80 * GIB}, evaluate, every=False, most=2000)
    assert len(asked) < 60
    assert found["card"].largest == found["card"].all_up_to == 32_767


def test_what_fits_is_not_monotone() -> None:
    """Every eighth length takes less: the largest of all that fit is not the end of those that all do."""
    limits = {"card": 10 * GIB}
    evaluate, _ = of(lambda n: ((n + 1) << 23) + (GIB if (n + 1) % 8 else 0), limits)
    found = survey(2048, limits, evaluate, every=False, most=2048)["card"]
    assert (found.all_up_to, found.largest) == (1151, 1279)  # lengths 1,152 and 1,280, counted from 1


def test_a_bound_on_the_looks_is_said() -> None:
    evaluate, asked = of(lambda n: (10 * GIB) + (n % 97 << 23), {"card": 10 * GIB})
    found = survey(4096, {"card": 10 * GIB}, evaluate, every=False, most=200)["card"]
    assert not found.complete and len(asked) <= 200


def test_a_point_is_looked_at_only_for_what_it_may_decide() -> None:
    limits = {"near": 12 * GIB, "far": 80 * GIB}
    evaluate, _ = of(lambda n: GIB + (n << 23), limits)
    found = survey(4096, limits, evaluate, every=False, most=4096)
    assert found["near"].all_up_to == 1408 and found["far"].largest == 4095
    assert found["far"].looked_at < 60 < found["near"].looked_at
    more, _ = of(lambda n: GIB + (n << 23), limits)  # what comes without being asked for is taken
    told = survey(4096, limits, lambda wanted: more(dict.fromkeys(wanted, limits)), every=False, most=4096)
    assert answer(told) == answer(found) and told["far"].looked_at == told["near"].looked_at


def test_what_stays_open_of_one_question_is_not_the_other_s() -> None:
    limits = {"ragged": 10 * GIB, "far": 80 * GIB}
    evaluate, _ = of(lambda n: (10 * GIB) + (n % 97 << 23), limits)
    found = survey(4096, limits, evaluate, every=False, most=200)
    assert found["far"].complete and not found["ragged"].complete


def test_nothing_fits_or_nothing_is_known() -> None:
    evaluate, _ = of(lambda n: 2 * GIB, {"card": GIB})
    assert answer(survey(100, {"card": GIB}, evaluate, every=False, most=100)) == {"card": (None, None)}
    found = survey(100, {"card": GIB}, lambda wanted: {}, every=False, most=100)["card"]
    assert (found.all_up_to, found.largest) == (None, None)
    assert found.looked_at == 0 and found.unanswered > 0 and not found.complete


def test_points_without_an_answer_are_counted() -> None:
    """As those of a target that raises at some lengths."""
    evaluate, asked = of(lambda n: GIB, {"card": 2 * GIB})
    known = {"card": 2 * GIB}
    found = survey(100, known, lambda wanted: evaluate({n: q for n, q in wanted.items() if n < 60}), True, 100)["card"]
    assert (found.all_up_to, found.largest, found.looked_at, found.unanswered) == (59, 59, 60, 40)
    assert len(asked) == 60
