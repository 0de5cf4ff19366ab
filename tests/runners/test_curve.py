"""Which points a symbolic trace is confirmed at."""

from __future__ import annotations

import pytest

from vramsweep.runners.curve import _alike, witnesses
from vramsweep.runners.symbolic import Point


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
