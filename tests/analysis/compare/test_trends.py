"""Test trends along an axis: known slopes are found with their intervals, and noise seldom makes a claim."""

from typing import Any

import numpy as np
import pytest
import synthetic

from vramsweep.analysis.compare.trends import along, memory_trends
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
