"""Test that the survey of many points finds the same fits as a check of each one."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from vramsweep.harness.search.axis_search import drive
from vramsweep.harness.search.fit_survey import REACH, STRETCH, Asked, Card, Edge, RequiredBytes, Survey

MIB, GIB = 1 << 20, 1 << 30
Setting = Callable[[int], int]
Looks = list[tuple[int, tuple[int, ...]]]
Evaluate = Callable[[Asked], Mapping[int, Mapping[str, RequiredBytes]]]


def survey(
    floors: Mapping[str, Sequence[float | None]], cards: dict[str, Card], evaluate: Evaluate, **options: Any
) -> dict[str, Edge]:
    """Run a survey with these answers; return the limits that it finds."""
    one = Survey(floors, cards, **options)
    assert drive([one], lambda asked: {number: evaluate(points) for number, points in asked.items()})
    return one.found()


def of(need: Setting, floor: Setting) -> tuple[Evaluate, Looks]:
    """Answers from functions of the point, and the points and rooms that were asked for. What is needed is found to a
    percent, as by replays."""
    asked: Looks = []

    def evaluate(wanted: Asked) -> dict[int, dict[str, RequiredBytes]]:
        found = {}
        for number, rooms in ((number, rooms) for number, settings in wanted.items() for rooms in settings.values()):
            asked.append((number, tuple(rooms)))
            room = need(number)
            least = max([floor(number), *(tried + 1 for tried in rooms if tried < room)])
            enough = min((tried for tried in rooms if tried >= room), default=math.inf)
            known = RequiredBytes(floor(number), max(floor(number), room - room // 100), room, True)
            found[number] = {"setting": RequiredBytes(floor(number), least, enough, False) if rooms else known}
        return found

    return evaluate, asked


def edges(
    points: int, need: Setting, limits: dict[str, int], floor: Setting | None = None, **options: Any
) -> tuple[dict[str, Edge], Looks]:
    """Return what the survey finds and looks at. It knows `floor` beforehand if given; else the floor is the need."""
    evaluate, asked = of(need, floor or need)
    floors = [None if floor is None else floor(number) for number in range(points)]
    cards = {name: Card("setting", limit) for name, limit in limits.items()}
    return survey({"setting": floors}, cards, evaluate, **options), asked


def truth(points: int, need: Setting, limits: dict[str, int]) -> dict[str, tuple[int | None, int | None]]:
    """From every point."""
    found: dict[str, tuple[int | None, int | None]] = {}
    for name, limit in limits.items():
        fits = [need(number) <= limit for number in range(points)]
        first = fits.index(False) if False in fits else points
        found[name] = (first - 1 if first else None, max((n for n, fit in enumerate(fits) if fit), default=None))
    return found


def answer(edges: dict[str, Edge]) -> dict[str, tuple[int | None, int | None]]:
    return {name: (edge.all_up_to, edge.largest) for name, edge in edges.items()}


def jagged(seed: int) -> tuple[Setting, Setting]:
    """Return need and floor. The floor has lines with a knee, and one class of eight that takes more; the need adds
    blocks of 2 MiB and jumps of up to 3 %."""
    dice = random.Random(seed)
    start, slope = dice.randint(2, 20) * GIB, dice.randint(1, 9) << 20
    knee, more = dice.randint(0, 2048), dice.random() / 20
    jumps = [1.01 + dice.random() * 0.03 for _ in range(64)]

    def floor(number: int) -> int:
        plain = start + slope * max(number - knee, 0) + (slope // 8) * number
        return int(plain * (1 + more * (number % 8 != 7)))

    return lambda number: int(floor(number) * jumps[number * 64 // 2048]) >> 21 << 21, floor


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("known", [True, False], ids=["floors known", "unknown"])
def test_it_is_what_looking_at_every_point_says(seed: int, known: bool) -> None:
    """And what it reports has been looked at: the ends, the point after the first of them, where its floor does not
    tell, and the stretch before that."""
    limits = {f"{size}": size * GIB for size in (4, 8, 12, 16, 24, 32, 48)}
    need, floor = jagged(seed)
    found, asked = edges(2048, need, limits, floor if known else None)
    assert answer(found) == truth(2048, need, limits)
    looked = {number for number, _ in asked}
    for size, edge in found.items():
        assert edge.complete
        assert {edge.all_up_to, edge.largest} <= {None, *looked}
        first = 0 if edge.all_up_to is None else edge.all_up_to + 1
        if first < 2048:
            assert first in looked or (known and floor(first) > limits[size])
            assert set(range(max(0, first - STRETCH), first)) <= looked


def one_in(period: int, seed: int) -> tuple[Setting, Setting]:
    """Return need and floor: a line; the need adds a little noise, and 3 % for one class of points."""
    dice = random.Random(seed)
    start, slope = dice.randint(1000, 2000) * MIB, dice.randint(2 * MIB, 4 * MIB)
    turn, noise = dice.randrange(period), [1.02 + dice.random() * 0.004 for _ in range(2048)]

    def floor(number: int) -> int:
        return start + slope * number

    return lambda number: int(floor(number) * (noise[number] + 0.03 * (number % period == turn))), floor


@pytest.mark.parametrize("period", [8, 16, 64])
@pytest.mark.parametrize("share", [None, 1.002, 1.01, 1.02], ids=str)
def test_some_of_a_class_are_seen_though_no_sample_is_one(period: int, share: float | None) -> None:
    """One card at a time: with a limit in the middle, or of so much of what the last point needs."""
    for seed in range(6):
        need, floor = one_in(period, seed)
        sizes = (4000 * MIB, 6000 * MIB) if share is None else (int(floor(2047) * 1.024 * share),)
        for size in sizes:
            found, asked = edges(2048, need, {"card": size}, floor)
            assert answer(found) == truth(2048, need, {"card": size})
            assert found["card"].complete and len(asked) < 320


def test_of_points_in_a_row_that_need_more_not_all_are_looked_at() -> None:
    """As lengths that round up to one more block do: a closer look tells them from one point alone, and its margin."""
    numbers = []
    for turn in range(0, 64, 8):

        def need(number: int, turn: int = turn) -> int:
            return int((16 * GIB + (number << 24)) * (1.05 if (number - turn) % 64 < 16 else 1.03))

        found, asked = edges(8192, need, {"card": 80 * GIB}, lambda number: 16 * GIB + (number << 24))
        assert answer(found) == truth(8192, need, {"card": 80 * GIB})
        numbers.append(len({number for number, _ in asked}))
    assert sum(numbers) / len(numbers) < 350  # 389 where runs of a dozen were looked at one by one


def test_without_passing_over_any_it_is_right_whatever_is_needed() -> None:
    dice = random.Random(0)
    needs = [dice.randint(1, 100) for _ in range(500)]
    limits = {"small": 2, "middle": 50, "large": 99}
    found, _ = edges(500, needs.__getitem__, limits, lambda number: 1, every=True)
    assert answer(found) == truth(500, needs.__getitem__, limits)
    assert {edge.margin for edge in found.values()} == {None}


def test_far_from_every_edge_few_points_are_looked_at() -> None:
    found, asked = edges(32_768, lambda n: GIB + (n << 20), {"card": 80 * GIB}, lambda n: GIB + (n << 20))
    assert len(asked) < 60
    assert found["card"].largest == found["card"].all_up_to == 32_767
    assert found["card"].margin == 0.01


def test_beyond_the_limit_samples_alone_are_looked_at_and_not_far() -> None:
    """Their need is found closely, because it is a measure for points that fit."""

    def need(number: int) -> int:
        return GIB + (number << 23)

    found, asked = edges(4096, need, {"card": 9 * GIB}, need)
    assert found["card"].largest == found["card"].all_up_to == 1024
    beyond = [(number, rooms) for number, rooms in asked if number > 1024]
    assert [number for number, _ in beyond] == [number for number in range(0, 4096, 85) if 1024 < number <= 1312]
    assert all(need(number) <= REACH * 9 * GIB and rooms == () for number, rooms in beyond)


def test_a_bound_on_the_looks_is_said_and_what_stays_open_of_one_card_is_not_the_other_s() -> None:
    limits = {"ragged": 10 * GIB, "far": 80 * GIB}
    found, asked = edges(4096, lambda n: (10 * GIB) + (n % 97 << 23), limits, lambda n: 9 * GIB, most=200)
    assert found["far"].complete and not found["ragged"].complete
    assert len(asked) <= 200 + 4096 // 8


def test_nothing_fits_or_nothing_is_known() -> None:
    assert answer(edges(100, lambda n: 2 * GIB, {"card": GIB}, lambda n: 2 * GIB)[0]) == {"card": (None, None)}
    assert answer(edges(100, lambda n: 2 * GIB, {"card": GIB})[0]) == {"card": (None, None)}
    unknown = survey({"setting": [None] * 100}, {"card": Card("setting", GIB)}, lambda wanted: {})["card"]
    assert (unknown.all_up_to, unknown.largest) == (None, None)
    assert unknown.looked_at == 0 and unknown.unanswered > 0 and not unknown.complete
    host = survey({"setting": [math.inf] * 100}, {"card": Card("setting", GIB)}, lambda wanted: {})["card"]
    assert (host.all_up_to, host.largest, host.looked_at, host.complete) == (None, None, 0, True)


def test_points_without_an_answer_are_counted() -> None:
    """As those of a target that raises at some lengths."""
    evaluate, _ = of(lambda n: GIB, lambda n: GIB)

    def some(wanted: Asked) -> Any:
        return evaluate({number: rooms for number, rooms in wanted.items() if number < 60})

    found = survey({"setting": [None] * 100}, {"card": Card("setting", 2 * GIB)}, some, every=True)["card"]
    assert (found.all_up_to, found.largest, found.looked_at, found.unanswered) == (59, 59, 60, 40)
    assert not found.complete


def without(needs: Setting, floor: Setting, missed: Callable[[int, tuple[int, ...]], bool]) -> tuple[Evaluate, Looks]:
    """Answers but for some points, asked with some rooms."""
    evaluate, asked = of(needs, floor)

    def some(wanted: Asked) -> dict[int, dict[str, RequiredBytes]]:
        found = evaluate(wanted)
        return {n: needs for n, needs in found.items() if not missed(n, tuple(wanted[n]["setting"]))}

    return some, asked


@pytest.mark.parametrize("known", [True, False], ids=["floors known", "unknown"])
def test_what_was_missed_is_not_judged_by_its_neighbours(known: bool) -> None:
    """A target may raise at a length, or a process die that looks at it: no edge lies there, though it might fit."""

    def need(number: int) -> int:
        return GIB + (number << 23)

    evaluate, asked = without(need, need, lambda number, rooms: number in (430, 1024))
    floors = [need(number) if known else None for number in range(2048)]
    cards = {name: Card("setting", size * GIB) for name, size in (("small", 9), ("large", 80))}
    found = survey({"setting": floors}, cards, evaluate)
    assert {430, 1024} <= {number for number, _ in asked}
    assert (found["small"].all_up_to, found["small"].largest, found["small"].unanswered) == (1023, 1023, 2)
    assert (found["large"].all_up_to, found["large"].largest, found["large"].unanswered) == (2047, 2047, 2)
    assert not found["small"].complete and not found["large"].complete


def test_what_needs_far_more_than_the_largest_card_has_is_no_measure_for_others() -> None:
    """How much more is not looked for. One sample, or every fiftieth point, which would fit by its floor."""
    limit = 10 * GIB
    floors = {"setting": [float(GIB + (n << 20)) for n in range(2048)]}
    cards = {"card": Card("setting", limit)}
    evaluate, asked = of(lambda n: GIB + (n << 20), lambda n: GIB + (n << 20))

    def without(period: int, turn: int) -> Evaluate:
        def bounded(wanted: Asked) -> dict[int, dict[str, RequiredBytes]]:
            more = {"setting": RequiredBytes(GIB, limit + 1, math.inf, True)}
            return evaluate(wanted) | {number: more for number in wanted if number % period == turn}

        return bounded

    one = survey(floors, cards, without(2048, 1849))["card"]
    assert (one.all_up_to, one.largest, one.complete) == (1848, 2047, True)
    assert len(asked) < 120
    many = survey(floors, cards, without(50, 49))["card"]
    assert (many.all_up_to, many.largest, many.complete) == (48, 2047, True)


def test_a_look_without_an_answer_is_not_repeated() -> None:
    """It was answered before, to a percent; in the one room that would decide there is no answer."""

    def need(number: int) -> int:
        return GIB + (number << 23)

    limits = {"small": need(51) - (1 << 22), "large": 80 * GIB}
    cards = {name: Card("setting", limit) for name, limit in limits.items()}
    for every in (True, False):
        evaluate, asked = without(need, lambda n: GIB, lambda number, rooms: bool(rooms) and number == 51)
        found = survey({"setting": [GIB] * 100}, cards, evaluate, every=every)
        assert max(Counter(number for number, _ in asked).values()) <= 4
        assert (found["small"].all_up_to, found["small"].unanswered, found["small"].complete) == (50, 1, False)
        assert found["large"].largest == 99


def test_what_has_no_answer_but_cannot_fit_is_beyond_the_card() -> None:
    """Point 10 asks for more than the small card has; of the large one it is not known whether it fits."""

    def need(number: int) -> int:
        return 1000 if number == 10 else 100

    cards = {"small": Card("setting", 500), "large": Card("setting", 5000)}
    evaluate, _ = without(need, need, lambda number, rooms: number == 10)
    known = {"setting": [need(number) for number in range(20)]}
    found = survey(known, cards, evaluate, every=True)
    assert (found["small"].all_up_to, found["small"].largest, found["small"].complete) == (9, 19, True)
    assert (found["large"].all_up_to, found["large"].largest, found["large"].complete) == (19, 19, False)


def line(number: int) -> int:
    return GIB + (number << 20)


def stepped(number: int) -> int:
    return GIB + (number if number < 999 else number + 1000 << 20)


def gentle(number: int) -> int:
    return 10 * GIB + (number << 18)


# Points, the floor, what is needed, and the limits of what the floor and the need are.
SHAPES: dict[str, tuple[int, Setting, Setting, list[int]]] = {
    # its neighbours say that the last fits, by 8 %, and it needs a tenth more; the first that does not is far below
    "the last that fits": (
        2048, stepped, lambda n: stepped(n) * {86: 20, 998: 11}.get(n, 10) // 10, [stepped(998) * 108 // 100]),
    # none may be passed over for its neighbours' sake
    "every seventh needs a fifth more": (4096, line, lambda n: line(n) * (12 if n % 7 == 0 else 10) // 10, [4 * GIB]),
    # it is found by the small card, and so is not passed over for the large one
    "one needs far more": (
        2048, line, lambda n: line(n) * (13 if n == 1000 else 10) // 10, [line(1000), line(1000) * 12 // 10]),
    # the samples are 43 apart; 32 points between two of them need 3 % more, and most of them more than there is
    "a jump between the samples": (
        2048, gentle, lambda n: gentle(n) * (103 if 1937 <= n < 1969 else 100) // 100, [gentle(1940) * 103 // 100]),
    # every eighth takes less: the largest of all that fit is not the end of those that all do
    "not monotone": (
        2048, lambda n: (n + 1 << 23) + (GIB if (n + 1) % 8 else 0),
        lambda n: (n + 1 << 23) + (GIB if (n + 1) % 8 else 0), [10 * GIB]),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_what_neighbours_do_not_tell_is_found(shape: str) -> None:
    points, floor, need, sizes = SHAPES[shape]
    limits = {f"card {n}": size for n, size in enumerate(sizes)}
    found, asked = edges(points, need, limits, floor)
    assert answer(found) == truth(points, need, limits)
    assert all(edge.complete for edge in found.values()) and len(asked) < 700


def test_what_is_not_looked_at_any_more_is_not_said_to_fit() -> None:
    need, floor = jagged(5)
    limits = {"card": 24 * GIB}
    right = edges(2048, need, limits, floor)[0]["card"]
    for most in (1, 50, 60, 70, 80):
        found = edges(2048, need, limits, floor, most=most)[0]["card"]
        assert found.complete or (found.all_up_to or 0) <= (right.all_up_to or 0)
        assert found.complete == (found == right)


def test_a_dip_between_the_samples_is_found_where_its_floor_is_known() -> None:
    """All the others cannot fit, so that nothing is looked at first."""

    def need(number: int) -> int:
        return GIB // 2 if number == 1 else 2 * GIB

    for every in (True, False):
        found, asked = edges(100, need, {"card": GIB}, need, every=every)
        assert answer(found) == {"card": (None, 1)}
        assert [number for number, _ in asked] == [1]
    assert answer(edges(100, need, {"card": GIB}, every=True)[0]) == {"card": (None, 1)}


def test_a_setting_has_floors_and_needs_of_its_own() -> None:
    needs = {"small": lambda n: GIB + (n << 20), "large": lambda n: GIB + (n << 21)}

    def evaluate(wanted: Asked) -> dict[int, dict[str, RequiredBytes]]:
        return {
            n: {name: RequiredBytes(needs[name](n), needs[name](n), needs[name](n), True) for name in rooms}
            for n, rooms in wanted.items()
        }

    floors = {name: [float(need(n)) for n in range(4096)] for name, need in needs.items()}
    cards = {f"{name} {size}": Card(name, size * GIB) for name in needs for size in (2, 3)}
    found = survey(floors, cards, evaluate)
    assert {name: edge.largest for name, edge in found.items()} == {
        "small 2": 1024, "small 3": 2048, "large 2": 512, "large 3": 1024,
    }  # fmt: skip


def test_samples_have_all_alignments() -> None:
    asked = edges(4096, lambda n: GIB, {"card": 2 * GIB}, lambda n: GIB)[1]
    assert {number % 8 for number, _ in asked} == set(range(8))


def test_the_margin_is_twice_what_a_point_needs_more_than_its_neighbours() -> None:
    """The samples are 0, 3, 6, ... of 150: the one at 39 needs 4 % more, so what lies about it fits by 8 %."""
    jump = 39

    def need(number: int) -> int:
        return GIB * 104 // 100 if number == jump else GIB

    fits, asked = edges(150, need, {"card": int(1.13 * GIB)}, lambda n: GIB)
    assert fits["card"].margin == 0.01 and {number for number, _ in asked} == {*range(0, 150, 3), 149}
    _, more = edges(150, need, {"card": int(1.11 * GIB)}, lambda n: GIB)
    assert {38, 40} <= {number for number, _ in more}


def test_one_card_s_looks_serve_the_others() -> None:
    limits = {f"{size}": size * GIB for size in (24, 26, 28)}
    need, floor = jagged(3)
    together = edges(2048, need, limits, floor)[1]
    alone = [edges(2048, need, {name: limit}, floor)[1] for name, limit in limits.items()]
    assert len(together) < sum(map(len, alone))
