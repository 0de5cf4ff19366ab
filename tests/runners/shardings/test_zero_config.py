"""DeepSpeed as its users run it: through the Trainer, by a ds_config.json, with the model whole first or divided."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run, cases, refusal, tiny
from test_sharded import SMALL, WORKSPACES, patched
from traces import SIMULATED, trace_trial
from transformers import AutoConfig, AutoModelForCausalLM

from vramsweep.harness.spec import trial, trial_parser
from vramsweep.runners.predict import trace_cache
from vramsweep.runners.shardings import zero_config

pytestmark = pytest.mark.deterministic

PARAMETERS = 119360
AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
TORCH_ADAM = {"type": "AdamW", "params": {"torch_adam": True}}  # DeepSpeed's own is compiled first, for minutes
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
ENGINE = tiny(runner={"name": "deepspeed", "options": {"zero_optimization": SMALL}}, sharding="zero2", precision="bf16")


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
        *(asked(tmp_path, 2, **both, checkpointing="full", seed=seed) for seed in (1, 2, 3)),
    ]
    rows = run_sweep(*values)
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
    # gloo's thread now and then lets the optimizer's gathered buffer go only after the next forward pass has begun
    for real, predicted in (([rows[0], *rows[8:]], rows[1]), ([rows[2]], rows[3])):
        for phase, tolerance in (("forward", 0.03), ("backward", 0.05)):  # a CPU updates one after the other
            column = f"{phase}_peak_allocated_bytes"
            assert predicted[column] - WORKSPACES == pytest.approx(min(row[column] for row in real), rel=tolerance)
    config = rows[0]["runner_config"]["deepspeed"]
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (2, 2)
    assert config["gradient_clipping"] == 1.0  # max_grad_norm, by the Trainer
    assert rows[2]["optimizer_effective"] == "DeepSpeedZeroOptimizer_Stage3(AdamW)"
    assert rows[6]["optimizer_effective"] == "DeepSpeedZeroOptimizer(AdamW)"


@pytest.mark.slow
def test_steps_that_the_trainer_s_engine_skips_are_counted(tmp_path: Path) -> None:
    values = asked(tmp_path, 2, {"fp16": {"enabled": "auto", "initial_scale_power": 40}}, precision="fp16")
    row = patched(tmp_path, values, "fp16")
    assert (row["skipped_steps"], row["measured_steps"]) == (2, 2)


def test_a_trainer_that_leaves_deepspeed_out_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(trial.InvalidTrial, match=r"needs DeepSpeed's engine, but .* trains"):
        trace_trial(asked(tmp_path, 2, device=SIMULATED), tmp_path)


def test_how_the_model_was_made_is_read_back(tmp_path: Path) -> None:
    whole = torch.nn.Linear(1, 1)
    zero_config.fitting(trial_parser.parse(asked(tmp_path, 3, zero_init=False)), whole)
    zero_config.fitting(trial_parser.parse(asked(tmp_path, 2)), whole)
    assert "zero_init=True" in refusal(RuntimeError, zero_config.fitting, trial_parser.parse(asked(tmp_path, 3)), whole)


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
    return [
        asdict(trace_cache.read(file.read_bytes())[0]) for file in (folder / "t" / "trials" / "traces").glob("*.json")
    ]


@pytest.mark.slow
def test_a_model_made_whole_is_all_on_the_card_once(run_sweep: Run, tmp_path: Path) -> None:
    """Under zero.Init a rank of 8 never holds more than its share and one layer's weights."""
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    large = {"model": {"config": wide, "parameters": None}, "world_size": 8}
    values = [asked(tmp_path, 3, device=SIMULATED, zero_init=zero_init, **large) for zero_init in (True, False)]
    divided, whole = run_sweep(*values)
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
    simulated: dict[str, Any] = {"device": SIMULATED}
    engine: dict[str, Any] = {"runner": {"name": "deepspeed"}}
    fake = engine | simulated
    overlapped = {"zero": {"overlap_com": True}}  # which zero.Init reads before the engine
    refused: list[tuple[dict[str, Any], str]] = [
        (asked(tmp_path, 2, {"zero": {"stage3_prefetch_bucket": 1}}, **fake), "does not take stage3_prefetch_bucket"),
        (asked(tmp_path, 2, {"gradient_clipping": 0.5}, **simulated), "gradient_clipping=0.5 vs hf max_grad_norm=1.0"),
        (asked(tmp_path, 3, overlapped, **simulated), "does not take overlap_com: .*the closest is overlap_comm"),
        (asked(tmp_path, 3, {"zero": {"zero_quantized_weights": True}}, **simulated), "lacks a CPU kernel"),
        (asked(tmp_path, 3, {"optimizer": {"type": "Foo"}}, **engine), "has no Foo; it has adagrad, adam"),
        (
            asked(tmp_path, 2, {"scheduler": {"type": "Foo"}}, **fake),
            "scheduler.type: Foo: there is no such scheduler; allowed: LRRangeTest, ",
        ),
        (asked(tmp_path, 2, {"scheduler": {"type": "WarmupDecayLR", "params": {}}}, **fake), "total_num_steps"),
        (asked(tmp_path, 2, {"communication_data_type": "foo"}, **fake), "DeepSpeed cannot read it"),
    ]
    fused = {"optimizer": "deepspeed_fused_adam", **simulated}
    filled, plain, *rows = run_sweep(
        asked(tmp_path, 3, auto, **fused),
        asked(tmp_path, 3, auto, **fused, **engine),
        *(values for values, _ in refused),
    )
    assert filled["outcome"] == plain["outcome"] == "ok", (filled["reason"], plain["reason"])
    zero = filled["runner_config"]["deepspeed"]["zero_optimization"]
    assert zero["reduce_bucket_size"] == 64 * 64  # hidden_size squared
    assert "reduce_bucket_size" not in plain["runner_config"]["zero_optimization"]  # the engine knows no "auto"
    for row in (filled, plain):
        assert row["optimizer_effective"] == "DeepSpeedZeroOptimizer_Stage3(FusedAdam)"
    for row, (_, reason) in zip(rows, refused, strict=True):
        assert row["outcome"] == "invalid" and re.search(reason, row["reason"]), row["reason"]


@pytest.mark.parametrize(("options", "said"), cases("deepspeed_key_mistakes"))
def test_what_deepspeed_would_ignore_is_an_error(options: str, said: str) -> None:
    config = zero_config.merged(zero_config.ds_config(trial_parser.parse(ENGINE)), json.loads(options))
    with pytest.raises(trial.InvalidTrial, match=said):
        zero_config.heeded(config)


def test_what_deepspeed_reads_is_left_alone() -> None:
    options = {
        "gradient_clipping": 1.0, "communication_data_type": "fp32", "wall_clock_breakdown": False,
        "zero_optimization": {"overlap_comm": True, "stage3_max_live_parameters": 1e6},
        "optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 1.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "activation_checkpointing": {"partition_activations": False},
        "flops_profiler": {"enabled": False}, "comms_logger": {"enabled": False},
    }  # fmt: skip
    zero_config.heeded(zero_config.merged(zero_config.ds_config(trial_parser.parse(ENGINE)), options))
