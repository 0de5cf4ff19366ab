"""The class that a configuration names, its inputs, and its memory: predicted, and as a CPU's live bytes."""

import json
from pathlib import Path

import architectures
import pytest
import torch
from conftest import Run, parametrized, refusal

from vramsweep.harness.spec.trial import InvalidTrial
from vramsweep.runners.model import build

pytestmark = pytest.mark.deterministic

TWELVE = (
    *("gpt2", "bert", "deberta_v2", "t5", "bart", "vit"),
    *("convnext", "llava", "idefics3", "qwen2_vl", "gemma3", "whisper"),
)


@parametrized("classes_of_configurations")
def test_the_class_and_its_batch(
    tmp_path: Path, name: str, named: str | None, made: str | None, shapes: dict[str, tuple[int, ...]]
) -> None:
    architectures.write_config(name, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": [named] if named else None}))
    trial = architectures.make_trial(str(tmp_path), "cpu")
    batch = build.data(trial).batch(0, 2)
    assert type(build.model(trial, torch.device("cpu"))).__name__ == (made or named)
    assert {key: tuple(one.shape) for key, one in batch.items()} == shapes


def test_an_image_needs_its_tokens(tmp_path: Path) -> None:
    architectures.write_config("llava", tmp_path)  # (64 / 8) squared placeholders, and one token more
    trial = architectures.make_trial(str(tmp_path), "cpu")
    assert (build.data(trial).batch(0, 1)["input_ids"] == 500).sum() == 64
    assert "64 of an image" in refusal(InvalidTrial, build.data, trial.model_copy(update={"seq_len": 64}))


@pytest.mark.slow
@pytest.mark.parametrize("name", TWELVE)
def test_architectures_need_what_a_cpu_s_tensors_need(name: str) -> None:
    predicted, measured = architectures.compare(name)
    assert predicted == pytest.approx(measured, rel=architectures.TOLERANCE)


@pytest.mark.slow
def test_images_are_no_tokens(tmp_path: Path, run_sweep: Run) -> None:
    architectures.write_config("vit", tmp_path)
    for row in run_sweep(*(architectures.make_trial(str(tmp_path), on).model_dump() for on in ("cpu", "simulated"))):
        assert row["samples_per_s"] or row["estimated_step_s"], row["reason"]
        names = ("tokens_per_s", "estimated_tokens_per_s", "model_flops_per_token", "padding_fraction")
        assert {row[name] for name in names} == {None}
