"""`plan`: what a sweep would run, before anything runs: trials, those that are impossible and why, whether the largest
are predicted to fit the GPU, and the expected time.

On a screen: what all trials have in common, and a line for each configuration.
"""

import itertools
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.machine import machine
from vramsweep.harness.messages.console import Console, make_table
from vramsweep.harness.messages.units import duration_words
from vramsweep.harness.questions import fit_prediction
from vramsweep.harness.questions.fit_prediction import Prediction, largest_trials, predict_fit
from vramsweep.harness.rows.journal import files, read
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.spec import fit_text
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.sweep import scheduler
from vramsweep.harness.sweep.budget import REACHED, Budget, Expected, measuring_seconds
from vramsweep.harness.sweep.labels import CALLED, WITHIN, Labels, describe_common, varying
from vramsweep.harness.sweep.plan import Planned, Settings
from vramsweep.harness.sweep.resume import reject_too_many_ranks, remaining_trials
from vramsweep.harness.sweep.session import Session, refuse_invalid

MOST = 24  # configurations listed
NAMED = 3  # trials listed for each reason why they cannot run


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep plan`; return the exit status."""
    from vramsweep.harness.config import compose  # here, because it imports Hydra, which no refusal needs

    asked = compose.resolve(argv, "plan", action="plan")
    if asked.settings is not None:
        show_session(asked)
        refuse_invalid(p.reason for p in asked.trials)
    return 0


def show_session(session: Session) -> None:
    """Show what a command would run, and its sweeper's notes."""
    assert session.settings is not None
    show(session.trials, session.settings, session.folder)
    if session.settings.output != "json":
        print("".join(f"{line}\n" for line in session.notes), end="")


def show(planned: Sequence[Planned], settings: Settings, folder: Path) -> None:
    """Print the configurations (output=all: every trial), the trials that cannot run and why, the predicted memory of
    the largest, and a time."""
    rows = read(folder)[0] if any(file.exists() for file in files(folder)) else []
    pending, finished, notes = remaining_trials(rows, planned, settings)
    unmeasured = [p for p in planned if not finished.get(p.trial_id, {}).get("attempt")]
    here = {p.trial_id: p for p in [*reject_too_many_ranks(unmeasured), *pending]}
    planned = [here.get(p.trial_id, p) for p in planned]
    todo = {p.trial_id for p in pending}
    largest = largest_trials(pending) if settings.predict else []
    predictions = predict_fit(largest, settings, planned)
    where, flops = _speed(planned, settings)
    budget = Budget(settings, finished.values(), flops=flops)
    by_id = {p.trial_id: p for p in largest}
    for one in predictions:
        if one.estimated_step_s is not None:
            budget.learn_step(by_id[one.trial_id], one.estimated_step_s, one.card)
    expected = {p.trial_id: Expected(None, "") for p in planned} | {p.trial_id: budget.expected(p) for p in pending}
    one_by_one = budget.total(pending)
    total = _spread_over_slots(one_by_one, pending, expected, settings)
    simulated = bool(planned) and all(p.trial is None or p.trial.device.name == "simulated" for p in planned)
    cost = None if simulated else budget.cost(total.seconds)
    measuring = list_measurements(planned, finished, settings.price_per_hour) if simulated else []
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
            "measuring": measuring,
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
        Console().print(show_plan(planned, todo, budget.total))
    counts = Counter(_state(p, todo) for p in planned)
    print(", ".join(f"{n} {state}" for state, n in counts.items()) + f" → {folder}")
    if unproven := sorted({name for p in pending if p.trial for name in catalog.unproven_techniques(p.trial)}):
        print(f"unproven, because no GPU has confirmed the prediction yet: {', '.join(unproven)}")
    for line in notes:
        print(line)
    price = settings.price_per_hour
    if pending:
        verb, count = "predicting" if simulated else "measuring", f"{len(pending):,} trial{'s' * (len(pending) != 1)}"
        print(f"estimated time: {_price(total.seconds, cost, price)} ({verb} {count} on {where}: {total.basis})")
    for own in measuring:
        on = f"{own['gpus']} x {own['gpu']}" if own["gpus"] > 1 else f"one {own['gpu']}"
        count = f"{own['trials']:,} trial{'s' * (own['trials'] != 1)}"
        told = _price(own["estimated_s"], own["estimated_cost"], price)
        ends = [own[f"estimated_{end}_s"] for end in ("low", "high")]
        within = "" if None in ends else f"; {' to '.join(map(duration_words, ends))}"
        print(f"measuring {count} on {on} instead: {told} ({own['basis']}{within})")
    sys.stdout.flush()
    for line in (*_together(pending, one_by_one, total, settings), *report(predictions, len(largest))):
        print(line)


def _spread_over_slots(
    total: Expected, pending: Sequence[Planned], expected: Mapping[str, Expected], settings: Settings
) -> Expected:
    """Return the time of the trials on all slots at once if no slot is ever idle; at least the longest trial's."""
    count, at_once = _places(pending, settings)
    each = {p.trial_id: expected[p.trial_id].seconds or 0.0 for p in pending}
    if total.seconds is None or count == 1:
        return total
    idle = sum(each[p.trial_id] * (1 - scheduler.resources_needed(p, count) / count) for p in pending if p.trial)
    spent = max(total.seconds - idle, *each.values(), 0.0)
    return Expected(spent, f"{total.basis}; {at_once} at the same time" if at_once > 1 else total.basis)


def _places(pending: Sequence[Planned], settings: Settings) -> tuple[int, int]:
    """Return the number of slots, and the most trials that run at the same time."""
    count = 1 if settings.exclusive else len(scheduler.list_resources(pending, settings.slots))
    needs = sorted(scheduler.resources_needed(p, count) for p in pending if p.trial)
    return count, max(1, sum(taken <= count for taken in itertools.accumulate(needs)))


def _together(pending: Sequence[Planned], one_by_one: Expected, total: Expected, settings: Settings) -> list[str]:
    """Describe how simultaneous trials affect measured speed, and the time one by one; empty if there are none."""
    measured = sum(p.trial is not None and p.trial.device.name != "simulated" for p in pending)
    count = min(measured, _places(pending, settings)[1])
    alone, now = (
        "an unknown time" if one.seconds is None else duration_words(one.seconds) for one in (one_by_one, total)
    )
    return [
        f"up to {count} trials run at the same time, so `check` rejects their speed (flag not_alone); "
        f"to measure speed, exclusive=true runs one trial at a time, in {alone} instead of {now}"
    ] * (count > 1)


def report(predictions: Sequence[Prediction], configurations: int) -> list[str]:
    """Describe the predictions, those that will not fit last and counted."""
    if not predictions:
        return []
    lines = [f"memory predicted for {predictions[0].card}, the largest trial of each configuration:"]
    lines += [f"  {one.label}: {_verdict(one)}" for one in sorted(predictions, key=lambda p: p.fits is False)]
    if configurations > len(predictions):
        lines.append(f"  {configurations - len(predictions)} smaller configurations were not predicted")
    if failing := sum(one.fits is False for one in predictions):
        lines.append(f"in {failing} of {configurations} configurations the largest trial is predicted not to fit")
    return lines


def _verdict(one: Prediction) -> str:
    if one.fits is None or one.card_bytes is None:
        return f"not predicted: {one.reason}"
    if one.fits and one.needed_bytes is not None:
        return fit_text.describe_fit(one.least_bytes, one.needed_bytes, one.card_bytes)
    return fit_text.describe_misfit(one.needed_bytes, one.card_bytes)


def _state(p: Planned, todo: set[str]) -> str:
    if p.trial is None:
        return "invalid"
    return "to do" if p.trial_id in todo else "finished"


def list_measurements(
    planned: Sequence[Planned], rows: Mapping[str, Row], price_per_hour: float | None
) -> list[dict[str, Any]]:
    """Return what measuring simulated trials would take, for each GPU and number of GPUs; None: unknown."""
    groups: dict[tuple[str, int], list[Planned]] = defaultdict(list)
    for p in planned:
        if p.trial is not None:
            groups[p.trial.device.card.name, p.trial.world_size].append(p)
    found = []
    for (gpu, gpus), items in groups.items():
        spent, low, high = (_add_seconds(items, rows, end) for end in ("", "low_", "high_"))
        cost = None if spent is None or price_per_hour is None else spent / 3600 * price_per_hour
        known = all((rows.get(p.trial_id) or {}).get("estimated_step_s") for p in items)
        rough = "rough, from parameters and tokens, until the trials are predicted"
        basis = "from estimated step times" if known else rough
        found.append({"gpu": gpu, "gpus": gpus, "trials": len(items), "estimated_s": spent, "estimated_cost": cost,
                      "estimated_low_s": low, "estimated_high_s": high,
                      "basis": basis})  # fmt: skip
    return found


def _add_seconds(items: Sequence[Planned], rows: Mapping[str, Row], end: str) -> float | None:
    each = [measuring_seconds(p.trial, rows.get(p.trial_id), end) for p in items if p.trial is not None]
    return None if None in each else sum(one or 0.0 for one in each)


def _price(seconds: float | None, cost: float | None, price_per_hour: float | None) -> str:
    """Describe a time, and its cost if a price is known."""
    if seconds is None:
        return "unknown" + ", cost: unknown" * (price_per_hour is not None)
    price = "" if cost is None else f", cost: {cost:,.2f} at {price_per_hour:g} an hour for the node"
    return f"about {duration_words(seconds)}{price}"


def _speed(planned: Sequence[Planned], settings: Settings) -> tuple[str, float | None]:
    """Return in words where trials are measured, and the FLOP/s assumed there (None: unknown). For a GPU it is a share
    of the published peak of the one that `choose_card` returns, else what numpy reaches on this CPU."""
    trial = next((p.trial for p in planned if p.trial and p.trial.device.name != "simulated"), None)
    if trial is None:
        return "this machine's CPU", None
    if trial.device.name == "cuda":
        card, _ = fit_prediction.choose_card(settings)
        here = machine.visible_gpus(os.environ)
        name = (here[0].name if here else None) or (card.name if card else "this GPU")
        peak = gpu_lookup.peak_of(card, trial.precision) if card else None
        on = f"{trial.world_size if trial.world_size > 1 else 'one'} {'x ' * (trial.world_size > 1)}{name}"
        return on + ", assumed for lack of a GPU" * (not here), None if peak is None else REACHED * peak
    import numpy as np

    side = 1024
    matrix = np.ones((side, side), dtype=np.float32)
    began = time.perf_counter()
    for _ in range(3):
        matrix @ matrix
    return "this CPU", 3 * 2 * side**3 / (time.perf_counter() - began)


def refused(planned: Sequence[Planned]) -> dict[str, list[str]]:
    """Return the names of the trials that cannot run, by reason."""
    named, found = Labels(planned), dict[str, list[str]]()
    for p in planned:
        if p.trial is None:
            found.setdefault(str(p.reason), []).append(named(p))
    return found


def show_plan(
    planned: Sequence[Planned], todo: set[str], total: Callable[[Sequence[Planned]], Expected]
) -> RenderableType:
    """Return for a terminal what all trials have in common, a line for each configuration in the order of their first
    trials, and what cannot run. `todo` are the ids of trials to do; `total` returns the time of several trials."""
    named, found = Labels(planned, WITHIN), dict[str, list[Planned]]()
    for p in planned:
        if p.trial is not None:
            found.setdefault(named.apart(p), []).append(p)
    known = {key for items in found.values() for key in items[0].resolved}.intersection(varying(planned))
    axes, numbers = [key for key in WITHIN if key in known], ("to do", "finished", "time")
    heads = ("configuration", *(CALLED.get(axis, axis.removesuffix(".name")) for axis in axes), *numbers)
    table = make_table(heads, numbers=numbers)
    for label, items in itertools.islice(found.items(), MOST):
        mine = [p for p in items if p.trial_id in todo]
        counts = [str(count or "–") for count in (len(mine), len(items) - len(mine))]
        ranges = (_range([p.resolved[key] for p in items]) if key in items[0].resolved else "–" for key in axes)
        seconds = total(mine).seconds
        took = "?" if seconds is None else f"~ {duration_words(seconds)}" if mine else "–"
        table.add_row(label or "all", *ranges, *counts, took)
    parts: list[RenderableType] = [describe_common(planned)]
    parts += [table] if found else []
    parts += [f"and {len(found) - MOST} more configurations; --all prints every trial"] if len(found) > MOST else []
    for reason, labels in refused(planned).items():
        more = f" and {len(labels) - NAMED:,} more" if len(labels) > NAMED else ""
        parts.append(f"{len(labels):,} cannot run: {reason} ({', '.join(labels[:NAMED])}{more})")
    return Group(*parts)


def _range(values: Sequence[object]) -> str:
    """Describe values: all of them if they are few, else the ends."""
    distinct = list(dict.fromkeys(values))
    if all(type(value) is int for value in distinct):
        distinct = sorted(distinct, key=lambda value: int(str(value)))
    texts = [f"{value:,}" if type(value) is int else str(value) for value in distinct]
    return ", ".join(texts) if len(texts) <= 4 else f"{texts[0]} to {texts[-1]} ({len(texts):,})"
