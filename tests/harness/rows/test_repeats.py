"""Repeats: memory to the byte, and speed's interval against scipy's."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from vramsweep.harness.rows import repeats


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
