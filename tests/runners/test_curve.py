"""Which points a symbolic trace is confirmed at."""

from __future__ import annotations

import pytest

from vramsweep.runners.curve import witnesses
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
