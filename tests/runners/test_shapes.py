"""Symbolic traces are those that are traced directly, where their guards hold, or there is none."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import sympy
from conftest import TARGETS, tiny
from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv, Max, Mod

from vramsweep.harness import gpus, trial
from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.runners import custom, deepspeed_zero, shapes, torch_loop, tracing, trainer
from vramsweep.runners.predict import replay
from vramsweep.runners.shapes import Candidate, Refused
from vramsweep.runners.symbolic import Point, SymbolicTrace, compiled
from vramsweep.runners.trace import Trace

RUNNERS: dict[str, Any] = {"torch": torch_loop, "trainer": trainer, "deepspeed": deepspeed_zero, "custom": custom}
CARD = gpus.named("a100-80gb")
T = TypeVar("T")
Traced = tuple[Trace, dict[str, Any]]


def chosen(point: Point, **over: Any) -> trial.Trial:
    device = {"name": "simulated", "gpu": "a100-80gb"}
    return trial.parse(tiny(device=device, seq_len=point.seq_len, micro_batch=point.micro_batch, **over))


def target(name: str) -> dict[str, Any]:
    return {"runner": {"name": "custom", "target": f"{TARGETS / 'lengths.py'}:{name}"}}


def direct(folder: Path, point: Point, **over: Any) -> Traced:
    asked = chosen(point, **over)
    return tracing.trace_trial(asked, CARD, folder, RUNNERS[asked.runner.name])


def symbolic(folder: Path, point: Point, **over: Any) -> Candidate | Refused:
    asked = chosen(point, **over)
    return shapes.trace(asked, CARD, folder, RUNNERS[asked.runner.name])


def candidate(folder: Path, point: Point, **over: Any) -> Candidate:
    found = symbolic(folder, point, **over)
    assert isinstance(found, Candidate), found
    return found


def apart(work: Callable[..., T], *args: Any, **over: Any) -> T:
    """In a process of its own: DeepSpeed keeps its groups of ranks for one."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(work, args, over)


@pytest.mark.slow
def test_a_plain_loop_is_byte_for_byte_what_is_traced(tmp_path: Path) -> None:
    found = candidate(tmp_path, Point(77, 3))
    points = [Point(512, 2), Point(90, 7)]
    sure = shapes.confirmed(found, {point: direct(tmp_path, point) for point in points})
    assert isinstance(sure, SymbolicTrace), sure
    assert sure.basis == "symbolic"
    third, details = sure.at(Point(131, 5))
    traced, traced_details = direct(tmp_path, Point(131, 5))
    assert third.sizes == traced.sizes
    assert third.events == traced.events
    assert details == traced_details
    assert replay(third, AllocatorConfig(), None) == replay(traced, AllocatorConfig(), None)
    assert {*sure.template.sizes} != {*traced.sizes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("over", "length"),
    [({}, 33), ({"packing": "documents"}, 40), ({"runner": {"name": "trainer"}}, 33)],
    ids=["plain", "packed", "trainer"],
)
def test_more_samples_than_are_drawn_are_as_others(tmp_path: Path, over: dict[str, Any], length: int) -> None:
    found = candidate(tmp_path, Point(24, 10), **over)
    traced = {point: direct(tmp_path, point, **over) for point in (Point(16, 200), Point(length, 2))}
    assert isinstance(shapes.confirmed(found, traced), SymbolicTrace)


def test_a_branch_on_the_length_bounds_where_it_is_true(tmp_path: Path) -> None:
    short, long = (candidate(tmp_path, Point(length, 2), **target("branch")).symbolic for length in (300, 1500))
    for length in (2, 999, 1000, 1001, 2000):
        assert short.holds(Point(length, 2)) == (length <= 1000)
        assert long.holds(Point(length, 2)) == (length > 1000)
    assert len(long.template.events) > len(short.template.events)


def test_so_does_a_remainder(tmp_path: Path) -> None:
    found = candidate(tmp_path, Point(77, 2), **target("padded"))
    assert [found.symbolic.holds(Point(length, 2)) for length in (78, 80, 81, 88)] == [True, False, True, False]
    points = [Point(1003, 5), Point(18, 9)]
    traced = {point: direct(tmp_path, point, **target("padded")) for point in points}
    assert isinstance(shapes.confirmed(found, traced), SymbolicTrace)


def test_what_a_target_makes_of_the_trial_s_length_is_a_formula(tmp_path: Path) -> None:
    found = candidate(tmp_path, Point(77, 2), **target("positions"))
    traced = {point: direct(tmp_path, point, **target("positions")) for point in (Point(512, 3), Point(90, 7))}
    assert isinstance(shapes.confirmed(found, traced), SymbolicTrace)


def test_a_length_as_a_plain_number_is_refused(tmp_path: Path) -> None:
    found = symbolic(tmp_path, Point(77, 2), **target("counted"))
    assert isinstance(found, Refused)
    assert "plain number" in found.reason


def test_a_length_that_nobody_sees_is_found_in_direct_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_length(make: Callable[..., T], point: Point) -> T:
        monkeypatch.setenv("HIDDEN_LENGTH", str(point.seq_len))
        return make(tmp_path, point, **target("hidden"))

    found = with_length(candidate, Point(77, 2))
    refused = shapes.confirmed(found, {p: with_length(direct, p) for p in (Point(512, 3), Point(90, 7))})
    assert isinstance(refused, Refused)
    assert "sizes differ from those traced at seq_len 512" in refused.reason
    alike = {p: with_length(lambda *args, **over: direct(*args, **over), p) for p in (Point(77, 3), Point(77, 9))}
    assert isinstance(shapes.confirmed(found, alike), SymbolicTrace)  # nothing else was wrong
    with pytest.raises(ValueError, match="two points"):
        shapes.confirmed(found, {})


def test_points_without_guards_values_and_padding_are_refused(tmp_path: Path) -> None:
    found = candidate(tmp_path, Point(300, 2), **target("branch"))
    traced = {point: direct(tmp_path, point, **target("branch")) for point in (Point(90, 2), Point(1001, 2))}
    refused = shapes.confirmed(found, traced)
    assert isinstance(refused, Refused)
    assert "guards do not hold at seq_len 1001" in refused.reason
    assert isinstance(symbolic(tmp_path, Point(77, 2), **target("looked")), Refused)
    assert isinstance(symbolic(tmp_path, Point(77, 2), padding=0.25), Refused)


@pytest.mark.slow
def test_packed_samples_hold_where_as_many_documents_are_in_one(tmp_path: Path) -> None:
    """How many there are is the size of a tensor, and was asked of the samples of the traced length."""
    over = {"precision": "bf16", "packing": "documents", "attention": "flash_attention_2"}
    found = candidate(tmp_path, Point(20, 1), **over).symbolic
    sizes = {length: direct(tmp_path, Point(length, 1), **over)[0].sizes for length in (4, 6, 9, 11)}
    for length, traced in sizes.items():
        assert found.holds(Point(length, 1)) == (found.at(Point(length, 1))[0].sizes == traced), length
    assert not found.holds(Point(9, 1))


def test_a_batch_of_one_is_no_other_batch(tmp_path: Path) -> None:
    found = candidate(tmp_path, Point(77, 1), **target("positions"))
    assert found.symbolic.holds(Point(512, 1))
    assert not found.symbolic.holds(Point(512, 2))
    assert not found.symbolic.holds(Point(1, 1))
    traced = {point: direct(tmp_path, point, **target("positions")) for point in (Point(512, 1), Point(90, 1))}
    assert isinstance(shapes.confirmed(found, traced), SymbolicTrace)


def test_formulas_are_worked_out_as_expressions_are() -> None:
    length, batch = sympy.symbols("l b", integer=True, positive=True)
    names = {length: "seq_len", batch: "micro_batch"}
    for expression in (
        3 * length**2 * batch - 7 * (batch + 1) * (length - 2),
        FloorDiv(-length, 8) * -16 + Mod(length * batch, 3),
        Max(0, length - 5) * CeilToInt(IntTrueDiv(length, 32)),
    ):
        formula = compiled(shapes.written(expression, names))
        for point in (Point(7, 2), Point(64, 3), Point(129, 10)):
            values = {length: point.seq_len, batch: point.micro_batch}
            assert formula(point) == int(expression.subs(values)), (expression, point)
    for expression in (length / 2, sympy.sqrt(length), sympy.Symbol("u0") + 1, IntTrueDiv(length, 3)):
        with pytest.raises(shapes.Unwritable):
            shapes.written(expression, names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "over",
    [
        {"runner": {"name": "trainer"}, "grad_accum": 2},
        {"runner": {"name": "trainer"}, "precision": "fp16"},
        {"runner": {"name": "deepspeed"}, "sharding": "zero3", "precision": "fp16", "world_size": 2},
        {"runner": {"name": "deepspeed"}, "sharding": "zero2", "precision": "bf16", "offload_optimizer": True},
        {"sharding": "ddp", "world_size": 2},
        {"sharding": "fsdp1", "world_size": 2, "precision": "bf16"},
        {"sharding": "fsdp2", "world_size": 2, "precision": "bf16"},
        {"precision": "bf16", "attention": "eager", "checkpointing": "full"},
        {"precision": "bf16", "attention": "flash_attention_2"},
        {"precision": "bf16", "adapter": "lora", "quantization": "nf4"},
        {"precision": "bf16", "packing": "documents"},
    ],
    ids=str,
)
def test_so_are_other_runners_and_techniques(tmp_path: Path, over: dict[str, Any]) -> None:
    found = apart(symbolic, tmp_path, Point(77, 3), **over)
    assert isinstance(found, Candidate), found
    points = [Point(509, 2), Point(90, 7), Point(12, 4)]
    assert all(found.symbolic.holds(point) for point in points), found.symbolic.guards
    sure = shapes.confirmed(found, {point: apart(direct, tmp_path, point, **over) for point in points})
    assert isinstance(sure, SymbolicTrace), sure
