"""What other tools say of a trial: by their own functions where they have any, else by the rule that is cited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from transformers import AutoConfig, AutoModelForCausalLM

from vramsweep.harness import trial
from vramsweep.runners import others

SIMULATED = {"name": "simulated", "gpu": "a100-80gb"}
TINY = 119_360


def asked(tracked: bool = False, trainable: int = TINY, **over: Any) -> dict[str, int | None]:
    return others.asked(trial.parse(tiny(device=SIMULATED, **over)), TINY, trainable, tracked)


def test_rules_of_thumb() -> None:
    found = asked(precision="bf16")
    assert found["16 bytes a parameter"] == 16 * TINY and found["18 bytes a parameter"] == 18 * TINY
    assert found["weights, gradients, optimizer state"] == 16 * TINY
    pure = asked(precision="bf16_pure", optimizer="sgd")
    assert pure["weights, gradients, optimizer state"] == 4 * TINY
    zero = asked(precision="bf16", sharding="zero2", world_size=4, runner={"name": "deepspeed"})
    assert zero["16 bytes a parameter"] == (2 + 14 / 4) * TINY
    assert zero["weights, gradients, optimizer state"] == (2 + 14 / 4) * TINY
    three = asked(precision="bf16", sharding="zero3", world_size=4, runner={"name": "deepspeed"})
    assert three["16 bytes a parameter"] == 4 * TINY
    lora = asked(trainable=1000, precision="bf16", adapter="lora")
    assert lora["16 bytes a parameter"] == 2 * TINY + 14 * 1000
    assert lora["accelerate estimate-memory"] is None  # it is about all weights


def test_tools_are_asked_as_they_are() -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    config = trial.parse(tiny(device=SIMULATED)).model
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(AutoConfig.for_model(str(config.model_type), **config.config))
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in net.modules())
    deepspeed = {"precision": "bf16", "world_size": 4, "runner": {"name": "deepspeed"}}
    two = asked(sharding="zero2", **deepspeed)["DeepSpeed estimate_zero"]
    assert two == estimate_zero2_model_states_mem_needs(TINY, 4, 1, cpu_offload=False)[1]
    three = asked(sharding="zero3", **deepspeed)["DeepSpeed estimate_zero"]
    assert three == estimate_zero3_model_states_mem_needs(TINY, largest, 4, 1, cpu_offload=False)[1]
    bytes_of = sum(p.numel() * 4 for p in net.parameters()) + sum(b.numel() * b.element_size() for b in net.buffers())
    assert asked(precision="fp32")["accelerate estimate-memory"] == pytest.approx(4 * bytes_of, rel=0.01)


@pytest.mark.slow
def test_mem_tracker_sees_two_steps() -> None:
    found = asked(tracked=True, precision="fp32")[others.MEM_TRACKER]
    assert found is not None and 16 * TINY < found < 64 * TINY
    assert others.MEM_TRACKER not in asked(precision="fp32")
    zero = asked(tracked=True, precision="bf16", sharding="zero3", world_size=2, runner={"name": "deepspeed"})
    assert zero[others.MEM_TRACKER] is None


def test_one_that_fails_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(asked: trial.Trial, model: others.Model) -> int | None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(others, "OTHERS", (others.Other("broken", "here", broken), *others.OTHERS[:1]))
    assert asked() == {"broken": None, "16 bytes a parameter": 16 * TINY}
    assert "no such thing" in capsys.readouterr().err


@pytest.mark.slow
def test_answers_are_lines(tmp_path: Path) -> None:
    one = trial.parse(tiny(device=SIMULATED)).model_dump(mode="json")
    request, answers = tmp_path / "a.json", tmp_path / "b.jsonl"
    trials = {"1": {"trial": one, "parameters": TINY, "trainable": TINY}}
    request.write_text(json.dumps({"trials": trials, "tracked": []}))
    others.main(request, answers)
    sources, said = map(json.loads, answers.read_text().splitlines())
    assert set(sources["sources"]) == {other.name for other in others.OTHERS}
    assert said["trial_id"] == "1" and said["others"]["16 bytes a parameter"] == 16 * TINY
