"""What `plan` shows before anything runs: the trials, those that are impossible and why, whether the largest are
predicted to fit the GPU, how long it will take.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.machine import machine
from vramsweep.harness.messages.console import Console
from vramsweep.harness.process.signals import Deadline
from vramsweep.harness.rows.journal import files, read, terminal
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.spec import runner_table, trial_parser
from vramsweep.harness.spec import trial as trials
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.sweep import run_trials, scheduler
from vramsweep.harness.sweep.budget import Budget, Expected
from vramsweep.harness.sweep.labels import Labels
from vramsweep.harness.sweep.plan import Planned, Settings
from vramsweep.harness.sweep.progress import duration
from vramsweep.harness.sweep.resume import reject_too_many_ranks, remaining_trials
from vramsweep.harness.sweep.session import Session
from vramsweep.harness.sweep.time_limit import duration_words
from vramsweep.harness.verbs import plan_summary

PREDICTIONS = 8  # configurations whose largest trial is predicted, the largest first
PREDICTION_S = 180.0  # for all of them together; a trace takes 1 to 30 s
CARD = "h100-80gb"  # the card to predict for where the machine has none, as device=simulated does
GIB = 1 << 30
WIDTH = 140  # columns, where the output is no terminal


@dataclass(frozen=True)
class Prediction:
    """What a configuration's largest trial is predicted to reserve on `card`, in bytes.

    `fits` is None where it could not be predicted, and `reason` says why.
    """

    trial_id: str
    label: str
    card: str
    needed_bytes: int | None = None
    card_bytes: int | None = None
    fits: bool | None = None
    reason: str | None = None


def show_session(session: Session) -> None:
    """Show what a command would run, and what its sweeper notes of it."""
    assert session.settings is not None
    show(session.trials, session.settings, session.folder)
    if session.settings.output != "json":
        print("".join(f"{line}\n" for line in session.notes), end="")


def show(planned: Sequence[Planned], settings: Settings, folder: Path) -> None:
    """Print the configurations (output=all: every trial), what cannot run and why, what the largest are predicted to
    need, and a time."""
    rows = read(folder)[0] if any(file.exists() for file in files(folder)) else []
    pending, finished, notes = remaining_trials(rows, planned, settings)
    unmeasured = [p for p in planned if not finished.get(p.trial_id, {}).get("attempt")]
    here = {p.trial_id: p for p in [*reject_too_many_ranks(unmeasured), *pending]}
    planned = [here.get(p.trial_id, p) for p in planned]
    todo = {p.trial_id for p in pending}
    largest = largest_trials(pending) if settings.predict else []
    predictions = predict(largest, settings, planned)
    budget = Budget(settings, finished.values(), flops=_speed(planned))
    expected = {p.trial_id: Expected(None, "") for p in planned} | {p.trial_id: budget.expected(p) for p in pending}
    one_by_one = budget.total(pending)
    total = _spread_over_slots(one_by_one, pending, expected, settings)
    cost = budget.cost(total.seconds)
    if settings.output == "json":
        listed = [
            {
                "trial_id": p.trial_id,
                "state": _state(p, todo),
                "reason": p.reason,
                "expected_s": expected[p.trial_id].seconds,
                "expected_basis": expected[p.trial_id].basis or None,
                "expected_cost": budget.cost(expected[p.trial_id].seconds),
                "trial": json.loads(json.dumps(p.resolved, default=str)),
            }
            for p in planned
        ]
        summary = {
            "folder": str(folder),
            "trials": listed,
            "predictions": [asdict(one) for one in predictions],
            "configurations": len(largest),
            "predicted_not_to_fit": sum(one.fits is False for one in predictions),
            "estimated_s": total.seconds,
            "estimate_basis": total.basis,
            "estimated_cost": cost,
            "estimated_exclusive_s": one_by_one.seconds,
        }
        print(json.dumps(summary, indent=1))
        return
    if settings.output == "all":
        labels = Labels(planned)
        for p in planned:
            took = expected[p.trial_id].seconds
            said = p.reason or ("" if took is None else f"~ {duration_words(took)}")
            print(f"{p.trial_id}  {_state(p, todo):<8}  {labels(p)}{f'  {said}' if said else ''}")
    else:
        console = Console() if Console().is_terminal else Console(width=WIDTH)
        console.print(plan_summary.show_plan(planned, plan_summary.lines(planned, todo, budget.total)), highlight=False)
    counts = Counter(_state(p, todo) for p in planned)
    print(", ".join(f"{n} {state}" for state, n in counts.items()) + f" → {folder}")
    unproven = sorted({name for p in pending if p.trial for name in catalog.unproven_techniques(p.trial)})
    if unproven:
        print(f"unproven, as no card has run it as predicted yet: {', '.join(unproven)}")
    for line in notes:
        print(line)
    time_s = "unknown" if total.seconds is None else duration(total.seconds)
    priced = "" if cost is None else f", cost: {cost:,.2f} at {settings.price_per_hour:g} an hour"
    print(f"estimated time: {time_s}{priced} ({total.basis})", flush=True)
    for line in _together(pending, one_by_one, total, settings):
        print(line)
    for line in report(predictions, len(largest)):
        print(line)


def _spread_over_slots(
    total: Expected, pending: Sequence[Planned], expected: Mapping[str, Expected], settings: Settings
) -> Expected:
    """What the trials take on all their places at once: no less than the longest, and no place ever idle."""
    count = 1 if settings.exclusive else len(scheduler.list_resources(pending, settings.slots))
    each = {p.trial_id: expected[p.trial_id].seconds or 0.0 for p in pending}
    if total.seconds is None or count == 1:
        return total
    idle = sum(each[p.trial_id] * (1 - scheduler.resources_needed(p, count) / count) for p in pending if p.trial)
    spent = max(total.seconds - idle, *each.values(), 0.0)
    return Expected(spent, f"{total.basis}; {count} places for trials")


def _together(pending: Sequence[Planned], one_by_one: Expected, total: Expected, settings: Settings) -> list[str]:
    """What it means for speed that trials are measured at the same time, and what it costs not to; none if none are."""
    measured = sum(p.trial is not None and p.trial.device.name != "simulated" for p in pending)
    count = 1 if settings.exclusive or measured < 2 else len(scheduler.list_resources(pending, settings.slots))
    alone, now = (
        "an unknown time" if one.seconds is None else duration_words(one.seconds) for one in (one_by_one, total)
    )
    return [
        f"up to {count} trials run at the same time, so `check` lets no speed of theirs pass (flag not_alone): "
        f"exclusive=true measures speed: one trial at a time, {alone} in place of {now}"
    ] * (count > 1)


def report(predictions: Sequence[Prediction], configurations: int) -> list[str]:
    """The predictions in words, those that will not fit last and counted."""
    if not predictions:
        return []
    lines = [f"memory predicted for {predictions[0].card}, the largest trial of each configuration:"]
    for one in sorted(predictions, key=lambda p: p.fits is False):
        lines.append(f"  {one.label}: {_verdict(one)}")
    if configurations > len(predictions):
        lines.append(f"  {configurations - len(predictions)} smaller configurations were not predicted")
    failing = sum(one.fits is False for one in predictions)
    if failing:
        lines.append(f"{failing} of {configurations} configurations: the largest trial will run out of memory")
    return lines


def _verdict(one: Prediction) -> str:
    if one.fits is None or one.card_bytes is None:
        return f"not predicted: {one.reason}"
    if one.needed_bytes is None:
        return f"will run out of memory on the card's {one.card_bytes / GIB:.1f} GiB ({one.reason})"
    needed = f"predicted to need {one.needed_bytes / GIB:,.1f} GiB, the card has {one.card_bytes / GIB:.1f} GiB"
    return needed if one.fits else f"{needed}: will run out of memory"


def largest_trials(todo: Sequence[Planned]) -> list[Planned]:
    """Of each configuration on a GPU (all but length, batch, seed and repeat) the one with most tokens, largest first.

    Large is by parameters, then by tokens of a micro-batch.
    """

    def size(p: Planned) -> tuple[int, int, int]:
        assert p.trial is not None
        return p.trial.model.parameters or 0, p.trial.seq_len * p.trial.micro_batch, p.trial.seq_len

    found: dict[str, Planned] = {}
    for p in todo:
        if p.trial is None or p.trial.device.name != "cuda" or runner_table.runner(p.trial.runner.name).starts:
            continue
        axes = p.trial.model_dump(mode="json", exclude={"seq_len", "micro_batch", "seed", "repeat"})
        key = json.dumps(axes, sort_keys=True)
        if key not in found or size(p) > size(found[key]):
            found[key] = p
    return sorted(found.values(), key=size, reverse=True)


def predict(largest: Sequence[Planned], settings: Settings, among: Sequence[Planned]) -> list[Prediction]:
    """Predict the first `PREDICTIONS` of the trials for this machine's GPU.

    Each is named by what tells it apart `among` the sweep's trials, its length and batch too where they vary.
    """
    if not largest:
        return []
    named = Labels(among, but=("seed", "repeat"))
    labels = {p.trial_id: named(p) for p in largest}
    on, problem = card(settings)
    if on is None:
        return [Prediction(p.trial_id, labels[p.trial_id], "this GPU", reason=problem) for p in largest[:1]]
    print(
        f"predicting memory of {min(len(largest), PREDICTIONS)} trial(s), for {on.name}; predict=false leaves it out",
        file=sys.stderr,
    )
    asked: dict[str, Planned] = {}
    refused: dict[str, str] = {}
    for p in largest[:PREDICTIONS]:
        assert p.trial is not None
        try:
            trial = simulated(p.trial, on)
        except trials.InvalidTrial as error:
            refused[p.trial_id] = str(error)
        else:
            asked[p.trial_id] = Planned(p.trial_id, trial.model_dump(mode="json"), trial, None)
    rows = predicted_rows(list(asked.values()), settings)
    return [
        Prediction(p.trial_id, labels[p.trial_id], on.name, reason=refused[p.trial_id])
        if p.trial_id in refused
        else _judge(asked[p.trial_id], labels[p.trial_id], on.name, rows.get(p.trial_id))
        for p in largest[:PREDICTIONS]
    ]


def predicted_rows(asked: Sequence[Planned], settings: Settings) -> dict[str, Row]:
    """Predict trials in a folder that is thrown away, within `PREDICTION_S` in all and without a word; their rows by
    id, as many as there was time for. Raises KeyboardInterrupt and UserError."""
    alone = replace(
        settings, report=False, shard=None, skip_dominated=False, budget=None, max_cost=None, others=False,
        timeout_s=PREDICTION_S / 2, retries=0, breaker=0, answer=None,
    )  # fmt: skip
    quiet = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="vramsweep-plan-") as root:
        folder = Path(root) / "plan"
        try:
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                return run_trials.run(asked, alone, folder, interrupts=Deadline(PREDICTION_S))[0]
        except run_trials.Interrupted as stop:
            if stop.at_once:
                raise KeyboardInterrupt from None
            return terminal(read(folder)[0])


def simulated(trial: trials.Trial, card: gpu_lookup.Gpu) -> trials.Trial:
    """The trial that predicts another one for a card. Raises InvalidTrial where that cannot be predicted."""
    over = {"device": {"name": "simulated", "gpu": card.name}, "record": False, "weights": "random"}
    return trial_parser.parse(trial.model_dump(mode="json") | over)


def _judge(item: Planned, label: str, card: str, row: Row | None) -> Prediction:
    """What a predicted row says of a trial; None where there was no time for it."""
    assert item.trial is not None
    kind = Outcome.TIMEOUT if row is None else row["outcome"]
    if row is None or kind not in (Outcome.OK, Outcome.OOM):
        slow = f"{PREDICTION_S:g} s were not enough for all"
        reason = slow if row is None or kind == Outcome.TIMEOUT else f"{kind}: {row['reason']}"
        return Prediction(item.trial_id, label, card, reason=reason)
    limit = item.trial.memory_limit()
    if kind == Outcome.OOM:
        needed = row["unlimited_peak_reserved_bytes"]
        return Prediction(item.trial_id, label, card, needed, limit, False, row["reason"])
    return Prediction(item.trial_id, label, card, row["peak_reserved_bytes"], limit, True)


def card(settings: Settings) -> tuple[gpu_lookup.Gpu | None, str]:
    """The card to predict for: the named one, this machine's, or `CARD`; None and why if it is not in our table."""
    if isinstance(settings.predict, str):
        return gpu_lookup.gpu_named(settings.predict), ""
    cards = machine.visible_gpus(os.environ)
    if not cards:
        return gpu_lookup.gpu_named(CARD), ""
    name = cards[0].name
    known = gpu_lookup.find_gpu(name) if name else None
    return known, f"{name or 'this GPU'} is not in the table of cards; predict=CARD predicts for one that is"


def _state(p: Planned, todo: set[str]) -> str:
    if p.trial is None:
        return "invalid"
    return "to do" if p.trial_id in todo else "finished"


def _speed(planned: Sequence[Planned]) -> float | None:
    """FLOP/s to reckon with: a third of the GPU's published peak, or what numpy reaches on this CPU."""
    trial = next((p.trial for p in planned if p.trial and p.trial.device.name != "simulated"), None)
    if trial is None:
        return None
    if trial.device.name == "cuda":
        cards = machine.visible_gpus(os.environ)
        name = cards[0].name if cards else None
        peak = gpu_lookup.peak_flops(name, trial.precision) if name else None
        return None if peak is None else peak / 3
    import numpy as np

    side = 1024
    matrix = np.ones((side, side), dtype=np.float32)
    began = time.perf_counter()
    for _ in range(3):
        matrix @ matrix
    return 3 * 2 * side**3 / (time.perf_counter() - began)
