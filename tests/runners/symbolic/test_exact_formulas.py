"""Formulas through whole numbers: the true one, or none, or the point that would tell."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from vramsweep.runners.symbolic.exact_formulas import SPARE, Candidates, Unknown
from vramsweep.runners.trace.symbolic_trace import Point, compiled

LENGTHS = [Point(length, 1) for length in range(1, 2049)]
GRID = [Point(length, batch) for length in range(8, 1009, 8) for batch in (1, 2, 3, 8)]
BATCHES = [Point(640, batch) for batch in range(1, 65)]
PADDED = [Point(length, 2, length - round(0.3 * length)) for length in range(4, 1000)]


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def learned(points: Sequence[Point], truth: Callable[[Point], int], most: int = 30) -> tuple[str | Unknown, int]:
    """Answer every point that is asked for; return what is found, and the number of points."""
    candidates = Candidates(points)
    at = candidates.choose([], candidates.enough)
    while True:
        (found,) = candidates.fit(at, np.array([[truth(points[i])] for i in at]))
        if isinstance(found, str) or len(at) > most:
            return found, len(at)
        assert not set(found.ask) & set(at), "asked again"
        at += found.ask or candidates.choose(at, 2)


TRUTHS: dict[str, Callable[[Point], int]] = {
    "constant": lambda p: 12_345,
    "tokens": lambda p: 64 * p.seq_len * p.micro_batch + 7,
    "scores": lambda p: 4 * 12 * p.micro_batch * p.seq_len**2,
    "flash": lambda p: p.micro_batch * 16 * up(p.seq_len, 128) * 4,
    "padded mask": lambda p: p.micro_batch * p.seq_len * up(p.seq_len, 16) * 2,
    "efficient": lambda p: p.micro_batch * (896 * p.seq_len + 4 * 14 * up(p.seq_len, 32)) + 1000,
    "two roundings": lambda p: p.micro_batch * (4 * up(p.seq_len, 32) + 12 * up(p.seq_len, 128) + 5 * p.seq_len),
    "an eighth": lambda p: up(p.seq_len * p.micro_batch, 8) // 8 * 896 * 4,
    "square of rounded": lambda p: p.micro_batch * up(p.seq_len, 64) ** 2,
    "half of a product": lambda p: p.seq_len * (p.seq_len + 1) // 2 * p.micro_batch,
    "at most the table": lambda p: 8 * p.seq_len * p.micro_batch + min(131_072, 264 * p.seq_len * p.micro_batch),
    "large": lambda p: 151_936 * 8_192 * 6 * p.seq_len * p.micro_batch + 3,
}


@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS)
@pytest.mark.parametrize("points", [LENGTHS, GRID, BATCHES], ids=["lengths", "grid", "batches"])
def test_the_true_function_is_found_at_every_point(points: list[Point], truth: Callable[[Point], int]) -> None:
    found, taken = learned(points, truth)
    assert isinstance(found, str)
    assert [compiled(found)(p) for p in points] == [truth(p) for p in points]
    assert taken <= 24


def test_what_is_kept_of_padded_samples_is_a_name_in_formulas() -> None:
    found, _ = learned(PADDED, lambda p: 2 * (p.kept or 0) * 896 + 4 * 3 * ((p.kept or 0) + 128) + p.seq_len)
    assert isinstance(found, str) and "kept" in found
    assert [compiled(found)(p) for p in PADDED] == [1804 * (p.kept or 0) + 1536 + p.seq_len for p in PADDED]


@pytest.mark.parametrize("seed", range(3))
def test_numbers_without_a_rule_have_no_formula(seed: int) -> None:
    def lot(point: Point) -> int:
        return random.Random(f"{seed} {point}").randrange(1 << 20)

    for points in (LENGTHS, GRID, BATCHES):
        found, _ = learned(points, lot)
        assert isinstance(found, Unknown)


@pytest.mark.parametrize("multiple", [3, 24, 100, 1000])
def test_other_roundings_have_no_formula(multiple: int) -> None:
    found, _ = learned(LENGTHS, lambda p: 4 * up(p.seq_len, multiple))
    assert isinstance(found, Unknown)


def test_two_points_more_than_coefficients() -> None:
    candidates = Candidates(LENGTHS)
    few = candidates.choose([], len(candidates.polynomial) + SPARE - 1)
    (found,) = candidates.fit(few, np.array([[4 * LENGTHS[i].seq_len] for i in few]))
    assert isinstance(found, Unknown) and found.ask


def test_points_that_cannot_tell_ask_for_one_that_does() -> None:
    candidates = Candidates(LENGTHS)
    at = [LENGTHS.index(Point(length, 1)) for length in (256, 512, 768, 1280, 1536, 2048)]  # rounded they are the same
    (found,) = candidates.fit(at, np.array([[64 * LENGTHS[i].seq_len] for i in at]))
    assert isinstance(found, Unknown) and all(LENGTHS[i].seq_len % 256 for i in found.ask)


def test_terms_that_are_one_at_all_wanted_points_are_one_candidate() -> None:
    points = [Point(length, 1) for length in range(128, 4097, 128)]
    found, taken = learned(points, lambda p: up(p.seq_len, 128) * 3)
    assert isinstance(found, str) and taken <= 8
    assert [compiled(found)(p) for p in points] == [3 * p.seq_len for p in points]


def test_no_size_below_one_where_others_are_above() -> None:
    points = [Point(length, 1) for length in range(1, 400)]
    candidates = Candidates(points)
    at = [points.index(Point(length, 1)) for length in (101, 130, 147, 215, 303, 306, 399, 222)]
    (found,) = candidates.fit(at, np.array([[points[i].seq_len * 8 - 800] for i in at]))
    assert isinstance(found, Unknown)
    assert [points[i].seq_len for i in found.ask] == [1]
