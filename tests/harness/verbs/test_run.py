"""Test the arguments of `vramsweep run`: replaced placeholders, and errors in a command."""

import json
import shlex
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import cases, merged, refusal, source, tiny

from vramsweep import __main__ as front_door
from vramsweep.harness.config import compose
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.spec import command_template, trial, trial_identity, trial_parser
from vramsweep.harness.spec.fit_text import describe_trial
from vramsweep.harness.verbs import run
from vramsweep.runners.trace.trace_data import cublas_workspace

BIN = Path(sys.executable).parent
BARE = {"seq_len": 1, "micro_batch": 1, "model": {"model_type": None, "config": {}}}


def parsed(command: str, **over: Any) -> trial.Trial:
    return trial_parser.parse(merged(tiny(**BARE), merged({"runner": {"name": "script", "command": command}}, over)))


@pytest.mark.parametrize(("command", "over", "words"), cases("commands_told"))
def test_a_command_is_told_its_settings(command: str, over: str, words: str) -> None:
    found = parsed(command, **json.loads(over))
    assert command_template.command_words(found, "OUT") == ["true", *json.loads(words)]


@pytest.mark.parametrize(("command", "settings", "reason"), cases("wrong_commands"))
def test_what_is_wrong_with_a_command_is_said(command: str, settings: str, reason: str) -> None:
    assert reason in refusal(trial.InvalidTrial, parsed, command.replace("{bin}", str(BIN)), **json.loads(settings))


@pytest.mark.parametrize(
    "command",
    ["python {file}.py", "python -m pkg x.py", "python -c pass x.py", "bash -c 'python x.py'", "env python x.py",
     f"{BIN}/torchrun --log x.py"],
)  # fmt: skip
def test_a_file_is_missed_only_where_it_is_surely_run_here(command: str) -> None:
    assert parsed(command, runner={"options": {"file": "x"}} if "{file}" in command else {})


def test_fp16_on_a_cpu_is_the_scripts_business() -> None:
    assert parsed("true {precision}", precision="fp16").precision == "fp16"


def test_another_script_is_another_trial(here: Path) -> None:
    """A file that the command names counts by what is in it; so does one behind an equals sign."""
    (here / "train.py").write_text("1")
    (here / "a.yaml").write_text("1")

    def identity() -> str:
        return trial_identity.trial_id(parsed("python train.py --config=a.yaml").model_dump(mode="json"))

    first = identity()
    assert identity() == first
    (here / "train.py").write_text("2")
    second = identity()
    (here / "a.yaml").write_text("2")
    assert len({first, second, identity()}) == 3


def test_what_a_command_writes_and_reads_is_no_other_trial(here: Path) -> None:
    """Only programs and settings count by their contents; what is large is not read at all."""
    (here / "train").write_text("#!/bin/sh")
    (here / "train").chmod(0o755)
    (here / "a.toml").write_text("1")
    for name in ("train.log", "last.ckpt", "data.txt"):
        (here / name).write_text("1")
    (here / "data.json").write_bytes(b" " * (command_template.LARGEST + 1))
    found = parsed("./train --c a.toml --log train.log --resume=last.ckpt data.json {data}", data="data.txt")
    assert set(found.fingerprints) == {"train", "a.toml"}


@pytest.mark.parametrize(("command", "name"), cases("programs_of_commands"))
def test_a_script_is_called_by_its_file(command: str, name: str) -> None:
    assert command_template.program(command) == name


def test_the_label_says_what_the_command_is_told() -> None:
    found = parsed("true {seq_len} {lr} {precision}", seq_len=8, runner={"options": {"lr": 1}}, world_size=2)
    assert describe_trial(found) == "tiny · seq 8 · precision=fp32 · lr=1 · x 2"


def test_own_names_before_the_dashes_are_placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "detect", lambda: "cuda")
    found = run.words(["lr=1,a", "seq_len=8", "allocator=default"], ["python", "t.py", "{lr}", "{seq_len}"])
    assert found[:2] == ["-m", "runner=script"]
    assert found[3:] == ["+runner.options.lr='1',a", "seq_len=8", "allocator=default", "device=cuda"]


def test_a_gpu_that_nobody_named_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    run.words(["device=simulated", "device.gpu=t4-16gb"], ["true"])
    assert capsys.readouterr().err == ""
    run.words(["device=simulated"], ["true"])
    apart = round((cublas_workspace((9, 0)) - cublas_workspace((8, 0))) / 2**20)
    assert f"h100-80gb, whose workspaces of cuBLAS are {apart} MiB a handle larger" in capsys.readouterr().err


def test_options_of_ones_own_reach_the_command_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["12e45", "True", "1.50", "[1,2]", "x y", "it's", "", "null", "(0.9,0.95)", "${x}", "s3://b/c?d=1", "01"]
    words = [f"own{n}={text}" for n, text in enumerate(typed)]
    (line,) = dry([*words, "--", "true", *(f"{{own{n}}}" for n in range(len(typed)))], capsys)
    assert shlex.split(line) == ["true", *typed]


def test_options_of_ones_own_are_axes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["lr=1e-4, 1.0", "n=range(1,2)", 't="a,b",[1,2]', "--", "true", "{lr}", "{n}", "{t}"]
    found = sorted(tuple(shlex.split(line)[1:]) for line in dry(words, capsys))
    assert found == sorted(product(("1e-4", "1.0"), "1", ("a,b", "[1,2]")))


@pytest.mark.parametrize(("words", "text"), cases("run_mistakes"))
def test_what_would_not_be_obeyed_is_refused(words: str, text: str, here: Path) -> None:
    """And nothing is written."""
    said = refusal(UserError, run.main, ["device=cpu", *json.loads(words)])
    assert text in said and "SECRET" not in said
    assert not list(here.iterdir())


def test_a_quoted_sign_of_the_shells_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry(["--", "true 'a | b' {{x}}"], capsys) == ["true 'a | b' '{x}'"]


def test_a_dry_run_shows_the_place_and_makes_none(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (line,) = dry(["name=n", "--", "true", "{output_dir}"], capsys)
    place = Path(line.split()[1])
    assert place.relative_to(here / "results" / "n" / "trials" / "attempts").parts[1:] == ("1", "output")
    assert not list(here.iterdir())


def test_a_dry_run_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry(["seq_len=8,16", "allocator=default,expandable", "--", "true", "--l", "{seq_len}"], capsys)
    expandable = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
    assert sorted(lines) == sorted(f"{variable}true --l {n}" for variable in ("", expandable) for n in (8, 16))


# Of every setting that a command can be told: a value that is not the default.
GIVEN = source("words_of_every_setting.txt")


def dry(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what a dry run of these words prints for device=cuda, through Hydra, without the option."""
    assert run.main(["--dry-run", "device=cuda", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_every_setting_reaches_the_command(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """As it is given on the command line, whatever conf/ and a file that it names have of it."""
    Path("zero3.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    given = GIVEN.split()
    names = [word.partition("=")[0] for word in given]
    assert set(names) == {*command_template.UNSAID, "world_size"}
    told = [f"--{name}={{{name}}}" for name in names]
    assert dry([*given, "--", "true", *told], capsys) == [" ".join(["true", *(f"--{word}" for word in given)])]


def test_what_a_ds_config_says_is_the_scripts_business(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    Path("a.json").write_text(
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": true}, '
        '"optimizer": {"type": "AdamW"}, "gradient_accumulation_steps": 4}'
    )
    assert dry(["ds_config=a.json", "--", "true", "{ds_config}"], capsys) == ["true a.json"]


def test_settings_are_axes_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["precision=bf16,fp32", "seed=1,2", "--", "true", "{precision:bf16=--bf16:fp32=}", "{seed}"]
    assert sorted(dry(words, capsys)) == ["true --bf16 1", "true --bf16 2", "true 1", "true 2"]


@pytest.mark.parametrize("word", ["precision=bf16_pure", "precision=fp32,bf16", "seq_len=1", "seed=0", "sharding=none"])
def test_a_setting_that_the_command_is_not_told_is_refused(word: str) -> None:
    with pytest.raises(UserError, match=f"{word} does not reach the command: write {{{word.partition('=')[0]}}}"):
        run.main(["--dry-run", "device=cuda", word, "--", "true"])


@pytest.mark.parametrize("words", [["seq_len=8"], ["seq_len=8", "--"]])
def test_a_command_must_stand_behind_the_dashes(words: list[str]) -> None:
    assert "seq_len=512,1024 -- python train" in refusal(UserError, run.main, words)


@pytest.mark.parametrize(("typed", "span"), [("n=1..64", "1,65,1"), ("n=8..32:8", "8,33,8"), ("n=2,3,9", "2,10,1")])
def test_the_range_of_a_search_is_that_of_the_words(typed: str, span: str) -> None:
    assert [*run._search([typed, "size=8"], "n")] == ["size=8", f"n=range({span})"]
    assert [*run._search(["size=8"], "n")] == ["size=8", "n=range(1,4097,1)"]


@pytest.mark.slow
def test_the_largest_number_of_a_command_is_found(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of n is 1 GiB that the step holds; an A100 of 40 GiB leaves 38.7 to PyTorch."""
    (here / "train.py").write_text(
        "import sys, torch\nw = torch.nn.Linear(8, 8).cuda()\no = torch.optim.SGD(w.parameters(), 0.1)\n"
        "for _ in range(9):\n    held = torch.empty(int(sys.argv[1]) << 30, dtype=torch.uint8, device='cuda')\n"
        "    w(torch.ones(8, device='cuda')).sum().backward()\n    o.step()\n    o.zero_grad()\n    del held\n"
    )
    own = ("gpu=a100-40gb", "report=false", "n=32..47", "--", sys.executable, "train.py", "{n}")
    assert front_door.main(["run", "--largest", "n", *own]) == 0
    assert "the largest n= that fits is 38" in capsys.readouterr().out
