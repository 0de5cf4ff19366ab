"""Test the time and cost that `plan` expects of each trial, by rows."""

from pathlib import Path

import pytest
from conftest import SETTINGS, Cli, tiny

from vramsweep.harness.config import compose
from vramsweep.harness.machine import machine
from vramsweep.harness.rows.journal import Journal
from vramsweep.harness.spec import trial_parser
from vramsweep.harness.sweep import plan, row_builder
from vramsweep.harness.sweep.budget import START_S, Budget, Expected, measuring_seconds

pytestmark = pytest.mark.deterministic


@pytest.mark.slow
def test_what_plan_says(tmp_path: Path, cli: Cli) -> None:
    words = ["-m", "model=tiny", "device=cpu", "seq_len=16,64,256", f"results={tmp_path}", "price_per_hour=36"]
    asked = compose.resolve(words)
    items, folder = asked.trials, asked.folder
    assert folder is not None
    ended = {16: {"outcome": "ok"}, 64: {"outcome": "oom", "reason": "full"}}
    with Journal(folder) as book:
        for item in items:
            if item.trial and item.trial.seq_len in ended:
                row = {"sweep": folder.name, "terminal": True, "duration_s": 10.0} | row_builder.started_columns(1)
                book.append(row_builder.initial_columns(item) | row | ended[item.trial.seq_len])
    found = cli.json("plan", *words)
    by_length = {one["trial"]["seq_len"]: one for one in found["trials"]}
    assert [by_length[n]["expected_s"] for n in (16, 64, 256)] == [None, None, 160.0]
    assert by_length[256]["expected_cost"] == found["estimated_cost"] == pytest.approx(1.6)
    assert (found["estimated_s"], found["estimate_basis"]) == (160.0, "from a trial of the same configuration")
    said = cli.run("plan", *words).out
    said_time = (
        "estimated time: about 2 min 40 s, cost: 1.60 at 36 an hour for the node (measuring 1 trial on this CPU: "
    )
    assert f"{said_time}from a trial of" in said
    said = cli.run("plan", *words, "--all").out
    assert "~ 2 min 40 s" in said


@pytest.mark.slow
def test_hours_and_money_before_anything_ran(here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep for a GPU that is not here, and one that predicts: both say what measuring would take."""
    monkeypatch.setattr(machine, "visible_gpus", lambda _: [])
    words = ["-m", "model=gpt2", "seq_len=256,1024", "price_per_hour=25"]
    found = cli.json("plan", *words, "device=cuda", "predict=false")
    assert found["estimated_s"] > 0 and found["estimated_cost"] == pytest.approx(found["estimated_s"] / 3600 * 25)
    said = cli.run("plan", *words, "device=cuda", "predict=false").out
    assert "at 25 an hour for the node (measuring 2 trials on one h100-80gb, assumed for lack of a GPU: rough" in said
    found = cli.json("plan", *words, "device=simulated", "sharding=ddp", "world_size=8")
    (measuring,) = found["measuring"]
    assert found["estimated_cost"] is None and (measuring["gpu"], measuring["gpus"]) == ("h100-80gb", 8)
    assert measuring["estimated_cost"] == pytest.approx(measuring["estimated_s"] / 3600 * 25)
    said = cli.run("plan", *words, "device=simulated", "predict=false").out
    assert "predicting 2 trials on this machine's CPU" in said and "measuring 2 trials on one h100-80gb instead" in said
    assert not list(here.rglob("journal.jsonl"))


def test_an_estimated_step_time_is_scaled_to_the_configuration_s_other_trials() -> None:
    device = {"name": "cuda"}
    small, large, other = (one for (one,) in plan.expand_trials(
        [tiny(seq_len=64, device=device), tiny(seq_len=128, device=device), tiny(precision="bf16", device=device)], 1
    ))  # fmt: skip
    mine = Budget(plan.Settings(**(SETTINGS | {"timeout_s": 1e6})))
    mine.learn_step(large, 10.0, "h100-80gb")
    assert large.trial is not None
    spent = 10.0 * large.trial.steps()
    assert mine.expected(large) == Expected(START_S + spent, "from estimated step times on h100-80gb")
    assert mine.expected(small).seconds == pytest.approx(START_S + spent / 2)
    assert mine.expected(other).seconds is None
    predicted = trial_parser.parse(tiny(device={"name": "simulated", "gpu": "h100-80gb"}))
    assert measuring_seconds(predicted, {"calibrated_step_s": 2.0}) == START_S + 2.0 * 5  # warm-up, probe, 2, FLOPs
    rough = measuring_seconds(predicted, None)
    assert rough is not None and START_S < rough < START_S + 1
