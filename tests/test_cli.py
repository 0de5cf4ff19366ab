"""The command line as a user meets it: Hydra's multirun, plan, status, doctor, and mistakes."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TARGETS, Cli, cases, parametrized, refusal, source
from packaging.requirements import Requirement

from vramsweep import __main__ as front_door
from vramsweep.harness.machine import machine
from vramsweep.harness.verbs import doctor


def planned(cli: Cli, *words: str, status: int = 0) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = cli.json("plan", *words, "predict=false", status=status)["trials"]
    return trials


@pytest.mark.slow
def test_a_multirun_with_lists_ranges_and_groups(cli: Cli) -> None:
    found = planned(
        cli, "-m", "model=gpt2", "device=cuda", "seq_len=range(1025,994,-10)", "allocator=default,expandable"
    )
    assert len(found) == 8
    invalid = [t for t in found if t["state"] == "invalid"]
    assert [t["reason"] for t in invalid] == [
        "seq_len 1025 is longer than gpt2's 1024 positions; take a model with more"
    ] * 2
    trials = [t["trial"] for t in found]
    assert {t["allocator"]["conf"] for t in trials} == {"", "expandable_segments:True"}


@pytest.mark.slow
@pytest.mark.parametrize(("group", "count"), [("allocator", 7), ("precision", 7), ("protocol", 5)])
def test_every_option_of_a_group_composes_and_can_run_on_cuda(group: str, count: int, cli: Cli) -> None:
    names = [p.stem for p in sorted((ROOT / "conf" / group).glob("*.yaml")) if p.stem not in ("custom", "job")]
    found = planned(cli, "-m", "device=cuda", f"{group}={','.join(names)}")
    assert len(found) == count
    reasons = {str(t["reason"]) for t in found}
    assert not {reason for reason in reasons - {"None"} if "pip install 'torchao" not in reason}  # fp8, without it


@pytest.mark.slow
def test_a_whole_job_is_for_what_has_one(cli: Cli) -> None:
    """The protocol that the test above leaves out."""
    ours, trainers = planned(cli, "-m", "device=cuda", "protocol=job", "runner=torch,trainer")
    assert "protocol=job is for runner=trainer and scripts" in str(ours["reason"]) and trainers["reason"] is None


@pytest.mark.slow
def test_the_trainer_s_own_batch_is_the_default_and_can_be_overridden(cli: Cli) -> None:
    assert planned(cli, "runner=trainer", "device=cpu")[0]["trial"]["micro_batch"] == 8
    assert planned(cli, "runner=trainer", "device=cpu", "micro_batch=2")[0]["trial"]["micro_batch"] == 2
    assert planned(cli, "runner=torch", "device=cpu")[0]["trial"]["micro_batch"] == 1


@pytest.mark.slow
def test_options_of_a_runner_and_a_free_allocator_text(cli: Cli) -> None:
    (one,) = planned(cli, "runner=deepspeed", "device=cuda", "+runner.options.zero_optimization.overlap_comm=false")
    assert one["trial"]["runner"]["options"] == {"zero_optimization": {"overlap_comm": False}}
    conf = "max_split_size_mb:64,expandable_segments:True"
    (two,) = planned(cli, "device=cuda", "allocator=custom", f"allocator.conf='{conf}'")
    assert two["trial"]["allocator"]["conf"] == "expandable_segments:True,max_split_size_mb:64"
    (bad,) = planned(cli, "device=cuda", "allocator=custom", "allocator.conf='nonsense:1'", status=2)
    assert bad["state"] == "invalid"
    assert "nonsense" in str(bad["reason"])


MODELS = f"lists all {len(list((ROOT / 'conf' / 'model').glob('*.yaml')))}"
# What is typed after `sweep`, and what must be in the answer, in this order.
MISTAKES: dict[str, tuple[str, ...]] = {
    **{typed: tuple(part.replace("{MODELS}", MODELS) for part in said) for typed, *said in cases("sweep_mistakes")},
    f"seq_len={'9' * 5000}": ("a number with thousands of digits",),
    f"seq_len={'9' * 400}": (
        "no trial can run: seq_len is a whole number of 400 digits; allowed is less than 9.2e+18",
    ),
    f"seq_len={'[' * 900}1{']' * 900}": ("nested too deep",),
    f"seq_len={'[' * 51}1{']' * 51}": ("nested too deep",),  # which Hydra could read
}


@pytest.mark.slow
@pytest.mark.parametrize("typed", MISTAKES)
def test_mistakes_are_named_in_a_line_or_two(typed: str, here: Path, cli: Cli) -> None:
    given = typed.replace("=", " ").split()
    base = [word for word in ("device=cpu", "model=tiny") if word.partition("=")[0] not in given]
    error = cli.refuse("sweep", *base, *typed.split())
    assert error.startswith("vramsweep: ")
    assert len(error.splitlines()) <= 2
    assert "Traceback" not in error and "earch path" not in error
    place = 0
    for text in MISTAKES[typed]:
        assert text in error[place:], error
        place = error.index(text, place)
    assert not list(here.rglob("journal.jsonl"))


@pytest.mark.parametrize(("typed", "said"), cases("verb_mistakes"))
def test_mistakes_of_every_verb_are_one_line(typed: str, said: str, here: Path, cli: Cli) -> None:
    rows = str(ROOT / "results" / "reference" / "gpt2-cpu")
    (error,) = cli.refuse(*typed.replace("ROWS", rows).split()).splitlines()
    assert said in error
    assert not list(here.rglob("journal.jsonl"))


@pytest.mark.usefixtures("here")
def test_a_trial_that_can_run_beside_one_that_cannot(cli: Cli) -> None:
    said = cli.run("plan", "-m", "device=cpu", "model=tiny", "optimizer=adamw_torch,paged_adamw_8bit")
    assert "1 invalid, 1 to do" in said.out and said.err == ""


def test_hydra_s_own_traceback_is_there_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert "Could not override 'protocol.x'" in refusal(Exception, front_door.main, ["sweep", "protocol.x=3"])


def test_one_sweep_from_command_to_report(here: Path, cli: Cli) -> None:
    words = ["-m", "model=tiny", "device=cpu", "protocol=brief", "seq_len=16,32,48,64", "precision=fp32", "name=one"]
    command = [sys.executable, "-m", "vramsweep", "sweep", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder = Path("results/one")
    assert "4 trials, 0 finished before, 4 to do" in done.stdout
    assert "MiB per" in done.stdout and "longest" in done.stdout and "tiny · torch · fp32" in done.stdout
    assert "1. All that was tried fits: up to 64 tokens." in done.stdout and "64 or more (longest tried)" in done.stdout
    assert f"fits      vramsweep fit {folder}" in done.stdout
    parts = {"README.txt", "report.html", "rows.csv", "figures", "trials", ".vramsweep.json"}
    assert {one.name for one in folder.iterdir()} == parts
    read_me = (folder / "README.txt").read_text().splitlines()
    assert len(read_me) == 10 and f"vramsweep sweep {' '.join(words)}" in read_me[8]
    for suffix in ("html", "png", "svg"):
        assert list((folder / "figures").glob(f"*.{suffix}"))
    assert "4 trials, 4 finished before, 0 to do" in cli.run("sweep", *words, "report=false").out
    (state,) = cli.json("status", folder)
    assert (state["state"], state["done"], state["total"], state["ok"]) == ("finished", 4, 4, 4)
    some = [*words[:4], "seq_len=16", *words[5:], "report=false"]
    assert "1 trial, 1 finished before" in cli.run("sweep", *some).out
    assert "finished  4/4: 4 ok; the last command: 1/1" in cli.run("status", folder).out
    assert not list(here.glob("multirun*"))
    assert "results/one  finished" in cli.run("report", "results").out
    assert '<a href="one/report.html">results/one</a>' in Path("results/index.html").read_text()
    for one in list((folder / "trials").iterdir()):  # as 0.1 left it
        one.rename(folder / one.name)
    (folder / "trials").rmdir()
    more = [word.replace("64", "64,80") for word in words]
    assert "5 trials, 4 finished before, 1 to do" in cli.run("sweep", *more).out
    assert not (folder / "trials").exists() and len(list((folder / "attempts").iterdir())) == 5
    assert "straight line" in cli.run("fit", folder).out


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_failed_trial_gives_exit_status_1(cli: Cli) -> None:
    words = ["model=tiny", "device=cpu", "runner=custom", f"runner.target={TARGETS / 'faults.py'}:raises"]
    assert "1 trial(s) failed" in cli.run("sweep", *words, "report=false", status=1).out


def test_columns(cli: Cli) -> None:
    assert {column["name"] for column in cli.json("columns")} >= {"peak_reserved_bytes", "mfu"}


def test_the_gpus_are_listed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli.run("gpus").out.splitlines()
    assert max(map(len, lines)) <= 80
    (t4,) = (line.split() for line in lines if line.startswith("t4-16gb"))
    assert t4 == ["t4-16gb", "16", "13.8", "7.5", "320", "8", "–", "65", "–", "–", "pcie3"]
    listed = {card["name"]: card for card in cli.json("cards")}  # its name of before
    assert listed["t4-16gb"]["memory_limit_bytes"] == (14912 - 768) << 20 and listed["t4-16gb"]["bf16"] is None
    assert listed.keys() <= {line.partition(" ")[0] for line in lines}
    for verb in ("explain", "predict", "sweep"):
        said = cli.run(verb, "--help-all").out
        assert "vramsweep gpus" in said and "rtx2070-8gb 6.8" in said


@pytest.mark.slow
def test_what_only_prints_imports_nothing_heavy() -> None:
    """Each of these is answered at once; what trains, fits or draws takes seconds to import."""
    code = source("imports_of_verbs.txt")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


CARD = machine.Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-0", "580.1", 80 << 30, 1 << 20, (99,))


def test_doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: [CARD])
    checks = doctor.doctor(tmp_path)
    problems = [c for c in checks if c.level == "problem"]
    assert any("pid 99" in c.text for c in problems)
    monkeypatch.setattr(machine, "gpus", list)
    checks = doctor.doctor(tmp_path / "results")
    assert any(c.name == "gpu" and c.level == "note" for c in checks)
    assert {c.name for c in checks} >= {"python", "torch", "transformers", "deepspeed", "disk", "memory", "load"}


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [machine.Gpu(n, "x", f"GPU-{n}a", "1", 1, 0, ()) for n in range(3)]
    monkeypatch.setattr(machine, "gpus", lambda: cards)
    for value, indices in ((None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("GPU-1a", [1]), ("1,9,0", [1])):
        environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        assert [gpu.index for gpu in machine.visible_gpus(environ)] == indices, value


def test_pins_satisfy_the_ranges() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts, extras = [*project["dependencies"], "vramsweep[dev,techniques,scripts]"], project["optional-dependencies"]
    seen: set[str] = set()
    while texts:
        requirement = Requirement(text := texts.pop())
        if requirement.name == "vramsweep":  # what its extras name
            texts += [one for extra in requirement.extras - seen for one in extras[extra]]
            seen |= requirement.extras
            continue
        assert pins[requirement.name.lower().replace("_", "-")] in requirement.specifier, text


def test_configuration_files_have_a_comment_for_their_reader() -> None:
    for path in (ROOT / "conf").rglob("*.yaml"):
        text = path.read_text()
        assert yaml.safe_load(text) is not None or path.stem == "none"
        assert path.parent.name == "device" or "# " in text.replace("# @package", ""), path


@pytest.mark.slow
@parametrized("words_of_version_0_1")
def test_names_and_values_of_version_0_1_are_understood_on_the_command_line(old: str, new: str, cli: Cli) -> None:
    ids = [[trial["trial_id"] for trial in planned(cli, *typed.split())] for typed in (old, new)]
    assert ids[0] == ids[1] and len(ids[0]) == 1 + ("-m" in old)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@parametrized("sweeps_that_cannot_run")
def test_a_sweep_of_which_nothing_could_run_does_not_end_well(
    more: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the machine that is to run it shows that it is impossible, also for a sweeper that sends batches."""
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: [CARD])
    words = ["model=tiny", "device=cuda", "world_size=2", "sharding=ddp", "report=false"]
    assert "world_size=2 needs 2 GPUs, but 1 is visible" in cli.refuse("sweep", "-m", *more.split(), *words)
