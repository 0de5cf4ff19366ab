"""What changes along an axis: known slopes and turns are found with their intervals, noise seldom makes a claim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import synthetic

from vramsweep.analysis.compare.trends import Turn, along, memory_crossovers, memory_trends, speed_crossover, turning
from vramsweep.analysis.compare.verdicts import compare
from vramsweep.analysis.compare.verdicts_text import sentences
from vramsweep.analysis.data.groups import split
from vramsweep.harness.messages.errors import UserError

pytestmark = pytest.mark.deterministic

MIB, GIB = 2**20, 2**30
RESERVED = "peak_reserved_bytes"
DRAWS = 200

Array = np.ndarray[Any, np.dtype[np.float64]]


def noise(random: np.random.Generator, n: int, alike: float = 0.0) -> Array:
    """Normal values of variance 1; of neighbours, `alike` is the correlation."""
    found = random.standard_normal(n)
    for i in range(1, n if alike else 0):
        found[i] = alike * found[i - 1] + np.sqrt(1 - alike**2) * found[i]
    return found


def reserved(random: np.random.Generator, x: Array, slope: float, alike: float) -> Array:
    """Axis, A and B: A grows, B is lower by 300 MiB and a slope in bytes per token, all in blocks, with noise."""
    a = 8 * GIB + 3 * MIB * x + 20 * MIB * noise(random, len(x), alike)
    b = a - 300 * MIB + slope * x + 20 * MIB * noise(random, len(x), alike)
    blocks = 2 * MIB * np.round(np.array([a, b]) / (2 * MIB))
    return np.array([x, *blocks]).T


def claimed(slope: float, n: int, alike: float) -> tuple[float, float]:
    """Shares of draws with a trend claimed (in bytes), and with the slope in its interval."""
    claims = covered = 0
    x = np.unique(np.round(np.linspace(1, 2048, n)))
    for seed in range(DRAWS):
        random = np.random.default_rng([seed, n])
        trend = memory_trends(RESERVED, {}, reserved(random, x, slope, alike), 0.0)[0]
        claims += trend.claimed
        covered += trend.low <= slope <= trend.high
    return claims / DRAWS, covered / DRAWS


@pytest.mark.slow
@pytest.mark.parametrize(("n", "alike"), [(8, 0.0), (32, 0.0), (300, 0.6), (2048, 0.6), (2048, 0.9)])
def test_a_trend_is_found_and_its_interval_covers_and_without_one_it_is_seldom_claimed(n: int, alike: float) -> None:
    assert min(claimed(-100_000.0, n, alike)) >= 0.9
    assert claimed(0.0, n, alike)[0] <= 0.07


def test_four_pairs_are_too_few_for_a_trend() -> None:
    sizes = np.array([(x, 100 * GIB, 100 * GIB - x * GIB) for x in (1.0, 2.0, 3.0, 4.0)])
    assert memory_trends(RESERVED, {}, sizes, 0.001) == []


def test_a_trend_below_the_tolerance_is_not_claimed() -> None:
    sizes = np.array([(x, 100.0 * GIB, 100.0 * GIB + 1024 * x) for x in range(1, 50)])
    assert not memory_trends(RESERVED, {}, sizes, 0.001)[0].claimed
    trend = memory_trends(RESERVED, {}, sizes, 0.0)[0]
    assert trend.claimed
    assert trend.slope == trend.low == trend.high == 1024


def crossed(shape: str, n: int, alike: float) -> tuple[float, float]:
    """Shares of draws with a crossover claimed, and of those with the truth in the interval; 3 % of noise a side."""
    x = np.round(np.linspace(1, 2048, n))
    at = 200.5 if n > 1000 else (x[n // 4 - 1] + x[n // 4]) / 2
    truth = {"log": 0.05 * np.log(x / at), "step": np.where(x < at, -0.04, 0.06), "none": 0 * x, "faster": 0 * x + 0.05}
    claims = covered = 0
    for seed in range(DRAWS):
        random = np.random.default_rng([seed, n])
        logs = truth[shape] + 0.03 * np.sqrt(2) * noise(random, n, alike)
        for turn in speed_crossover({}, x, logs, np.full(n, np.nan)):
            assert turn.low <= turn.at <= turn.high
            claims += 1
            covered += turn.verdict == "FASTER" and turn.low <= at <= turn.high
    return claims / DRAWS, covered / max(claims, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "n", "alike"),
    [("log", 50, 0.0), ("log", 200, 0.5), ("log", 2048, 0.5), ("step", 200, 0.0), ("step", 2048, 0.5)],
)
def test_a_crossover_is_found_and_its_interval_covers(shape: str, n: int, alike: float) -> None:
    assert min(crossed(shape, n, alike)) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["none", "faster"])
@pytest.mark.parametrize(("n", "alike"), [(50, 0.0), (200, 0.5), (2048, 0.5)])
def test_without_a_crossover_none_is_claimed(shape: str, n: int, alike: float) -> None:
    assert crossed(shape, n, alike)[0] <= 0.02


def test_a_sign_that_turns_twice_is_no_crossover() -> None:
    x = np.arange(1.0, 201)
    y = np.where((x > 60) & (x < 140), 0.1, -0.1) + 0.01 * noise(np.random.default_rng(0), 200)
    assert turning(x, y, None) is None


def test_one_odd_run_moves_no_crossover() -> None:
    x = np.arange(1.0, 201)
    y = np.where(x > 80, 0.1, -0.1) + 0.01 * noise(np.random.default_rng(0), 200)
    before = turning(x, y, None)
    y[10], y[150] = 5, -5
    after = turning(x, y, None)
    assert isinstance(before, Turn) and isinstance(after, Turn)
    assert (after.low, after.at, after.high) == (before.low, before.at, before.high)
    assert before.low <= 80.5 <= before.high


def test_repeats_tell_the_noise_where_there_are_few_pairs() -> None:
    x = np.array([128.0, 256, 512, 1024, 2048, 4096])
    logs = np.array([-0.05, -0.04, -0.05, 0.04, 0.05, 0.06])
    turn = speed_crossover({}, x, logs, np.full(6, 0.005))[0]
    assert (turn.verdict, turn.onward, turn.low, turn.at, turn.high) == ("FASTER", True, 512, 768, 1024)
    assert speed_crossover({}, x, logs, np.full(6, np.nan)) == []
    assert speed_crossover({}, x, logs, np.full(6, 0.05)) == []
    assert speed_crossover({}, x, -logs, np.full(6, 0.005))[0].verdict == "SLOWER"


def test_pairs_at_one_place_turn_nowhere_between_them() -> None:
    """As of equal tokens that are of other lengths: the sign must turn between two places."""
    x = np.repeat([1.0, 2, 3, 4, 5, 6], 2)
    logs = np.array([-0.1, 0.1, *[0.1] * 10])
    assert speed_crossover({}, x, logs, np.full(12, 0.001)) == []
    assert speed_crossover({}, np.repeat([1.0, 2], 6), np.repeat([-0.1, 0.1], 6), np.full(12, 0.001)) == []
    (turn,) = speed_crossover({}, x, np.repeat([-0.1, -0.1, -0.1, 0.1, 0.1, 0.1], 2), np.full(12, 0.001))
    assert (turn.pairs, turn.low, turn.at, turn.high) == (12, 3, 3.5, 4)
    assert (turn.before, turn.after) == (pytest.approx(np.expm1(-0.1)), pytest.approx(np.expm1(0.1)))
    random = np.random.default_rng(0)
    a = np.full(40, 10.0 * GIB)
    b = a + np.where(np.arange(40) < 10, -GIB, GIB) + 10 * MIB * random.standard_normal(40)
    assert memory_crossovers(RESERVED, {}, np.array([np.repeat([1.0, 2], 20), a, b]).T, 0.001) == []


def test_memory_that_begins_to_be_smaller_does_so_between_two_lengths() -> None:
    sizes = np.array([(x, 10.0 * GIB, (10.0 if x < 900 else 9.0) * GIB) for x in (128.0, 256, 512, 1024, 2048)])
    (turn,) = memory_crossovers(RESERVED, {}, sizes, 0.001)
    assert (turn.verdict, turn.onward, turn.exact, turn.low, turn.high) == ("SMALLER", True, True, 512, 1024)
    assert turn.before == 0
    assert turn.after == pytest.approx(-0.1)
    assert memory_crossovers(RESERVED, {}, sizes[:4], 0.001) == []  # one pair is not clear


@pytest.mark.slow
def test_trends_are_along_the_axis_asked_for_and_apart_by_the_other_settings() -> None:
    rows = synthetic.sweep(repeats=1)
    found = compare(*split(synthetic.table(rows), "allocator", ["default", "expandable"]))
    by_length = along(found)
    assert by_length.axis == "seq_len"
    assert {t.settings["micro_batch"] for t in by_length.trends} == {1, 2, 4}
    (growing,) = (said for said in sentences(by_length, RESERVED) if said.endswith("[batch 1]"))
    assert growing.startswith("the gap grows by ") and " bytes per token (95 % interval " in growing
    assert "from -0.39 GiB (-10.93 %) at 128 tokens to -1.75 GiB (-11.20 %) at 8,192 tokens" in growing
    by_tokens = along(found, "tokens")
    assert all(not t.settings for t in by_tokens.trends)
    with pytest.raises(UserError, match="take --axis seq_len or tokens"):
        alone = [r for r in rows if r["micro_batch"] == 1]
        sides = split(synthetic.table(alone), "allocator", ["default", "expandable"])
        along(compare(*sides), "micro_batch")


def test_kernels_within_one_set_along_the_batch() -> None:
    rows = []
    for kernels, saved in (("none", 0), ("liger", 50 * MIB)):
        for row in synthetic.curve((1024,), batches=range(1, 8)):
            row["peak_allocated_bytes"] -= saved * row["micro_batch"]
            rows.append({**row, "kernels": kernels, "trial_id": row["trial_id"] + kernels})
    found = compare(*split(synthetic.table(rows), "kernels", ["none", "liger"]))
    changes = along(found)
    assert changes.axis == "micro_batch"
    (said,) = sentences(changes, "peak_allocated_bytes")
    assert said.startswith("the gap grows by 52,428,800 bytes per sample (95 % interval 52,428,800 to 52,428,800): ")
    assert "from -50.0 MiB" in said and "at 7 samples" in said
