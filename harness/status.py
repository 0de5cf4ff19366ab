"""How far a sweep is, from its folder alone: readable while it runs, by anyone, without a lock."""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path

from vramsweep.harness import journal
from vramsweep.harness.outcome import is_answer, is_verdict
from vramsweep.harness.row import Outcome
from vramsweep.harness.sweep import counted
from vramsweep.harness.trial import ID_VERSION


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
    stopped: int  # by a fault of the machine, and without an answer yet
    last_row_at: str | None
    unreadable: int


def read(folder: Path) -> Status:
    """The status of one sweep's folder. Raises UserError if there is no journal in it."""
    rows, unreadable = journal.read(folder)
    wanted, any_system = _wanted(folder)
    finished = journal.terminal(rows) if wanted is None else counted(rows, wanted, any_system)[0]
    last = {row["trial_id"]: row["outcome"] for row in rows if wanted is None or row["trial_id"] in wanted}
    outcomes = [row["outcome"] for row in finished.values()]
    total = None if wanted is None else len(wanted)
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
        sum(not is_answer(kind) for kind in outcomes),
        sum(not is_verdict(kind) for trial_id, kind in last.items() if trial_id not in finished),
        rows[-1].get("started_at") if rows else None,
        unreadable,
    )


def _wanted(folder: Path) -> tuple[dict[str, tuple[str | None, ...]] | None, bool]:
    """The last plan's trials, each with its system, and whether any system counts; None where no plan of today is."""
    try:
        found = json.loads((folder / journal.PLAN).read_text())
        if found["id_version"] != ID_VERSION:
            return None, False
        systems = [tuple(one) for one in found["systems"]]
        own = zip(found["trials"], found["system"], strict=True)
        return {trial_id: systems[at] for trial_id, at in own}, bool(found["any_system"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None, False


def _locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks does not tell
            return False
        return False
