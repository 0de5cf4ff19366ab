"""`advise`: rows become options, what is said of them, and mistakes."""

import dataclasses
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from conftest import SETTINGS, Cli, cases, tiny
from rich.console import Console

from vramsweep.harness.questions import advice
from vramsweep.harness.search import axis_search
from vramsweep.harness.search.advice_search import REMEDIES, Advice, Option, apply_changes, search
from vramsweep.harness.spec import trial_parser
from vramsweep.harness.sweep import plan
from vramsweep.harness.verbs import advise

pytestmark = pytest.mark.deterministic

MIB = 1 << 20
FULL = next(one for one in REMEDIES if one.words == "checkpointing=full")
SGD = next(one for one in REMEDIES if one.words == "optimizer=sgd")
OFFLOAD = next(one for one in REMEDIES if one.words == "activation_offload=true")
PURE = next(one for one in REMEDIES if one.words == "precision=bf16_pure")


def planned(**over: Any) -> plan.Planned:
    [[found]] = plan.expand_trials([tiny(device={"name": "simulated", "gpu": "t4-16gb"}, **over)], 1)
    return found


class Stub:
    """The attributes of AdviceRequest that `show` uses."""

    most, padding = 1024, ""

    def __init__(self, axis: str | None = None, **over: Any) -> None:
        self.base, self.axis = planned(**over), axis
        assert self.base.trial is not None
        self.trial = self.base.trial

    def planned(self, remedies: Any) -> plan.Planned:
        [[item]] = plan.expand_trials([apply_changes(self.base.resolved, remedies)], 1)
        return item


def said(found: Advice, axis: str | None = None, reached: Any = (), given: Any = (), **over: Any) -> str:
    out = StringIO()
    advise.show(Stub(axis, **over), found, reached, given, Console(file=out, width=140))  # type: ignore[arg-type]
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
    assert advice.option((FULL,), item, ok) == Option((FULL,), 7, 3.0 / 1000)
    bound = advice.option((), item, ok | {"peak_reserved_most_bytes": 9, "calibrated_step_s": None})
    assert (bound.least, bound.need) == (7, 9)
    assert advice.option((), item, ok | {"calibrated_step_s": None}).seconds is None  # another kind is no substitute
    assert advice.option((), item, ok, "estimated_step_s").seconds == 2.0 / 1000
    full = {"outcome": "oom", "unlimited_peak_reserved_bytes": 11, "peak_reserved_bytes": None, "reason": "too small"}
    assert advice.option((), item, full) == Option((), 11, None, full=True)
    host = {"outcome": "host_oom", "unlimited_peak_reserved_bytes": 11, "reason": "a node's 64 GiB are too few"}
    assert advice.option((), item, host) == Option((), 11, None, host["reason"], full=True)
    assert advice.option((), item, host | {"unlimited_peak_reserved_bytes": None}).full
    crash = advice.option((), item, {"outcome": "crash", "reason": "it broke"})
    assert (crash.need, crash.reason) == (None, "it broke")
    invalid = plan.Planned("x", {}, None, "needs compute capability 8.0")
    assert advice.option((), invalid, None).reason == "needs compute capability 8.0"


@pytest.mark.parametrize(("calibrated", "ratio"), [(4.0, None), (None, 0.5)])
def test_times_are_of_the_kind_that_the_run_as_it_is_has(
    calibrated: float | None, ratio: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(todo: Any, *_: Any, **__: Any) -> tuple[dict[str, Any], int]:
        base = {"outcome": "ok", "peak_reserved_bytes": 7, "estimated_step_s": 2.0, "calibrated_step_s": calibrated}
        other = base | {"estimated_step_s": 1.0, "calibrated_step_s": None}
        return {item.trial_id: other if item.trial.checkpointing == "full" else base for item in todo}, 0

    monkeypatch.setattr(advice.run_trials, "run", rows)
    settings = plan.Settings(**(SETTINGS | {"results": str(tmp_path)}))
    asked = advice.AdviceRequest(planned(), settings, tmp_path, None)  # type: ignore[arg-type] # no worker is started
    [base] = asked.predict([()])
    [full] = asked.predict([(FULL,)])
    assert base.seconds and (full.seconds and full.seconds / base.seconds) == ratio


def test_what_is_said() -> None:
    text = said(found(), given=["model=tiny", "results=elsewhere", "seq_len=32", "device.gpu=t4-16gb"])
    assert "does not fit: needs 3.9 GiB, 0.98 GiB above the limit of 2.9 GiB" in text
    assert "left out: precision=bf16_pure: precision bf16_pure needs a newer card" in text
    alone, _, together = text.partition("These fit, fastest first; no other is both smaller and faster")
    assert alone.index("optimizer=sgd") < alone.index("checkpointing=full")  # ranked by what they save
    assert " 1.5 " in alone and "x 1.30" in alone and "SGD without momentum" in alone
    assert "checkpointing=full optimizer=sgd" in together
    assert "Recommended: checkpointing=full (the same result)" in text  # SGD is faster, and another training
    # for the card that is there
    assert "vramsweep sweep model=tiny seq_len=32 checkpointing=full device=cuda\n" in text
    assert "Not tried" not in text
    assert "peak GiB" in alone


def test_what_to_pad_is_said_before_the_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stub, "padding", "pad the vocabulary")
    assert "\npad the vocabulary\n" in said(found()).partition("Each change alone")[0]


def test_small_runs_are_compared_in_mib() -> None:
    few = dataclasses.replace(found(), limit=2 << 30)
    small = [dataclasses.replace(one, need=one.need and one.need // 100) for one in few.tried]
    text = said(dataclasses.replace(few, base=small[0], singles=tuple(small[1:4]), tried=tuple(small)))
    assert "peak MiB" in text and "saves MiB" in text and " 25.0 " in text and "<0.01" not in text


def test_a_bound_that_reaches_the_limit_is_no_fit_for_sure() -> None:
    bound = search([], lambda taken: [Option(one, 3000 * MIB, 1e-5, least=2000 * MIB) for one in taken], 3000 * MIB)
    text = said(bound)
    assert "unchanged, it probably fits: peak reserved 2.0 to 2.9 of 2.9 GiB (100 %)" in text
    assert "Recommended: no change (the same result); probably fits" in text


def test_what_cannot_be_met_names_the_nearest() -> None:
    text = said(found(limit=300 * MIB))
    assert "Nothing fits. Closest: checkpointing=full optimizer=sgd, which does not fit: needs 0.49 GiB" in text
    assert "Recommended" not in text


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
    assert "unchanged, it does not fit: a node's 64 GiB are too few" in text and "cannot be predicted" not in text
    assert "Recommended: optimizer=sgd" in text
    nothing = said(search([FULL], predict, 1000 * MIB))
    assert ("Closest: no change, which does not fit: a node's" if need else "nothing is known to fit") in nothing


def on_gpus(
    needs: dict[int, int], level: int = 3, single: int = 9000, more: Any = (), beside: int = 0, **over: Any
) -> Advice:
    """Advice on a run that needs too much, where each of so many GPUs needs so many MiB and one with SGD `single`."""
    stub = Stub(**over)
    base = stub.base.resolved["world_size"]

    def predict(taken: Any) -> list[Option]:
        counts = [next((one.change["world_size"] for one in these if one.group == "gpus"), base) for these in taken]
        less = [100 * (FULL in these) + 200 * (OFFLOAD in these) for these in taken]
        need = [single if SGD in these else needs[count] - saved for count, saved, these in
                zip(counts, less, taken, strict=True)]  # fmt: skip
        return [Option(these, mib * MIB, 1e-5, beside=beside * MIB) for these, mib in zip(taken, need, strict=True)]

    stub.predict, stub.limit = predict, 3000 * MIB  # type: ignore[attr-defined]
    advised = search([FULL, SGD, *more], predict, 3000 * MIB, most=0)
    options = advice.predict_on_gpus(stub, advised, level)  # type: ignore[arg-type]
    return dataclasses.replace(advised, on_gpus=tuple(options))


def names(options: Any) -> list[str]:
    return [advise._name(one.remedies) for one in options]


def test_more_gpus_are_looked_at_until_it_fits() -> None:
    told = on_gpus({1: 8000, 2: 4500, 4: 2500}, micro_batch=8)
    changes = ["world_size=2 sharding=fsdp2 micro_batch=4", "world_size=4 sharding=fsdp2 micro_batch=2"]
    assert names(told.on_gpus) == changes
    assert told.recommended is not None and names([told.recommended]) == changes[1:]  # nothing else fits
    text = said(told, given=["model=tiny", "micro_batch=8"])
    assert "the run fits on 4 x t4-16gb with fsdp2 (4 GPUs)" in text
    assert "vramsweep sweep model=tiny world_size=4 sharding=fsdp2 micro_batch=2 device=cuda" in text


def test_gpus_that_only_just_fit_are_said_and_more_are_looked_at() -> None:
    told = on_gpus({1: 8000, 2: 2900, 4: 2000}, beside=500, micro_batch=8)
    text = " ".join(said(told, given=["model=tiny", "micro_batch=8"]).split())
    assert "fits on 2 x t4-16gb with fsdp2 (2 GPUs), excluding NCCL's buffers of 1 to 2 GiB, which may not fit" in text
    assert "the run fits on 4 x t4-16gb with fsdp2 (4 GPUs)" in text and "(4 GPUs), excluding" not in text
    assert "Recommended: world_size=4" in text and "not included: NCCL's buffers; leave 1 to 2 GiB" in text


def test_one_gpu_with_a_change_comes_before_several() -> None:
    told = on_gpus({1: 8000, 2: 2900}, single=2000)
    assert told.recommended is not None and told.recommended.remedies == (SGD,)
    assert names(told.on_gpus) == ["world_size=2 sharding=fsdp2 micro_batch=1"]


def test_samples_that_gpus_cannot_share_are_said_and_another_training() -> None:
    told = on_gpus({1: 8000, 2: 2900}, micro_batch=1)
    assert "(2 GPUs, and 2 times the samples per step)" in said(told) and told.on_gpus[0].level == 3
    assert on_gpus({1: 8000}, level=1, micro_batch=1).on_gpus == ()
    passes = on_gpus({1: 8000, 2: 2900}, micro_batch=1, grad_accum=6)
    assert names(passes.on_gpus) == ["world_size=2 sharding=fsdp2 grad_accum=3"]


@pytest.mark.parametrize(
    ("axis", "batch", "largest"), [("seq_len", 8, [1024]), ("seq_len", 1, [1024]), ("micro_batch", 8, [])]
)
def test_a_goal_that_nothing_gets_to_on_one_gpu_looks_at_several(
    axis: str, batch: int, largest: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not at dividing the batch that is to be the largest."""

    def rows(todo: Any, *_: Any, **__: Any) -> tuple[dict[str, Any], int]:
        full = {"outcome": "oom", "unlimited_peak_reserved_bytes": 1 << 40, "reason": "too small"}
        fits = {"outcome": "ok", "peak_reserved_bytes": MIB, "reason": None}
        big = {item.trial_id: item.trial.world_size < 4 or item.trial.seq_len > 1024 for item in todo}
        return {one: full if is_big else fits for one, is_big in big.items()}, 0

    monkeypatch.setattr(advice.run_trials, "run", rows)
    settings = plan.Settings(**(SETTINGS | {"results": str(tmp_path)}))
    base = planned(seq_len=512, micro_batch=batch)
    asked = advice.AdviceRequest(base, settings, tmp_path, None, axis)  # type: ignore[arg-type] # no worker is started
    told, reached = advice.ask_predictions(asked, 3, 4)
    got = [one for one in reached if one.value is not None]
    assert [one.option.remedies[0].change["world_size"] for one in got] == [4] * len(largest)
    assert all(largest[0] * 0.97 <= (one.value or 0) <= largest[0] for one in got)
    if largest:
        text = said(told, axis, reached, ["model=tiny", "seq_len=512"])
        assert "Divided among GPUs" in text and f"seq_len={got[0].value} world_size=4" in text


@pytest.mark.parametrize(("free", "counts"), [(0, [2, 4, 8]), (1 << 30, [])])
def test_a_run_that_only_just_fits_is_divided_too(
    free: int, counts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(todo: Any, *_: Any, **__: Any) -> tuple[dict[str, Any], int]:
        came = {"outcome": "ok", "peak_reserved_bytes": asked.limit - free, "reason": None}
        return {item.trial_id: came for item in todo}, 0

    monkeypatch.setattr(advice.run_trials, "run", rows)
    settings = plan.Settings(**(SETTINGS | {"results": str(tmp_path)}))
    asked = advice.AdviceRequest(planned(micro_batch=8), settings, tmp_path, None)  # type: ignore[arg-type] # no worker
    told, _ = advice.ask_predictions(asked, 3, 4)
    assert [one.remedies[0].change["world_size"] for one in told.on_gpus if len(one.remedies) == 1] == counts


def test_gpus_that_are_named_come_first_and_more_are_looked_at() -> None:
    named: dict[str, Any] = {"world_size": 2, "sharding": "ddp", "micro_batch": 4}
    told = on_gpus({2: 4000, 4: 2500}, single=2000, **named)
    assert names(told.on_gpus) == ["world_size=2 sharding=fsdp2", "world_size=4 sharding=fsdp2 micro_batch=2"]
    assert told.recommended is not None and told.recommended.remedies == (SGD,)
    told = on_gpus({2: 9000, 4: 6000, 8: 3050}, **named)
    least = "world_size=8 sharding=fsdp2 micro_batch=1"  # does not fit: then with what saves most at the same result
    assert names(told.on_gpus)[2:] == [least, f"{least} checkpointing=full"]
    assert told.recommended == told.on_gpus[-1]
    told = on_gpus({2: 9000, 4: 6000, 8: 3050}, more=[OFFLOAD], **named)  # which FSDP does not go together with
    assert names(told.on_gpus)[2:] == [least]
    divided: dict[str, Any] = {"world_size": 4, "sharding": "zero3", "runner": {"name": "deepspeed"}, "micro_batch": 2}
    assert names(on_gpus({4: 8000, 8: 100}, **divided).on_gpus) == ["world_size=8 sharding=zero3 micro_batch=1"]
    assert "Nothing fits. Closest: world_size=8" in said(on_gpus({4: 8000, 8: 5000}, **divided))


def test_how_far_a_run_gets_ends_where_a_node_is_full() -> None:
    assert Option((), 5, 1.0, "the node", full=True).beyond(9) is None  # counts as too much
    assert Option((), 15, 1.0, full=True).beyond(9) == 15 and Option((), 5, 1.0).beyond(9) == 5


def test_a_model_that_cannot_be_traced_has_its_states() -> None:
    nothing = search([FULL], lambda taken: [Option(one, None, None, "an operator has no fake") for one in taken], 99)
    text = said(nothing)
    parameters = trial_parser.parse(tiny()).model.parameters
    assert "no prediction: an operator has no fake" in text
    assert f"{parameters:,} parameters need 16 bytes each" in text
    assert "only a measurement can tell" in said(nothing, model={"parameters": None})


def test_goals_of_length_say_how_far_each_gets() -> None:
    told = found()
    by = {tuple(one.words for one in option.remedies): option for option in told.tried}
    reached = [advice.ReachedLimit(by[()], 700), advice.ReachedLimit(by["checkpointing=full",], 900),
               advice.ReachedLimit(by["checkpointing=full", "optimizer=sgd"], 900),
               advice.ReachedLimit(by["optimizer=sgd",], None)]  # fmt: skip
    text = said(told, "seq_len", reached, ["model=tiny", "seq_len=32"])
    assert "Recommended: checkpointing=full (the same result); predicted to fit up to seq_len=900\n" in text
    assert "vramsweep sweep model=tiny seq_len=900 checkpointing=full device=cuda" in text
    assert advice.best([advice.ReachedLimit(by[()], None)]) is None


def test_a_goal_changes_less_of_the_result_before_it_goes_further() -> None:
    rounding = next(one for one in REMEDIES if one.words == "loss=chunked")

    def got(taken: tuple[Any, ...], value: int | None) -> advice.ReachedLimit:
        return advice.ReachedLimit(Option(taken, 1, None), value)

    reached = [got((), 6), got((FULL,), 18), got((rounding,), 100), got((SGD,), 150), got((PURE,), None)]
    assert advice.best(reached) == reached[2]  # rounding at most
    assert advice.best([got((), None), got((PURE,), 7), got((SGD,), 9)]) == got((PURE,), 7)
    assert advice.best([got((), 6), got((FULL,), 6)]) == got((), 6)


@pytest.mark.parametrize(("typed", "message"), cases("advise_mistakes"))
@pytest.mark.usefixtures("here")
def test_mistakes_are_explained(typed: str, message: str, cli: Cli) -> None:
    assert message in cli.refuse("advise", *typed.split())


WORDS = ["model=tiny", "precision=fp32", "seq_len=512", "micro_batch=16"]
WORDS += ["device.memory_gib=0.9", "device.capability=8.6"]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_goal_s_answer_fits_and_the_next_does_not(cli: Cli) -> None:
    goal = ["--goal", "largest-batch", "--accept", "same", "--most", "3"]
    found = cli.json("advise", *WORDS, "gpu=l4-24gb", *goal)
    by = {" ".join(one["change"]): one["largest"] for one in found["micro_batch"]}
    assert 0 < by[""] < max(by.values()) and {one["result"] for one in found["micro_batch"]} == {"the same result"}
    chosen = found["recommended"]
    assert max(by.values()) == by[" ".join(chosen["change"])]
    rest = [word for word in WORDS if not word.startswith("micro_batch")]
    for batch, fits in ((by[""], True), (axis_search.grid_next(by[""]), False)):
        (direct,) = cli.json("explain", *rest, "device.gpu=l4-24gb", f"micro_batch={batch}")
        assert (direct["explanation"]["refused"] is None) == fits


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_what_is_recommended_fits_when_it_is_predicted_by_itself(cli: Cli) -> None:
    """A card so small that the tiny model needs help; the same command again asks nothing anew."""
    command = ["advise", *WORDS, "--most", "2", "--accept", "precision", "--json"]
    first = cli.run(*command)
    advice = json.loads(first.out)
    chosen = advice["recommended"]
    assert not advice["as_it_is"]["fits"] and chosen["fits"]
    settings = [one for change in chosen["change"] for one in change.split()]
    taken = {one.partition("=")[0] for one in settings}
    rest = [word for word in WORDS if word.partition("=")[0] not in taken]
    (direct,) = cli.json("explain", *rest, *settings)
    assert direct["explanation"]["refused"] is None
    assert direct["explanation"]["peak_reserved"] == chosen["reserved_bytes"] <= advice["memory_limit_bytes"]
    again = cli.run(*command)
    assert json.loads(again.out)["recommended"] == chosen
    assert "[1/" in first.err and "[1/" not in again.err
