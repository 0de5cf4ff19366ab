"""Identity and validity of trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import custom, tiny

from vramsweep.harness import trial as trials


def identity(values: dict[str, Any]) -> str:
    return trials.trial_id(trials.parse(values).model_dump(mode="json"))


def test_same_values_give_the_same_id_whatever_their_order() -> None:
    assert identity(tiny()) == identity(dict(reversed(list(tiny().items()))))


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 33},
        {"seed": 1},
        {"repeat": 1},
        {"protocol": {"measured_steps": 3}},
        {"model": {"config": {"hidden_size": 128}}},
        {"optimizer": "sgd"},
        {"gradient_checkpointing": True},
    ],
)
def test_any_changed_setting_is_a_new_trial(change: dict[str, Any]) -> None:
    assert identity(tiny(**change)) != identity(tiny())


def test_a_raised_measurement_version_is_a_new_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(tiny())
    monkeypatch.setitem(trials.MEASUREMENT_VERSIONS, "torch", 99)
    assert identity(tiny()) != before


def test_a_changed_target_file_is_a_new_trial(tmp_path: Path) -> None:
    target = tmp_path / "mine.py"
    ids = []
    for text in ("def build(trial): pass", "def build(trial): return 1"):
        target.write_text(text)
        ids.append(identity(tiny(runner={"name": "custom", "target": f"{target}:build"})))
    assert ids[0] != ids[1]


def test_equal_allocator_texts_are_one_trial() -> None:
    cuda = {"device": {"name": "cuda"}}
    one = tiny(**cuda, allocator={"name": "a", "conf": "max_split_size_mb:128,expandable_segments:True"})
    two = tiny(**cuda, allocator={"name": "a", "conf": " expandable_segments:True , max_split_size_mb:128"})
    assert trials.parse(one).allocator.conf == trials.parse(two).allocator.conf
    assert identity(one) == identity(two)


CUDA = {"device": {"name": "cuda"}}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (tiny(seq_len=0), "seq_len = 0"),
        (tiny(record=True), "record=true needs device=cuda"),
        (tiny(**CUDA, record=True, allocator={"name": "a", "conf": "backend:cudaMallocAsync"}), "native allocator"),
        (tiny(seq_len="long"), "seq_len = 'long'"),
        (tiny(seq_len=4097), "longer than tiny's 4096 positions"),
        (tiny(micro_batch=0), "micro_batch = 0"),
        (tiny(precision="fp8"), "precision = 'fp8'"),
        (tiny(colour="red"), "colour"),
        (tiny(precision="fp16"), "not supported on device=cpu"),
        (tiny(precision="tf32"), "tensor cores"),
        (tiny(attention="flash_attention_2"), "needs CUDA"),
        (tiny(allocator={"name": "expandable", "conf": "expandable_segments:True"}), "not in use on device=cpu"),
        (tiny(**CUDA, allocator={"name": "x", "conf": "max_split_size:128"}), "max_split_size"),
        (tiny(**CUDA, allocator={"name": "x", "conf": "max_split_size_mb:1"}), "max_split_size_mb:1"),
        (
            tiny(**CUDA, allocator={"name": "x", "conf": "backend:cudaMallocAsync,expandable_segments:True"}),
            "expandable_segments has no effect",
        ),
        (tiny(runner={"name": "torch", "zero_stage": 2}), "belongs to runner=deepspeed"),
        (tiny(runner={"name": "torch", "world_size": 2}), "needs runner=deepspeed"),
        (tiny(**CUDA, runner={"name": "fsdp"}, precision="fp16"), "runner=fsdp in fp16"),
        (tiny(runner={"name": "fsdp", "options": {"mesh": 2}}), "runner=fsdp takes reshard_after_forward"),
        (tiny(runner={"name": "fsdp", "zero_stage": 2}), "belongs to runner=deepspeed"),
        (
            tiny(
                runner={"name": "deepspeed", "zero_stage": 3, "offload_param": True},
                device={"name": "simulated", "gpu": "a100-80gb"},
            ),
            "offload_param cannot be simulated",
        ),
        (
            tiny(
                runner={"name": "deepspeed", "zero_stage": 2, "options": {"optimizer": {"type": "AdamW"}}},
                device={"name": "simulated", "gpu": "a100-80gb"},
            ),
            "compiled kernels and cannot be simulated",
        ),
        (tiny(runner={"name": "deepspeed"}), "needs runner.zero_stage"),
        (tiny(runner={"name": "deepspeed", "zero_stage": 4}), "zero_stage = 4"),
        (tiny(runner={"name": "deepspeed", "zero_stage": 0, "offload_optimizer": True}), "silently ignores"),
        (tiny(runner={"name": "deepspeed", "zero_stage": 2, "offload_param": True}), "needs zero_stage 3"),
        (tiny(runner={"name": "deepspeed", "zero_stage": 0}, precision="bf16"), "ZeRO-0 in bf16"),
        (tiny(runner={"name": "deepspeed", "zero_stage": 2}, precision="bf16_pure"), "master weights"),
        (tiny(runner={"name": "custom"}), "needs runner.target"),
        (tiny(runner={"name": "custom", "target": "nowhere.py:build"}), "no file nowhere.py"),
        (tiny(weights="pretrained"), "needs model.path"),
        (tiny(data="corpus.txt"), "needs a tokenizer"),
        (tiny(model={"path": "somewhere"}), "either a shipped architecture or model.path"),
    ],
)
def test_impossible_combinations_say_why(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(trials.InvalidTrial) as caught:
        trials.parse(values)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_steps_and_tokens() -> None:
    trial = trials.parse(tiny(grad_accum=3, seq_len=10, micro_batch=4))
    assert trial.tokens_per_step() == 120
    assert trial.samples_per_step() == 12
    assert trial.steps() == 1 + 1 + 2 + 1


def test_custom_needs_no_model_architecture() -> None:
    values = custom("good")
    values["model"] = {"name": "mine"}
    assert trials.parse(values).model.name == "mine"
