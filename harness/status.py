"""How far a sweep is, from its folder alone: readable while it runs, by anyone, without a lock."""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path

from vramsweep.harness import journal
from vramsweep.harness.outcome import is_answer
from vramsweep.harness.row import Outcome
from vramsweep.harness.sweep import PLAN


@dataclass(frozen=True)
class Status:
    """A sweep's state: running (its journal is locked), finished, or stopped with trials left. Counts are of trials."""

    folder: str
    state: str
    done: int
    total: int | None
    ok: int
    oom: int
    invalid: int
    failed: int
    last_row_at: str | None
    unreadable: int


def read(folder: Path) -> Status:
    """The status of one sweep's folder. Raises UserError if there is no journal in it."""
    rows, unreadable = journal.read(folder)
    every = journal.terminal(rows)
    try:
        planned: list[str] | None = json.loads((folder / PLAN).read_text())["trials"]
    except (OSError, ValueError, KeyError):
        planned = None
    finished = every if planned is None else {i: every[i] for i in planned if i in every}
    outcomes = [row["outcome"] for row in finished.values()]
    total = None if planned is None else len(planned)
    if any(map(_locked, journal.files(folder))):
        state = "running"
    else:
        state = "finished" if total is None or len(finished) == total else "stopped"
    return Status(
        str(folder),
        state,
        len(finished),
        total,
        outcomes.count(Outcome.OK),
        outcomes.count(Outcome.OOM),
        outcomes.count(Outcome.INVALID),
        sum(not is_answer(row["outcome"]) for row in finished.values()),
        rows[-1].get("started_at") if rows else None,
        unreadable,
    )


def _locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks does not tell
            return False
        return False
