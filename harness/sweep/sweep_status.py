"""The progress of a sweep, from its folder alone: readable while it runs, by anyone, without a lock."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import journal, journal_lock
from vramsweep.harness.rows.outcome import is_answer, is_verdict
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.spec.trial_identity import ID_VERSION
from vramsweep.harness.sweep import slurm_jobs
from vramsweep.harness.sweep.resume import rows_for_system


@dataclass(frozen=True)
class Status:
    """A sweep's state: running (a journal of it is locked), waiting (its jobs are in a cluster's queue), finished, or
    stopped with trials left. Counts are of the folder's trials, from all its commands. `total` counts those with a row
    that counts and those that the last command has still to run. `command_done` of `command_total` are its own."""

    folder: str
    state: str
    done: int
    total: int | None
    ok: int
    oom: int
    invalid: int
    failed: int
    stopped: int  # by a fault of the machine, without an answer yet
    last_row_at: str | None
    unreadable: int
    skipped: int = 0
    command_done: int | None = None
    command_total: int | None = None

    @property
    def apart(self) -> bool:
        """Return whether the folder holds more than the last command's trials."""
        return self.command_total is not None and (self.done, self.total) != (self.command_done, self.command_total)


def read_status(folder: Path) -> Status:
    """Return the status of one sweep's folder. Raises UserError if it has neither a journal nor a job."""
    begun = any(file.exists() for file in journal.files(folder))
    rows, unreadable = journal.read(folder) if begun or not slurm_jobs.submitted_jobs(folder) else ([], 0)
    return status_from_rows(folder, rows, unreadable, journal.plans(folder))


def status_from_rows(folder: Path, rows: Sequence[Row], unreadable: int, plans: Sequence[Mapping[str, Any]]) -> Status:
    """Return the status from rows, the number of lines not believed, and the plans of the folder's writers."""
    begun = any(file.exists() for file in journal.files(folder))
    wanted, any_system = _wanted(plans)
    asked = {} if wanted is None else rows_for_system(rows, wanted, any_system)[0]
    finished = asked | {name: row for name, row in journal.terminal(rows).items() if name not in (wanted or ())}
    last = {row["trial_id"]: row["outcome"] for row in rows}
    outcomes = [row["outcome"] for row in finished.values()]
    total = None if wanted is None else len(finished) + len(wanted) - len(asked)
    if any(journal_lock.is_locked(file) for file in journal.files(folder) if file.exists()):
        state = "running"
    elif begun and (total is None or len(finished) == total):
        state = "finished"
    else:
        state = "waiting" if slurm_jobs.is_waiting(folder) else "stopped"
    return Status(
        str(folder),
        state,
        len(finished),
        total,
        outcomes.count(Outcome.OK),
        outcomes.count(Outcome.OOM),
        outcomes.count(Outcome.INVALID),
        sum(not is_answer(kind) for kind in outcomes),
        sum(not is_verdict(kind) for trial_id, kind in last.items() if trial_id not in finished),
        rows[-1].get("started_at") if rows else None,
        unreadable,
        outcomes.count(Outcome.SKIPPED),
        None if wanted is None else len(asked),
        None if wanted is None else len(wanted),
    )


def progress(of: Status) -> str:
    """Describe how far the sweep is, and also the last command if the folder holds more than its trials."""
    total = "?" if of.total is None else of.total
    own = f"; the last command: {of.command_done}/{of.command_total}" if of.apart else ""
    return f"{of.done}/{total}: {counts(of)}{own}"


def counts(of: Status) -> str:
    """Describe the counts of outcomes in words."""
    names = ("ok", "oom", "invalid", "skipped", "failed", "stopped", "unreadable")
    return ", ".join(f"{count} {name}" for name in names if (count := getattr(of, name))) or "no rows yet"


def _wanted(plans: Sequence[Mapping[str, Any]]) -> tuple[dict[str, tuple[str | None, ...]] | None, bool]:
    """Return the last plan's trials, each with its system, and whether any system counts. The trials are None without a
    plan in the current format. The system of a shard's trials is that of its own plan, wherever it ran."""
    try:
        wanted = _systems(plans[-1])
        for one in plans:
            with contextlib.suppress(ValueError, LookupError, TypeError, UserError):
                systems = list(_systems(one).items())
                own = [systems[at] for at in one["own"]]
                wanted |= {trial_id: system for trial_id, system in own if trial_id in wanted}
        return wanted, bool(plans[-1]["any_system"])
    except (ValueError, LookupError, TypeError, UserError):
        return None, False


def _systems(found: Mapping[str, Any]) -> dict[str, tuple[str | None, ...]]:
    """Return a plan's trials, each with its system. Raises ValueError, LookupError or TypeError for another format."""
    if found["id_version"] != ID_VERSION:
        raise ValueError(found["id_version"])
    systems = [tuple(one) for one in found["systems"]]
    return {trial_id: systems[at] for trial_id, at in zip(found["trials"], found["system"], strict=True)}
