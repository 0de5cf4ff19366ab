"""Versions to predict like: against what upstream's own code of those versions allocated, and what was published."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, parametrized, tiny

from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.spec import trial, trial_parser, version_differences
from vramsweep.runners.loops import deepspeed_engine, hf_trainer
from vramsweep.runners.predict import make_trace
from vramsweep.runners.trace.trace_data import Trace

pytestmark = [pytest.mark.slow, pytest.mark.deterministic]
A100 = gpu_lookup.gpu_named("a100-80gb")
OLD = {"deepspeed": "0.14.2", "transformers": "4.40.0"}
SIMULATED = {"name": "simulated", "gpu": "a100-80gb"}
MIB = 1 << 20
SMALL = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
# Bytes at most in the phases of the third step, cuBLAS workspaces left out, when deepspeed 0.14.2 and transformers
# 4.40.0 themselves were traced: ZeRO-3 in fp16 on two ranks, model made before it is divided, length 64, batch 2,
# padding, FusedAdam, by model, with the cache and with reentrant checkpointing.
UPSTREAM = {
    ("llama", False): (1_052_133_069, 1_048_412_889, 1_042_823_593),
    ("llama", True): (1_046_327_949, 1_042_592_921, 1_042_823_593),
    ("qwen2", False): (1_045_528_269, 1_043_185_369, 1_037_073_321),
    ("qwen2", True): (1_040_051_853, 1_037_365_401, 1_037_073_321),
}


def peaks(trace: Trace) -> tuple[int, ...]:
    """Bytes at most in each phase of the third step, workspaces left out."""
    found, live, start = [], 0, 0
    for mark in trace.marks:
        most = live
        for event in trace.events[start : mark.end]:
            if event and trace.categories[abs(event) - 1] != "workspaces":
                live += trace.sizes[event - 1] if event > 0 else -trace.sizes[-event - 1]
                most = max(most, live)
        start = mark.end
        if mark.step == 2:
            found.append(most)
    return tuple(found)


def traced_apart(folder: Path, chosen: trial.Trial) -> tuple[list[int], list[str]]:
    """Peaks and the differences applied, from a process of its own: DeepSpeed keeps its groups of ranks for one."""
    (folder / "trial.json").write_text(chosen.model_dump_json())
    environ = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'runners'}:{Path(__file__).parent}",
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=400)
    found, applied = json.loads(done.stdout.splitlines()[-1])
    return found, applied or []


@pytest.mark.parametrize(("model", "checkpointing"), UPSTREAM)
def test_a_run_of_old_versions_is_predicted_as_their_own_code_allocates(
    tmp_path: Path, model: str, checkpointing: bool
) -> None:
    config = SMALL | {"tie_word_embeddings": model == "qwen2"}
    values: dict[str, Any] = {
        "model": {"name": "old", "model_type": model, "config": config},
        "runner": {"name": "deepspeed"}, "sharding": "zero3", "world_size": 2, "precision": "fp16", "zero_init": False,
        "seq_len": 64, "micro_batch": 2, "padding": 0.5, "optimizer": "deepspeed_fused_adam", "versions": OLD,
        "use_cache": "off" if checkpointing else "on", "checkpointing": "full" if checkpointing else "none",
        "checkpointing_reentrant": checkpointing, "device": SIMULATED,
        "protocol": {"name": "old", "warmup_steps": 1, "measured_steps": 1},
    }  # fmt: skip
    chosen = trial_parser.parse(tiny(**values))
    found, applied = traced_apart(tmp_path, chosen)
    assert sorted(applied) == sorted(one.name for one in version_differences.find_differences(chosen))
    # sines once more, one-element tensors; today's checkpointed layer keeps mask and sines as long as its loss lives
    assert found == pytest.approx(UPSTREAM[model, checkpointing], abs=36 * 1024 if checkpointing else 12 * 1024)


@parametrized("versions_of_deepspeed")
def test_parameters_that_may_live_are_counted_as_then(
    tmp_path: Path, versions: dict[str, str], upstream: tuple[int, ...]
) -> None:
    """stage3_max_live_parameters holds back prefetching: it allows the parameters of two layers of eight."""
    zero = {
        "stage3_max_live_parameters": 1_600_000, "stage3_max_reuse_distance": 100,
        "stage3_prefetch_bucket_size": 168_000, "stage3_param_persistence_threshold": 1000, "reduce_bucket_size": MIB,
    }  # fmt: skip
    config = SMALL | {"num_hidden_layers": 8, "tie_word_embeddings": False}
    values: dict[str, Any] = {
        "model": {"name": "old", "model_type": "llama", "config": config},
        "runner": {"name": "deepspeed", "options": {"zero_optimization": zero}}, "sharding": "zero3", "world_size": 8,
        "precision": "fp16", "zero_init": False, "seq_len": 16, "micro_batch": 1, "optimizer": "deepspeed_fused_adam",
        "checkpointing": "full", "checkpointing_reentrant": True, "versions": versions, "device": SIMULATED,
        "protocol": {"name": "old", "warmup_steps": 1, "measured_steps": 1},
    }  # fmt: skip
    found, applied = traced_apart(tmp_path, trial_parser.parse(tiny(**values)))
    assert tuple(found) == upstream
    assert ("zero_live_parameters" in applied) is bool(versions)


@pytest.mark.parametrize("runner", ["deepspeed", "trainer"])
def test_qwen_0_5b_is_predicted_as_published_whoever_drives_it(tmp_path: Path, runner: str) -> None:
    """At length 1 what counts is what stays: 10,900 MiB active, tables of sines in fp16 among it (the Trainer, which
    makes its model in fp32 and leaves the cast to DeepSpeed)."""
    config = yaml.safe_load((ROOT / "conf" / "model" / "qwen0.5b.yaml").read_text())
    values: dict[str, Any] = {
        "model": config, "runner": {"name": runner}, "sharding": "zero3",
        "precision": "fp16", "zero_init": False, "seq_len": 1, "optimizer": "deepspeed_fused_adam", "versions": OLD,
        "use_cache": "on", "device": SIMULATED, "protocol": {"name": "old", "warmup_steps": 1, "measured_steps": 1},
    }  # fmt: skip
    found, applied = traced_apart(tmp_path, trial_parser.parse(tiny(**values)))
    assert "zero_half_buffers" in applied
    assert (max(found) + 2 * 8_519_680) / MIB == pytest.approx(10_900, rel=0.0005)  # with cuBLAS workspaces


def test_llama_3_8b_is_predicted_as_published() -> None:
    """Length 2,048. With batch 2 no block waits for a stream: 64,180 MiB active on all ranks; 3 ran out of memory.
    With batch 1 it lies between a card that keeps up and a host that runs ahead."""
    data = ROOT.parent / "shared" / "data" / "llama3-8b-zero3-8gpu"
    if not data.is_dir():
        pytest.skip("needs the published files")
    command = [sys.executable, str(ROOT / "benchmarks" / "published_8b.py"), "--only", "batches", "--json"]
    where = os.environ | {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=where)
    points = {point["value"]: point for point in map(json.loads, answer.stdout.splitlines())}
    one, two, three = (points[value]["predicted"] for value in (1, 2, 3))
    assert one["active"] <= min(points[1]["active"]) and max(points[1]["active"]) <= one["active_most"]
    assert one["active"] == pytest.approx(min(points[1]["active"]), rel=0.05)
    assert two["active"] == pytest.approx(min(points[2]["active"]), rel=0.001)
    assert points[3]["active"] is None and not three["fits"]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    asked = trial.Trial.model_validate_json((folder / "trial.json").read_text())
    driver = {"deepspeed": deepspeed_engine, "trainer": hf_trainer}[asked.runner.name]
    traced, about = make_trace.trace_trial(asked, A100, folder, driver)
    print(json.dumps([peaks(traced), about["differences"]]))
