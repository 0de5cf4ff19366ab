"""`advise`: rows become options, what is said of them, and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SETTINGS, tiny
from rich.console import Console

from vramsweep.harness import advise, plan, reach, trial
from vramsweep.harness.advice import Advice, Option, search
from vramsweep.harness.errors import UserError
from vramsweep.harness.remedies import REMEDIES

MIB = 1 << 20
FULL = next(one for one in REMEDIES if one.words == "checkpointing=full")
SGD = next(one for one in REMEDIES if one.words == "optimizer=sgd")
PURE = next(one for one in REMEDIES if one.words == "precision=bf16_pure")


def planned(**over: Any) -> plan.Planned:
    [[found]] = plan.expand([tiny(device={"name": "simulated", "gpu": "t4-16gb"}, **over)], 1)
    return found


class Stub:
    """What `show` asks of Asked."""

    most = 1024

    def __init__(self, **over: Any) -> None:
        self.base = planned(**over)
        assert self.base.trial is not None
        self.trial = self.base.trial


def said(found: Advice, axis: str | None = None, reached: Any = (), given: Any = (), **over: Any) -> str:
    out = StringIO()
    advise.show(Stub(**over), found, axis, reached, given, Console(file=out, width=140))  # type: ignore[arg-type]
    return out.getvalue()


def found(limit: int = 3000 * MIB) -> Advice:
    sizes = {(): (4000, 1e-5), ("checkpointing=full",): (2500, 1.3e-5), ("optimizer=sgd",): (2000, 0.9e-5),
             ("checkpointing=full", "optimizer=sgd"): (500, 1.2e-5)}  # fmt: skip

    def predict(taken: Any) -> list[Option]:
        options = []
        for remedies in taken:
            need, seconds = sizes.get(tuple(one.words for one in remedies), (None, None))
            reason = None if need else "precision bf16_pure needs a newer card"
            options.append(Option(remedies, need and need * MIB, seconds, reason))
        return options

    return search([FULL, SGD, PURE], predict, limit)


def test_rows_become_options() -> None:
    item = planned(seq_len=100, micro_batch=2, grad_accum=5)
    ok = {"outcome": "ok", "peak_reserved_bytes": 7, "peak_reserved_most_bytes": None, "estimated_step_s": 2.0,
          "calibrated_step_s": 3.0, "reason": None}  # fmt: skip
    assert advise.option((FULL,), item, ok) == Option((FULL,), 7, 3.0 / 1000)
    assert advise.option((), item, ok | {"peak_reserved_most_bytes": 9, "calibrated_step_s": None}).need == 9
    assert advise.option((), item, ok | {"calibrated_step_s": None}).seconds is None  # another kind is no substitute
    assert advise.option((), item, ok, "estimated_step_s").seconds == 2.0 / 1000
    full = {"outcome": "oom", "unlimited_peak_reserved_bytes": 11, "peak_reserved_bytes": None, "reason": "too small"}
    assert advise.option((), item, full) == Option((), 11, None, full=True)
    host = {"outcome": "host_oom", "unlimited_peak_reserved_bytes": 11, "reason": "a node's 64 GiB are too few"}
    assert advise.option((), item, host) == Option((), 11, None, host["reason"], full=True)
    assert advise.option((), item, host | {"unlimited_peak_reserved_bytes": None}).full
    crash = advise.option((), item, {"outcome": "crash", "reason": "it broke"})
    assert (crash.need, crash.reason) == (None, "it broke")
    invalid = plan.Planned("x", {}, None, "needs compute capability 8.0")
    assert advise.option((), invalid, None).reason == "needs compute capability 8.0"


@pytest.mark.parametrize(("calibrated", "ratio"), [(4.0, None), (None, 0.5)])
def test_times_are_of_the_kind_that_the_run_as_it_is_has(
    calibrated: float | None, ratio: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(todo: Any, *_: Any) -> tuple[dict[str, Any], int]:
        base = {"outcome": "ok", "peak_reserved_bytes": 7, "estimated_step_s": 2.0, "calibrated_step_s": calibrated}
        other = base | {"estimated_step_s": 1.0, "calibrated_step_s": None}
        return {item.trial_id: other if item.trial.checkpointing == "full" else base for item in todo}, 0

    monkeypatch.setattr(advise.sweep, "run", rows)
    settings = plan.Settings(**(SETTINGS | {"results": str(tmp_path)}))
    asked = advise.Asked(planned(), settings, tmp_path, None)  # type: ignore[arg-type] # no worker is started
    [base] = asked.predict([()])
    [full] = asked.predict([(FULL,)])
    assert base.seconds and (full.seconds and full.seconds / base.seconds) == ratio


def test_what_is_said() -> None:
    text = said(found(), given=["model=tiny", "results=elsewhere", "seq_len=32", "device.gpu=t4-16gb"])
    assert "does not fit: 4,000 MiB, 1,000 too many" in text
    assert "left out: precision=bf16_pure: precision bf16_pure needs a newer card" in text
    alone, _, together = text.partition("What fits and nothing beats in both")
    assert alone.index("optimizer=sgd") < alone.index("checkpointing=full")  # ranked by what they save
    assert "+1,500" in alone and "x 1.30" in alone and "SGD without momentum" in alone
    assert "checkpointing=full optimizer=sgd" in together
    assert "Recommended: checkpointing=full (the same result)" in text  # SGD is faster, and another training
    assert (
        "vramsweep sweep model=tiny seq_len=32 checkpointing=full device=cuda\n" in text
    )  # for the card that is there
    assert "Not tried" not in text


def test_what_cannot_be_met_names_the_nearest() -> None:
    text = said(found(limit=300 * MIB))
    assert "Nothing fits. The nearest is checkpointing=full optimizer=sgd: 500 MiB, 200 too many" in text
    assert "Recommended" not in text


def test_what_was_not_tried_is_said() -> None:
    def predict(taken: Any) -> list[Option]:
        return [Option(remedies, (100 - len(remedies)) * MIB, 1e-5) for remedies in taken]

    some = search([FULL, SGD, PURE], predict, 1000 * MIB, most=1)
    assert "Not tried: 3 of 8 combinations" in said(some)


def test_what_was_not_tried_is_said_of_what_is_left_out_too() -> None:
    def predict(taken: Any) -> list[Option]:
        return [Option(one, None if PURE in one else 100 * MIB, 1e-5, "no" if PURE in one else None) for one in taken]

    some = search([FULL, SGD, PURE], predict, 1000 * MIB, most=0)
    assert (some.space, len(some.tried)) == (5, 4)
    assert "Not tried: 1 of 5 combinations" in said(some)


@pytest.mark.parametrize("need", [500 * MIB, None])
def test_a_node_that_is_too_small_is_what_advice_is_for(need: int | None) -> None:
    """Which of the card would have room for."""

    def predict(taken: Any) -> list[Option]:
        why = "a node's 64 GiB are too few"
        fits = {SGD: Option((SGD,), 300 * MIB, 1e-5)}
        return [fits[SGD] if SGD in one else Option(one, need, 1e-5, why, full=True) for one in taken]

    found = search([FULL, SGD], predict, 1000 * MIB)
    text = said(found)
    assert "does not fit: a node's 64 GiB are too few" in text and "cannot be predicted" not in text
    assert "Recommended: optimizer=sgd" in text
    nothing = said(search([FULL], predict, 1000 * MIB))
    assert ("The nearest is as it is: a node's" if need else "nothing is known to fit") in nothing


def test_how_far_a_run_gets_ends_where_a_node_is_full() -> None:
    assert Option((), 5, 1.0, "the node", full=True).beyond(9) is None  # counts as too much
    assert Option((), 15, 1.0, full=True).beyond(9) == 15 and Option((), 5, 1.0).beyond(9) == 5


def test_a_model_that_cannot_be_traced_has_its_states() -> None:
    nothing = search([FULL], lambda taken: [Option(one, None, None, "an operator has no fake") for one in taken], 99)
    text = said(nothing)
    parameters = trial.parse(tiny()).model.parameters
    assert "cannot be predicted: an operator has no fake" in text
    assert f"{parameters:,} parameters, 16 bytes each" in text
    assert "nothing can be said without measuring" in said(nothing, model={"parameters": None})


def test_goals_of_length_say_how_far_each_gets() -> None:
    advice = found()
    by = {tuple(one.words for one in option.remedies): option for option in advice.tried}
    reached = [advise.Reached(by[()], 700), advise.Reached(by["checkpointing=full",], 900),
               advise.Reached(by["checkpointing=full", "optimizer=sgd"], 900),
               advise.Reached(by["optimizer=sgd",], None)]  # fmt: skip
    text = said(advice, "seq_len", reached, ["model=tiny", "seq_len=32"])
    assert "Recommended: checkpointing=full (the same result)" in text  # as far as with SGD
    assert "vramsweep sweep model=tiny seq_len=900 checkpointing=full device=cuda" in text
    assert advise.best([advise.Reached(by[()], None)]) is None


def test_a_goal_changes_less_of_the_result_before_it_goes_further() -> None:
    rounding = next(one for one in REMEDIES if one.words == "loss=chunked")

    def got(taken: tuple[Any, ...], value: int | None) -> advise.Reached:
        return advise.Reached(Option(taken, 1, None), value)

    reached = [got((), 6), got((FULL,), 18), got((rounding,), 100), got((SGD,), 150), got((PURE,), None)]
    assert advise.best(reached) == reached[2]  # rounding at most
    assert advise.best([got((), None), got((PURE,), 7), got((SGD,), 9)]) == got((PURE,), 7)
    assert advise.best([got((), 6), got((FULL,), 6)]) == got((), 6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=tiny", "device=cuda"], "device=cuda: advice is from predictions; leave it out"),
        (["--most", "-1", "model=tiny"], "--most -1: allowed is 0 or more"),
        (["-m", "model=tiny", "seq_len=32,64"], "advise takes one trial, and these are 2"),
        (["model=tiny", "device.gpu=voodoo2"], "device.gpu is voodoo2, which is not listed"),
        (["model=nonesuch"], "nonesuch"),
    ],
)
def test_mistakes_are_explained(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        advise.main([*words, f"results={tmp_path}"])


def command(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    line = [sys.executable, "-m", "vramsweep", "advise", "model=tiny", "precision=fp32", f"results={folder}", *words]
    done = subprocess.run([*line, "--json"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_a_goal_s_answer_fits_and_the_next_does_not(tmp_path: Path) -> None:
    words = ["seq_len=512", "micro_batch=16", "gpu=l4-24gb", "device.memory_gib=0.9", "device.capability=8.6"]
    status, found = command(tmp_path, *words, "--goal", "largest-batch", "--accept", "same", "--most", "3")
    assert status == 0
    by = {" ".join(one["change"]): one["largest"] for one in found["micro_batch"]}
    assert 0 < by[""] < max(by.values()) and {one["result"] for one in found["micro_batch"]} == {"the same result"}
    chosen = found["recommended"]
    assert max(by.values()) == by[" ".join(chosen["change"])]
    for batch, fits in ((by[""], True), (reach.onwards(by[""]), False)):
        size = f"micro_batch={batch}"
        _, direct = command(tmp_path, *words[:1], size, *words[2:], "--accept", "same", "--most", "0")
        assert direct["as_it_is"]["fits"] == fits


@pytest.mark.slow
def test_a_share_of_the_card_is_all_that_there_is(tmp_path: Path) -> None:
    share = "allocator.conf=per_process_memory_fraction:0.004"
    few = ["--most", "0", "--accept", "same"]
    status, found = command(tmp_path, "seq_len=512", "micro_batch=16", "gpu=l4-24gb", share, *few)
    assert found["memory_limit_bytes"] < 100 << 20 and not found["as_it_is"]["fits"]
    assert all(one["reserved_bytes"] <= found["memory_limit_bytes"] for one in found["alone"] if one["fits"])
    assert status == int(not any(one["fits"] for one in found["alone"]))


@pytest.mark.slow
def test_what_is_recommended_fits_when_it_is_predicted_by_itself(tmp_path: Path) -> None:
    """A card so small that the tiny model needs help; the same command again asks nothing anew."""
    words = ["model=tiny", "seq_len=512", "micro_batch=16", "precision=fp32", f"results={tmp_path}",
             "device.memory_gib=0.9", "device.capability=8.6"]  # fmt: skip
    command = [sys.executable, "-m", "vramsweep", "advise", *words, "--most", "2", "--accept", "precision", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    advice = json.loads(done.stdout)
    chosen = advice["recommended"]
    assert not advice["as_it_is"]["fits"] and chosen["fits"]
    alone = [sys.executable, "-m", "vramsweep", "explain", *words]
    settings = [one for change in chosen["change"] for one in change.split()]
    taken = {one.partition("=")[0] for one in settings}
    alone = [one for one in alone if one.partition("=")[0] not in taken]
    explained = subprocess.run([*alone, *settings, "--json"], capture_output=True, text=True, check=False, cwd=ROOT)
    (direct,) = json.loads(explained.stdout)
    assert direct["explanation"]["refused"] is None
    assert direct["explanation"]["peak_reserved"] == chosen["reserved_bytes"] <= advice["memory_limit_bytes"]
    again = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert json.loads(again.stdout)["recommended"] == chosen
    assert "[1]" in done.stderr and "[1]" not in again.stderr
