"""Sharded training: what rank 0 is predicted to hold, against arithmetic and against real ranks on this CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run, tiny

from vramsweep.harness import attempt, gpus, trial, upgrade
from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.runners import torch_loop, tracing
from vramsweep.runners.dispatch import LiveBytes
from vramsweep.runners.predict import replay
from vramsweep.runners.storages import Mark
from vramsweep.runners.trace import Trace

PARAMETERS = 119360
SMALL = {"reduce_bucket_size": 1 << 20, "allgather_bucket_size": 1 << 20}  # by default 2 GB of zeros each
SIMULATED = {"name": "simulated", "gpu": "a100-80gb"}
WORKSPACES = 2 * 8_519_680  # forward's and backward's, on that card


def fsdp_trial(world: int, device: dict[str, str], **over: Any) -> dict[str, Any]:
    return upgrade.layout(
        tiny(runner={"name": "fsdp", "world_size": world} | over.pop("runner", {}), device=device, **over)
    )


def traced(folder: Path, world: int, **over: Any) -> Trace:
    chosen = trial.parse(fsdp_trial(world, SIMULATED, **over))
    return tracing.trace_trial(chosen, gpus.named("a100-80gb"), folder, torch_loop)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "precision"), [(1, "fp32"), (8, "bf16")])
def test_fsdp_holds_its_share_of_the_state_to_the_byte(tmp_path: Path, world: int, precision: str) -> None:
    trace = traced(tmp_path, world, precision=precision)
    made: Counter[str] = Counter()
    for size, category in zip(trace.sizes, trace.categories, strict=True):
        made[category] += size
    share = 4 * PARAMETERS // world  # fp32 in both; bf16 is what is gathered and computed in
    assert made["parameters"] == share
    assert made["gradients"] == 3 * share  # three steps
    assert made["optimizer_state"] == 2 * share
    assert len(set(trace.streams)) > 1


@pytest.mark.slow
def test_what_fsdp_gathers_is_freed_after_the_forward_pass_if_asked(tmp_path: Path) -> None:
    def gathered(**options: Any) -> int:
        trace = traced(tmp_path, 8, runner={"options": options})
        ends = [mark.end for mark in trace.marks if mark.phase == "forward"]
        alive: set[int] = set()
        for event in trace.events[: ends[-1]]:
            alive.add(event) if event > 0 else alive.discard(-event)
        return sum(trace.sizes[e - 1] for e in alive if trace.categories[e - 1] == "communication")

    kept = gathered(reshard_after_forward=False)
    assert gathered(reshard_after_forward=True) < kept
    assert kept >= 4 * PARAMETERS


@pytest.mark.slow
def test_real_ranks_hold_what_is_predicted(run_sweep: Run) -> None:
    """Forward and backward peaks; in the optimizer's phase a CPU updates one parameter after the other."""
    # eager: with grouped heads in fp32, CUDA and a CPU differ in the fused kernel that they choose
    both = (fsdp_trial(2, device, attention="eager") for device in ({"name": "cpu"}, SIMULATED))
    real, predicted = run_sweep(*both, isolation="warm")
    assert real["outcome"] == predicted["outcome"] == "ok", (real["reason"], predicted["reason"])
    assert real["parameters"] == predicted["parameters"] == PARAMETERS
    assert real["model_flops_per_token"] == pytest.approx(761_856, rel=1e-3)  # the plain loop's; sharding adds none
    assert len(real["rank_peak_allocated_bytes"]) == 2
    for phase, tolerance in (("forward", 0.03), ("backward", 0.15)):
        column = f"{phase}_peak_allocated_bytes"
        # blocks are multiples of 512 bytes, and there is the pool of samples; docs/sharding.md on the backward phase
        assert predicted[column] - WORKSPACES == pytest.approx(real[column], rel=tolerance), phase
    for kind in ("allocated", "reserved", "active"):
        assert predicted[f"rank_peak_{kind}_bytes"] == [predicted[f"peak_{kind}_bytes"]]
    assert "estimate: communication" in predicted["prediction_basis"]
    assert real["prediction_basis"] is None


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
    command = [sys.executable, str(Path(__file__).with_name("patched_worker.py")), str(folder), *what]
    environ = attempt.environment("", "cpu", os.environ)
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
    assert row["skipped_steps"] == skipped
    assert row["measured_steps"] == 2


@pytest.mark.slow
def test_ddp_holds_everything_and_a_copy_of_the_gradients_in_buckets(run_sweep: Run) -> None:
    """Two real ranks: the buckets are as large as the gradients (torch/nn/parallel/distributed.py)."""
    alone, two, accumulated = run_sweep(
        tiny(),
        tiny(sharding="ddp", world_size=2),
        tiny(sharding="ddp", world_size=2, grad_accum=2, precision="bf16"),
        isolation="warm",
    )
    assert [row["outcome"] for row in (alone, two, accumulated)] == ["ok"] * 3, (two["reason"], accumulated["reason"])
    assert two["parameters"] == alone["parameters"] == PARAMETERS
    assert two["model_flops_per_token"] == alone["model_flops_per_token"]
    more = two["optimizer_peak_allocated_bytes"] - alone["optimizer_peak_allocated_bytes"]
    assert more == pytest.approx(4 * PARAMETERS, rel=0.05)
    assert len(two["rank_peak_allocated_bytes"]) == 2
    assert two["runner_config"]["bucket_cap_mb"] == 25
    elapsed = sum(accumulated["step_times_s"])
    assert accumulated["tokens_per_s"] == pytest.approx(2 * 2 * 2 * 32 * 2 / elapsed)


@pytest.mark.slow
def test_gradients_are_averaged_with_the_last_accumulated_pass_or_with_each(tmp_path: Path) -> None:
    """Two real ranks; one bucket holds all gradients of the tiny model, from the second step on."""
    counts = []
    for name, over in (("last", {}), ("each", {"no_sync": False})):
        folder = tmp_path / name
        folder.mkdir()
        row = patched(folder, tiny(sharding="ddp", world_size=2, grad_accum=4, **over), "averages")
        counts.append(len((folder / "averages").read_text().splitlines()))
        assert row["measured_steps"] == 2
    steps = 1 + 1 + 2 + 1  # warm-up, probe, measured, counted
    assert counts[0] == steps
    assert counts[1] == 4 * steps


def test_averaging_after_every_pass_needs_several() -> None:
    with pytest.raises(trial.InvalidTrial, match="changes nothing with grad_accum=1"):
        trial.parse(tiny(sharding="ddp", world_size=2, no_sync=False))
    with pytest.raises(trial.InvalidTrial, match="needs sharding=ddp"):
        trial.parse(tiny(grad_accum=2, no_sync=False))
