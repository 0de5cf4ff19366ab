"""DistributedDataParallel: what ranks hold, simulated against real ones; targets that wrap their model themselves."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TARGETS, Run, tiny
from test_sharded import WORKSPACES

from vramsweep.harness import gpus, trial
from vramsweep.runners import custom, tracing

PARAMETERS = 4 * (256 * 512 + 512 + 512 * 256 + 256)  # bytes, of tests/targets/divided.py
SIMULATED = {"name": "simulated", "gpu": "a100-80gb"}


def divided(function: str, **over: Any) -> dict[str, Any]:
    runner = {"name": "custom", "target": f"{TARGETS / 'divided.py'}:{function}"}
    return tiny(**{"runner": runner, "sharding": "ddp", "world_size": 2, "model": {"name": "own"}} | over)


def agree(name: str, world: int, tolerance: int = 2048) -> None:
    """Rank 0 of real ranks held what is predicted, at rest and in each phase; token ids and counters apart.

    In a process of its own: one that has run tensor operations cannot fork ranks.
    """
    check = [sys.executable, str(ROOT / "benchmarks" / "sharded_check.py"), name, "--exact", "--json"]
    done = subprocess.run([*check, "--worlds", str(world)], capture_output=True, text=True, check=True, timeout=170)
    (found,) = json.loads(done.stdout)
    real, predicted = found["real"], found["predicted"]
    assert predicted["built"] == real["built"]
    assert predicted["rest"] == real["rest"]
    for phase in ("forward", "backward", "optimizer"):
        assert predicted[phase] == pytest.approx(real[phase], abs=tolerance), phase


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "DDP, fp32",
        "DDP, buckets of 2 MiB as gradients, fp32",
        "DDP, 2 passes, each averaged, fp32",
        "Trainer DDP, bf16",
    ],
)
def test_real_ranks_hold_what_is_predicted(name: str) -> None:
    agree(name, 2, tolerance=4096)


@pytest.mark.slow
def test_a_target_wraps_its_own_model(run_sweep: Run) -> None:
    """Buckets double the gradients, on real ranks and in the prediction."""
    predicted, whole, flattened, gathered, *several = run_sweep(
        divided("ddp", device=SIMULATED),
        divided("alone"),
        divided("fsdp1", sharding="fsdp1", device=SIMULATED),
        divided("fsdp2", sharding="fsdp2", device=SIMULATED),
        *(divided("ddp", repeat=repeat) for repeat in range(3)),
        *(divided(kind, sharding=kind, repeat=repeat) for kind in ("fsdp1", "fsdp2") for repeat in range(3)),
        isolation="warm",
    )
    # on a busy machine gloo's threads may let go of what they have sent only later
    real, flat, shards = (
        min(rows, key=lambda row: row["optimizer_peak_allocated_bytes"] or math.inf)
        for rows in (several[:3], several[3:6], several[6:])
    )
    assert [row["outcome"] for row in (real, predicted, shards, gathered)] == ["ok"] * 4, (real, predicted, shards)
    assert [row["outcome"] for row in (flat, flattened)] == ["ok"] * 2, (flat, flattened)
    assert real["parameters"] == predicted["parameters"] == shards["parameters"] == PARAMETERS // 4
    assert len(real["rank_peak_allocated_bytes"]) == 2
    for row in (real, predicted):  # weights, two states, gradients, buckets
        assert row["optimizer_peak_allocated_bytes"] >= 5 * PARAMETERS
    for measured, traced in ((real, predicted), (shards, gathered)):
        held = traced["optimizer_peak_allocated_bytes"] - WORKSPACES
        assert held == pytest.approx(measured["optimizer_peak_allocated_bytes"], rel=0.02)
    # with gloo one layer's part more is there, for which no reason was found
    more = flat["optimizer_peak_allocated_bytes"] - (flattened["optimizer_peak_allocated_bytes"] - WORKSPACES)
    assert 0 <= more <= PARAMETERS / 4
    assert shards["optimizer_peak_allocated_bytes"] < 4 * PARAMETERS
    assert whole["outcome"] == "invalid"
    assert "Sequential is no DistributedDataParallel and holds none" in whole["reason"]


@pytest.mark.parametrize(
    ("function", "sharding", "reason"),
    [
        ("joined_again", "ddp", "the process group is there already; call init_process_group only"),
        ("too_late", "fsdp2", "the optimizer has none of the model's parameters"),
        ("ddp", "fsdp2", "a DistributedDataParallel is made; use sharding=ddp"),
        ("alone", "fsdp1", "Sequential is no FullyShardedDataParallel"),
        ("too_late", "fsdp1", "FSDPSequential is no FullyShardedDataParallel"),
        ("alone", "fsdp2", "Sequential was not passed to fully_shard, nor anything in it"),
    ],
)
def test_what_a_target_does_wrong_is_said_in_a_line(tmp_path: Path, function: str, sharding: str, reason: str) -> None:
    chosen = trial.parse(divided(function, sharding=sharding, device=SIMULATED))
    with pytest.raises(trial.InvalidTrial, match=reason):
        tracing.trace_trial(chosen, gpus.named("a100-80gb"), tmp_path, custom)


def test_all_of_a_wrapper_s_parameters_count(tmp_path: Path) -> None:
    chosen = trial.parse(divided("in_a_wrapper", sharding="fsdp2", device=SIMULATED))
    _, details = tracing.trace_trial(chosen, gpus.named("a100-80gb"), tmp_path, custom)
    assert details["parameters"] == PARAMETERS // 4 + 256 * 257


def test_options_belong_to_a_sharding() -> None:
    for over, match in (
        ({"sharding": "ddp", "runner": {"options": {"bucket_mb": 5}}}, "takes bucket_cap_mb, gradient_as_bucket_view"),
        ({"sharding": "fsdp2", "runner": {"options": {"bucket_cap_mb": 5}}}, "it belongs to sharding=ddp"),
        (
            {"sharding": "zero1", "runner": {"name": "custom", "target": f"{__file__}:x"}},
            "needs runner=trainer or deepspeed",
        ),
    ):
        with pytest.raises(trial.InvalidTrial, match=match):
            trial.parse(tiny(world_size=2, **over))
