"""Planning: order, resume, settings, estimates."""

import itertools
import json
from random import Random
from typing import Any

import pytest
from conftest import SETTINGS, cases, literal_cases, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process import fork_server
from vramsweep.harness.rows.journal import line
from vramsweep.harness.rows.schema import Outcome, complete_row
from vramsweep.harness.sweep import plan, resume, row_builder
from vramsweep.harness.sweep.budget import configuration


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
    expanded = plan.expand_trials([tiny(seq_len=n) for n in (8, 16, 24, 0)], repeats=2)
    ordered = plan.order_trials(expanded)
    assert [p.trial.seq_len if p.trial else None for p in ordered] == [None, None, 24, 8, 16, 24, 8, 16]
    assert [p.trial.repeat for p in ordered if p.trial] == [0, 0, 0, 1, 1, 1]


def test_configurations_interleave() -> None:
    """ABC ABC ABC, never AAA BBB CCC: every configuration runs once before any runs again, whatever its template."""
    runners = ({"name": "torch"}, {"name": "trainer"})
    grid = [tiny(seq_len=n, micro_batch=b, runner=r) for n in (8, 16, 24) for b in (1, 2) for r in runners]
    ordered = [p.trial for p in plan.order_trials(plan.expand_trials(grid, repeats=3)) if p.trial]
    names = [(one.seq_len, one.micro_batch, one.runner.name) for one in ordered]
    rounds = [names[at : at + len(grid)] for at in range(0, len(names), len(grid))]
    assert len(rounds) == 3
    assert all(len(set(one)) == len(grid) for one in rounds)
    pairs = [[one[2] for one in names[at : at + 2]] for at in range(0, len(names), 2)]
    assert pairs == [["torch", "trainer"], ["trainer", "torch"]] * 9  # the next point begins with what is alive


lengths_of = st.lists(st.integers(1, 200), min_size=1, max_size=4, unique=True)
CONFIGURATIONS = [
    {"runner": {"name": runner}, "precision": precision, "seed": seed}
    for runner, precision, seed in itertools.product(("torch", "trainer"), ("fp32", "bf16"), (0, 1))
]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(lengths_of, lengths_of, st.integers(1, 2), st.randoms(use_true_random=False))
def test_any_beginning_is_balanced(seq_lens: list[int], batches: list[int], repeats: int, random: Random) -> None:
    """All configurations have equally many trials, give or take one; each has its ends before what lies between."""
    grid = [tiny(seq_len=n, micro_batch=b, **c) for n in seq_lens for b in batches for c in CONFIGURATIONS]
    random.shuffle(grid)
    ordered = plan.order_trials(plan.expand_trials(grid, repeats))
    assert {p.trial_id for p in ordered} == {p.trial_id for of_one in plan.expand_trials(grid, repeats) for p in of_one}
    assert len({configuration(p.resolved) for p in ordered}) == 4  # seeds are repeats by another name
    names = [(p.trial.runner.name, p.trial.precision, p.trial.seed) for p in ordered if p.trial]
    counts = dict.fromkeys(names, 0)
    for name in names:
        counts[name] += 1
        assert max(counts.values()) - min(counts.values()) <= 1
    shapes = list(dict.fromkeys((p.trial.repeat, p.trial.seq_len, p.trial.micro_batch) for p in ordered if p.trial))
    assert shapes[0] == (0, max(seq_lens), max(batches))
    ends = {(0, n, b) for n in (min(seq_lens), max(seq_lens)) for b in (min(batches), max(batches))}
    assert set(shapes[: len(ends)]) == ends
    assert len(shapes) == repeats * len(seq_lens) * len(batches)  # each point is one run of trials


def test_batches_are_coarse_to_fine_as_lengths_are() -> None:
    grid = [tiny(seq_len=n, micro_batch=b) for n in range(1, 6) for b in range(1, 6)]
    shapes = [(p.trial.seq_len, p.trial.micro_batch) for p in plan.order_trials(plan.expand_trials(grid, 1)) if p.trial]
    assert shapes[:4] == [(5, 5), (5, 1), (1, 5), (1, 1)]
    assert set(shapes[:9]) == {(n, b) for n in (1, 3, 5) for b in (1, 3, 5)}


def test_more_templates_than_stay_alive_take_turns_by_length() -> None:
    assert plan.ALIVE == fork_server.LEAST
    cuda = {"name": "cuda"}
    confs = [{"name": f"split{n}", "conf": f"max_split_size_mb:{n}"} for n in range(21, 21 + plan.ALIVE + 1)]
    shapes = itertools.product((8, 16, 24), (1, 2), confs)
    grid = [tiny(seq_len=n, micro_batch=b, allocator=conf, device=cuda) for n, b, conf in shapes]
    ordered = [p.trial for p in plan.order_trials(plan.expand_trials(grid, 1)) if p.trial]
    assert len(ordered) == len(grid)
    changes = sum(a.allocator != b.allocator for a, b in itertools.pairwise(ordered))
    points = [(t.seq_len, t.micro_batch) for t in ordered]
    assert changes < len(grid) - 1 - 2 * len(confs)  # batches of one length run by one template, one after the other
    less = plan.order_trials(plan.expand_trials([g for g in grid if g["allocator"] != confs[0]], 1))
    few = [p.trial for p in less if p.trial]
    assert len(points) == len(few) + len(grid) // len(confs)
    assert [len({(t.seq_len, t.micro_batch) for t in few[at : at + 8]}) for at in range(0, len(few), 8)] == [1] * 6


def test_equal_combinations_are_one_trial() -> None:
    assert len(plan.order_trials(plan.expand_trials([tiny(), tiny()], 1))) == 1


def test_pending() -> None:
    planned = plan.order_trials(plan.expand_trials([tiny(seq_len=n) for n in (8, 16, 24)], 1))
    by_length = {p.trial.seq_len: p.trial_id for p in planned if p.trial}
    finished = {by_length[8]: {"outcome": "ok"}, by_length[16]: {"outcome": "crash"}}
    left = [p.trial.seq_len for p in resume.pending_trials(planned, finished, retry_failed=False) if p.trial]
    again = [p.trial.seq_len for p in resume.pending_trials(planned, finished, retry_failed=True) if p.trial]
    assert left == [24]
    assert sorted(again) == [16, 24]


@pytest.mark.parametrize(
    "bad",
    [{"seq_len": 0}, {"seq_len": "x"}, {"model": {"name": 3}}, {"runner": {"name": "no"}}, {"padding": float("inf")},
     {"device": {"name": "simulated", "gpu": "a100-80gb", "node_memory_gib": float("nan")}}],
)  # fmt: skip
def test_the_row_of_an_impossible_trial_fits_the_schema(bad: dict[str, Any]) -> None:
    (planned,) = plan.order_trials(plan.expand_trials([tiny(**bad)], 1))
    row = complete_row(row_builder.unstarted_row(planned, Outcome.INVALID, planned.reason))
    assert row["outcome"] == "invalid"
    assert row["reason"]
    assert row["terminal"] is True
    assert line(row)  # a journal can keep it


def test_a_fault_of_the_machine_runs_again_and_so_does_what_was_impossible_and_no_longer_is() -> None:
    (one,) = plan.order_trials(plan.expand_trials([tiny()], 1))
    for row, again in literal_cases("rows_that_run_again"):
        assert bool(resume.pending_trials([one], {one.trial_id: row}, retry_failed=False)) is again, row
    (impossible,) = plan.order_trials(plan.expand_trials([tiny(seq_len=0)], 1))
    row = {"outcome": "invalid", "attempt": 0}
    for more, again in (({}, False), ({"reason": impossible.reason}, False), ({"reason": "another"}, True)):
        assert bool(resume.pending_trials([impossible], {impossible.trial_id: row | more}, retry_failed=True)) is again


def test_old_names_of_the_runner_s_settings_are_understood() -> None:
    old = {"name": "deepspeed", "zero_stage": 2, "world_size": 4, "offload_optimizer": True, "options": {}}
    (planned,) = plan.order_trials(plan.expand_trials([tiny(runner=old)], 1))
    new = tiny(runner={"name": "deepspeed"}, sharding="zero2", world_size=4, offload_optimizer=True)
    assert planned.trial_id == plan.order_trials(plan.expand_trials([new], 1))[0].trial_id
    assert planned.trial and planned.trial.samples_per_step() == 8


@pytest.mark.parametrize(("change", "text"), cases("settings_out_of_range"))
def test_settings_out_of_range(change: str, text: str) -> None:
    with pytest.raises(UserError, match=text):
        plan.settings([SETTINGS | json.loads(change)])
