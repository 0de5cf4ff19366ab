"""Pieces: what a few traces say of many points is what tracing each would say, or nothing is said."""

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from conftest import cases
from traces import small, trace_trial

from vramsweep.harness.hardware.interconnects import Collective
from vramsweep.harness.hardware.roofline import Work
from vramsweep.harness.spec import length_distribution, trial_parser
from vramsweep.harness.spec.trial import InvalidTrial
from vramsweep.runners.model import build
from vramsweep.runners.symbolic.piecewise_templates import CHECKS, FEW, MOST, Cover, Known, Traced, cover
from vramsweep.runners.trace.symbolic_trace import Point, difference
from vramsweep.runners.trace.trace_data import HostStorages, Maker, Mark, Trace

pytestmark = pytest.mark.deterministic

LENGTHS = [Point(length, 1) for length in range(1, 2049)]
GRID = [Point(length, batch) for length in range(8, 4001, 8) for batch in (1, 2, 4)]
BATCHES = [Point(512, batch) for batch in range(1, 65)]
EVERY = [
    pytest.param(LENGTHS, id="lengths"),
    pytest.param(GRID, id="grid", marks=pytest.mark.slow),
    pytest.param(BATCHES, id="batches"),
]
Truth = Callable[[Point], Sequence[int]]


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def made(sizes: Sequence[int], kind: str = "", micro_batch: int = 1) -> Traced:
    """A trace of these storages, the last of them the host's too; `kind` is the kernels'."""
    numbers = range(1, len(sizes) + 1)
    host = HostStorages([sizes[-1]], ["other"], [1], [Mark(1, None, "load")], pinned=[True])
    trace = Trace(
        list(sizes), ["activations"] * len(sizes), [*numbers, *(-n for n in numbers)], [Mark(len(sizes), None, "load")],
        streams=[0] * len(sizes), origins=[0] * len(sizes), makers=[Maker("", "op", "")],
        kernels=[(Work(kind, 0, 3 * size, 1), 1) for size in sizes],
        collectives=[(Collective("all_reduce", sizes[0]), 2)], host=host,
    )  # fmt: skip
    return Traced(trace, {"parameters": 100, "runner_config": {"per_device": micro_batch, "nested": {"on": True}}})


class Asked:
    """Traces by a function of the point, and keeps what was asked for. None: the point cannot be traced."""

    def __init__(self, truth: Callable[[Point], Traced | None]) -> None:
        self.truth, self.points = truth, list[Point]()

    def __call__(self, points: Sequence[Point]) -> Mapping[Point, Traced]:
        assert not set(points) & set(self.points), "traced twice"
        self.points += points
        found = {point: self.truth(point) for point in points}
        return {point: one for point, one in found.items() if one is not None}


def of(truth: Truth, kind: Callable[[Point], str] = lambda p: "") -> Asked:
    return Asked(lambda p: made(truth(p), kind(p), p.micro_batch))


def judged(points: Collection[Point], asked: Asked, known: Known = lambda point: {}) -> Cover:
    """The cover, every point of which is right or left."""
    found = cover(points, asked, known)
    assert set(asked.points) <= set(points)
    for point in points:
        said, true = found.at(point), asked.truth(point)
        if said is None:
            assert point in found.left or true is None
            continue
        assert true is not None and point not in found.left
        assert difference(said[:2], true) is None, point
        assert said[2] == "traced" or int(said[2].split()[2]) > CHECKS
        if said[2] != "traced":
            assert [piece.at(point)[0] == said[0] for piece in found.pieces if piece.holds(point)] == [True]
    return found


def plain(p: Point) -> list[int]:
    tokens = p.seq_len * p.micro_batch
    return [4096, 64 * tokens, 48 * tokens * p.seq_len, p.micro_batch * 16 * up(p.seq_len, 128), 8 * p.seq_len]


def stepped(p: Point) -> Traced:
    """As plain, with one size more that goes in steps, by what it follows, and is nothing where there is little."""
    tokens, (trace, details) = p.seq_len * p.micro_batch, made(plain(p), micro_batch=p.micro_batch)
    size = max(min(9, math.ceil(tokens / 48)), math.ceil(tokens / 90)) * 1024 if tokens >= 700 else 0
    trace.sizes.append(size)
    for listed, value in ((trace.categories, "temporaries"), (trace.streams, 0), (trace.origins, 0)):
        listed.append(value)
    trace.events[5:5] = [6, -6]
    trace.marks[0] = Mark(7, None, "load")
    steps = "min(1, {} // 700) * max(min(9, -(-{} // 48)), -(-{} // 90)) * 1024"
    return Traced(replace(trace, stepwise=[(5, steps, tokens)]), details)


@pytest.mark.parametrize(("points", "traces"), [(LENGTHS, 14), (GRID, 18), (BATCHES, 12)])
@pytest.mark.parametrize("truth", [lambda p: made(plain(p), "", p.micro_batch), stepped], ids=["plain", "in steps"])
def test_few_traces_of_an_undivided_configuration(
    points: list[Point], traces: int, truth: Callable[[Point], Traced]
) -> None:
    found = judged(points, asked := Asked(truth))
    assert not found.left and len(found.pieces) == 1
    assert len(asked.points) <= traces
    said = found.at(next(p for p in points if p not in asked.points))
    assert said is not None and said[2] == f"checked at {len(asked.points)} points"


def test_few_points_are_traced_each() -> None:
    asked = of(plain)
    found = judged(LENGTHS[:FEW], asked)
    assert sorted(asked.points) == LENGTHS[:FEW] and not found.pieces and not found.left
    assert cover([], of(plain)).at(Point(1, 1)) is None


def test_nothing_is_said_of_what_was_not_wanted() -> None:
    found = cover(LENGTHS[8::8], of(plain))
    assert found.at(LENGTHS[9]) is None and found.at(Point(64, 2)) is None


DIVIDED: dict[str, tuple[Truth, Callable[[Point], str]]] = {
    "one is another matter": (lambda p: plain(p) if p.seq_len > 1 else [5], lambda p: ""),
    "batch 1 has other kernels": (plain, lambda p: str(p.micro_batch == 1)),
    "aligned to 8": (plain, lambda p: str(p.seq_len % 8 == 0)),
    "aligned to 64": (plain, lambda p: str(p.seq_len % 64 == 0)),
    "batch even": (plain, lambda p: str(p.micro_batch % 2)),
    "an edge": (plain, lambda p: str(p.seq_len > 777)),
    "an edge in tokens": (plain, lambda p: str(p.seq_len * p.micro_batch > 1500)),
    "a step": (lambda p: [*plain(p), 100 + 8 * p.seq_len + (4096 if p.seq_len >= 1000 else 0)], lambda p: ""),
    "at most so many": (lambda p: [*plain(p), 64 * min(1000, p.seq_len * p.micro_batch)], lambda p: ""),
    "an edge among the aligned": (plain, lambda p: str(p.seq_len % 16 == 0 and p.seq_len > 500)),
    "two edges": (plain, lambda p: str((p.seq_len > 200) + (p.seq_len > 1300))),
    "other sizes where aligned": (lambda p: [*plain(p), 8 if p.seq_len % 32 == 0 else 24 * p.seq_len], lambda p: ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("points", EVERY)
@pytest.mark.parametrize(("truth", "kind"), DIVIDED.values(), ids=DIVIDED)
def test_pieces_are_found_with_their_exact_edges(
    points: list[Point], truth: Truth, kind: Callable[[Point], str]
) -> None:
    asked = of(truth, kind)
    found = judged(points, asked)
    assert not found.left
    assert len(asked.points) <= min(MOST, 66)


def lot(point: Point, many: int) -> int:
    return int(hashlib.sha256(str(point).encode()).hexdigest(), 16) % many


UNRULY: dict[str, tuple[Truth, Callable[[Point], str]]] = {
    "padded to 24": (lambda p: [*plain(p), 4 * up(p.seq_len * p.micro_batch, 24)], lambda p: ""),
    "by lot": (lambda p: [*plain(p), 1 + lot(p, 1000)], lambda p: ""),
    "events by lot": (plain, lambda p: str(lot(p, 3))),
    "cubes": (lambda p: [p.seq_len**3 + p.micro_batch**3], lambda p: ""),
    "chunks": (lambda p: [64] * -(-p.seq_len * p.micro_batch // 37), lambda p: ""),
}


@pytest.mark.parametrize("points", EVERY)
@pytest.mark.parametrize(("truth", "kind"), UNRULY.values(), ids=UNRULY)
def test_what_follows_no_rule_is_left(points: list[Point], truth: Truth, kind: Callable[[Point], str]) -> None:
    asked = of(truth, kind)
    found = judged(points, asked)
    assert found.left or len(asked.points) == len(points)
    assert len(asked.points) <= MOST


def test_points_that_cannot_be_traced() -> None:
    found = judged(LENGTHS, Asked(lambda p: made(plain(p)) if p.seq_len <= 1500 else None))
    assert found.left == set(LENGTHS[1500:]) and len(found.pieces) == 1
    odd = judged(LENGTHS, Asked(lambda p: made(plain(p)) if p.seq_len % 2 == 0 else None))
    assert odd.left == set(LENGTHS[::2])
    nothing = judged(LENGTHS, none := Asked(lambda p: None))
    assert nothing.left == set(LENGTHS) and len(none.points) < 20


def test_a_target_that_remembers_is_left() -> None:
    """Its events are others each time that it is traced, so nothing about a point can be known from another."""
    calls = itertools.count()
    asked = Asked(lambda p: made(plain(p), str(next(calls) % 3)))
    found = cover(LENGTHS, asked)
    assert set(found.left) == set(LENGTHS) - set(asked.points) and len(asked.points) <= MOST


@pytest.mark.slow
def test_a_check_that_disagrees_divides() -> None:
    """A length that is drawn as a check is unlike the others: more is asked, and nothing wrong is said."""
    checks = cover(LENGTHS, asked := of(plain))
    assert len(checks.pieces) == 1
    last = asked.points[-1]
    judged(LENGTHS, again := of(lambda p: [*plain(p)[:-1], plain(p)[-1] + (512 if p == last else 0)]))
    assert last in again.points and len(again.points) > len(asked.points)


def test_one_length_amid_others_is_not_seen() -> None:
    """The limit of a few points, which is why a row says at how many the formulas were checked."""
    asked = of(lambda p: [64 * p.seq_len + (512 if p.seq_len == 1000 else 0)])
    found = cover(LENGTHS, asked)
    said = found.at(LENGTHS[999])
    assert LENGTHS[999] not in asked.points
    assert said is not None and said[0].sizes == [64_000] and said[2].startswith("checked at")


def test_details_that_vary_and_details_that_are_known() -> None:
    def truth(p: Point) -> Traced:
        trace, details = made(plain(p), "", p.micro_batch)
        return Traced(trace, details | {"padding_fraction": 1 / p.seq_len})

    judged(GRID, Asked(truth), lambda p: {"padding_fraction": 1 / p.seq_len})
    left = judged(GRID, Asked(truth), lambda p: {"padding_fraction": 0.5})
    assert not left.pieces


@pytest.mark.slow
def test_thousands_of_points_quickly() -> None:
    points = [Point(length, 1) for length in range(1, 32_769)]
    found = cover(points, asked := of(plain))
    assert not found.left and len(asked.points) <= 16
    for point in random.Random(0).sample(points, 500):
        said = found.at(point)
        assert said is not None and said[0].sizes == plain(point)


# Real traces


def point(values: dict[str, Any], length: int, batch: int) -> Point:
    share = values.get("padding", 0.0)
    return Point(length, batch, length - length_distribution.padded_tokens(share, length) if share else None)


def filled(values: dict[str, Any], p: Point) -> dict[str, Any]:
    return small(seq_len=p.seq_len, micro_batch=p.micro_batch, **values)


def direct(values: dict[str, Any], folder: Path, p: Point) -> Traced | None:
    place = folder / "of" / f"{p.seq_len}-{p.micro_batch}"
    place.mkdir(parents=True, exist_ok=True)
    try:
        return Traced(*trace_trial(filled(values, p), place))
    except InvalidTrial:
        return None


def really(
    values: dict[str, Any], points: Sequence[Point], trace: Callable[[Sequence[Point]], Mapping[Point, Traced]]
) -> Cover:
    """The cover of real traces, compared with direct ones at random points: everything, event for event."""
    found = cover(points, trace, lambda p: dict(build.data(trial_parser.parse(filled(values, p))).columns))
    drawn = [p for p in random.Random(str(values)).sample(points, 12) if p not in found.traced][:3]
    for p, true in trace(drawn).items():
        said = found.at(p)
        if said is not None:
            assert difference(said[:2], true) is None
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("case", "settings"), cases("piecewise_trials"))
def test_real_traces_of_techniques(case: str, settings: str, tmp_path: Path) -> None:
    values = json.loads(settings)
    points = [point(values, length, batch) for length in range(16, 1700, 4) for batch in (1, 2, 3)]
    found = really(
        values, points, lambda asked: {p: one for p in asked if (one := direct(values, tmp_path, p)) is not None}
    )
    assert not found.left and len(found.traced) <= MOST, case


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_traces_of_deepspeed(tmp_path: Path) -> None:
    """In processes of their own: DeepSpeed keeps its groups of ranks as long as one lives. They are forked from one
    that has imported it, which no other test asks multiprocessing for."""
    values = {"runner": {"name": "deepspeed"}, "sharding": "zero3", "world_size": 4, "precision": "bf16"}
    points = [point(values, length, 1) for length in range(2, 1025)]
    context = get_context("forkserver")
    context.set_forkserver_preload(["vramsweep.runners.loops.deepspeed_engine"])
    with ProcessPoolExecutor(2, context, max_tasks_per_child=1) as pool:

        def trace(asked: Sequence[Point]) -> Mapping[Point, Traced]:
            found = {p: pool.submit(direct, values, tmp_path, p) for p in asked}
            return {p: one for p, future in found.items() if (one := future.result()) is not None}

        assert not really(values, points, trace).left
