"""Test Hydra's part of `sweep` and `plan`: devices chosen by files, sweepers that optimise, help."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TARGETS, Cli, parametrized, source, tiny
from hydra.core.plugins import Plugins

from vramsweep import __main__ as front_door
from vramsweep.harness.config import compose
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.machine import machine
from vramsweep.harness.process.attempt import Launcher
from vramsweep.harness.questions import fit_prediction
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.schema import COLUMNS
from vramsweep.harness.spec import trial
from vramsweep.harness.sweep import plan, session, sweep_status
from vramsweep.harness.verbs import run_words

# A stand-in for Optuna's sweeper (hydra-optuna-sweeper 1.3.0 with optuna 5.0.0): batches of its own choosing, the value
# taken with float(), a trial told failed if that raises, and a study that ends with an error when it is told NaN.
SWEEPER = source("sweeper_of_optuna.txt")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: [])
    compose.detect.cache_clear()
    yield
    compose.detect.cache_clear()


@pytest.fixture
def files(here: Path) -> Path:
    """A --config-dir with an experiment that chooses device and runner, and one that leaves them alone."""
    folder = here / "own" / "experiment"
    folder.mkdir(parents=True)
    head = "# @package _global_\ndefaults:\n"
    given = f"{head}  - override /device: cpu\n  - override /runner: trainer\nmodel: {{name: mine}}\nseq_len: 77\n"
    (folder / "night.yaml").write_text(given)
    (folder / "day.yaml").write_text("# @package _global_\nseq_len: 78\n")
    return folder.parent


def planned(cli: Cli, *words: str) -> list[dict[str, Any]]:
    return [t["trial"] for t in cli.json("plan", *words, "predict=false")["trials"]]


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_a_file_of_the_user_s_chooses_the_device(files: Path, cli: Cli) -> None:
    own = ["--config-dir", str(files)]
    (night,) = planned(cli, *own, "+experiment=night")
    assert (night["device"]["name"], night["runner"]["name"], night["seq_len"]) == ("cpu", "trainer", 77)
    (day,) = planned(cli, *own, "+experiment=day")
    assert (day["device"]["name"], day["seq_len"]) == ("simulated", 78)
    assert planned(cli, *own, "+experiment=night", "device=auto")[0]["device"]["name"] == "cpu"
    assert planned(cli, *own, "+experiment=night", "device=cuda")[0]["device"]["name"] == "cuda"
    both = planned(cli, *own, "-m", "+experiment=night,day")
    assert {(t["seq_len"], t["device"]["name"]) for t in both} == {(77, "cpu"), (78, "simulated")}


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_the_preset_of_make_sweep_is_that_of_the_file_s_device(files: Path, cli: Cli) -> None:
    words = ["--config-dir", str(files), "-m", "device=auto", "sweep=auto", "model=tiny"]
    of_cpu = planned(cli, *words, "+experiment=night")
    assert {t["seq_len"] for t in of_cpu} == {32, 64, 97, 128, 193, 256}  # conf/sweep/cpu.yaml
    assert {t["seq_len"] for t in planned(cli, *words)} >= {2048}


@pytest.mark.slow
def test_auto_takes_cuda_when_there_is_one(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    card = machine.Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-0", "580.1", 80 << 30, 1 << 20, ())
    for cards, build, device in (([card], "13.0", "cuda"), ([], "13.0", "simulated"), ([card], None, "simulated")):
        monkeypatch.setattr(machine, "torch_cuda", lambda build=build: build)
        monkeypatch.setattr(machine, "visible_gpus", lambda environ, cards=cards: cards)
        compose.detect.cache_clear()
        said = cli.run("plan", "-m", "model=tiny", "sweep=auto", "device=auto", "predict=false")
        assert f"tiny-torch-{device}" in said.out
        assert ("cuda_malloc_async" in said.out) == (device == "cuda")
        told = [line for line in said.err.splitlines() if "(0:" not in line]  # but for how far it is
        assert len(told) == (device == "simulated")
        assert cli.run("plan", "model=tiny", "device=cpu").err == ""
    compose.detect.cache_clear()


@pytest.mark.slow
def test_options_of_hydra_s_may_stand_anywhere(cli: Cli) -> None:
    assert len(planned(cli, "device=cpu", "seq_len=8,16", "model=tiny", "--multirun")) == 2


@pytest.mark.usefixtures("no_gpu")
@parametrized("hydra_help")
def test_what_hydra_can_show_is_shown(words: tuple[str, ...], texts: tuple[str, ...], cli: Cli) -> None:
    said = cli.run("sweep", *words)
    assert all(text in said.out for text in texts), said.out
    assert "Traceback" not in said.err


@pytest.mark.slow
def test_what_hydra_is_made_of_is_shown() -> None:
    """It logs, to wherever standard output is at that moment; so it is a process of its own."""
    command = [sys.executable, "-m", "vramsweep", "sweep", "--info", "all"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert all(text in done.stdout for text in ("model/qwen0.5b", "device/simulated", "Provider"))


# sweepers that optimise


@pytest.fixture
def sweeper(here: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `sweep` under the stand-in sweeper with these batches of overrides; returns the status and what was told."""
    plugin = here / "plugin" / "hydra_plugins" / "stand_in"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(SWEEPER)
    monkeypatch.syspath_prepend(str(plugin.parents[1]))
    monkeypatch.delitem(sys.modules, "hydra_plugins.stand_in", raising=False)
    Plugins.instance().register(importlib.import_module("hydra_plugins.stand_in").Sweep)
    own = here / "own" / "hydra" / "sweeper"
    own.mkdir(parents=True)

    def run(batches: list[list[list[str]]], *words: str) -> tuple[int, Any]:
        node = {"_target_": "hydra_plugins.stand_in.Sweep", "batches": batches}
        (own / "stand_in.yaml").write_text(yaml.safe_dump(node))
        base = ["-m", "--config-dir", str(own.parents[1]), "hydra/sweeper=stand_in", "model=tiny", "device=cpu"]
        ended = front_door.main(["sweep", *base, "precision=fp32", "results=out", *words])
        told = here / "out" / "told.json"
        return ended, json.loads(told.read_text()) if told.exists() else None

    return run


@pytest.mark.slow
def test_a_sweeper_that_optimises_is_told_a_number_or_a_failure(
    sweeper: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = f"{TARGETS / 'faults.py'}"
    custom = ["runner=custom", "protocol=brief"]
    batches = [
        [["seq_len=16", "protocol=brief"], ["seq_len=5000"]],  # the second is longer than the model's positions
        [["seq_len=32", "protocol=brief"]],
        [[*custom, f"runner.target={faults}:raises"]],
        [["seq_len=16", "protocol=brief"]],  # asked again: answered from the journal
    ]
    words = ["objective=peak_allocated_bytes", "retries=0", "report=true"]
    ended, told = sweeper(batches, *words)
    assert ended == 1  # one trial failed
    assert [value is None for value in told] == [False, True, False, True, False]
    assert told[0] == told[4] and isinstance(told[0], float) and told[2] > told[0]
    (folder,) = [path.parents[1] for path in (tmp_path / "out").rglob("journal.jsonl")]
    rows = journal.read(folder)[0]
    by_length = {row["seq_len"]: row["peak_allocated_bytes"] for row in rows if row["outcome"] == "ok"}
    assert by_length == {16: told[0], 32: told[2]}
    said = capsys.readouterr().out
    assert "1 trial, 1 finished before, 0 to do" in said
    state = sweep_status.read_status(folder)
    assert (state.state, state.total, state.done, state.failed) == ("finished", 4, 4, 1)
    assert (folder / "report.html").exists() and not list((tmp_path / "out").glob("*/*/report.html"))

    ended, again = sweeper(batches, *words, "report=false")  # the same command resumes
    assert (ended, again) == (1, told)
    assert len(journal.read(folder)[0]) == len(rows)


@pytest.mark.slow
def test_the_report_is_written_once_after_the_last_batch(
    sweeper: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    monkeypatch.setattr(run_words.run_trials, "report", lambda folder, brief: written.append(folder))
    made: list[Launcher] = []

    class Counted(Launcher):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(session, "Launcher", Counted)
    batches = [[["seq_len=5000"]], [["seq_len=16", "protocol=brief"]]]
    ended, told = sweeper(batches, "report=true", "objective=peak_allocated_bytes")
    assert (ended, told[0]) == (0, None)
    (row,) = [row for row in journal.read(tmp_path / "out" / "tiny-torch-cpu")[0] if row["outcome"] == "ok"]
    assert told[1] == row["peak_allocated_bytes"] > 0
    assert [str(folder) for folder in written] == ["out/tiny-torch-cpu"]
    assert len(made) == 1  # its templates serve every batch
    assert not made[0].templates.pids()  # and are ended with the command


def test_when_no_trial_of_any_batch_can_run(sweeper: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ended, told = sweeper([[["seq_len=5000"]], [["seq_len=6000"]]], "objective=tokens_per_s")
    assert (ended, told) == (2, [None, None])
    assert "no trial can run: seq_len 5000 is longer than tiny's 4096 positions" in capsys.readouterr().err


@pytest.mark.slow
def test_our_own_sweeper_in_batches(here: Path, cli: Cli) -> None:
    words = ["-m", "model=tiny", "device=cpu", "seq_len=5000,16,32", "protocol=brief", "precision=fp32", "report=false"]
    cli.run("sweep", *words, "hydra.sweeper.max_batch_size=1")
    state = sweep_status.read_status(here / "results" / "tiny-torch-cpu")
    assert (state.state, state.total, state.ok, state.invalid) == ("finished", 3, 2, 1)


def test_the_objective_of_repeats_is_their_median_and_unknown_if_one_has_none() -> None:
    rows = [{"x": 1.0}, {"x": 9.0}, {"x": 2.0}]
    assert session.answer_of(rows, "x") == 2.0
    assert session.answer_of([*rows, {"x": None}], "x") is None
    assert session.answer_of([*rows, None], "x") is None
    assert session.answer_of(rows, None) == rows[0]
    assert {"peak_reserved_bytes", "tokens_per_s", "mfu"} <= set(plan.OBJECTIVES)
    assert not {"outcome", "plateau", "step_times_s"} & set(plan.OBJECTIVES)
    assert len(plan.OBJECTIVES) < len(COLUMNS)


# predictions of `plan`


@pytest.mark.slow
def test_plan_says_which_of_the_largest_trials_will_not_fit(
    here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: [])
    own = ["model.config.num_hidden_layers=1", "model.parameters=73000"]
    grid = ["-m", "model=tiny", *own, "device=cuda", "precision=fp32", "seq_len=8,4096", "micro_batch=1,2048"]
    grid += ["compile=none,default", "predict=t4-16gb"]
    found = cli.json("plan", *grid)
    assert (found["configurations"], found["predicted_not_to_fit"]) == (2, 1)
    by_mode = {("compile" in (one["reason"] or "")): one for one in found["predictions"]}
    fails, unknown = by_mode[False], by_mode[True]
    assert fails["fits"] is False and fails["card"] == "t4-16gb"
    assert fails["label"] == "compile=none · seq 4096 · batch 2048"
    # the logits alone, three times over: 512 token ids in fp32
    assert fails["needed_bytes"] > max(fails["card_bytes"], 3 * 4096 * 2048 * 512 * 4)
    assert unknown["fits"] is None and unknown["label"] == "compile=default · seq 4096 · batch 2048"
    assert [path.name for path in (here / "results").iterdir()] == [".hydra"]  # what the predictions left is gone
    said = cli.run("plan", *grid).out
    needed, has = (fails[name] / (1 << 30) for name in ("needed_bytes", "card_bytes"))
    assert f"does not fit: needs {needed:,.1f} GiB, {needed - has:,.1f} GiB above the limit of {has:.1f} GiB" in said
    assert said.splitlines()[-1] == "in 1 of 2 configurations the largest trial is predicted not to fit"


@pytest.mark.slow
def test_plan_predicts_what_a_simulated_sweep_says(here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: [])
    words = ["model=tiny", "seq_len=64", "precision=fp32", "report=false"]
    (one,) = cli.json("plan", *words, "device=cuda")["predictions"]
    cli.run("sweep", *words, "device=simulated", f"device.gpu={one['card']}")
    (row,) = journal.read(here / "results" / "tiny-torch-simulated")[0]
    assert (one["needed_bytes"], one["fits"]) == (row["peak_reserved_bytes"], True)


@pytest.mark.slow
def test_one_that_hangs_leaves_plan_s_other_predictions(here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: [])
    monkeypatch.setattr(fit_prediction, "PREDICTION_S", 24.0)
    place = TARGETS / "simulated_faults.py"
    words = ["-m", "runner=custom", f"runner.target={place}:fine,{place}:hangs", "model=tiny", "seq_len=64"]
    done = cli.run("plan", *words, "precision=fp32", "device=cuda", "output=json")
    by_fit = {one["fits"]: one for one in json.loads(done.out)["predictions"]}
    assert by_fit[True]["needed_bytes"] > 0
    assert by_fit[None]["reason"] == "24 s were not enough for all predictions"
    assert "together" not in done.err and not (here / "results" / "tiny-custom-cuda").exists()


def test_the_largest_of_each_configuration_the_largest_first() -> None:
    base = yaml.safe_load((ROOT / "conf" / "model" / "tiny.yaml").read_text())
    big = base | {"name": "big", "parameters": 10**9}

    def one(model: dict[str, Any], **over: Any) -> dict[str, Any]:
        return tiny(**({"seq_len": 8, "micro_batch": 1, "device": {"name": "cuda"}} | over)) | {"model": model}

    values = [
        one(base), one(base, seq_len=512), one(base, micro_batch=100), one(big), one(base, precision="bf16"),
        one(base, device={"name": "cpu"}, seq_len=4096),
    ]  # fmt: skip
    found = fit_prediction.largest_trials([p for trials in plan.expand_trials(values, 2) for p in trials])
    seen = [(p.trial.model.name, p.trial.precision, p.trial.seq_len, p.trial.micro_batch) for p in found if p.trial]
    assert seen == [("big", "fp32", 8, 1), ("tiny", "fp32", 8, 100), ("tiny", "bf16", 8, 1)]


def test_a_card_that_is_not_in_the_table_is_said_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVIDIA Nonesuch 9000", None):
        card = machine.Gpu(0, name, "GPU-0", "580.1", 80 << 30, 1 << 20, ())  # type: ignore[arg-type]
        monkeypatch.setattr(machine, "visible_gpus", lambda environ, card=card: [card])
        assert "not in the table of GPUs; predict=GPU" in cli.run("plan", "model=tiny", "device=cuda").out


def test_the_card_assumed_is_that_of_the_configuration() -> None:
    assert yaml.safe_load((ROOT / "conf" / "device" / "simulated.yaml").read_text())["gpu"] == fit_prediction.CARD
    assert gpu_lookup.gpu_named(fit_prediction.CARD)


@pytest.mark.parametrize("name", ["cpu", "cuda", "simulated"])
def test_every_setting_of_a_device_can_be_given_without_a_plus(name: str) -> None:
    """One that a group's file lacks is refused by Hydra, whatever the documentation says."""
    assert set(yaml.safe_load((ROOT / f"conf/device/{name}.yaml").read_text())) == set(trial.DeviceAxis.model_fields)
