"""Every verb as a user meets it: help, examples, documentation, sizes, files to write, an output that has gone."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Cli, parametrized, refusal

from vramsweep import __main__ as front_door
from vramsweep import verbs
from vramsweep.harness.config import compose, overrides, settings_reference
from vramsweep.harness.machine import machine
from vramsweep.harness.messages import argument_parser, units
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process.interpreter import build_command
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep.plan import SETTINGS
from vramsweep.harness.verbs import doctor
from vramsweep.verbs import VERBS, Verb

each = pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
COMMONEST = settings_reference.COMMONEST
ROWS = str(ROOT / "results" / "reference" / "gpt2-cpu")
INTERNAL = {"repeat", "fingerprints"}  # of a trial, which nobody types


def words(example: str) -> list[str]:
    typed = shlex.split(example.removeprefix('eval "$(').removesuffix(')"'), comments=True)
    assert typed[0] == "vramsweep"
    return typed[1:]


# what is said of each

FEWER = {"calibrate": 2, "doctor": 3, "gpus": 2, "techniques": 3, "columns": 2, "help": 2}  # examples


@each
def test_help_is_40_lines_of_100_columns_with_examples(verb: Verb, cli: Cli) -> None:
    page = cli.run(verb.name, "--help").out
    assert len(page.splitlines()) <= 40 and max(map(len, page.splitlines())) <= 100
    assert verb.line in page and all(example in page for example in verb.examples)
    assert len(verb.examples) == FEWER.get(verb.name, 4)
    for key in COMMONEST if verb.settings else ():
        assert re.search(rf"^  {re.escape(key.removeprefix('device.'))}=", page, re.M), key
    assert (f"{verb.name} --help-all, docs/settings.md" in page) == verb.settings
    assert max(map(len, cli.run(verb.name, "--help-all").out.splitlines())) <= 100
    assert (f"1, {verb.no};" in page) == (verb.no is not None)
    assert cli.run("help", verb.name).out == page


@each
def test_examples_are_what_the_verb_takes(verb: Verb) -> None:
    known = {"gpu", *settings_reference.defaults(), *(group.name for group in settings_reference.groups())}
    for example in verb.examples:
        name, *typed = words(example)
        assert name == verb.name
        typed = typed[: typed.index("--")] if "--" in typed else typed
        _, rest = verb.parser().parse_known_args(typed)
        given = {word.partition("=")[0] for word in rest if Path(word).parts[0] != "results"}
        assert given <= (known if verb.settings else set()), example


def test_the_overview_has_every_verb_in_a_section_and_every_status(cli: Cli) -> None:
    page = cli.run("--help").out
    assert max(map(len, page.splitlines())) <= 100
    assert {verb.section for verb in VERBS} == set(verbs.SECTIONS)
    lines = page.splitlines()
    assert cli.run().out == page and lines[-4] == "Start here"
    for line in lines[-3:]:  # commands that can be typed as they are
        assert words(line.strip())[0] in verbs.BY_NAME
    assert all(f"  {verb.name:<12}{verb.line}" in lines for verb in VERBS)
    assert all(re.search(rf"^  {status} +\w", page, re.MULTILINE) for status in verbs.STATUSES)


def test_what_is_documented_exists_and_what_exists_is_documented() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    named = set(re.findall(r"(?:^|(?<!from)[`\s(])vramsweep ([a-z]+)(?![\w.=-])", code, re.MULTILINE))
    assert named - verbs.BY_NAME.keys() == set()
    assert verbs.BY_NAME.keys() - named == set()


def test_help_on_settings_has_every_setting_option_and_preset(cli: Cli) -> None:
    page = cli.run("sweep", "--help-all").out
    assert compose.DEVICE  # its resolver is what the default device is found with
    told = settings_reference.defaults()
    assert {key for key in (*SETTINGS, *Trial.model_fields) if key not in INTERNAL} <= {
        *told, *(group.name for group in settings_reference.groups()),
    }  # fmt: skip
    groups = {group.name for group in settings_reference.groups()}
    composed = {key for key in overrides.keys() if not key.startswith("model.config.")}  # noqa: SIM118 a function's
    assert {key for key in composed - groups if not key.endswith(".name")} <= told.keys()
    assert not [one.key for one in settings_reference.every() if not one.meaning]
    assert all(re.search(rf"^  {re.escape(key)}=", page, re.MULTILINE) for key in told)
    for group in settings_reference.groups():
        files = {file.stem for file in (ROOT / "conf" / group.name).glob("*.yaml")}
        assert files == {one.name for one in group.options} and all(one.meaning for one in group.options)
        assert all(re.search(rf"(^| ){re.escape(name)}[, \n]", page) for name in files)
    assert "h100-80gb 78.3" in page
    config = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text())
    assert told["seed"] == str(config["seed"]) and told["micro_batch"] == "1" and told["runner.stop"] == "true"


def test_flags_of_hydra_are_those_that_verbs_hand_on() -> None:
    _, parser = overrides.parse([], "run")
    assert {*parser._option_string_actions, "--json", "--all"} == set(argument_parser.FLAGS)


# sizes, and files to be written


def actions(verb: Verb) -> list[Any]:
    return verb.parser()._actions


@each
def test_every_flag_that_takes_a_size_takes_no_nonsense(verb: Verb) -> None:
    parser = verb.parser()
    for action in actions(verb):
        assert (action.type is units.parse_size) == (action.metavar == "SIZE"), action.option_strings
        if action.metavar not in ("SIZE", "SIZES"):
            continue
        bad = ["24G", "24Gb", "-1GiB", "0GiB", "lots", "nan", "", "9" * 400 + "TiB"]
        for text in [*bad, *(["24"] if action.metavar == "SIZE" else ["0", "inf"])]:
            said = refusal(UserError, parser.parse_known_args, [f"{action.option_strings[0]}={text}"])
            assert said.startswith(f"{action.option_strings[0]}: ") and "\n" not in said


def test_every_setting_that_is_a_size_or_a_time_takes_units_and_no_nonsense() -> None:
    named = [key for key in settings_reference.defaults() if re.search(r"_gib$|_s$|hours$", key)]
    assert {"device.memory_gib", "device.headroom_gib", "cluster.mem_gib", "timeout_s", "cluster.hours"} <= set(named)
    for key in named:
        good, bare = ("1.5GiB", "1.5") if key.endswith("_gib") else ("90m", "1.5" if key.endswith("hours") else "5400")
        assert overrides.today(f"{key}={good}") == f"{key}={bare}"
        assert overrides.today(f"{key}=2,{good}") == f"{key}=2,{bare}"
        for text in ("24G", "24x", "0GiB", "0m"):
            with pytest.raises(UserError, match=f"^{key}={text}"):
                overrides.today(f"{key}={text}")


def test_values_of_others_are_left_as_they_are() -> None:
    for word in ("+runner.options.warm_s=10m", "+model.config.window_gib=24x", "+versions.hours=8h"):
        assert overrides.today(word) == word


@each
def test_every_file_that_is_written_is_refused_at_once_if_it_cannot_be(verb: Verb, here: Path, cli: Cli) -> None:
    out = [one for one in actions(verb) if one.dest in ("out", "figure") or "OUT" in str(one.metavar)]
    folders = verb.name in ("report", "paper")
    assert all(isinstance(one.type, argument_parser.OutFile) != folders for one in out)
    for one in [] if folders else out:
        given = {"words": ["x.yaml"], "file": ["x.pickle"], "rows": [ROWS], "readings": ["x.json"], "data": ["x.json"]}
        before = [word for action in actions(verb) for word in given.get(action.dest, [])]
        said = cli.refuse(verb.name, *before, *one.option_strings[:1], "x.gif")
        assert f"x.gif must end in one of {', '.join(one.type.suffixes)}" in said
    assert not list(here.iterdir())


# an output that has gone

PRINTED = (  # of each side, at once and at the end; what others print takes the same ways
    "columns", "doctor", f"status {ROWS}", f"check {ROWS}", f"compare {ROWS} {ROWS}", "plan model=tiny device=cpu",
    "help", "sweep --help",
)  # fmt: skip


def test_a_folder_that_is_gone_and_docstrings_that_are_are_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in VERBS:
        place = tmp_path / verb.name
        place.mkdir()
        monkeypatch.chdir(place)
        place.rmdir()
        for example in () if verb.side == verbs.FRONT else verb.examples:
            assert front_door.main(words(example)) == 2
            assert re.fullmatch(r"vramsweep: the current folder .*; cd to one that exists\n", capsys.readouterr().err)
        assert front_door.main([verb.name, "--help"]) == 0
    monkeypatch.chdir(ROOT)


def test_our_processes_have_docstrings_whatever_is_asked_of_python(tmp_path: Path) -> None:
    (tmp_path / "flags.py").write_text("import os, sys; print(sys.flags.optimize, os.getpid())")
    for level, left in (("2", "1"), ("1", "1"), ("", "0")):
        own = os.environ | {"PYTHONOPTIMIZE": level, "PYTHONPATH": str(tmp_path)}
        with subprocess.Popen(build_command("flags"), env=own, stdout=subprocess.PIPE, text=True) as process:
            assert process.communicate()[0].split() == [left, str(process.pid)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed", ["explain model=tiny seq_len=64", f"report {ROWS} --out OUT --images none", f"paper {ROWS} --out OUT"]
)
def test_an_interpreter_without_docstrings_and_asserts_does_the_same(tmp_path: Path, typed: str) -> None:
    line = [sys.executable, "-OO", "-m", "vramsweep", *typed.replace("OUT", str(tmp_path / "out")).split()]
    own = os.environ | {"PYTHONOPTIMIZE": "2"}
    done = subprocess.run(line, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("typed", PRINTED)
@pytest.mark.parametrize("broken", ["its reader has gone", "its disk is full"])
def test_an_output_that_has_gone_is_no_traceback(
    typed: str, broken: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if broken == "its disk is full":
        if not Path("/dev/full").exists():
            pytest.skip("this system has no /dev/full")
        stream = Path("/dev/full").open("w")  # noqa: SIM115
    else:
        reading, writing = os.pipe()
        os.close(reading)
        stream = os.fdopen(writing, "w")
    with stream:
        monkeypatch.setattr(sys, "stdout", stream)
        status = front_door.main(typed.split())
        monkeypatch.undo()
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(("note: ", "no usable CUDA"))]
    assert (status, said) == {
        "its reader has gone": (141, []),
        "its disk is full": (2, ["vramsweep: the output cannot be written: No space left on device"]),
    }[broken]


@parametrized("closed_outputs")
def test_at_the_end_of_the_interpreter_too(shell: str, status: tuple[int, ...], said: str) -> None:
    command = shell.format(f"{shlex.quote(sys.executable)} -m vramsweep")
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in status and done.stderr == said


# what auto means


def test_doctor_says_what_auto_means_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = machine.Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-0", "580.1", 80 << 30, 1 << 20, ())
    for cards, built, environ, device, sweep, why in (
        ([card], "13.0", {}, "device=cuda, measured: NVIDIA H100 80GB HBM3", "sweep=cuda", "built with CUDA 13.0"),
        ([card], None, {}, "device=simulated, predicted for h100-80gb", "sweep=simulated", "built without CUDA"),
        ([], "13.0", {}, "device=simulated, predicted for h100-80gb", "sweep=simulated", "no NVIDIA driver or GPU"),
        ([card], "13.0", {"CUDA_VISIBLE_DEVICES": ""}, "device=simulated", "sweep=simulated", "leaves no GPU"),
    ):
        monkeypatch.setattr(machine, "gpus", lambda cards=cards: cards)
        monkeypatch.setattr(machine, "torch_cuda", lambda built=built: built)
        monkeypatch.setattr(machine, "torch_version", lambda: "2.13.0")
        checks = {check.name: check for check in doctor.doctor(tmp_path, environ)}
        assert checks["device=auto"].text.startswith(device) and why in checks["device=auto"].text
        assert checks["sweep=auto"].text.startswith(f"{sweep}: ")
