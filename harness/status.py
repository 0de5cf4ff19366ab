"""`status`, how far a sweep is, from its folder alone: readable while it runs, by anyone, without a lock."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vramsweep.harness import cluster, journal, lock, units
from vramsweep.harness.errors import UserError
from vramsweep.harness.outcome import is_answer, is_verdict
from vramsweep.harness.parsers import Parser
from vramsweep.harness.row import Outcome, Row
from vramsweep.harness.sweep import counted
from vramsweep.harness.trial import ID_VERSION


@dataclass(frozen=True)
class Status:
    """A sweep's state: running (a journal of it is locked), waiting (jobs of it are in a cluster's queue), finished, or
    stopped with trials left. Counts are of the folder's trials, whichever command they were of; `total` are those with
    a row that counts and those that the last command has still to run. `command_done` of `command_total` are its own.
    """

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
    command_done: int | None = None
    command_total: int | None = None

    @property
    def apart(self) -> bool:
        """Whether the folder holds more than what the last command was of."""
        return self.command_total is not None and (self.done, self.total) != (self.command_done, self.command_total)


def read(folder: Path) -> Status:
    """The status of one sweep's folder. Raises UserError if neither a journal is in it nor a job of it."""
    begun = any(file.exists() for file in journal.files(folder))
    rows, unreadable = journal.read(folder) if begun or not cluster.submitted(folder) else ([], 0)
    return of(folder, rows, unreadable, journal.plans(folder))


def of(folder: Path, rows: Sequence[Row], unreadable: int, plans: Sequence[Mapping[str, Any]]) -> Status:
    """The same from rows, the lines that could not be believed, and the plans of the folder's writers."""
    begun = any(file.exists() for file in journal.files(folder))
    wanted, any_system = _wanted(plans)
    asked = {} if wanted is None else counted(rows, wanted, any_system)[0]
    finished = asked | {name: row for name, row in journal.terminal(rows).items() if name not in (wanted or ())}
    last = {row["trial_id"]: row["outcome"] for row in rows}
    outcomes = [row["outcome"] for row in finished.values()]
    total = None if wanted is None else len(finished) + len(wanted) - len(asked)
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
        None if wanted is None else len(asked),
        None if wanted is None else len(wanted),
    )


def parser() -> Parser:
    """Its options."""
    found = Parser(prog="vramsweep status")
    found.add_argument("folder", nargs="*", type=Path, help="results/SWEEP; all under results/ if none is given")
    found.add_argument("--json", action="store_true", help="print the data instead")
    watching = "show it until it ends, every SECONDS (2), or as 1m; of several, and none named, those that run"
    found.add_argument("--watch", metavar="SECONDS", nargs="?", const="2", help=watching)
    return found


def main(argv: Sequence[str]) -> int:
    """`status`; returns the exit status. Raises UserError for what is no sweep."""
    arguments = parser().parse_args(argv)
    begun = {p.parent for p in Path("results").glob("*/journal*.jsonl")}
    submitted = {p.parent.parent for p in Path("results").glob("*/cluster/jobs.json")}
    folders = arguments.folder or sorted(begun | submitted)
    if not folders:
        raise UserError("no sweep under results/ yet; start one with `vramsweep sweep model=tiny`")
    if arguments.watch is not None:
        return _watch(folders, bool(arguments.folder), arguments.watch, arguments.json)
    found = [read(folder) for folder in folders]
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
        return 0
    for one in found:
        print(f"{one.folder}  {one.state}  {progress(one)}")
        if one.last_row_at:
            print(f"  last attempt began {one.last_row_at}")
    return 0


def _watch(folders: Sequence[Path], named: bool, text: str, as_json: bool) -> int:
    from vramsweep.harness import watch  # which needs this module

    if as_json:
        raise UserError("--watch is for people, --json for programs: status --json says it once; leave one out")
    try:
        seconds = float(text)  # 0 and nan are numbers too, of which the range is told
    except ValueError:
        try:
            seconds = units.seconds(text)
        except UserError:
            raise UserError(f"--watch {text}: allowed is a number of seconds; a folder comes before it") from None
    if not 0.1 <= seconds <= 3600:
        raise UserError(f"--watch {text}: allowed is 0.1 to 3600 seconds")
    if not named:
        folders = [folder for folder in folders if any(map(lock.held, journal.files(folder)))]
        if not folders:
            raise UserError("no sweep runs under results/; `vramsweep status` says how far those there came")
    return watch.watch(folders, seconds)


def progress(of: Status) -> str:
    """How far it is, in words; where the folder holds more than the last command asked for, that too."""
    total = "?" if of.total is None else of.total
    own = f"; the last command: {of.command_done}/{of.command_total}" if of.apart else ""
    return f"{of.done}/{total}: {counts(of)}{own}"


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
