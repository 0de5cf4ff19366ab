"""What `plan` expects of each trial: memory by what is known of others, time and cost by rows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli, tiny
from hypothesis import given
from hypothesis import strategies as st

from vramsweep.harness import account, launch, plan
from vramsweep.harness.forecast import Forecast, Known, forecasts, measured
from vramsweep.harness.journal import Journal

SHAPES = list(itertools.product((8, 16, 32), (1, 2, 4)))
CUDA = {"name": "cuda"}


def grid(**over: Any) -> dict[tuple[int, int], plan.Planned]:
    values = [tiny(seq_len=n, micro_batch=b, device=CUDA, **over) for n, b in SHAPES]
    return dict(zip(SHAPES, (one for (one,) in plan.expand(values, 1)), strict=True))


@given(st.lists(st.tuples(st.sampled_from(SHAPES), st.booleans()), max_size=6))
def test_each_trial_against_all_that_is_known(found: list[tuple[tuple[int, int], bool]]) -> None:
    todo = grid()
    said = forecasts(todo.values(), [Known(todo[shape].resolved, fits, "measured") for shape, fits in found])
    for (n, b), item in todo.items():
        fails = any(not fits and shape[0] <= n and shape[1] <= b for shape, fits in found)
        fitted = any(fits and shape[0] >= n and shape[1] >= b for shape, fits in found)
        assert said[item.trial_id].fits is (False if fails else True if fitted else None)


def test_why_it_is_expected_and_of_which_configuration() -> None:
    todo, other = grid(), grid(precision="bf16")
    known = [Known(todo[16, 2].resolved, False, "predicted for t4-16gb"), Known(todo[8, 1].resolved, True, "measured")]
    said = forecasts([*todo.values(), *other.values()], known)
    assert said[todo[16, 2].trial_id] == Forecast(False, "predicted for t4-16gb")
    assert said[todo[32, 4].trial_id].basis == "seq 16 · batch 2 runs out of memory, predicted for t4-16gb"
    assert said[todo[8, 1].trial_id] == Forecast(True, "measured")
    assert said[todo[8, 4].trial_id] == said[other[32, 4].trial_id] == Forecast()


def test_rows_that_tell() -> None:
    (item,) = (p for (p,) in plan.expand([tiny(seq_len=16, device={"name": "simulated", "gpu": "t4-16gb"})], 1))
    row = plan.axes(item)
    kinds = [measured([row | {"outcome": kind}]) for kind in ("ok", "oom", "crash", "timeout")]
    assert [[(k.fits, k.how) for k in one] for one in kinds] == [[(True, "predicted")], [(False, "predicted")], [], []]
    assert measured([{"trial_id": "x", "outcome": "ok"}]) == []


@pytest.mark.slow
def test_what_plan_says(tmp_path: Path, cli: Cli) -> None:
    words = ["-m", "model=tiny", "device=cpu", "seq_len=16,64,256", f"results={tmp_path}", "price_per_hour=36"]
    items, _ = launch.resolve(words)
    folder = launch.folder()
    assert folder is not None
    ended = {16: {"outcome": "ok"}, 64: {"outcome": "oom", "reason": "full"}}
    with Journal(folder) as book:
        for item in items:
            if item.trial and item.trial.seq_len in ended:
                row = {"sweep": folder.name, "terminal": True, "duration_s": 10.0} | account.begun(1)
                book.append(account.before(item) | row | ended[item.trial.seq_len])
    found = cli.json("plan", *words)
    by_length = {one["trial"]["seq_len"]: one for one in found["trials"]}
    assert [by_length[n]["expected_s"] for n in (16, 64, 256)] == [None, None, 160.0]
    assert by_length[256]["expected_cost"] == found["estimated_cost"] == pytest.approx(1.6)
    assert (by_length[256]["expected_to_fit"], found["trials_expected_oom"]) == (False, 1)
    assert by_length[16]["expected_to_fit"] is None
    assert (found["estimated_s"], found["estimate_basis"]) == (160.0, "a trial of the same configuration")
    said = cli.run("plan", *words).out
    assert "1 expected to run out of memory (seq 64 · batch 1 runs out of memory, measured)" in " ".join(said.split())
    assert "estimated time: 2:40, cost: 1.60 at 36 an hour (a trial of the same configuration)" in said
    assert "1 of 1 trials to do are expected to run out of memory" in said
    said = cli.run("plan", *words, "--all").out
    assert "~ 2 min 40 s, expected to run out of memory (seq 64 · batch 1 runs out of memory, measured)" in said
