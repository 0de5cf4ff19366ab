"""Which points a symbolic trace is confirmed at."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import tiny

from vramsweep.harness import trial
from vramsweep.runners import build, shapes
from vramsweep.runners.curve import _alike, _symbolic, curve, witnesses
from vramsweep.runners.symbolic import Point, SymbolicTrace
from vramsweep.runners.trace import Trace


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
    found = _alike([Point(length, batch) for length in lengths for batch in (1, 2, 4)])
    assert found == [Point(length, batch) for length in lengths if length > 1 for batch in (2, 4)]
    assert _alike([Point(length, 1) for length in lengths]) == [Point(length, 1) for length in lengths if length > 1]
    assert _alike([]) == []


@pytest.mark.parametrize("untraceable", [True, False])
def test_why_there_is_no_symbolic_trace_is_said(untraceable: bool) -> None:
    """Its guards hold too seldom, or it would hold where nothing can be traced."""
    empty = SymbolicTrace(Trace(), (), (), (), (), (), {}, (), () if untraceable else ("seq_len == 5",), "unconfirmed")
    said: list[str] = []

    class Fake:
        def symbolic(self, *given: Any, **more: Any) -> shapes.Candidate:
            return shapes.Candidate(empty, frozenset(), frozenset())

        def kept(self, trials: Any) -> dict[Point, Any]:
            return {}

        def say(self, text: str) -> None:
            said.append(text)

    points = [Point(n, 2) for n in range(2, 40)]
    assert _symbolic(trial.parse(tiny()), points, Fake()) is None  # type: ignore[arg-type]
    (line,) = said
    assert ("nothing can be traced" if untraceable else "1 of 38 points") in line


def test_of_a_length_the_share_of_padding_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the batch it does not depend."""
    made, data = [], build.data
    monkeypatch.setattr(build, "data", lambda of: made.append(of.seq_len) or data(of))

    class Fake:
        def kept(self, trials: Any) -> dict[Point, Any]:
            return {}

        def symbolic(self, *given: Any, **more: Any) -> None:
            return None

    points = [Point(length, batch, length - length // 4) for length in (8, 16) for batch in (1, 2, 100)]
    known = curve(trial.parse(tiny(padding=0.25)), points, Fake()).cover.known  # type: ignore[arg-type]
    assert [known(where) for where in points] == [{"padding_fraction": 0.25}] * len(points)
    assert sorted(made) == [8, 16]
