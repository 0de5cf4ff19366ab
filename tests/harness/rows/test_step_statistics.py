"""Steady steps: false alarms by simulation, power on drifting clocks; repeats: memory in bytes; scipy is the oracle."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from vramsweep.harness.rows import repeats, step_statistics

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


def run(repeat: int = 0, **over: Any) -> dict[str, Any]:
    return {
        "trial_id": f"t{repeat}", "outcome": "ok", "device": "cuda", "memory_source": "cuda_allocator",
        "peak_allocated_bytes": 1000, "peak_reserved_bytes": 2048, "gpu_name": "card", "runner": "torch",
        "trial": {"seq_len": 8, "repeat": repeat, "seed": 0},
    } | over  # fmt: skip


def test_runs_that_differ_in_nothing_but_the_repeat_are_one_configuration() -> None:
    others = [
        run(2, gpu_name="another"), run(3, trial={"seq_len": 16, "repeat": 0, "seed": 0}), run(4, outcome="oom"),
        run(5, device="simulated"), run(6, runner="watch"), run(7, trial={"seq_len": 8, "repeat": 7, "seed": 1}),
        run(8, foreign="somewhere"),
    ]  # fmt: skip
    found = repeats.configurations([run(0), *others, run(1), run(1)])
    assert [[row["trial_id"] for row in runs] for runs in found] == [["t0", "t1", "t1"], ["t2"], ["t3"], ["t7"]]


def test_one_byte_is_reported_with_both_values() -> None:
    runs = [run(0), run(1, peak_reserved_bytes=2049), run(2)]
    (found,) = repeats.find_apart(runs)
    assert (found.column, found.low_trial, found.low, found.high_trial, found.high) == (
        "peak_reserved_bytes", "t0", 2048, "t1", 2049
    )  # fmt: skip
    assert found.text() == "peak_reserved_bytes of repeats t0 and t1 differs by 1 B: 2,048 and 2,049"
    assert not repeats.find_apart([run(0), run(1)])


def test_a_trial_that_was_measured_again_counts_as_a_repeat() -> None:
    (found,) = repeats.find_apart([run(0), run(0, peak_allocated_bytes=1512)])
    assert found.text().startswith("peak_allocated_bytes of trial t0, measured again, differs by 512 B")


def test_the_resident_set_of_a_cpu_does_not_repeat_and_need_not() -> None:
    of_cpu = {"device": "cpu", "memory_source": "cpu_tensors_and_rss"}
    assert not repeats.find_apart([run(0, **of_cpu), run(1, **of_cpu, peak_reserved_bytes=9999)])
    assert repeats.find_apart([run(0, **of_cpu), run(1, **of_cpu, peak_allocated_bytes=1001)])
    assert not repeats.find_apart([run(0, peak_reserved_bytes=None), run(1)])  # unknown is no difference


def test_many_pairs_are_counted_the_furthest_apart_first() -> None:
    found = [
        one for extra in range(1, 8) for one in repeats.find_apart([run(0), run(1, peak_reserved_bytes=2048 + extra)])
    ]
    said = repeats.sentences(found)
    assert "differs by 7 B" in said[0] and len(said) == 5
    assert said[-1] == "3 more differences in memory that should be byte-identical"


@pytest.mark.parametrize("runs", [2, 3, 20])
def test_the_interval_is_student_s_on_logs(runs: int) -> None:
    speeds = np.exp(np.random.default_rng(runs).normal(8, 0.02, runs))
    found = repeats.interval(speeds.tolist())
    low, high = stats.ttest_1samp(np.log(speeds), 0.0).confidence_interval(0.95)
    assert found is not None and found.runs == runs
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert found.mean == pytest.approx(stats.gmean(speeds))


def test_the_interval_holds_as_often_as_it_says() -> None:
    """For 2,000 configurations of three processes that differ by 3 %, 95 % of the intervals hold the truth."""
    speeds = 5000 * np.exp(np.random.default_rng(20266).normal(0, 0.03, (2000, 3)))
    found = [repeats.interval(row.tolist()) for row in speeds]
    held = np.mean([one is not None and one.low <= 5000 <= one.high for one in found])
    assert held == pytest.approx(0.95, abs=0.015)


def test_one_process_has_no_interval() -> None:
    assert repeats.interval([5000.0]) is repeats.interval([]) is None
