"""How far a sweep is, from its folder alone: readable while it runs, by anyone, without a lock."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramsweep.harness import cluster, journal, lock
from vramsweep.harness.errors import UserError
from vramsweep.harness.outcome import is_answer, is_verdict
from vramsweep.harness.row import Outcome, Row
from vramsweep.harness.sweep import counted
from vramsweep.harness.trial import ID_VERSION


@dataclass(frozen=True)
class Status:
    """A sweep's state: running (a journal of it is locked), waiting (jobs of it are in a cluster's queue), finished, or
    stopped with trials left. Counts are of trials."""

    folder: str
    state: str
    done: int
    total: int | None
    ok: int
    oom: int
    invalid: int
    failed: int
    stopped: int  # by a fault of the machine, and without an answer yet
    last_row_at: str | None
    unreadable: int
    skipped: int = 0


def read(folder: Path) -> Status:
    """The status of one sweep's folder. Raises UserError if neither a journal is in it nor a job of it."""
    begun = any(file.exists() for file in journal.files(folder))
    rows, unreadable = journal.read(folder) if begun or not cluster.submitted(folder) else ([], 0)
    return of(folder, rows, unreadable, journal.plans(folder))


def of(folder: Path, rows: Sequence[Row], unreadable: int, plans: Sequence[Mapping[str, Any]]) -> Status:
    """The same from rows, the lines that could not be believed, and the plans of the folder's writers."""
    begun = any(file.exists() for file in journal.files(folder))
    wanted, any_system = _wanted(plans)
    finished = journal.terminal(rows) if wanted is None else counted(rows, wanted, any_system)[0]
    last = {row["trial_id"]: row["outcome"] for row in rows if wanted is None or row["trial_id"] in wanted}
    outcomes = [row["outcome"] for row in finished.values()]
    total = None if wanted is None else len(wanted)
    if any(lock.held(file) for file in journal.files(folder) if file.exists()):
        state = "running"
    elif begun and (total is None or len(finished) == total):
        state = "finished"
    else:
        state = "waiting" if cluster.waiting(folder) else "stopped"
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
    )


def counts(of: Status) -> str:
    """What came out, in words."""
    names = ("ok", "oom", "invalid", "skipped", "failed", "stopped", "unreadable")
    return ", ".join(f"{count} {name}" for name in names if (count := getattr(of, name))) or "no rows yet"


def _wanted(plans: Sequence[Mapping[str, Any]]) -> tuple[dict[str, tuple[str | None, ...]] | None, bool]:
    """The last plan's trials, each with its system, and whether any system counts; None where no plan of today is.

    The system of a shard's trials is what its own plan says, wherever it ran.
    """
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
    """A plan's trials, each with its system. Raises ValueError, LookupError or TypeError where it is none of today."""
    if found["id_version"] != ID_VERSION:
        raise ValueError(found["id_version"])
    systems = [tuple(one) for one in found["systems"]]
    return {trial_id: systems[at] for trial_id, at in zip(found["trials"], found["system"], strict=True)}
