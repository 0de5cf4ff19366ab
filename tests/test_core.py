"""One measured run for each runner that needs no DeepSpeed, and the same predicted: what benchmarks/versions.py asks of
any torch and transformers."""

from __future__ import annotations

from importlib import metadata

from conftest import Run, tiny


def test_measured_and_predicted_runs_have_answers(run_sweep: Run) -> None:
    simulated = {"name": "simulated", "gpu": "l4-24gb"}
    trainer = {"name": "trainer"}
    rows = run_sweep(tiny(), tiny(runner=trainer), tiny(device=simulated), tiny(device=simulated, runner=trainer))
    assert [row["reason"] for row in rows] == [None] * 4
    measured = [row for row in rows if row["device"] == "cpu"]
    assert {row["transformers_version"] for row in measured} == {metadata.version("transformers")}
    assert {row["parameters"] for row in rows} == {119360}
    # in fp32 four bytes for each weight and its gradient, eight for Adam's two moments
    assert all(row["peak_allocated_bytes"] >= 16 * 119360 for row in rows)
    for row in rows[2:]:
        assert row["peak_parameters_bytes"] >= 4 * 119360 and row["peak_optimizer_state_bytes"] >= 8 * 119360
