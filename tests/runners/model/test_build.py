"""Models, text data and pretrained weights from local folders; no hub."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, refusal, save_tokenizer, source, tiny
from transformers import AutoConfig, AutoModelForCausalLM

from vramsweep.harness.spec import trial as trials
from vramsweep.harness.spec import trial_parser
from vramsweep.runners.measure import model_description
from vramsweep.runners.model import build

pytestmark = pytest.mark.deterministic

CPU = torch.device("cpu")


@pytest.mark.parametrize("file", sorted((ROOT / "conf" / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_models_have_the_parameters_they_claim(file: Path) -> None:
    values = yaml.safe_load(file.read_text())
    if values["model_type"] is None:
        return
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(AutoConfig.for_model(values["model_type"], **values["config"]))
    net.tie_weights()
    assert model_description.parameters(net) == values["parameters"]
    positions = getattr(net.config, "max_position_embeddings", None) or net.config.max_seq_len  # MPT's name for it
    assert positions == values["max_positions"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny model with a tokenizer of whole words, and a text."""
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    torch.manual_seed(7)
    values = tiny()["model"]
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **values["config"])).save_pretrained(path)
    (path / "text.txt").write_text("a b c\n\na b c a b c a b c a b c a b c\n")
    return path


def hub(folder: Path, **over: Any) -> trials.Trial:
    model = {"name": "mine", "model_type": None, "config": {}, "path": str(folder), "max_positions": None}
    values = tiny(**over)
    values["model"] = model
    return trial_parser.parse(values)


def test_pretrained_weights_are_loaded_and_random_ones_are_not(folder: Path) -> None:
    saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    loaded = build.model(hub(folder, weights="pretrained"), CPU).state_dict()
    fresh = build.model(hub(folder), CPU).state_dict()
    name = "model.embed_tokens.weight"
    assert torch.equal(saved[name], loaded[name])
    assert not torch.equal(saved[name], fresh[name])


def test_the_id_follows_the_files(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a\n")
    one = hub(folder, data=str(text))
    assert set(one.fingerprints) == {str(text), str(folder / "config.json"), str(folder / "tokenizer.json")}
    text.write_text("b\n")
    assert hub(folder, data=str(text)).fingerprints != one.fingerprints


def test_what_a_model_cannot_do_is_invalid(folder: Path, tmp_path: Path) -> None:
    assert "4096 positions" in refusal(trials.InvalidTrial, build.model, hub(folder, seq_len=5000), CPU)
    assert "model.path" in refusal(trials.InvalidTrial, build.model, hub(tmp_path), CPU)
    (tmp_path / "empty.txt").write_text("\n\n")
    assert "contains no text" in refusal(trials.InvalidTrial, build.data, hub(folder, data=str(tmp_path / "empty.txt")))
    unknown = trial_parser.parse(tiny(model={"model_type": "no_such"}))
    assert "no_such" in refusal(trials.InvalidTrial, build.model, unknown, CPU)


def test_batches_cycle_through_the_pool_and_depend_on_the_seed() -> None:
    data = build.data(trial_parser.parse(tiny()))
    again = build.data(trial_parser.parse(tiny()))
    other = build.data(trial_parser.parse(tiny(seed=1)))
    assert torch.equal(data.batch(3, 2)["input_ids"], again.batch(3, 2)["input_ids"])
    assert not torch.equal(data.batch(3, 2)["input_ids"], other.batch(3, 2)["input_ids"])
    assert torch.equal(data.batch(0, 2)["input_ids"], data.batch(build.POOL // 2, 2)["input_ids"])


def test_no_batch_has_the_same_tensor_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors tell what an operator moves: a batch of 100 has 100 of them, though values repeat after 64."""
    many, stack = 100, torch.stack
    stacked: list[list[torch.Tensor]] = []
    monkeypatch.setattr(torch, "stack", lambda rows: stacked.append(rows) or stack(rows))
    for over in ({}, {"padding": 0.25}, {"packing": "documents"}):
        data = build.data(trial_parser.parse(tiny(micro_batch=many, **over)))
        assert len(data.samples) == build.POOL
        stacked.clear()
        ids = data.batch(0, many)["input_ids"]
        assert len(stacked) == len(data.samples[0])
        assert all(len(rows) == len(set(map(id, rows))) == many for rows in stacked)
        assert torch.equal(ids[0], ids[build.POOL]) and not torch.equal(ids[0], ids[1])


def test_a_step_s_batch_is_not_the_last_one_s_though_it_takes_every_sample() -> None:
    data = build.data(trial_parser.parse(tiny(micro_batch=100)))
    first, second = (data.batch(step, 100)["input_ids"] for step in (0, 1))
    assert {*map(tuple, first[64:].tolist())} != {*map(tuple, second[64:].tolist())}
    assert torch.equal(second[0], first[100 - build.POOL])


def test_tf32_is_on_only_when_asked_for() -> None:
    cuda = {"device": {"name": "cuda"}}
    build.prepare(trial_parser.parse(tiny(**cuda, precision="tf32")))
    assert torch.backends.cuda.matmul.allow_tf32
    build.prepare(trial_parser.parse(tiny()))
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


IMPORTED = source("imports_while_building.txt")


@pytest.mark.slow
def test_nothing_is_imported_while_a_model_is_made_on_its_device() -> None:
    """Modules that keep a tensor would put it there, where a fresh process imports them, and nowhere else."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, json.dumps(tiny())], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    where = json.loads(done.stdout.splitlines()[-1])
    assert "transformers.models.qwen2.modeling_qwen2" in where
    assert set(where.values()) == {"cpu"}, where
