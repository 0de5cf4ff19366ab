"""Steady steps: the tests' false alarms by simulation, their power on drifting clocks, and scipy as the oracle."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from vramsweep.harness.rows import step_statistics

ROWS = 2000
Array = np.ndarray[Any, np.dtype[np.float64]]


def noise(random: np.random.Generator, rows: int, steps: int, deviation: float, carried: float = 0.0) -> Array:
    """Steps of 50 ms with normal noise, of which each keeps a share of the one before (AR(1)); shape (rows, steps)."""
    fresh = random.normal(size=(rows, 50 + steps)) * np.sqrt(1 - carried**2)
    for at in range(1, fresh.shape[1]):
        fresh[:, at] += carried * fresh[:, at - 1]
    return 0.05 * (1 + deviation * fresh[:, 50:])


def share(test: Callable[[Sequence[float]], bool | None], rows: Array) -> float:
    return float(np.mean([bool(test(row.tolist())) for row in rows]))


@pytest.mark.parametrize("steps", [10, 28])
@pytest.mark.parametrize("deviation", [0.005, 0.02, 0.05])
def test_independent_steps_are_seldom_flagged(steps: int, deviation: float) -> None:
    """No more than the stated chance: of 2,000 rows up to 31 are within three standard errors of 1 %."""
    rows = noise(np.random.default_rng(20261), ROWS, steps, deviation)
    limit = step_statistics.FALSE_ALARM + 3 * np.sqrt(step_statistics.FALSE_ALARM / ROWS)
    assert share(step_statistics.is_drifting, rows) <= limit
    assert share(step_statistics.outlying_end, rows) <= limit
    assert share(step_statistics.is_noisy, rows) == 0.0


def test_what_autocorrelated_steps_do() -> None:
    """The documented limit: noise that carries over looks like a drift more often, unless it is small."""
    random = np.random.default_rng(20262)
    loud, quiet = (noise(random, ROWS, 10, deviation, carried=0.6) for deviation in (0.02, 0.005))
    assert 0.06 < share(step_statistics.is_drifting, loud) < 0.12
    assert share(step_statistics.is_drifting, quiet) < 0.01
    assert share(step_statistics.outlying_end, loud) < 0.01


@pytest.mark.parametrize(("sign", "what"), [(-1, "warm-up that goes on"), (1, "clocks that fall")])
def test_a_drift_is_seen(sign: int, what: str) -> None:
    """Ten steps that change by 8 % from the first to the last, with noise of 1 %: nine rows in ten are flagged."""
    rows = noise(np.random.default_rng(20263), 200, 10, 0.01) * (1 + sign * 0.08 * np.linspace(0, 1, 10))
    assert share(step_statistics.is_drifting, rows) > 0.9, what


def test_a_drift_too_small_to_move_the_mean_is_none() -> None:
    times = [0.05 * (1 + 0.001 * step) for step in range(10)]
    assert step_statistics.p_value(times) < 1e-5
    assert step_statistics.is_drifting(times) is False


@pytest.mark.parametrize("at", [0, 9])
def test_an_odd_end_is_seen_and_an_odd_middle_is_none(at: int) -> None:
    times = noise(np.random.default_rng(20264), 1, 10, 0.01)[0].tolist()
    assert step_statistics.outlying_end(times) is False
    odd = [*times]
    odd[at] *= 1.2
    assert step_statistics.outlying_end(odd) is True
    middle = [*times]
    middle[4] *= 1.2
    assert step_statistics.outlying_end(middle) is False


def test_an_odd_end_among_many_moves_nothing() -> None:
    times = [0.05] * 499 + [0.1]
    assert step_statistics.outlying_end(times) is False


@pytest.mark.parametrize("steps", [6, 9, 10, 25, 60])
def test_the_chance_is_scipy_s(steps: int) -> None:
    """Kendall's tau against the order, counted exactly by another program."""
    generator = random.Random(steps)
    for slope in (0.0, 0.02, -0.05):
        times = [1 + generator.random() + slope * at for at in range(steps)]
        known = stats.kendalltau(range(steps), times, method="exact").pvalue
        assert step_statistics.p_value(times) == pytest.approx(known, rel=1e-9)


def test_the_chance_of_many_steps_is_nearly_scipy_s() -> None:
    generator = random.Random(1)
    times = [1 + generator.random() + 0.001 * at for at in range(200)]
    known = stats.kendalltau(range(200), times, method="asymptotic").pvalue
    assert step_statistics.p_value(times) == pytest.approx(known, rel=0.05)


def test_ties_make_it_cautious() -> None:
    times = [2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert step_statistics.p_value(times) >= stats.kendalltau(range(10), times, method="asymptotic").pvalue
    assert step_statistics.p_value([1.0] * 10) == pytest.approx(1.0)


def test_sen_s_slope_is_scipy_s() -> None:
    times = noise(np.random.default_rng(20265), 1, 25, 0.05)[0]
    slope = stats.theilslopes(times).slope
    assert step_statistics.drift(times.tolist()) == pytest.approx(slope * 24 / np.median(times))


@pytest.mark.parametrize("times", [[], [1.0], [1.0] * 5])
def test_too_few_steps_tell_nothing(times: list[float]) -> None:
    assert step_statistics.is_drifting(times) is step_statistics.outlying_end(times) is None


def test_spread_is_the_sample_standard_deviation_over_the_mean() -> None:
    times = [0.9, 1.0, 1.1]
    assert step_statistics.spread(times) == pytest.approx(float(stats.variation(times, ddof=1)))
    assert step_statistics.spread([1.0]) is step_statistics.is_noisy([0.0, 1.0]) is None
    assert step_statistics.is_noisy([1.0] * 99 + [1.6]) is True  # one step of many, over a half off
    assert step_statistics.is_noisy([1.0] * 99 + [1.4]) is False
