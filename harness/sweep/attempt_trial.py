"""One attempt of a trial in a slot: from its settings to its row."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vramsweep.harness.files.sweep_folder import own_files
from vramsweep.harness.machine import gpu_lock, machine
from vramsweep.harness.machine.gpu_occupancy import GpuTaken
from vramsweep.harness.process.attempt import Launcher, attempt_environment, read_progress, read_steps
from vramsweep.harness.process.worker_files import RECORDING
from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.journal import Journal
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.spec import runner_table
from vramsweep.harness.sweep import row_builder
from vramsweep.harness.sweep.plan import Planned, Settings
from vramsweep.harness.sweep.scheduler import Slot

SETTLE_S = 0.3  # for a signal to reach the launcher too


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
    with gpu_lock.lock_gpus(slot.cards, slot.sleep, settings.timeout_s) as others:
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
