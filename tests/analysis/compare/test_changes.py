"""Changes of level, steps and dips of a difference: found where they were put, and not where there is nothing."""

from __future__ import annotations

import numpy as np
import pytest

from vramsweep.analysis.compare.changes import find_level, find_places

pytestmark = pytest.mark.deterministic

X = np.arange(2.0, 2002, 2)


@pytest.mark.parametrize("at", [202, 700, 1500])
def test_the_interval_holds_where_speed_changes(at: int) -> None:
    random, holds = np.random.default_rng(at), 0
    for _ in range(100):
        logs = np.where(at > X, 0.0, 0.03) + 0.01 * random.standard_normal(len(X))
        found = find_level("tokens_per_s", {}, X, logs, 0.01)
        assert found is not None and abs(found.before) < 0.005 and found.after == pytest.approx(0.0305, abs=0.004)
        assert found.after_low < found.after < found.after_high
        holds += found.low < at <= found.high
    assert 90 <= holds <= 100


def test_no_change_is_claimed_of_noise_or_of_neighbours_that_are_alike() -> None:
    random = np.random.default_rng(1)
    for _ in range(100):
        noise = 0.02 * random.standard_normal(len(X))
        walk = np.zeros(len(X))
        for i in range(1, len(X)):
            walk[i] = 0.9 * walk[i - 1] + noise[i]
        for logs in (noise, walk):
            assert find_level("tokens_per_s", {}, X, logs, 0.01) is None


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
