"""Planning: order, resume, settings, estimates."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from conftest import SETTINGS, tiny
from hypothesis import given
from hypothesis import strategies as st

from vramsweep.harness import plan
from vramsweep.harness.errors import UserError
from vramsweep.harness.journal import line
from vramsweep.harness.row import complete


@given(st.integers(0, 400))
def test_halving_visits_every_position_once(count: int) -> None:
    assert sorted(plan.halving(count)) == list(range(count))


def test_halving_is_coarse_to_fine() -> None:
    assert plan.halving(9) == [8, 0, 4, 2, 6, 1, 3, 5, 7]


@given(st.integers(3, 200), st.integers(2, 50))
def test_any_beginning_of_the_order_covers_the_range_evenly(count: int, cut: int) -> None:
    seen = sorted(plan.halving(count)[: min(cut, count)])
    gaps = [b - a for a, b in itertools.pairwise(seen)]
    assert max(gaps) <= 4 * max(1, min(gaps)) + 1


def test_order_puts_repeats_last_and_impossible_trials_first() -> None:
    expanded = plan.expand([tiny(seq_len=n) for n in (8, 16, 24, 0)], repeats=2)
    ordered = plan.order(expanded)
    assert [p.trial.seq_len if p.trial else None for p in ordered] == [None, None, 24, 8, 16, 24, 8, 16]
    assert [p.trial.repeat for p in ordered if p.trial] == [0, 0, 0, 1, 1, 1]


def test_equal_combinations_are_one_trial() -> None:
    assert len(plan.order(plan.expand([tiny(), tiny()], 1))) == 1


def test_pending() -> None:
    planned = plan.order(plan.expand([tiny(seq_len=n) for n in (8, 16, 24)], 1))
    by_length = {p.trial.seq_len: p.trial_id for p in planned if p.trial}
    finished = {by_length[8]: {"outcome": "ok"}, by_length[16]: {"outcome": "crash"}}
    left = [p.trial.seq_len for p in plan.pending(planned, finished, retry_failed=False) if p.trial]
    again = [p.trial.seq_len for p in plan.pending(planned, finished, retry_failed=True) if p.trial]
    assert left == [24]
    assert sorted(again) == [16, 24]


@pytest.mark.parametrize(
    "bad",
    [
        {"seq_len": 0},
        {"seq_len": "x"},
        {"model": {"name": 3}},
        {"runner": {"name": "no"}},
        {"padding": float("inf")},
        {"device": {"name": "simulated", "gpu": "a100-80gb", "node_memory_gib": float("nan")}},
    ],
)
def test_the_row_of_an_impossible_trial_fits_the_schema(bad: dict[str, Any]) -> None:
    (planned,) = plan.order(plan.expand([tiny(**bad)], 1))
    row = complete(plan.invalid(planned))
    assert row["outcome"] == "invalid"
    assert row["reason"]
    assert row["terminal"] is True
    assert line(row)  # a journal can keep it


def test_a_fault_of_the_machine_runs_again_and_so_does_what_was_impossible_and_no_longer_is() -> None:
    (one,) = plan.order(plan.expand([tiny()], 1))
    for row, again in (
        ({"outcome": "contended", "attempt": 3}, True),
        ({"outcome": "environment", "attempt": 1}, True),
        ({"outcome": "invalid", "attempt": 0}, True),
        ({"outcome": "invalid", "attempt": 1}, False),
        ({"outcome": "timeout", "attempt": 1}, False),
    ):
        assert bool(plan.pending([one], {one.trial_id: row}, retry_failed=False)) is again, row
    (impossible,) = plan.order(plan.expand([tiny(seq_len=0)], 1))
    assert not plan.pending([impossible], {impossible.trial_id: {"outcome": "invalid", "attempt": 0}}, False)


def test_old_names_of_the_runner_s_settings_are_understood() -> None:
    old = {"name": "deepspeed", "zero_stage": 2, "world_size": 4, "offload_optimizer": True, "options": {}}
    (planned,) = plan.order(plan.expand([tiny(runner=old)], 1))
    new = tiny(runner={"name": "deepspeed"}, sharding="zero2", world_size=4, offload_optimizer=True)
    assert planned.trial_id == plan.order(plan.expand([new], 1))[0].trial_id
    assert planned.trial and planned.trial.samples_per_step() == 8


def test_a_setting_cannot_be_swept() -> None:
    with pytest.raises(UserError, match="isolation cannot be swept"):
        plan.settings([SETTINGS, SETTINGS | {"isolation": "warm"}])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"isolation": "hot"}, "isolation=hot: allowed is warm or cold"),
        ({"timeout_s": 0}, "timeout_s=0: allowed is a number of at least 0.001"),
        ({"retries": -1}, "retries=-1"),
        ({"repeats": "two"}, "repeats=two"),
        ({"answer": "clams"}, "answer=clams: there is no such answer; allowed: claims, .*; did you mean claims?"),
    ],
)
def test_settings_out_of_range(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        plan.settings([SETTINGS | change])


def test_estimate_from_finished_rows_and_before_there_are_any() -> None:
    todo = plan.order(plan.expand([tiny(seq_len=n) for n in (8, 16)], 1))
    assert plan.estimate_s(todo, [{"duration_s": 2.0}, {"duration_s": 4.0}], None)[0] == pytest.approx(6.0)
    seconds, basis = plan.estimate_s(todo, [], 1e9)
    tokens = (8 + 16) * 2 * 5
    assert seconds == pytest.approx(6 * 119360 * tokens / 1e9 + 4.0)
    assert "rough" in basis
    assert plan.estimate_s(todo, [], None)[0] is None
