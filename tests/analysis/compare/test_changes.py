"""Changes of level, steps and dips of a difference: found where they were put, and not where there is nothing."""

import numpy as np
import pytest
from test_trends import noise

from vramsweep.analysis.compare.trends import find_level, find_places, find_turn

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
