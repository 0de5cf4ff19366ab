"""Test a user's ds_config.json: the values that are taken from it, and those that contradict the axes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli, cases, refusal, tiny

from vramsweep.harness.spec import trial, trial_identity, trial_parser

pytestmark = pytest.mark.deterministic

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


def planned(cli: Cli, *words: str) -> list[dict[str, Any]]:
    found = cli.json("plan", "-m", "model=tiny", "device=simulated", *words, "predict=false")
    return [one["trial"] for one in found["trials"]]


@pytest.mark.slow
def test_axes_that_are_left_alone_are_what_the_file_says(write: Write, cli: Cli) -> None:
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    full = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 32, "fp16": {"enabled": True}, "optimizer": ADAMW}
    every = write(zero(3, zero=offload, **full))
    axes = ("sharding", "micro_batch", "grad_accum", "precision", "optimizer", "offload_optimizer", "offload_param")
    for runner in ("trainer", "deepspeed"):
        (found,) = planned(cli, f"runner={runner}", f"ds_config={every}", "world_size=4")
        assert [found[axis] for axis in axes] == ["zero3", 2, 4, "fp16", "deepspeed_cpu_adam", True, True]
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), "auto")
    left = write(zero(1, **auto, bf16={"enabled": "auto"}, fp16={"enabled": False}), "left.json")
    (found,) = planned(cli, "runner=trainer", f"ds_config={left}")
    assert [found[axis] for axis in axes] == ["zero1", 8, 1, "bf16", "default", False, False]
    both = planned(cli, "runner=deepspeed", f"ds_config={every},{left}", "world_size=4", "optimizer=default,sgd")
    assert [one["sharding"] for one in both] == ["zero3", "zero3", "zero1", "zero1"]
    assert [one["optimizer"] for one in both] == ["default", "sgd"] * 2


CLIPPED = json.dumps(zero(2, gradient_clipping=10**400))
LONG: list[tuple[str, dict[str, Any], str]] = [
    (CLIPPED, {}, "gradient_clipping is a whole number of 401 digits; allowed is"),
    ('{"a": 1' + "0" * 5000 + "}", {}, "ds.json cannot be read as JSON | 4300 digits"),
    ('{"a": ' * 900 + "1" + "}" * 900, {}, "ds.json | nested deeper than 50"),
    ("[" * 100_000, {}, "ds.json | nested deeper than 50"),
    (json.dumps(zero(2)), {"runner": {"name": "trainer", "options": {"max_grad_norm": 10**400}}}, "max_grad_norm is a"),
]


@pytest.mark.parametrize(
    ("content", "over", "said"),
    LONG + [(text, json.loads(over), said) for text, over, said in cases("ds_config_mistakes")],
)
def test_a_file_that_contradicts_an_axis_is_refused_by_both_names(
    write: Write, content: str, over: dict[str, Any], said: str
) -> None:
    simulated = {"name": "simulated", "gpu": "a100-80gb"}
    given = {"runner": {"name": "trainer"}, "sharding": "zero2", "device": simulated, "ds_config": write(content)}
    told = refusal(trial.InvalidTrial, trial_parser.parse, tiny(**given | over))
    assert all(part in told for part in said.split(" | ")), told


def test_who_takes_a_file_and_what_does_without_one(tmp_path: Path, write: Write) -> None:
    none = tiny(ds_config=str(tmp_path / "none.json"), runner={"name": "deepspeed"}, sharding="zero2")
    for values, text in (
        (none, "there is no such"),
        (tiny(ds_config=write(zero(2))), "ds_config needs runner=trainer or deepspeed, not torch"),
        (tiny(runner={"name": "trainer", "options": {"deepspeed": "x"}}), "ds_config, the path of a file"),
        (tiny(runner={"name": "trainer"}, sharding="zero2", zero_init=False), "zero_init=false has no effect"),
        (tiny(runner={"name": "trainer"}, sharding="zero1", precision="bf16_pure"), "fp32 master weights"),
    ):
        assert text in refusal(trial.InvalidTrial, trial_parser.parse, values)


def test_the_content_of_the_file_is_part_of_the_trial_not_its_name(write: Write) -> None:
    def identity(content: Any, name: str) -> str:
        values = tiny(runner={"name": "deepspeed"}, sharding="zero2", ds_config=write(content, name))
        return trial_identity.trial_id(trial_parser.parse(values).model_dump(mode="json"))

    first = identity(zero(2), "a.json")
    assert identity(zero(2), "b.json") == first
    assert identity(zero(2, zero={"overlap_comm": False}), "a.json") != first
