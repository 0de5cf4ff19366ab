"""Sharded training: what rank 0 is predicted to hold, against arithmetic and against real ranks on this CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TARGETS, Run, tiny
from traces import SIMULATED, alive, total, trace_trial

from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.process import attempt
from vramsweep.harness.rows import migrations
from vramsweep.runners.measure.dispatch_modes import LiveBytes
from vramsweep.runners.predict.replay_trace import replay
from vramsweep.runners.trace.trace_data import Mark, Trace

PARAMETERS = 119360
SMALL = {"reduce_bucket_size": 1 << 20, "allgather_bucket_size": 1 << 20}  # by default 2 GB of zeros each
WORKSPACES = 2 * 8_519_680  # forward's and backward's, on that card


def fsdp_trial(world: int, device: dict[str, str], **over: Any) -> dict[str, Any]:
    return migrations.upgrade_layout(
        tiny(runner={"name": "fsdp", "world_size": world} | over.pop("runner", {}), device=device, **over)
    )


def traced(folder: Path, world: int, **over: Any) -> Trace:
    return trace_trial(fsdp_trial(world, SIMULATED, **over), folder)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "precision"), [(1, "fp32"), (8, "bf16")])
def test_fsdp_holds_its_share_of_the_state_to_the_byte(tmp_path: Path, world: int, precision: str) -> None:
    trace = traced(tmp_path, world, precision=precision)
    share = 4 * PARAMETERS // world  # fp32 in both; bf16 is what is gathered and computed in
    assert total(trace, "parameters") == share
    assert total(trace, "gradients") == 3 * share  # three steps
    assert total(trace, "optimizer_state") == 2 * share
    assert len(set(trace.streams)) > 1


@pytest.mark.slow
def test_what_fsdp_gathers_is_freed_after_the_forward_pass_if_asked(tmp_path: Path) -> None:
    def gathered(**options: Any) -> int:
        trace = traced(tmp_path, 8, runner={"options": options})
        ends = [mark.end for mark in trace.marks if mark.phase == "forward"]
        held = alive(trace.events[: ends[-1]])
        return sum(trace.sizes[n] for n in held if trace.categories[n] == "communication")

    kept = gathered(reshard_after_forward=False)
    assert gathered(reshard_after_forward=True) < kept
    assert kept >= 4 * PARAMETERS


@pytest.mark.slow
def test_a_predicted_row_has_one_rank_and_says_what_of_it_is_estimated(run_sweep: Run) -> None:
    """test_data_parallel.py compares predictions with what real ranks hold, byte for byte."""
    (row,) = run_sweep(fsdp_trial(2, SIMULATED))
    assert row["outcome"] == "ok" and row["parameters"] == PARAMETERS, row["reason"]
    for kind in ("allocated", "reserved", "active"):
        assert row[f"rank_peak_{kind}_bytes"] == [row[f"peak_{kind}_bytes"]]
    assert "estimate: communication" in row["prediction_basis"]


def test_an_emptied_cache_and_a_stream_of_its_own_show_in_reserved() -> None:
    def reserved(events: list[int], streams: list[int]) -> int:
        marks = [Mark(len(events), None, "load")]
        trace = Trace([30 << 20] * 2, ["temporaries"] * 2, events, marks, streams=streams)
        return replay(trace, AllocatorConfig(), None).final.reserved

    assert reserved([1, -1, 2], [0, 0]) == 30 << 20
    assert reserved([1, -1, 2], [0, 1]) == 60 << 20
    assert reserved([1, -1, 0, 2], [0, 1]) == 30 << 20


def test_live_bytes_see_a_storage_that_is_resized() -> None:
    with LiveBytes() as live:
        tensor = torch.empty(1000)
        before = live.live
        tensor.untyped_storage().resize_(0)
        assert before - live.live == 4000
        tensor.untyped_storage().resize_(8000)
        assert live.live - before == 4000


def patched(folder: Path, trial: dict[str, Any], *what: str) -> dict[str, Any]:
    """The complete values of a worker of patched_worker.py."""
    (folder / "spec.json").write_text(json.dumps({"trial": trial}))
    command = [sys.executable, str(TARGETS / "patched_worker.py"), str(folder), *what]
    environ = attempt.attempt_environment("", "cpu", os.environ)
    done = subprocess.run(command, env=environ, timeout=90, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "result.json").read_text())
    assert result["complete"] is True
    values: dict[str, Any] = result["values"]
    return values


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_the_row_is_of_the_worst_rank_and_outlives_one_that_fails_afterwards(tmp_path: Path, fails: bool) -> None:
    row = patched(tmp_path, fsdp_trial(2, {"name": "cpu"}), "more", *(["fail"] if fails else []))
    assert row["worst_rank"] == 1
    for kind, slack in (("allocated", 1 << 20), ("reserved", 32 << 20)):  # the system's share of a resident set varies
        peaks = row[f"rank_peak_{kind}_bytes"]
        assert peaks[1] - peaks[0] == pytest.approx(64 << 20, abs=slack)
        assert row[f"peak_{kind}_bytes"] == peaks[1]
    assert row["tokens_per_s"] == pytest.approx(2 * 2 * 32 * 2 / row["elapsed_s"])
    if fails:
        (note,) = row["notes"]
        assert note.startswith("rank 1: the step that counts FLOPs failed") and "CUDA out of memory" in note
        assert row.get("model_flops_per_token") is None
    else:
        assert row["notes"] is None and row["model_flops_per_token"] == pytest.approx(761_856, rel=1e-3)


@pytest.mark.slow
def test_no_rank_begins_the_measured_steps_before_all_are_there(tmp_path: Path) -> None:
    row = patched(tmp_path, tiny(sharding="ddp", world_size=2), "late")
    assert (tmp_path / "order").read_text().split() == ["there"] * 2 + ["mark"] * 6
    assert row["notes"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("power", "skipped"), [(40, 2), (8, 0)])
def test_steps_that_deepspeed_skips_for_an_overflow_are_counted(tmp_path: Path, power: int, skipped: int) -> None:
    options = {"fp16": {"initial_scale_power": power}, "zero_optimization": SMALL}
    runner = {"name": "deepspeed", "options": options}
    row = patched(tmp_path, tiny(runner=runner, sharding="zero2", precision="fp16"), "fp16")
    assert (row["skipped_steps"], row["measured_steps"]) == (skipped, 2)


@pytest.mark.slow
def test_gradients_are_averaged_with_the_last_accumulated_pass_or_with_each(tmp_path: Path) -> None:
    """Two real ranks; one bucket holds all gradients of the tiny model, from the second step on."""
    counts = []
    for name, over in (("last", {}), ("each", {"no_sync": False})):
        folder = tmp_path / name
        folder.mkdir()
        row = patched(folder, tiny(sharding="ddp", world_size=2, grad_accum=4, **over), "averages")
        counts.append(len((folder / "averages").read_text().splitlines()))
        assert row["measured_steps"] == 2 and row["runner_config"]["bucket_cap_mb"] == 25  # torch's own
    steps = 1 + 1 + 2 + 1  # warm-up, probe, measured, counted
    assert counts[0] == steps
    assert counts[1] == 4 * steps
