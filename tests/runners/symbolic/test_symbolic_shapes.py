"""Symbolic traces are those that are traced directly, where their guards hold, or there is none."""

import builtins
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import sympy
from conftest import TARGETS, cases, parametrized, refusal, tiny
from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv, Max, Mod
from traces import A100, small

from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.spec import runner_table, trial, trial_parser
from vramsweep.runners.model import build
from vramsweep.runners.predict import make_trace
from vramsweep.runners.predict.replay_trace import replay
from vramsweep.runners.rank.entry_modules import import_entry
from vramsweep.runners.symbolic import symbolic_candidate, symbolic_shapes
from vramsweep.runners.symbolic.symbolic_candidate import Candidate, Refused
from vramsweep.runners.symbolic.trace_family import _symbolic, _traceable, curve, witnesses
from vramsweep.runners.trace.symbolic_trace import Point, SymbolicTrace, compiled
from vramsweep.runners.trace.trace_data import Trace

pytestmark = pytest.mark.deterministic

T = TypeVar("T")
Traced = tuple[Trace, dict[str, Any]]


def chosen(point: Point, **over: Any) -> trial.Trial:
    return trial_parser.parse(small(seq_len=point.seq_len, micro_batch=point.micro_batch, **over))


def module(over: dict[str, Any]) -> Any:
    name = over.get("runner", {"name": "torch"})["name"]
    return import_entry(runner_table.runner(name).module)


def target(name: str) -> dict[str, Any]:
    return {"runner": {"name": "custom", "target": f"{TARGETS / 'lengths.py'}:{name}"}}


def direct(folder: Path, point: Point, **over: Any) -> Traced:
    return make_trace.trace_trial(chosen(point, **over), A100, folder, module(over))


def symbolic(folder: Path, point: Point, **over: Any) -> Candidate | Refused:
    return symbolic_shapes.trace(chosen(point, **over), A100, folder, module(over))


def candidate(folder: Path, point: Point, **over: Any) -> Candidate:
    found = symbolic(folder, point, **over)
    assert isinstance(found, Candidate), found
    return found


def confirmed(folder: Path, traced: Point, at: tuple[Point, Point], **over: Any) -> SymbolicTrace | Refused:
    """The symbolic trace of one point, held against direct traces of two others."""
    found = candidate(folder, traced, **over)
    return symbolic_candidate.verified(found, {point: direct(folder, point, **over) for point in at})


def apart(work: Callable[..., T], *args: Any, **over: Any) -> T:
    """In a process of its own: DeepSpeed keeps its groups of ranks for one."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(work, args, over)


@pytest.mark.slow
def test_a_plain_loop_is_byte_for_byte_what_is_traced(tmp_path: Path) -> None:
    sure = confirmed(tmp_path, Point(77, 3), (Point(512, 2), Point(90, 7)))
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
@parametrized("trials_of_many_samples", ids=["plain", "packed", "trainer"])
def test_more_samples_than_are_drawn_are_as_others(tmp_path: Path, over: dict[str, Any], length: int) -> None:
    at = Point(16, 200), Point(length, 2)
    assert isinstance(confirmed(tmp_path, Point(24, 10), at, **over), SymbolicTrace)


@pytest.mark.slow
def test_a_branch_on_the_length_bounds_where_it_is_true(tmp_path: Path) -> None:
    short, long = (candidate(tmp_path, Point(length, 2), **target("branch")).symbolic for length in (300, 1500))
    for length in (2, 999, 1000, 1001, 2000):
        assert short.holds(Point(length, 2)) == (length <= 1000)
        assert long.holds(Point(length, 2)) == (length > 1000)
    assert len(long.template.events) > len(short.template.events)


@pytest.mark.slow
def test_so_does_a_remainder(tmp_path: Path) -> None:
    found = candidate(tmp_path, Point(77, 2), **target("padded"))
    assert [found.symbolic.holds(Point(length, 2)) for length in (78, 80, 81, 88)] == [True, False, True, False]
    at = Point(1003, 5), Point(18, 9)
    assert isinstance(confirmed(tmp_path, Point(77, 2), at, **target("padded")), SymbolicTrace)


def test_what_a_target_makes_of_the_trial_s_length_is_a_formula(tmp_path: Path) -> None:
    at = Point(512, 3), Point(90, 7)
    assert isinstance(confirmed(tmp_path, Point(77, 2), at, **target("positions")), SymbolicTrace)


def test_a_length_as_a_plain_number_is_refused(tmp_path: Path) -> None:
    found = symbolic(tmp_path, Point(77, 2), **target("counted"))
    assert isinstance(found, Refused)
    assert "plain number" in found.reason


def test_a_length_that_nobody_sees_is_found_in_direct_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_length(make: Callable[..., T], point: Point) -> T:
        monkeypatch.setenv("HIDDEN_LENGTH", str(point.seq_len))
        return make(tmp_path, point, **target("hidden"))

    found = with_length(candidate, Point(77, 2))
    refused = symbolic_candidate.verified(found, {p: with_length(direct, p) for p in (Point(512, 3), Point(90, 7))})
    assert isinstance(refused, Refused)
    assert "sizes differ from those traced at seq_len 512" in refused.reason
    alike = {p: with_length(lambda *args, **over: direct(*args, **over), p) for p in (Point(77, 3), Point(77, 9))}
    assert isinstance(symbolic_candidate.verified(found, alike), SymbolicTrace)  # nothing else was wrong
    assert "two points" in refusal(ValueError, symbolic_candidate.verified, found, {})


def test_points_without_guards_values_and_padding_are_refused(tmp_path: Path) -> None:
    refused = confirmed(tmp_path, Point(300, 2), (Point(90, 2), Point(1001, 2)), **target("branch"))
    assert isinstance(refused, Refused)
    assert "guards do not hold at seq_len 1001" in refused.reason
    assert isinstance(symbolic(tmp_path, Point(77, 2), **target("looked")), Refused)
    assert isinstance(symbolic(tmp_path, Point(77, 2), padding=0.25), Refused)


@parametrized("errors_of_the_machine")
def test_what_only_the_machine_of_now_lacks_is_raised_and_so_not_kept(
    kind: str, given: tuple[Any, ...], passes: bool, tmp_path: Path
) -> None:
    class Fails:
        def run(self, *_: Any) -> None:
            try:
                raise getattr(builtins, kind)(*given)
            except Exception as cause:
                raise RuntimeError("the step failed") from cause

    if passes:
        with pytest.raises(RuntimeError, match="the step failed"):
            symbolic_shapes.trace(chosen(Point(77, 2)), A100, tmp_path, Fails())
    else:
        assert isinstance(symbolic_shapes.trace(chosen(Point(77, 2)), A100, tmp_path, Fails()), Refused)


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
    at = Point(512, 1), Point(90, 1)
    assert isinstance(confirmed(tmp_path, Point(77, 1), at, **target("positions")), SymbolicTrace)


def test_formulas_are_worked_out_as_expressions_are() -> None:
    length, batch = sympy.symbols("l b", integer=True, positive=True)
    names = {length: "seq_len", batch: "micro_batch"}
    for expression in (
        3 * length**2 * batch - 7 * (batch + 1) * (length - 2),
        FloorDiv(-length, 8) * -16 + Mod(length * batch, 3),
        Max(0, length - 5) * CeilToInt(IntTrueDiv(length, 32)),
    ):
        formula = compiled(symbolic_shapes.written(expression, names))
        for point in (Point(7, 2), Point(64, 3), Point(129, 10)):
            values = {length: point.seq_len, batch: point.micro_batch}
            assert formula(point) == int(expression.subs(values)), (expression, point)
    for expression in (length / 2, sympy.sqrt(length), sympy.Symbol("u0") + 1, IntTrueDiv(length, 3)):
        with pytest.raises(symbolic_shapes.NotSerializable):
            symbolic_shapes.written(expression, names)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [text for (text,) in cases("symbolic_trials")])
def test_so_are_other_runners_and_techniques(tmp_path: Path, settings: str) -> None:
    over = json.loads(settings)
    module(over)  # imported once for four processes
    found = apart(symbolic, tmp_path, Point(77, 3), **over)
    assert isinstance(found, Candidate), found
    points = [Point(509, 2), Point(90, 7), Point(12, 4)]
    assert all(found.symbolic.holds(point) for point in points), found.symbolic.guards
    sure = symbolic_candidate.verified(found, {point: apart(direct, tmp_path, point, **over) for point in points})
    assert isinstance(sure, SymbolicTrace), sure


# Which points a symbolic trace is confirmed at


@pytest.mark.parametrize(
    "held",
    [
        [Point(length, batch) for length in range(2, 50) for batch in (2, 3, 4)],
        [Point(length, 2) for length in range(64, 2049, 64)],
        [Point(100, 3), Point(100, 4), Point(104, 3), Point(160, 3), Point(200, 3)],  # what an interrupted grid left
        [Point(7, 2), Point(8, 2)],
    ],
    ids=["grid", "aligned", "rest", "two"],
)
def test_witnesses_differ_in_all_that_the_points_do(held: list[Point]) -> None:
    found = witnesses(held)
    assert {held[0], held[-1]} <= set(found) <= set(held)
    assert len(found) == len(set(found)) >= min(3, len(held))
    for quality in (lambda p: p.seq_len % 8 == 0, lambda p: p.micro_batch):
        assert min(2, len({*map(quality, held)})) <= len({*map(quality, found)})


def test_one_symbolic_trace_holds_for_ones_or_for_several() -> None:
    lengths = range(1, 30)
    found = _traceable([Point(length, batch) for length in lengths for batch in (1, 2, 4)])
    assert found == [Point(length, batch) for length in lengths if length > 1 for batch in (2, 4)]
    assert _traceable([Point(length, 1) for length in lengths]) == [
        Point(length, 1) for length in lengths if length > 1
    ]
    assert _traceable([]) == []


@pytest.mark.parametrize("untraceable", [True, False])
def test_why_there_is_no_symbolic_trace_is_said(untraceable: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Its guards hold too seldom, or it would hold where nothing can be traced."""
    empty = SymbolicTrace(Trace(), (), (), (), (), (), {}, (), () if untraceable else ("seq_len == 5",), "unconfirmed")

    class Fake:
        def symbolic(self, *given: Any, **more: Any) -> symbolic_candidate.Candidate:
            return symbolic_candidate.Candidate(empty, (), ())

        def kept(self, trials: Any) -> dict[Point, Any]:
            return {}

    points = [Point(n, 2) for n in range(2, 40)]
    assert _symbolic(trial_parser.parse(tiny()), points, Fake()) is None  # type: ignore[arg-type]
    (line,) = capsys.readouterr().out.splitlines()
    assert ("cannot be traced" if untraceable else "1 of 38 points") in line


def test_of_a_length_the_share_of_padding_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share does not depend on the batch."""
    made, data = [], build.data
    monkeypatch.setattr(build, "data", lambda of: made.append(of.seq_len) or data(of))

    class Fake:
        def kept(self, trials: Any) -> dict[Point, Any]:
            return {}

        def symbolic(self, *given: Any, **more: Any) -> None:
            return None

    points = [Point(length, batch, length - length // 4) for length in (8, 16) for batch in (1, 2, 100)]
    known = curve(trial_parser.parse(tiny(padding=0.25)), points, Fake()).cover.known  # type: ignore[arg-type]
    assert [known(where) for where in points] == [{"padding_fraction": 0.25}] * len(points)
    assert sorted(made) == [8, 16]
