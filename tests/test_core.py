"""One run for each runner; of those that need no DeepSpeed also predicted, as benchmarks/versions.py asks."""

import sys
from importlib import metadata

import pytest
from conftest import ROOT, TARGETS, Run, tiny


def test_measured_and_predicted_runs_have_answers(run_sweep: Run) -> None:
    simulated = {"name": "simulated", "gpu": "l4-24gb"}
    trainer = {"name": "trainer"}
    values = [tiny(), tiny(runner=trainer), tiny(device=simulated), tiny(device=simulated, runner=trainer)]
    rows = run_sweep(*values, isolation="warm")
    assert [row["reason"] for row in rows] == [None] * 4
    measured = [row for row in rows if row["device"] == "cpu"]
    assert {row["transformers_version"] for row in measured} == {metadata.version("transformers")}
    assert {row["parameters"] for row in rows} == {119360}
    # in fp32 four bytes for each weight and its gradient, eight for Adam's two moments
    assert all(row["peak_allocated_bytes"] >= 16 * 119360 for row in rows)
    for row in rows[2:]:
        assert row["peak_parameters_bytes"] >= 4 * 119360 and row["peak_optimizer_state_bytes"] >= 8 * 119360


def test_the_other_runners_have_answers_too(run_sweep: Run) -> None:
    """DeepSpeed's engine, a function of one's own, and a script as it is."""
    pytest.importorskip("deepspeed")
    target = {"name": "custom", "target": f"{TARGETS / 'backward.py'}:by_hand"}
    command = f"{sys.executable} {ROOT / 'tests' / 'scripts' / 'plain.py'} --max_len {{seq_len}} --bs {{micro_batch}}"
    script = {"name": "script", "command": command}
    rows = run_sweep(tiny(runner={"name": "deepspeed"}, sharding="zero2"), tiny(runner=target), tiny(runner=script))
    assert [row["reason"] for row in rows] == [None] * 3
    assert [row["runner"] for row in rows] == ["deepspeed", "custom", "script"]
    assert all(row["outcome"] == "ok" and row["peak_allocated_bytes"] > 0 and row["step_median_s"] > 0 for row in rows)
