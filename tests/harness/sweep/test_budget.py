"""Budgets: what is typed, what rows say of trials' time and cost, what may start, and where a sweep stops."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import SETTINGS, Cli, cases, custom, parametrized, refusal, tiny

from vramsweep.harness.config import compose
from vramsweep.harness.machine import machine
from vramsweep.harness.messages import units
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.journal import Journal
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.spec import trial_parser
from vramsweep.harness.sweep import budget, plan, row_builder, run_trials, trial_loop
from vramsweep.harness.sweep.budget import START_S, Budget, Expected, measuring_seconds
from vramsweep.harness.sweep.plan import Planned
from vramsweep.harness.verbs.plan import list_measurements

pytestmark = pytest.mark.deterministic


def planned(*values: dict[str, Any]) -> list[Planned]:
    return [one for (one,) in plan.expand_trials(values, 1)]


def settings(**over: Any) -> plan.Settings:
    return plan.Settings(**(SETTINGS | {"timeout_s": 1e6} | over))


def measured(item: Planned, spent: float, **over: Any) -> Row:
    return row_builder.axis_columns(item) | {"outcome": "ok", "terminal": True, "duration_s": spent} | over


@pytest.mark.parametrize(("settings_", "text"), cases("limit_mistakes"))
def test_bad_limits(settings_: str, text: str) -> None:
    given = SETTINGS | json.loads(settings_)
    said = refusal(UserError, plan.settings, [given, given])
    assert said.startswith(text) and "\n" not in said


def test_the_tighter_limit_counts() -> None:
    assert units.parse_limit(None, None, 12.5) is None
    time_first = units.parse_limit("1h", 40, 12.5)
    cost_first = units.parse_limit("8h", 40, 12.5)
    assert time_first == (3600, "budget of 1 h")
    assert cost_first == (40 / 12.5 * 3600, "max_cost of 40 at 12.5 an hour")


def test_expected_from_the_nearest_trial_of_the_same_configuration() -> None:
    small, big, asked, other = planned(
        tiny(seq_len=16), tiny(seq_len=64), tiny(seq_len=128), tiny(seq_len=128, precision="bf16")
    )
    mine = Budget(settings(), [measured(small, 3.0, overhead_s=2.0), measured(big, 6.0, overhead_s=2.0)])
    assert mine.expected(big).seconds == pytest.approx(6.0)
    assert mine.expected(asked).seconds == pytest.approx(2 + 4 * 128 / 64)  # twice the tokens, the start stays
    assert mine.expected(asked).basis == "from a trial of the same configuration"
    assert mine.expected(other).basis == "from a trial of another configuration"
    for spent in (10.0, 20.0, 90.0):  # of repeats the median
        mine.learn([measured(other, spent)])
    assert mine.expected(other).seconds == pytest.approx(20.0)


def test_other_configurations_are_scaled_by_parameters_and_failures_are_no_measure_of_length() -> None:
    model = tiny()["model"]
    one, twice = planned(tiny(), tiny(model=model | {"name": "twice", "parameters": 2 * model["parameters"]}))
    mine = Budget(settings(), [measured(one, 10.0)])
    assert mine.expected(twice).seconds == pytest.approx(20.0)
    failed = Budget(settings(), [measured(one, 2.0, outcome="oom"), {"trial_id": "x", "duration_s": 4.0}])
    assert failed.expected(one) == budget.Expected(3.0, "from the mean of 2 finished trials")


@parametrized("odd_rows")
def test_rows_of_others_that_say_odd_things(wrong: dict[str, Any]) -> None:
    one, other = planned(tiny(), tiny(precision="bf16"))
    mine = Budget(settings(budget="1h"), [measured(one, 5.0) | wrong])
    found = mine.total([one, other])
    assert found.seconds is not None and math.isfinite(found.seconds)
    assert mine.allows(other, 0.0) is None


def test_expected_before_anything_has_finished() -> None:
    todo = planned(tiny(seq_len=8), tiny(seq_len=16), tiny(seq_len=0))
    found = Budget(settings(), flops=1e9).total(todo)
    assert found.seconds == pytest.approx(6 * 119360 * (8 + 16) * 2 * 5 / 1e9 + 4.0)
    assert "rough" in found.basis
    assert Budget(settings()).total(todo).seconds is None
    assert Budget(settings(timeout_s=3), flops=1).total(todo).seconds == 6.0  # a deadline ends the longest


def test_simulated_trials_share_a_trace() -> None:
    card = {"name": "simulated", "gpu": "h100-80gb"}
    todo = planned(*(tiny(seq_len=n, precision=p, device=card) for n in (8, 16, 32) for p in ("fp32", "bf16")))
    own = Budget(settings())
    assert own.total(todo).seconds == pytest.approx(2 * budget.TRACE_S + 6 * budget.PREDICTED_S)
    own.learn([measured(todo[0], 1.0)])
    assert own.total(todo).seconds == pytest.approx(2 * budget.TRACE_S + 3 * 1.0 + 3 * budget.PREDICTED_S)


def test_what_may_start() -> None:
    short, long, impossible = planned(tiny(seq_len=16), tiny(seq_len=1600), tiny(seq_len=0))
    clock = iter([100.0])
    mine = Budget(settings(budget="60s"), [measured(short, 1.0)], clock=lambda: next(clock))
    wanted = "budget of 1 min: 1 min left, but it would take 1 min 40 s (from a trial of the same configuration)"
    assert mine.allows(long, 100.0) == wanted
    assert mine.allows(short, 158.9) is None
    assert "0.5 s left" in str(mine.allows(short, 159.5))
    assert mine.allows(short, 160.0) == "budget of 1 min is spent"
    assert mine.allows(impossible, 1e9) is None  # it takes no time
    right = "budget of 1 min: 2 of 3 trials were not started; run the same command again to resume"
    assert mine.left_out(3, [impossible.trial_id]) == right
    assert Budget(settings(), [measured(short, 1e9)]).allows(short, 1e9) is None
    unknown = Budget(settings(budget="10s"), began_s=0.0)
    assert unknown.allows(long, 9.0) is None  # nothing says that it would not fit
    assert unknown.left_out(1, []) is None


def test_one_that_may_start_later_is_not_left_out() -> None:
    (one,) = planned(tiny())
    mine = Budget(settings(budget="10s"), [measured(one, 20.0)], began_s=0.0)
    assert mine.allows(one, 1.0)
    for _ in range(3):
        mine.learn([measured(one, 2.0)])
    assert mine.allows(one, 2.0) is None
    assert mine.left_out(1, []) is None


def test_cost() -> None:
    mine = Budget(settings(price_per_hour=12.5))
    assert mine.cost(7200) == 25.0
    assert mine.cost(None) is None
    assert Budget(settings()).cost(7200) is None


def test_a_sweep_stops_in_time_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trials of 10 s for every 100 tokens, on a clock that stands still between them."""
    now = [1000.0]

    def run_trial(item: Planned, settings: Any, folder: Path, book: journal.Journal, *rest: Any, **_: Any) -> Row:
        assert item.trial is not None
        spent = item.trial.seq_len / 10
        now[0] += spent
        return book.append(measured(item, spent, attempt=1, cpu_name="x", torch_version=None))

    monkeypatch.setattr(trial_loop, "run_trial", run_trial)
    monkeypatch.setattr(trial_loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    todo = plan.order_trials(plan.expand_trials([custom("good", seq_len=n) for n in (100, 200, 300, 400)], 1))
    folder = tmp_path / "t"
    rows, status = run_trials.run(todo, settings(budget="75s", any_system=True), folder, began_s=1000.0)
    assert sorted(row["seq_len"] for row in rows.values()) == [100, 200, 400]  # 300 would not fit after 400 and 100
    assert status == 0
    assert "budget of 1 min 15 s: 1 of 4 trials were not started; run the same command again" in capsys.readouterr().out
    rows, status = run_trials.run(todo, settings(budget="75s", any_system=True), folder, began_s=now[0])
    assert (len(rows), status) == (4, 0)
    assert "not started" not in capsys.readouterr().out


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
    time = "estimated time: about 2 min 40 s, cost: 1.60 at 36 an hour for the node (measuring 1 trial on this CPU: "
    assert f"{time}from a trial of" in said and "~ 2 min 40 s" in cli.run("plan", *words, "--all").out


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
    row = {
        "estimated_step_s": 1.0,
        "calibrated_step_s": 2.0,
        "calibrated_step_low_s": 1.5,
        "calibrated_step_high_s": 3.0,
    }
    assert measuring_seconds(predicted, row) == START_S + 2.0 * 5  # warm-up, probe, 2, FLOPs
    item = plan.plan_trial(predicted)
    (found,) = list_measurements([item], {item.trial_id: row}, 36.0)
    ends = [found[f"estimated_{end}s"] for end in ("low_", "", "high_")]
    assert ends == [START_S + 7.5, START_S + 10, START_S + 15] and found["estimated_cost"] == pytest.approx(0.12)
    (unknown,) = list_measurements([item], {}, None)
    assert unknown["estimated_low_s"] is None  # nothing is predicted, so no interval is known
    (untimed,) = list_measurements([item], {item.trial_id: {"estimated_step_s": None}}, None)
    assert untimed["estimated_high_s"] is None and untimed["basis"].startswith("rough")
    rough = measuring_seconds(predicted, None)
    assert rough is not None and START_S < rough < START_S + 1
