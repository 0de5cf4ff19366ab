"""DeepSpeed as its users run it: through the Trainer, by a ds_config.json, with the model whole first or divided."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run, tiny
from test_sharded import SIMULATED, WORKSPACES, patched
from transformers import AutoConfig, AutoModelForCausalLM

from vramsweep.harness import gpus, trial
from vramsweep.runners import tracing, trainer
from vramsweep.runners.shardings import zero

PARAMETERS = 119360
SMALL = {"reduce_bucket_size": 1 << 20, "allgather_bucket_size": 1 << 20}  # by default 2 GB of zeros each
AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
TORCH_ADAM = {"type": "AdamW", "params": {"torch_adam": True}}  # DeepSpeed's own is compiled first, for minutes
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}


def file(folder: Path, stage: int, **more: Any) -> str:
    """A ds_config.json as users of the Trainer have it."""
    zero = {"stage": stage, **SMALL, **more.pop("zero", {})}
    text = json.dumps({**AUTO, "zero_optimization": zero, **more})
    path = folder / f"{abs(hash(text))}.json"
    path.write_text(text)
    return str(path)


def asked(folder: Path, stage: int, more: dict[str, Any] | None = None, **over: Any) -> dict[str, Any]:
    """A trial of the Trainer's with such a file."""
    given = {"runner": {"name": "trainer"}, "ds_config": file(folder, stage, **(more or {})), "device": {"name": "cpu"}}
    return tiny(sharding=f"zero{stage}", **given | over)


@pytest.mark.slow
def test_the_trainer_s_engine_real_and_predicted_whatever_the_stage(run_sweep: Run, tmp_path: Path) -> None:
    """Phases of two real ranks, with accumulation and checkpointing, and the first loss, which is ln(vocabulary)."""
    offload = {"offload_optimizer": {"device": "cpu"}}
    both = {"world_size": 2, "attention": "eager", "grad_accum": 2, "precision": "bf16"}
    values = [
        *(asked(tmp_path, 2, **both, checkpointing="full", device=device) for device in ({"name": "cpu"}, SIMULATED)),
        *(asked(tmp_path, 3, **both, device=device) for device in ({"name": "cpu"}, SIMULATED)),
        asked(tmp_path, 3, **both, zero_init=False),
        asked(tmp_path, 0),
        asked(tmp_path, 1, {"zero": offload, "optimizer": TORCH_ADAM}, offload_optimizer=True, optimizer="adamw_torch"),
        tiny(runner={"name": "deepspeed", "options": {"zero_optimization": SMALL}}, sharding="zero3", precision="bf16"),
    ]
    rows = run_sweep(*values, isolation="warm")
    assert [row["outcome"] for row in rows] == ["ok"] * len(rows), [row["reason"] for row in rows]
    for row in rows:
        assert row["parameters"] == PARAMETERS and row["deepspeed_version"]
        if row["device"] == "simulated":
            continue
        # tied weights too are initialised by transformers, of std 0.02, under zero.Init or not
        assert row["loss_first"] * row["grad_accum"] ** (row["runner"] == "trainer") == pytest.approx(
            math.log(512), 0.02
        )
        assert row["skipped_steps"] == 0 and row["measured_steps"] == 2
        elapsed = sum(row["step_times_s"])
        assert row["tokens_per_s"] == pytest.approx(2 * 32 * 2 * row["grad_accum"] * row["world_size"] / elapsed)
    for real, predicted in ((rows[0], rows[1]), (rows[2], rows[3])):
        for phase, tolerance in (("forward", 0.03), ("backward", 0.05)):  # a CPU updates one after the other
            column = f"{phase}_peak_allocated_bytes"
            assert predicted[column] - WORKSPACES == pytest.approx(real[column], rel=tolerance), phase
    config = rows[0]["runner_config"]["deepspeed"]
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (2, 2)
    assert config["gradient_clipping"] == 1.0  # max_grad_norm, by the Trainer
    assert rows[2]["optimizer_effective"] == "DeepSpeedZeroOptimizer_Stage3(AdamW)"
    assert rows[6]["optimizer_effective"] == "DeepSpeedZeroOptimizer(AdamW)"


@pytest.mark.slow
@pytest.mark.parametrize(("power", "skipped"), [(40, 2), (8, 0)])
def test_steps_that_the_trainer_s_engine_skips_are_counted(tmp_path: Path, power: int, skipped: int) -> None:
    values = asked(tmp_path, 2, {"fp16": {"enabled": "auto", "initial_scale_power": power}}, precision="fp16")
    row = patched(tmp_path, values, "fp16")
    assert row["skipped_steps"] == skipped
    assert row["measured_steps"] == 2


def test_a_trainer_that_leaves_deepspeed_out_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    chosen = trial.parse(asked(tmp_path, 2, device=SIMULATED))
    with pytest.raises(trial.InvalidTrial, match=r"what trains is .*, not DeepSpeed's engine"):
        tracing.trace_trial(chosen, gpus.named("a100-80gb"), tmp_path, trainer)


def test_how_the_model_was_made_is_read_back(tmp_path: Path) -> None:
    whole = torch.nn.Linear(1, 1)
    zero.fitting(trial.parse(asked(tmp_path, 3, zero_init=False)), whole)
    zero.fitting(trial.parse(asked(tmp_path, 2)), whole)
    with pytest.raises(RuntimeError, match="zero_init=True"):
        zero.fitting(trial.parse(asked(tmp_path, 3)), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepspeed", "trainer"])
def test_what_each_storage_of_the_engine_is_for(run_sweep: Run, tmp_path: Path, name: str) -> None:
    """Blocks of several parameters are gathered together and copied out of what the collective filled; a gradient has a
    place on the card on its way to the host; offloading by its old name offloads."""
    given: dict[str, Any] = {"device": SIMULATED, "precision": "bf16", "runner": {"name": name}, "world_size": 8}
    offloaded = {"offload_optimizer": True, "optimizer": "adamw_torch", **given}
    (gathered,) = run_sweep(
        asked(tmp_path, 3, {"zero": {"stage3_param_persistence_threshold": 0}}, seq_len=31, micro_batch=3, **given)
    )
    (trace,) = kept(tmp_path)
    *_, before, forward, _, _ = trace["marks"]
    of: dict[str, set[int]] = {}
    for event in trace["events"][before[0] : forward[0]]:
        of.setdefault(trace["categories"][event - 1], set()).add(trace["sizes"][event - 1]) if event > 0 else None
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **tiny()["model"]["config"]))
    weights = {2 * parameter.numel() for parameter in net.parameters() if parameter.dim() > 1}
    assert weights <= of["communication"] and not weights & of["activations"]
    for told in ({"offload_optimizer": {"device": "cpu"}}, {"cpu_offload": True}):
        (row,) = run_sweep(asked(tmp_path, 2, {"zero": told, "optimizer": TORCH_ADAM}, **offloaded))
        assert row["outcome"] == gathered["outcome"] == "ok", row["reason"]
        assert row["peak_buffers_bytes"] < 1000  # rotary frequencies, not the embeddings' gradient
    for trace in [one for one in kept(tmp_path) if one != trace]:
        assert "optimizer_state" in trace["host"]["categories"] and "optimizer_state" not in trace["categories"]


def kept(folder: Path) -> list[dict[str, Any]]:
    """The traces of the sweep."""
    return [tracing.plain(tracing.read(file.read_bytes())[0]) for file in (folder / "t" / "traces").glob("*.json")]


@pytest.mark.slow
def test_a_configuration_that_deepspeed_cannot_read_is_a_line(run_sweep: Run, tmp_path: Path) -> None:
    engine: dict[str, Any] = {"device": SIMULATED, "runner": {"name": "deepspeed"}}
    cases = (
        ({"scheduler": {"type": "Foo"}}, "scheduler.type: Foo is none of LRRangeTest, "),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "total_num_steps"),
        ({"communication_data_type": "foo"}, "DeepSpeed cannot read it"),
    )
    rows = run_sweep(*(asked(tmp_path, 2, more, **engine) for more, _ in cases), isolation="warm")
    for row, (_, text) in zip(rows, cases, strict=True):
        assert row["outcome"] == "invalid" and text in row["reason"], row["reason"]


@pytest.mark.slow
def test_a_model_made_whole_is_all_on_the_card_once(run_sweep: Run, tmp_path: Path) -> None:
    """Under zero.Init a rank of 8 never holds more than its share and one layer's weights."""
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    large = {"model": {"config": wide, "parameters": None}, "world_size": 8}
    values = [asked(tmp_path, 3, device=SIMULATED, zero_init=zero_init, **large) for zero_init in (True, False)]
    divided, whole = run_sweep(*values, isolation="warm")
    assert divided["outcome"] == whole["outcome"] == "ok", (divided["reason"], whole["reason"])
    parameters = divided["parameters"]
    assert whole["parameters"] == parameters
    assert whole["load_peak_allocated_bytes"] >= 4 * parameters
    assert divided["load_peak_allocated_bytes"] < 4 * parameters / 2
    for column in ("forward_peak_allocated_bytes", "peak_parameters_bytes"):
        assert whole[column] == divided[column]


@pytest.mark.slow
def test_a_key_that_nobody_heeds_is_refused_and_one_that_the_trainer_fills_in_is_not(
    run_sweep: Run, tmp_path: Path
) -> None:
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    warmup = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    auto = {
        "zero": dict.fromkeys(sizes, "auto"),
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "optimizer": ADAMW,
    }
    fused = {"device": SIMULATED, "optimizer": "deepspeed_fused_adam"}
    engine = {"runner": {"name": "deepspeed"}}
    values = [
        asked(tmp_path, 3, auto, **fused),
        asked(tmp_path, 3, auto, **fused, **engine),
        asked(tmp_path, 2, {"gradient_cliping": 1.0}, device=SIMULATED),
        asked(tmp_path, 2, {"zero": {"stage3_prefetch_bucket": 1}}, device=SIMULATED, **engine),
        asked(tmp_path, 2, {"gradient_clipping": 0.5}, device=SIMULATED),
        asked(tmp_path, 3, {"zero": {"overlap_com": True}}, device=SIMULATED),  # zero.Init reads it before the engine
        asked(tmp_path, 3, {"zero": {"zero_quantized_weights": True}}, device=SIMULATED),
        asked(tmp_path, 3, {"optimizer": {"type": "Foo"}}, **engine),
    ]
    filled, plain, *refused = run_sweep(*values, isolation="warm")
    assert filled["outcome"] == plain["outcome"] == "ok", (filled["reason"], plain["reason"])
    zero = filled["runner_config"]["deepspeed"]["zero_optimization"]
    assert zero["reduce_bucket_size"] == 64 * 64  # hidden_size squared
    assert "reduce_bucket_size" not in plain["runner_config"]["zero_optimization"]  # the engine knows no "auto"
    for row in (filled, plain):
        assert row["optimizer_effective"] == "DeepSpeedZeroOptimizer_Stage3(FusedAdam)"
    reasons = (
        "gradient_cliping: DeepSpeed",
        "does not take stage3_prefetch_bucket",
        "gradient_clipping=0.5 vs hf max_grad_norm=1.0",
        "does not take overlap_com: .*the closest is overlap_comm",
        "has no kernel for a CPU",
        "has no Foo; it has adagrad, adam",
    )
    for row, text in zip(refused, reasons, strict=True):
        assert row["outcome"] == "invalid" and re.search(text, row["reason"]), row["reason"]
