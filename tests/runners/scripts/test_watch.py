"""`vramsweep.watch()` in a script that trains by itself: each in its own process, as users have it."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, TARGETS, Cli, Run, parametrized, source, tiny

import vramsweep
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows.journal import read
from vramsweep.harness.rows.schema import Row
from vramsweep.runners.scripts.trainer_callback import precision

PLAIN = source("plain_training.txt")


def trained(folder: Path, text: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    known = {name: value for name, value in os.environ.items() if name != "VRAMSWEEP_ATTEMPT"}
    command = [*(words or [sys.executable]), "train.py"]
    place = known | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'scripts'}"} | environ
    return subprocess.run(command, cwd=folder, env=place, capture_output=True, text=True, check=False)


def plain(steps: int, fault: str = "pass") -> str:
    return PLAIN.replace("STEPS", str(steps)).replace("FAULT", fault)


def rows(folder: Path) -> list[Row]:
    found, unreadable = read(folder / "results" / "mine")
    assert not unreadable
    return found


@pytest.mark.slow
def test_a_block_becomes_an_ordinary_row(tmp_path: Path, run_sweep: Run, cli: Cli) -> None:
    done = trained(tmp_path, plain(12))
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert "vramsweep.watch" not in done.stderr and "train.py" not in done.stderr  # others say what they like there
    (row,) = rows(tmp_path)
    assert (row["outcome"], row["reason"]) == ("ok", None)
    assert (row["runner"], row["model"], row["sweep"]) == ("watch", "train", "mine")
    assert (row["seq_len"], row["micro_batch"], row["precision"], row["grad_accum"]) == (48, 3, "fp32", 1)
    assert row["trial"]["runner"]["options"] == {"note": "first try"}
    assert {row[name] for name in ("checkpointing", "optimizer", "data", "sharding")} == {None}
    assert (row["warmup_steps"], row["measured_steps"]) == (3, 6)  # of 12: 3, two that are looked at, 6, and the last
    assert row["tokens_per_s"] * row["elapsed_s"] == pytest.approx(48 * 3 * 6)
    assert not list(tmp_path.glob("results/mine/attempts"))
    target = {"name": "custom", "target": f"{TARGETS / 'scripted.py'}:plain"}
    (ours,) = run_sweep(tiny(seq_len=48, micro_batch=3, runner=target))
    same = [f"{phase}_peak_allocated_bytes" for phase in ("forward", "backward", "optimizer")]
    same += ["peak_allocated_bytes", "model_flops_per_token", "parameters", "trainable_parameters"]
    assert {name: row[name] for name in same} == {name: ours[name] for name in same}
    trained(tmp_path, plain(12).replace("48", "96"))
    cli.run("report", tmp_path / "results" / "mine")
    assert [row["seq_len"] for row in rows(tmp_path)] == [48, 96]


@pytest.mark.slow
def test_what_leaves_the_block_is_the_rows_outcome(tmp_path: Path) -> None:
    full = "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')"
    for step, fault, outcome in ((7, full, "oom"), (3, full, "oom"), (4, "ValueError('bad data')", "crash")):
        done = trained(tmp_path, plain(12, f"if step == {step}: raise {fault}"))  # 3 and 4 are looked at by modes
        assert done.returncode == 1 and "Error: " in done.stderr.splitlines()[-1]
        assert "AssertionError" not in done.stderr
        row = rows(tmp_path)[-1]
        assert row["outcome"] == outcome
        assert row["reason"].endswith(("Tried to allocate 2.00 GiB.", "bad data, at train.py:22"))


@pytest.mark.slow
def test_what_cannot_be_watched_is_said(tmp_path: Path) -> None:
    for steps in (4, 5):  # which end amid the steps that modes look at
        done = trained(tmp_path, plain(steps))
        assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
        assert f"vramsweep.watch wrote no row: the block had {steps} optimizer steps, but a row needs 7" in done.stderr
    assert not (tmp_path / "results").exists()
    nested = "import vramsweep\nwith vramsweep.watch():\n  with vramsweep.watch(): pass"
    assert "this process is already being watched" in trained(tmp_path, nested).stderr


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"precision": "fp17"}, "precision=fp17: there is no such precision; did you mean fp16? Allowed: fp32"),
        ({"precision": torch.bfloat16}, "precision=torch.bfloat16: there is no such precision; allowed: fp32"),
        ({"seq_len": "abc"}, "seq_len='abc': input should be a valid integer"),
        ({"world_size": 0}, "world_size=0: input should be greater than or equal to 1"),
        ({"warmup_steps": 0}, "warmup_steps=0: input should be greater than or equal to 1"),
        ({"model": torch.nn.Linear(1, 1)}, "model is of type Linear, which a row cannot store"),
        ({"lr": float("nan")}, "lr is of type float, which a row cannot store"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_said_at_once(settings: dict[str, Any], said: str) -> None:
    for begin in (vramsweep.watch, vramsweep.TrainerCallback):
        with pytest.raises(UserError, match=f"^vramsweep.watch: {re.escape(said)}"):
            begin("mine", **settings)


def test_a_rank_that_somebody_ends_waits_for_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.warns(UserWarning, match="the block ended before its 2 ranks could exchange results"),
        pytest.raises(KeyboardInterrupt),
        vramsweep.watch("mine", results=str(tmp_path)),
    ):
        raise KeyboardInterrupt


def test_a_secret_on_the_command_line_is_not_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub_token", "hf_abcdefghijklmnop1234"])
    assert vramsweep.watch("mine")._trial.runner.command == "train.py"
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1e-4"])
    assert vramsweep.watch("mine")._trial.runner.command == "train.py --lr 1e-4"


def test_a_malformed_variable_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments")
    with pytest.raises(UserError, match=r"^vramsweep.watch: PYTORCH_CUDA_ALLOC_CONF: "):
        vramsweep.watch("mine")


@pytest.mark.slow
def test_a_training_that_we_started_is_left_alone(tmp_path: Path) -> None:
    done = trained(tmp_path, plain(12), VRAMSWEEP_ATTEMPT=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "None\n")
    assert not (tmp_path / "results").exists()


TRAINER = source("trainer_of_a_script.txt")
FAILING = source("trainer_that_fails.txt")


@pytest.mark.slow
def test_a_trainer_that_raises_has_a_row_and_the_process_goes_on(tmp_path: Path) -> None:
    text = TRAINER + FAILING.replace("FAULT", "self.passes == 8")
    caught = "try:\n    trainer(Failing).train()\nexcept torch.OutOfMemoryError:\n    print('caught')\n"
    done = trained(tmp_path, f"{text}{caught}trainer().train()\ntrainer(Failing).train()", TMPDIR=str(tmp_path))
    assert "caught" in done.stdout and done.stderr.splitlines()[-1].startswith("torch.OutOfMemoryError: CUDA out")
    assert [row["outcome"] for row in rows(tmp_path)] == ["oom", "ok", "oom"]
    row = rows(tmp_path)[1]
    assert (row["micro_batch"], row["grad_accum"], row["seq_len"], row["precision"]) == (2, 2, 40, "fp32")
    assert row["tokens_per_s"] * row["elapsed_s"] == pytest.approx(2 * 2 * 40 * 6)
    assert not list(tmp_path.glob("vramsweep-*"))


@pytest.mark.slow
def test_each_attempt_at_a_batch_has_its_row(tmp_path: Path) -> None:
    text = TRAINER + FAILING.replace("FAULT", 'len(inputs["input_ids"]) > 3')
    done = trained(
        tmp_path, f"{text}trainer(Failing, auto_find_batch_size=True, per_device_train_batch_size=5).train()"
    )
    assert done.returncode == 0, done.stderr
    assert [(row["outcome"], row["micro_batch"]) for row in rows(tmp_path)] == [("oom", 5), ("oom", 4), ("ok", 3)]


@pytest.mark.slow
def test_a_trainer_with_a_loop_of_its_own_may_be_left(tmp_path: Path) -> None:
    own = source("trainer_of_its_own_loop.txt")
    done = trained(tmp_path, f"{TRAINER}{own}trainer().train()\ntrainer(Own).train()", TMPDIR=str(tmp_path))
    assert done.stderr.splitlines()[-1] == "ValueError: bad data"
    left, well, last = rows(tmp_path)
    assert (left["outcome"], left["reason"]) == ("crash", "builtins.RuntimeError: the training stopped before its end")
    line = f"{TRAINER}{own}".splitlines().index('        raise ValueError("bad data")') + 1
    assert (well["outcome"], last["reason"]) == ("ok", f"builtins.ValueError: bad data, at train.py:{line}")
    assert not list(tmp_path.glob("vramsweep-*"))


@parametrized("precisions_of_arguments", ids=str)
def test_precision_is_that_of_arguments_and_weights(
    autocast: dict[str, Any], dtypes: list[str], said: str | None
) -> None:
    asked = {"bf16": False, "fp16": False, "tf32": None, "deepspeed": None} | autocast
    weights = [torch.nn.Parameter(torch.ones(1, dtype=getattr(torch, name)), requires_grad=False) for name in dtypes]
    assert precision(types.SimpleNamespace(**asked), torch.nn.ParameterList(weights)) == said


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_ranks_write_one_row(tmp_path: Path, inside: bool) -> None:
    text = (ROOT / "tests" / "scripts" / "ddp.py").read_text()
    head, loop = text.split("for step in range(50):")
    body, tail = loop.split("dist.destroy")
    end = f"{'    ' * inside}dist.destroy{tail}"  # where the ranks' group is gone when the block ends
    indented = "\n".join(f"    {line}" for line in f"for step in range(12):{body}".splitlines())
    text = f"import vramsweep\n{head}with vramsweep.watch('mine'):\n{indented}\n{end}"
    torchrun = str(Path(sys.executable).parent / "torchrun")
    done = trained(tmp_path, text, torchrun, "--nproc-per-node", "2")
    assert done.returncode == 0 and "wrote no row" not in done.stderr, done.stderr
    (row,) = rows(tmp_path)
    assert (row["world_size"], len(row["rank_peak_allocated_bytes"]), row["grad_accum"]) == (2, 2, 2)
