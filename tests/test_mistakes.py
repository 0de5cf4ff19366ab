"""Test newcomers' mistakes on the command line: accepted with a line of explanation, or refused in one or two lines."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Cli, cases, parametrized

from vramsweep.harness.config import conf_files, settings_reference, typed_words
from vramsweep.harness.config.compose import detect, read_positions
from vramsweep.harness.machine import hub_models, machine
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep import plan
from vramsweep.harness.verbs.cli import read_parser


@pytest.fixture(autouse=True)
def nothing_but_a_cpu(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    """No GPU, no hub, an empty folder."""
    monkeypatch.setenv("HF_HUB_CACHE", str(here))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: [])
    monkeypatch.setattr(machine, "gpus", list)
    detect.cache_clear()


@pytest.mark.parametrize(("line", "typed", "status", "said", "unsaid"), cases("mistakes"))
def test_a_mistake_is_understood_or_named(line: str, typed: str, status: str, said: str, unsaid: str, cli: Cli) -> None:
    printed = cli.run(*typed.split(), status=int(status))
    text = printed.out + printed.err
    place = 0
    for part in said.split(" | "):
        assert part in text[place:], text
    assert not [part for part in unsaid.split(" | ") if part and part in text], text
    assert len(printed.err.splitlines()) <= 2 and "Traceback" not in text
    assert not list(Path().rglob("journal.jsonl"))


def understood(*words: str, verb: str = "sweep") -> list[str]:
    return typed_words.understand(verb, words, read_parser("sweep"))[0]


@pytest.mark.parametrize(("typed", "read"), cases("words_read"))
def test_what_words_are_read_as(typed: str, read: str, here: Path) -> None:
    (here / "ds.json").touch()
    for name in ("own", "gpt2-folder"):
        (here / name).mkdir()
        (here / name / "config.json").write_text("{}")
    assert understood(*typed.split()) == read.replace("'./own'", "own").split()


def test_what_a_command_calls_its_own_stays_as_it_is() -> None:
    words = "batch_size=8 max_length=4 lr=1e-4 --seq-len 3 -- t.py {batch_size} {max_length} {lr} --gpu h100"
    typed = words.split()
    assert understood(*typed, verb="run") == ["batch_size=8", "max_length=4", "lr=1e-4", "seq_len=3", *typed[5:]]


@pytest.mark.parametrize("typed", ["H100 SXM", "8xH100 SXM", "H100 SXM5 80GB"])
def test_a_gpu_s_name_of_several_words_leads_to_the_listed_one(typed: str) -> None:
    with pytest.raises(UserError, match="h100-80gb"):
        understood(f"gpu={typed}")
    for name, listed in (("A100 SXM4 80GB", "a100-80gb"), ("NVIDIA Tesla T4", "t4-16gb"), ("RTX 4090", "rtx4090-24gb")):
        assert understood(f"gpu={name}") == [f"device.gpu={listed}", "device=simulated"]


@pytest.mark.parametrize(("typed", "model"), cases("spellings_of_models"))
def test_a_model_s_name_in_another_spelling(typed: str, model: str, here: Path) -> None:
    assert conf_files.find_model(typed) == model and understood(f"model={typed}") == [f"model={model}"]
    assert (
        understood("--config-dir", "own", f"model={typed}")[-1] == f"model={typed}"
    )  # which may have one of this name
    (here / typed).mkdir()
    (here / typed / "config.json").write_text("{}")
    assert understood(f"model={typed}")[0] == "model=hub"


@pytest.mark.parametrize("typed", ["llama38b", "llama3-1.8b", "llama3", "other/llama3-8b", "qwen2.5-7b", "8b", ""])
def test_what_may_be_several_models_or_none(typed: str) -> None:
    assert conf_files.find_model(typed) is None


def test_each_built_in_model_has_a_name_of_its_own() -> None:
    assert all(conf_files.find_model(name) == name for name in conf_files.file_names("model"))


def test_a_model_of_which_files_are_needed_is_the_hub_s_own() -> None:
    words = ["model=Qwen/Qwen3-8B", "weights=pretrained"]
    assert understood(*words) == ["model=hub", "model.path=Qwen/Qwen3-8B", "weights=pretrained"]
    assert understood(words[0], "data=synthetic") == ["model=qwen3-8b", "data=synthetic"]


@parametrized("settings_given_twice")
def test_a_setting_by_two_of_its_names_is_refused(words: str) -> None:
    with pytest.raises(UserError, match=r"by another name, and \w+\.?\w* is given too; leave one out"):
        understood(*words.split())


@pytest.mark.parametrize("model", ["nowhere/at/all", "'./own'", "Qwen/Qwen3-8B@main"])
def test_nothing_is_said_of_a_model_that_is_not_read_otherwise(model: str) -> None:
    assert typed_words.understand("sweep", [f"model={model}"], read_parser("sweep")) == ([f"model={model}"], [])


def test_whole_numbers_are_those_of_a_trial() -> None:
    def kind(key: str) -> object:
        model: Any = Trial
        for name in key.split("."):
            field = getattr(model, "model_fields", {}).get(name)
            model = field and field.annotation
        return model

    told = {key for key in settings_reference.defaults() if kind(key) is int}
    assert conf_files.whole_numbers() == told and len(told) > 5


def test_every_alias_stands_for_what_there_is() -> None:
    """And hides nothing: no alias is a setting, and each value one that its setting has."""
    known = {*settings_reference.defaults(), *(group.name for group in settings_reference.groups())}
    for name, now in typed_words.ALIASES.items():
        key, _, value = now.partition("=")
        assert key in known and ("=" in name or name not in known)
        assert not value or value in conf_files.list_options(key)
    assert not typed_words.ALIASES.keys() & {*Trial.model_fields, *plan.SETTINGS}


def test_what_is_found_elsewhere_hides_no_setting() -> None:
    """A word of another tool may be the last part of a setting here, and then the setting is named too."""
    assert not conf_files.ELSEWHERE.keys() & conf_files.setting_names()
    tails = {name.rpartition(".")[2]: name for name in conf_files.written_defaults()}
    for word in conf_files.ELSEWHERE.keys() & tails:
        assert tails[word] in conf_files.ELSEWHERE[word]
    assert "warmup_steps" in tails


def test_other_words_for_the_same_trials_have_the_same_ids(cli: Cli) -> None:
    typed = ["--model Qwen/Qwen3-8B --bs 1..2 gpu=H100-80GB dtype=bfloat16", "sweep=cpu model=tiny device=cpu"]
    ours = ["-m model=qwen3-8b micro_batch=1,2 device=simulated device.gpu=h100-80gb precision=bf16", f"-m {typed[1]}"]
    for words, same in zip(typed, ours, strict=True):
        read = [cli.json("plan", *line.split(), "predict=false")["trials"] for line in (words, same)]
        assert [one["trial_id"] for one in read[0]] == [one["trial_id"] for one in read[1]] and len(read[0]) > 1


def test_models_that_are_to_be_had(here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    (here / "own").mkdir()
    assert "has no config.json" in str(hub_models.find_problem("own"))
    (here / "own" / "config.json").write_text(json.dumps({**TINY["model"]["config"], "model_type": "qwen2"}))
    assert hub_models.find_problem("own") is None
    (trial,) = cli.json("plan", "model=own/config.json", "seq_len=8", "predict=false")["trials"]
    assert trial["trial"]["model"]["path"] == "own" and trial["trial"]["model"]["max_positions"] == 4096
    refused = cli.run("plan", "model=./own", "seq_len=5000", "predict=false", status=2).err
    assert "seq_len 5000 is longer than own's 4096 positions; take a model with more" in refused
    assert read_positions("own", {"max_position_embeddings": 8}) == 8
    assert read_positions("own", {"max_position_embeddings": None, "n_positions": 8}) is None  # as transformers has it
    assert read_positions("nothing", {"n_positions": 8}) == 8 and read_positions("x" * 300, {}) is None
    for unknown in ("nothing", "some/model", "a b/../c"):
        assert read_positions(unknown, {}) is None
    (here / "other.json").write_text("{}")
    assert (
        "model.path=./other.json: it is a file, not a folder; give"
        in cli.run("plan", "model=./other.json", status=2).err
    )
    assert "the hub cannot be reached" in str(hub_models.find_problem("some/model"))
