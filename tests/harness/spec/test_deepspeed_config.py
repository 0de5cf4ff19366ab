"""A user's ds_config.json beside the axes: what is taken from it, what contradicts them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny

from vramsweep import __main__ as front_door
from vramsweep.harness import trial

Write = Callable[[Any], str]
ADAMW = {"type": "AdamW", "params": {"lr": "auto"}}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a ds_config and returns its path."""

    def write(content: Any, name: str = "ds.json") -> str:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def zero(stage: Any, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage} | more.pop("zero", {})} | more


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert front_door.main(["plan", "-m", "model=tiny", "device=simulated", *words, "predict=false", "--json"]) == 0
    return [one["trial"] for one in json.loads(capsys.readouterr().out)["trials"]]


@pytest.mark.slow
def test_axes_that_are_left_alone_are_what_the_file_says(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    full = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 32, "fp16": {"enabled": True}, "optimizer": ADAMW}
    every = write(zero(3, zero=offload, **full))
    axes = ("sharding", "micro_batch", "grad_accum", "precision", "optimizer", "offload_optimizer", "offload_param")
    for runner in ("trainer", "deepspeed"):
        (found,) = planned(capsys, f"runner={runner}", f"ds_config={every}", "world_size=4")
        assert [found[axis] for axis in axes] == ["zero3", 2, 4, "fp16", "deepspeed_cpu_adam", True, True]
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), "auto")
    left = write(zero(1, **auto, bf16={"enabled": "auto"}, fp16={"enabled": False}), "left.json")
    (found,) = planned(capsys, "runner=trainer", f"ds_config={left}")
    assert [found[axis] for axis in axes] == ["zero1", 8, 1, "bf16", "default", False, False]
    both = planned(capsys, "runner=deepspeed", f"ds_config={every},{left}", "world_size=4", "optimizer=default,sgd")
    assert [one["sharding"] for one in both] == ["zero3", "zero3", "zero1", "zero1"]
    assert [one["optimizer"] for one in both] == ["default", "sgd"] * 2


@pytest.mark.parametrize(
    ("content", "over", "names"),
    [
        (zero(2), {"sharding": "zero3"}, ("zero_optimization.stage is 2", "sharding=zero3 (3 there)")),
        (zero(2), {"sharding": "none"}, ("zero_optimization.stage is 2", "sharding=none")),
        (zero(2, train_micro_batch_size_per_gpu=4), {}, ("train_micro_batch_size_per_gpu is 4", "micro_batch=2")),
        (zero(2, gradient_accumulation_steps=4), {}, ("gradient_accumulation_steps is 4", "grad_accum=1")),
        (zero(2, train_batch_size=7), {}, ("train_batch_size is 7", "micro_batch=2 grad_accum=1 world_size=1")),
        (zero(2, bf16={"enabled": True}), {}, ("bf16.enabled is true", "precision=fp32 (false there)")),
        (zero(2, bfloat16={"enabled": True}), {}, ("bfloat16.enabled is true", "precision=fp32")),
        (zero(2, fp16={"enabled": False}), {"precision": "fp16"}, ("fp16.enabled is false", "precision=fp16")),
        (zero(2, amp={"enabled": True}), {}, ("amp.enabled is true", "precision")),
        (zero(2, zero={"offload_optimizer": {"device": "cpu"}}), {}, ('is "cpu"', "offload_optimizer=false")),
        (
            zero(3, zero={"offload_param": {"device": "none"}}),
            {"sharding": "zero3", "offload_param": True},
            ('offload_param.device is "none"', 'offload_param=true ("cpu" there)'),
        ),
        (zero(3, zero={"offload_param": {"device": "nvme"}}), {"sharding": "zero3"}, ("nvme, which is not supported",)),
        (zero(2, optimizer=ADAMW), {}, ('optimizer is {"type": "AdamW"', "optimizer=default")),
        (zero(2, optimizer={"type": "Lamb"}), {"optimizer": "sgd"}, ('{"type": "Lamb"}', "optimizer=sgd")),
        (zero(2, optimizer={"type": "Lamb"}), {}, ("optimizer of type Lamb cannot be simulated",)),
        ({"bf16": {"enabled": "auto"}}, {}, ("has no zero_optimization.stage",)),
        (zero("3"), {}, ('stage is "3"', "must be 0 to 3")),
        (zero(True), {"sharding": "zero1"}, ("stage is true", "must be 0 to 3")),
        (zero("auto"), {"sharding": "ddp"}, ("leaves the stage to sharding=ddp", "zero0")),
        (
            zero(2, bf16={"enabled": True}, fp16={"enabled": True}),
            {"precision": "bf16"},
            ("bf16 and fp16 are both enabled",),
        ),
        (zero(2, optimizer="AdamW"), {}, ('optimizer is "AdamW"', "must be")),
        (zero(2, optimizer={"params": {}}), {}, ('optimizer is {"params": {}}', '"type": NAME')),
        (zero(2, zero={"offload_optimizer": None}), {"offload_optimizer": True}, ("is null; it must be an object",)),
        (zero(2, gradient_clipping="abc"), {}, ('gradient_clipping is "abc"; it must be a number',)),
        (zero(2, bf16=None), {"precision": "bf16"}, ("bf16 is null; it must be an object",)),
        (zero(2, bf16="auto"), {"precision": "bf16"}, ('bf16 is "auto"; it must be an object',)),
        (zero(2, scheduler="WarmupLR"), {}, ('scheduler is "WarmupLR"; it must be an object',)),
        (zero(2, bf16={"enabled": "true"}), {}, ('bf16.enabled is "true"; it must be true or false',)),
        (zero(2, tensor_parallel={"autotp_size": 2}), {}, ("tensor_parallel.autotp_size is 2", "not supported")),
        ('{"zero_optimization": {"stage": 2}, "zero_optimization": {"stage": 3}}', {}, ("is there twice",)),
        ("{", {}, ("ds.json is not JSON",)),
        (zero(2, gradient_clipping=10**400), {}, ("gradient_clipping is a whole number of 401 digits; allowed is",)),
        (zero(2, scheduler={"params": [{"lr": -(10**36)}]}), {}, ("lr is a whole number of 37 digits",)),
        ('{"gradient_clipping": NaN}', {}, ("gradient_clipping is NaN",)),
        ('{"a": 1' + "0" * 5000 + "}", {}, ("ds.json is not JSON", "4300 digits")),
        ('{"a": ' * 900 + "1" + "}" * 900, {}, ("ds.json", "nested deeper than 50")),
        ("[" * 100_000, {}, ("ds.json", "nested deeper than 50")),
        (zero(2), {"micro_batch": 10**20}, ("micro_batch is a whole number of 21 digits",)),
        (
            zero(2),
            {"runner": {"name": "trainer", "options": {"max_grad_norm": 10**400}}},
            ("max_grad_norm is a whole",),
        ),
        (zero(2), {"device": {"name": "simulated", "gpu": "l4-24gb", "memory_gib": 1e300}}, ("less than 1000000000",)),
        ("[1]", {}, ("ds.json holds [1]; it must be one object",)),
    ],
)
def test_a_file_that_contradicts_an_axis_is_refused_by_both_names(
    write: Write, content: Any, over: dict[str, Any], names: tuple[str, ...]
) -> None:
    simulated = {"name": "simulated", "gpu": "a100-80gb"}
    given = {"runner": {"name": "trainer"}, "sharding": "zero2", "device": simulated, "ds_config": write(content)}
    with pytest.raises(trial.InvalidTrial) as caught:
        trial.parse(tiny(**given | over))
    for name in names:
        assert name in str(caught.value)


def test_who_takes_a_file_and_what_does_without_one(tmp_path: Path, write: Write) -> None:
    for values, text in (
        (tiny(ds_config=write(zero(2))), "ds_config needs runner=deepspeed or trainer, not torch"),
        (
            tiny(ds_config=str(tmp_path / "none.json"), runner={"name": "deepspeed"}, sharding="zero2"),
            "there is no such",
        ),
        (tiny(runner={"name": "trainer", "options": {"deepspeed": "x"}}), "ds_config, the path of a file"),
        (tiny(runner={"name": "trainer"}, sharding="zero2", zero_init=False), "zero_init=false changes nothing"),
        (tiny(runner={"name": "trainer"}, sharding="zero1", precision="bf16_pure"), "fp32 master weights"),
    ):
        with pytest.raises(trial.InvalidTrial, match=text):
            trial.parse(values)


def test_the_content_of_the_file_is_part_of_the_trial_not_its_name(write: Write) -> None:
    def identity(content: Any, name: str) -> str:
        values = tiny(runner={"name": "deepspeed"}, sharding="zero2", ds_config=write(content, name))
        return trial.trial_id(trial.parse(values).model_dump(mode="json"))

    first = identity(zero(2), "a.json")
    assert identity(zero(2), "b.json") == first
    assert identity(zero(2, zero={"overlap_comm": False}), "a.json") != first
