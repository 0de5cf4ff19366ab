"""The loop over a sweep's trials: which of them starts now, which is tried again, and when the sweep stops.

Each attempt of a trial runs in a slot, from its settings to its row.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vramsweep.harness.files.sweep_folder import own_files
from vramsweep.harness.machine import gpu_readiness, machine
from vramsweep.harness.machine.gpu_readiness import GpuTaken, lock_gpus
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process.attempt import Launcher, attempt_environment, read_progress, read_steps
from vramsweep.harness.process.signals import Interrupts
from vramsweep.harness.process.worker_files import RECORDING
from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.journal import Journal
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.spec import runner_table
from vramsweep.harness.sweep import batch_prediction, row_builder, scheduler
from vramsweep.harness.sweep.budget import Budget
from vramsweep.harness.sweep.oom_dominance import OomDominance
from vramsweep.harness.sweep.plan import Planned, Settings
from vramsweep.harness.sweep.progress import Progress
from vramsweep.harness.sweep.scheduler import Pool, Slot

SETTLE_S = 0.3  # for a signal to reach the launcher too


def run_all(
    todo: Sequence[Planned],
    tried: Counter[str],
    settings: Settings,
    folder: Path,
    journal: Journal,
    launcher: Launcher,
    progress: Progress,
    interrupts: Interrupts,
    budget: Budget,
    dominators: OomDominance | None = None,
) -> dict[str, Row]:
    """Run the trials, and once more those that a fault of the machine stopped, as long as that makes progress.

    Simulated ones are first predicted together, grouped by fork server. Only what the budget allows is started. With
    `dominators`, a trial is skipped if one that ran out of memory, before or here, dominates it, unless a batch
    predicted it. A transient failure is tried again at once, on another GPU if there is one. Raises UserError once
    `settings.breaker` trials in a row have failed the same way, and Finished or KeyboardInterrupt. Running trials end
    before, except for KeyboardInterrupt.
    """
    done: dict[str, Row] = {}

    def skip(item: Planned, why: str) -> None:
        row = {"sweep": folder.name} | row_builder.unstarted_row(item, Outcome.SKIPPED, why)
        done[item.trial_id] = journal.append(row)
        progress.show(done[item.trial_id], item)

    impossible = [item for item in todo if item.trial is None]
    invalid = (row_builder.unstarted_row(item, Outcome.INVALID, item.reason) for item in impossible)
    done |= {one["trial_id"]: one for one in journal.extend({"sweep": folder.name} | row for row in invalid)}
    for item in impossible:
        progress.show(done[item.trial_id], item)
    left = [p for p in todo if dominators is None or dominators.reason(p) is None]
    batches = list(batch_prediction.batches(left).values())
    for number, batch in enumerate(batches, 1):
        progress.batches = len(batches) - number
        if allowed := [item for item in batch if budget.allows(item, time.monotonic()) is None]:
            with interrupts.finishing():
                done |= batch_prediction.run(
                    allowed, tried, settings, folder, journal, launcher, progress, interrupts.check
                )
    budget.learn(done.values())
    todo = [item for item in todo if item.trial_id not in done]
    room = scheduler.list_resources(todo, settings.slots)
    health = gpu_readiness.GpuHealth(place.card for place in room)
    while todo:
        lengths = {p.trial.seq_len for p in todo if p.trial}
        waiting, streak, mistake, tries = list(todo), list[Row](), None, Counter[str]()
        pool = Pool(launcher.threads, room, settings.exclusive, interrupts.check, health)
        with interrupts.finishing(), pool as running:
            while True:
                while mistake is None and not interrupts.stops() and (first := running.first_fitting(waiting)):
                    at, places = first
                    item = waiting.pop(at)
                    if budget.allows(item, time.monotonic()) is not None:
                        continue
                    if dominators is not None and (why := dominators.reason(item)) is not None:
                        skip(item, why)
                        continue
                    progress.starts(item)
                    before, seconds = (tried[item.trial_id], tries[item.trial_id]), interrupts.bound(settings.timeout_s)
                    own = settings if seconds == settings.timeout_s else replace(settings, timeout_s=seconds)
                    job = partial(run_trial, item, own, folder, journal, launcher, *before)
                    running.start(item, places, partial(job, hear=partial(progress.works, item.trial_id)))
                if not running:
                    break
                item, row = running.wait()
                if row is None:
                    continue
                done[item.trial_id] = row
                tried[item.trial_id], progress.cards = row["attempt"], health.warnings()
                tries[item.trial_id] += 1
                if not row["terminal"] and tries[item.trial_id] <= settings.retries:
                    waiting.insert(0, item)
                    continue
                budget.learn([row])
                progress.show(row, item)
                if dominators is not None:
                    dominators.add(row)
                streak = _same_failures(streak, row)
                # the longest trials come first, and only they may be too slow or too long: the next length shows it
                spans = len(lengths) < 2 or len({one["seq_len"] for one in streak}) > 1
                if 0 < settings.breaker <= len(streak) and spans and not health.explains(row):
                    mistake = mistake or UserError(_broken(row, len(streak)))
        if mistake is not None:
            raise mistake
        faults = [p for p in todo if p.trial_id in done and not outcome.is_verdict(done[p.trial_id]["outcome"])]
        todo = faults if len(faults) < len(todo) else []
        progress.total += len(todo)
    return done


def run_trial(
    item: Planned,
    settings: Settings,
    folder: Path,
    journal: Journal,
    launcher: Launcher,
    tried: int,
    tries: int,
    slot: Slot,
    hear: Callable[[Mapping[str, Any]], None] = lambda record: None,
) -> Row:
    """Attempt a trial once and return its row, which is terminal if it has an answer or no retry is left.

    A fault of the machine is no verdict, so its row is not terminal. `tried` attempts have a row already, `tries` of
    them in this round. `hear` gets what the worker reports of its activity.
    """
    trial = item.trial
    if trial is None:
        return journal.append({"sweep": folder.name} | row_builder.unstarted_row(item, Outcome.INVALID, item.reason))
    base: Row = {"sweep": folder.name, "isolation": launcher.isolation} | row_builder.initial_columns(item, slot.cards)
    environ = attempt_environment(trial.allocator_variable(), trial.device.name, os.environ, machine.uuids(slot.cards))
    if tries:
        slot.sleep(settings.backoff_s * 2 ** (tries - 1))
    own = own_files(folder)
    number = max(tried, row_builder.count_attempts(own / "attempts" / item.trial_id)) + 1
    place = own / "attempts" / item.trial_id / str(number)

    def look() -> None:
        slot.check()
        if trial.device.name == "simulated":
            hear(read_progress(place))

    row = base | row_builder.started_columns(number)
    with lock_gpus(slot.cards, slot.sleep, settings.timeout_s) as others:
        taken = GpuTaken(held=others) if others else launcher.occupancy.taken(slot.cards, launcher.own_pids, slot.sleep)
        if taken:
            evidence = outcome.Evidence(foreign=taken.processes, held=taken.held)
        else:
            spec = {"trial": item.resolved, "trial_id": item.trial_id, "attempt": number, "cpus": slot.cpus}
            template = runner_table.fork_server_name(trial)
            done = launcher.attempt(spec, place, environ, template, settings.timeout_s, look)
            evidence = done.evidence
            if evidence.result is None and (evidence.exit_code or -1) < 0:
                time.sleep(SETTLE_S)  # a signal that ends workers and launcher alike is no result of a trial
                slot.check()
            row |= row_builder.process_columns(done, environ, base["gpu_name"])
    if (place / RECORDING).exists():
        row["recording"] = str((place / RECORDING).relative_to(own))
    row["node_trials"] = sorted(slot.beside)
    final = tries == settings.retries
    return journal.append(row_builder.classified_row(row, trial, evidence, row_builder.phase(read_steps(place)), final))


def _same_failures(before: list[Row], row: Row) -> list[Row]:
    """Return the consecutive equal failures, this row's last. Contention is no failure: other users will leave."""
    kind, reason = row["outcome"], row["reason"]
    if outcome.is_answer(kind):
        return []
    if kind == Outcome.CONTENDED:
        return before
    same = before and outcome.is_same_failure((before[-1]["outcome"], before[-1]["reason"]), (kind, reason))
    return [*before, row] if same else [row]


def _broken(row: Row, count: int) -> str:
    again = "" if outcome.runs_again(row["outcome"], asked=False) else " with retry_failed=true"
    return (
        f"{count} trials in a row ended in the same way, so the sweep stops: {row['outcome']}: {row['reason']}. "
        f"Finished rows are kept; fix the problem and run the same command{again} (breaker=0 never stops)"
    )
