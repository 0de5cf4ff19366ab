"""Presets of several grids, whose cases are one sweep: what they plan, who wins, mistakes, and that ours can run."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, Cli, parametrized, source
from test_hydra import planned

from vramsweep.harness.config import compose
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import journal
from vramsweep.harness.verbs import cli

OURS = sorted((ROOT / "conf" / "sweep").glob("*.yaml"))
CASES = source("preset_of_cases.txt")


@pytest.fixture
def preset(here: Path) -> Path:
    """A --config-dir with the preset `mine`, of three cases; the last one is in the first."""
    file = here / "own" / "sweep" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(CASES)
    return file


def of_preset(file: Path, *words: str) -> list[str]:
    return ["--config-dir", str(file.parents[1]), "sweep=mine", *words]


@pytest.mark.slow
def test_a_preset_of_cases_is_one_sweep(preset: Path, cli: Cli) -> None:
    found = planned(cli, *of_preset(preset))  # with -m or without: a case is a list anyway
    assert found == planned(cli, "-m", *of_preset(preset))
    alone = planned(cli, "model=tiny", "seq_len=64", "device=simulated", "protocol=brief")
    assert alone == [t for t in found if t["seq_len"] == 64]  # neither cases nor answer are of the trial
    assert sorted((t["seq_len"], t["checkpointing"], t["device"]["gpu"]) for t in found) == [
        (64, "none", "h100-80gb"), (128, "full", "l4-24gb"), (128, "none", "h100-80gb"), (128, "none", "l4-24gb"),
    ]  # fmt: skip
    said = cli.run("plan", *of_preset(preset))
    assert "4 to do → results/mine-simulated" in said.out
    assert said.err == ""
    said = cli.run("sweep", *of_preset(preset), "report=false")
    assert "4 trials, 0 finished before, 4 to do" in said.out
    folder = preset.parents[2] / "results" / "mine-simulated"
    assert len(journal.terminal(journal.read(folder)[0])) == 4
    kept = json.loads((folder / "trials" / journal.PLAN).read_text())
    assert len(kept["trials"]) == 4
    assert kept["answer"] == "claims"
    said = cli.run("sweep", *of_preset(preset), "report=false")
    assert "4 trials, 4 finished before, 0 to do" in said.out


@pytest.mark.slow
def test_a_case_is_read_as_typed_words_are(preset: Path, cli: Cli) -> None:
    """Aliases, ranges and other spellings; the command line wins over a case's alias too."""
    told = CASES.replace("- model=tiny seq_len=128\n", "- model=Tiny --seq-len 16..48:16 bs=3 gpu=L4-24GB\n")
    preset.write_text(told)
    found = [t for t in planned(cli, *of_preset(preset)) if t["micro_batch"] == 3]
    assert sorted(t["seq_len"] for t in found) == [16, 32, 48]
    assert {(t["model"]["name"], t["device"]["gpu"]) for t in found} == {("tiny", "l4-24gb")}
    assert {t["micro_batch"] for t in planned(cli, *of_preset(preset, "micro_batch=2"))} == {2}


@pytest.mark.slow
@parametrized("words_over_cases")
def test_the_command_line_wins_over_a_case(
    words: list[str], different: set[tuple[int, str]], preset: Path, cli: Cli
) -> None:
    found = planned(cli, *of_preset(preset, *words))
    assert {(t["seq_len"], t["checkpointing"]) for t in found} == different
    if words[0].startswith("device"):
        key = "gpu" if "." in words[0] else "name"
        assert {t["device"][key] for t in found} == {words[0].partition("=")[2]}
    if words == ["device=simulated"]:
        assert {t["device"]["gpu"] for t in found} == {"h100-80gb", "l4-24gb"}


@pytest.mark.slow
@parametrized("preset_mistakes")
def test_mistakes_in_a_case_name_the_preset(
    old: str, new: str, words: tuple[str, ...], said: str, preset: Path, cli: Cli
) -> None:
    preset.write_text(CASES.replace(old, new) if old else CASES)
    assert said in cli.refuse("plan", *of_preset(preset, *words))


def made(*words: str) -> str:
    """The commands that make would run, also where make itself runs these tests."""
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    command = ["make", "-n", "VENV=", *words]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout


def test_make_leaves_the_model_to_the_preset() -> None:
    assert "model=" not in made("plan", "SWEEP=claims")
    assert "-m model=gpt2 device=auto sweep=claims" in made("plan", "SWEEP=claims", "MODEL=gpt2")


@pytest.mark.parametrize("given", ["WATCH=1", "WATCH=0.5", ""])
def test_make_status_is_a_command_that_is_understood(given: str, tmp_path: Path) -> None:
    line = made("status", f"RESULTS={tmp_path}", *filter(None, [given])).split()
    with pytest.raises(UserError, match=r"there is no file or folder|holds no sweep"):
        cli.import_verb("status").main(line[line.index("status") + 1 :])


@pytest.mark.slow
@pytest.mark.parametrize("file", OURS, ids=lambda file: file.stem)
def test_every_preset_can_be_planned(file: Path, here: Path, cli: Cli) -> None:
    """And where many lengths are asked for, some are no multiples of 8: alignment would not be seen without them."""
    found = planned(cli, "-m", f"sweep={file.stem}", *(["device=simulated"] if file.stem == "none" else []))
    assert found
    lengths = {trial["seq_len"] for trial in found}
    assert len(lengths) < 5 or {length % 8 == 0 for length in lengths} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("name", [file.stem for file in OURS if "cases:" in file.read_text()])
def test_our_presets_of_cases_can_be_measured_too(name: str) -> None:
    """Words of the simulated device that a preset has give way with it; its answer has its name, if it asks."""
    asked = compose.resolve([f"sweep={name}", "device=cuda"])
    planned, settings = asked.trials, asked.settings
    assert settings is not None and settings.answer == ("claims" if name == "claims" else None)
    assert len(planned) > 5 and not [one.reason for one in planned if one.reason and "device." in one.reason]
    predicted = compose.resolve([f"sweep={name}"]).trials
    reasons = [str(one.reason) for one in predicted if one.trial is None]
    assert len(predicted) >= len(planned) and all(reason.startswith("compile=") for reason in reasons)
