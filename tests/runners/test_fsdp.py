"""FSDP1 and FSDP2 in the plain loop and the Trainer: predicted against real ranks; what their arguments may say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, tiny
from test_ddp import agree

from vramsweep.harness import gpus, trial
from vramsweep.runners import torch_loop, tracing, trainer

SIMULATED = {"name": "simulated", "gpu": "a100-80gb"}
PARAMETERS = 119360


def under_trainer(sharding: str, **over: Any) -> dict[str, Any]:
    config = {"fsdp_config": over.pop("config")} if "config" in over else {}
    values = {"runner": {"name": "trainer", "options": config}, "sharding": sharding, "world_size": 4}
    return tiny(**values | {"device": SIMULATED} | over)


def made(folder: Path, values: dict[str, Any]) -> Counter[str]:
    """Bytes that were ever allocated in a simulated run, by category."""
    trace, _ = tracing.trace_trial(trial.parse(values), gpus.named("a100-80gb"), folder, trainer)
    found: Counter[str] = Counter()
    for size, category in zip(trace.sizes, trace.categories, strict=True):
        found[category] += size
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["FSDP1, bf16", "Trainer FSDP1, bf16", "Trainer FSDP2, bf16", "FSDP2, bf16", "Trainer FSDP2 offload, bf16"],
)
def test_real_ranks_hold_what_is_predicted(name: str) -> None:
    agree(name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_the_trainer_holds_its_share_in_fp32(tmp_path: Path, sharding: str) -> None:
    """Also of a model that was loaded in bf16: accelerate casts what is trained."""
    found = made(tmp_path, under_trainer(sharding, precision="bf16"))
    assert found["parameters"] == PARAMETERS
    assert found["optimizer_state"] == pytest.approx(2 * PARAMETERS, abs=200)  # and counters


@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"transformer_layer_cls_to_wrap": "GPT2Block"}, "Qwen2ForCausalLM has no GPT2Block; .* Qwen2DecoderLayer"),
        ({"version": 2}, "fsdp_config.version belongs to the axis sharding"),
        ({"cpu_offload": True}, "belongs to the axis offload_param"),
        ({"reshard": True}, "does not look at it with sharding=fsdp"),
        ({"reshard_after_forward": "maybe"}, "reshard_after_forward is maybe; with sharding=fsdp. it must be"),
        ({"transformer_layer_cls_to_wrap": 3}, "it must be a name or a list of names"),
        ({"xla": True}, "fsdp_config.xla is for torch_xla"),
        ({"min_num_params": 1000}, "has no effect without auto_wrap_policy=SIZE_BASED_WRAP"),
    ],
)
def test_what_fsdp_config_may_say(tmp_path: Path, sharding: str, config: dict[str, Any], match: str) -> None:
    with pytest.raises(trial.InvalidTrial, match=match):
        made(tmp_path, under_trainer(sharding, config=config))


@pytest.mark.slow
def test_offloading_takes_everything_but_what_is_gathered_off_the_card(tmp_path: Path) -> None:
    found = made(tmp_path, under_trainer("fsdp2", offload_param=True))
    assert not found["parameters"] and not found["gradients"] and not found["optimizer_state"]
    assert found["communication"] > 4 * PARAMETERS
    with pytest.raises(trial.InvalidTrial, match="give offload_param=true alone"):
        trial.parse(under_trainer("fsdp2", offload_param=True, offload_optimizer=True))


@pytest.mark.slow
@pytest.mark.parametrize("driver", [trainer, torch_loop])
def test_what_is_offloaded_is_page_locked_and_there_once(tmp_path: Path, driver: Any) -> None:
    """CPUOffloadPolicy's pin_memory is true, of parameters and of gradients (_fsdp_param.py, _fsdp_collectives.py)."""
    over = {"runner": {"name": driver.__name__.rpartition(".")[2].removesuffix("_loop")}}
    values = under_trainer("fsdp2", offload_param=True, **over)
    trace, _ = tracing.trace_trial(trial.parse(values), gpus.named("a100-80gb"), tmp_path, driver)
    host = trace.host
    alive = set()
    for event in host.events:
        alive.add(event) if event > 0 else alive.discard(-event)
    kept = Counter[tuple[str, bool]]()
    for number in (event - 1 for event in alive):
        kept[host.categories[number], host.pinned[number]] += host.sizes[number]
    assert kept["parameters", True] == PARAMETERS and not kept["parameters", False]  # fp32, a quarter of them
    assert kept["other", False] < 1000 and not kept["other", True]
    gradients = [pinned for pinned, name in zip(host.pinned, host.categories, strict=True) if name == "gradients"]
    assert gradients and all(gradients)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_what_has_no_memory_yet_takes_none_while_it_is_divided(tmp_path: Path, options: dict[str, Any]) -> None:
    values = under_trainer("fsdp2", runner={"name": "torch", "options": options}, world_size=64)
    trace, _ = tracing.trace_trial(trial.parse(values), gpus.named("a100-80gb"), tmp_path, torch_loop)
    live = most = 0
    for event in trace.events[: trace.marks[0].end]:
        live += trace.sizes[event - 1] if event > 0 else -trace.sizes[-event - 1]
        most = max(most, live)
    largest = 4 * 512 * 64  # which torch makes before it is the module's
    assert largest < most < largest + 2 * 4 * PARAMETERS / 64 + 4096


@pytest.mark.slow
def test_offloaded_parameters_train_on_real_ranks(run_sweep: Run) -> None:
    cpu = {"device": {"name": "cpu"}, "world_size": 2, "offload_param": True}
    rows = run_sweep(
        under_trainer("fsdp1", **cpu),
        under_trainer("fsdp2", **cpu),
        tiny(sharding="fsdp1", **cpu),
        tiny(sharding="fsdp2", **cpu),
        isolation="warm",
    )
    assert [row["outcome"] for row in rows] == ["ok"] * 4, [row["reason"] for row in rows]
    assert {row["parameters"] for row in rows} == {PARAMETERS}


@pytest.mark.parametrize("runner", [{"name": "torch", "options": {"use_orig_params": True}}, {"name": "trainer"}])
def test_what_torch_would_not_flatten_is_a_line(runner: dict[str, Any]) -> None:
    simulated = {"name": "simulated", "gpu": "a100-80gb"}
    values = tiny(
        sharding="fsdp1", world_size=2, adapter="lora", precision="bf16_pure", runner=runner, device=simulated
    )
    with pytest.raises(trial.InvalidTrial, match="flattens weights of one dtype only"):
        trial.parse(values)
    trial.parse(values | {"precision": "bf16"})
