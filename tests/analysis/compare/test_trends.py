"""Test trends and changes along an axis: they are found where they were put, and noise seldom makes a claim."""

from typing import Any

import numpy as np
import pytest
import synthetic

from vramsweep.analysis.compare.trends import along, find_level, find_places, find_turn, memory_trends
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
    with pytest.raises(UserError, match="use --axis seq_len or tokens"):
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


pytestmark = pytest.mark.deterministic

DRAWS = 200
X = np.arange(2.0, 2002, 2)


def changed(size: float, at: float, n: int, alike: float) -> tuple[float, float]:
    """Shares of draws with a change claimed, and of those with the truth in its interval; 3 % of noise a side."""
    x = np.round(np.linspace(1, 2048, n))
    claims = covered = 0
    for seed in range(DRAWS):
        random = np.random.default_rng([seed, n])
        logs = np.where(x < at, -0.01, size - 0.01) + 0.03 * np.sqrt(2) * noise(random, n, alike)
        if (found := find_level("tokens_per_s", {}, x, logs, np.full(n, np.nan), 0.01)) is not None:
            claims += 1
            covered += found.low < at <= found.high
    return claims / DRAWS, covered / max(claims, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "alike"), [(200, 0.0), (200, 0.5), (2048, 0.0), (2048, 0.5)])
def test_a_change_is_found_its_interval_covers_and_without_one_none_is_claimed(n: int, alike: float) -> None:
    assert min(changed(0.1, 800, n, alike)) >= 0.9
    assert changed(0.0, 800, n, alike)[0] <= 0.02


def test_repeats_tell_the_noise_where_there_are_few_pairs() -> None:
    x = np.array([128.0, 256, 512, 1024, 2048, 4096])
    logs = np.array([-0.05, -0.04, -0.05, 0.04, 0.05, 0.06])
    found = find_level("tokens_per_s", {}, x, logs, np.full(6, 0.005), 0.01)
    assert found is not None and (found.low, found.at, found.high) == (512, 1024, 1024)
    assert (found.before, found.after) == (pytest.approx(np.expm1(-0.05)), pytest.approx(np.expm1(0.05)))
    for errors in (np.nan, 0.05):
        assert find_level("tokens_per_s", {}, x, logs, np.full(6, errors), 0.01) is None


def test_memory_begins_to_differ_between_two_lengths() -> None:
    x = np.array([2048.0, 128, 256, 512, 1024])
    ratio = np.where(x < 900, 1.0, 0.9)
    found = find_turn("peak_reserved_bytes", {}, x, np.log(ratio), np.abs(ratio - 1) > 0.005)
    assert found is not None and found.exact and (found.low, found.high, found.before) == (512, 1024, 0)
    assert found.after == pytest.approx(-0.1)
    assert find_turn("peak_reserved_bytes", {}, x[1:], np.log(ratio[1:]), np.abs(ratio[1:] - 1) > 0.005) is None
    twice = np.array([1.1, 1.1, 0.9, 0.9, 1.1, 1.1])
    assert find_turn("peak_reserved_bytes", {}, np.arange(6.0), np.log(twice), np.full(6, True)) is None


def test_a_step_and_a_dip_are_where_they_are() -> None:
    random = np.random.default_rng(2)
    values = np.full(len(X), 10e9)
    bytes_ = 1e6 * random.standard_normal(len(X)) - np.where(X >= 722, 983e6, 0)
    (step,) = find_places("peak_reserved_bytes", {}, X, bytes_, values, "bytes")
    assert (step.start, step.stop) == (722, None) and step.size == pytest.approx(-983e6, rel=0.01)
    logs = 0.002 * random.standard_normal(len(X)) - np.where((X >= 790) & (X < 850), 0.06, 0)
    shuffled = random.permutation(len(X))
    (dip,) = find_places("tokens_per_s", {}, X[shuffled], logs[shuffled], np.ones(len(X)), "ratio")
    assert (dip.start, dip.stop) == (790, 850) and dip.size == pytest.approx(-0.06, abs=0.003)


def test_a_rise_before_a_dip_is_not_what_the_dip_takes_back() -> None:
    logs = np.select([X < 700, X < 790, X < 850], [0.02, 0.06, -0.08], 0.06)
    rise, dip = find_places("tokens_per_s", {}, X, logs, np.ones(len(X)), "ratio")
    assert (rise.start, rise.stop, dip.start, dip.stop) == (700, None, 790, 850)
