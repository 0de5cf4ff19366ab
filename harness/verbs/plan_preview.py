"""What `plan` shows before anything runs: the trials, those that are impossible and why, whether the largest are
predicted to fit the GPU, how long it will take.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.hardware.gpu_lookup import GIB
from vramsweep.harness.machine import machine
from vramsweep.harness.messages.activity import duration
from vramsweep.harness.messages.console import Console
from vramsweep.harness.questions.fit_prediction import Prediction, largest_trials, predict_fit
from vramsweep.harness.rows.journal import files, read
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.sweep import scheduler
from vramsweep.harness.sweep.budget import Budget, Expected
from vramsweep.harness.sweep.labels import Labels
from vramsweep.harness.sweep.plan import Planned, Settings
from vramsweep.harness.sweep.resume import reject_too_many_ranks, remaining_trials
from vramsweep.harness.sweep.session import Session
from vramsweep.harness.sweep.time_limit import duration_words
from vramsweep.harness.verbs import plan_summary


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
    predictions = predict_fit(largest, settings, planned)
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
        Console().print(plan_summary.show_plan(planned, plan_summary.lines(planned, todo, budget.total)))
    counts = Counter(_state(p, todo) for p in planned)
    print(", ".join(f"{n} {state}" for state, n in counts.items()) + f" → {folder}")
    if unproven := sorted({name for p in pending if p.trial for name in catalog.unproven_techniques(p.trial)}):
        print(f"unproven, as no card has run it as predicted yet: {', '.join(unproven)}")
    for line in notes:
        print(line)
    time_s = "unknown" if total.seconds is None else duration(total.seconds)
    priced = "" if cost is None else f", cost: {cost:,.2f} at {settings.price_per_hour:g} an hour"
    print(f"estimated time: {time_s}{priced} ({total.basis})", flush=True)
    for line in (*_together(pending, one_by_one, total, settings), *report(predictions, len(largest))):
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
    lines += [f"  {one.label}: {_verdict(one)}" for one in sorted(predictions, key=lambda p: p.fits is False)]
    if configurations > len(predictions):
        lines.append(f"  {configurations - len(predictions)} smaller configurations were not predicted")
    if failing := sum(one.fits is False for one in predictions):
        lines.append(f"{failing} of {configurations} configurations: the largest trial will run out of memory")
    return lines


def _verdict(one: Prediction) -> str:
    if one.fits is None or one.card_bytes is None:
        return f"not predicted: {one.reason}"
    if one.needed_bytes is None:
        return f"will run out of memory on the card's {one.card_bytes / GIB:.1f} GiB ({one.reason})"
    needed = f"predicted to need {one.needed_bytes / GIB:,.1f} GiB, the card has {one.card_bytes / GIB:.1f} GiB"
    return needed if one.fits else f"{needed}: will run out of memory"


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
