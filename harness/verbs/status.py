"""`status`: the progress of a sweep, from its folder alone: readable while it runs, by anyone, without a lock.

--watch repeats it until the sweep ends, in another terminal or on another machine; it then reads only new lines of a
journal. sweep_status.py defines the counts.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.text import Text

from vramsweep.harness.files.bounded_reads import read_content
from vramsweep.harness.files.sweep_folder import find_sweeps, own_files
from vramsweep.harness.messages import units
from vramsweep.harness.messages.console import Console, duration
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process.worker_files import RESULT, SPEC
from vramsweep.harness.rows import journal, journal_lock
from vramsweep.harness.rows.outcome import is_answer
from vramsweep.harness.rows.schema import SYSTEM, Row
from vramsweep.harness.spec.fit_text import describe_trial
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep import row_builder, slurm_jobs
from vramsweep.harness.sweep.batch_prediction import together
from vramsweep.harness.sweep.sweep_status import Status, progress, read_status, status_from_rows
from vramsweep.harness.verbs.cli import read_parser

RECENT = 20  # trials in the rate
FAILURES = 5
SPEC_LIMIT = 16 << 20  # bytes of an attempt's specification
AXES = ("model", "runner", "sharding", "seq_len", "micro_batch", "precision", "allocator")
COLUMNS = ("trial_id", "attempt", "terminal", "outcome", "reason", "started_at", "device", *SYSTEM, *AXES)
# Between the batches of one command, and while its report is made, no journal is locked. Seconds to wait for such a
# sweep, by whether its launcher runs; None: unknown, because it is on another machine.
GRACE: Mapping[bool | None, float] = {True: 60.0, None: 10.0, False: 0.0}


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep status`; return the exit status. Raises UserError for a folder without a sweep."""
    arguments = read_parser("status").parse_args(argv)
    named = [one for folder in arguments.folder for one in _sweeps(folder)]
    if not (folders := named or sorted(find_sweeps(Path("results"), 1))):
        raise UserError("no sweep under results/ yet; start one with `vramsweep sweep model=tiny`")
    if arguments.watch is not None:
        return _watch(folders, bool(arguments.folder), arguments.watch, arguments.json)
    found = list[Status]()
    for folder in folders:
        try:
            found.append(read_status(folder))
        except UserError as error:
            if folder in arguments.folder:
                raise
            print(f"{folder}: {error}", file=sys.stderr)  # but show the others
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
        return 0
    for one in found:
        print(head(one))
        if one.last_row_at:
            print(f"  last attempt began {one.last_row_at}")
    return 0


def _sweeps(folder: Path) -> list[Path]:
    """Return the sweeps below a folder; the folder itself if it is a sweep's or has none below it."""
    begun = any(file.exists() for file in journal.files(folder)) or slurm_jobs.submitted_jobs(folder)
    return [folder] if begun else sorted(find_sweeps(folder)) or [folder]


def head(of: Status) -> str:
    """Describe the progress of a sweep in a line."""
    return f"{of.folder}  {of.state}  {progress(of)}"


@dataclass(frozen=True)
class Seen:
    """A sweep at the moment `now`. `rate` is trials a minute, of the last `RECENT` attempts (None: unknown). `failures`
    describes the last trials without an answer and when they began, the newest first; `running` the attempts that run.
    `cost` is that of the last command so far, in the unit of `price_per_hour=` (None: no price)."""

    status: Status
    now: datetime
    rate: float | None = None
    failures: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    cost: float | None = None

    def speed(self) -> str:
        """Describe the speed, the time that the planned trials still need, and the cost."""
        if self.rate is None or self.status.state != "running":
            return "speed not known yet" if self.rate is None else "nothing is running"
        if self.status.total is None:
            return f"{self.rate:.2g} trials a minute"
        left = 60 * (self.status.total - self.status.done) / self.rate
        until = self.now + timedelta(seconds=left)
        cost = "" if self.cost is None else f", cost so far {self.cost:.2f}"
        return f"{self.rate:.2g} trials a minute, {duration(left)} left, until {until:%H:%M}Z{cost}"

    def log(self) -> str:
        """Return a line for a log, which changes only if something has happened, not as time passes."""
        return "; last failure: ".join([head(self.status), *self.failures[:1]])


@dataclass
class Watched:
    """A folder that is watched, and the part of its journals already read."""

    folder: Path
    tail: journal.Tail = field(init=False)
    quiet_since: float | None = None  # of the monotonic clock

    def __post_init__(self) -> None:
        self.tail = journal.Tail(self.folder, COLUMNS)

    def look(self, now: datetime) -> Seen:
        """Read new rows and return the sweep as it is at `now`. Raises UserError if there is no journal."""
        self.tail.look()
        rows, plans = self.tail.rows, journal.plans(self.folder)
        found = status_from_rows(self.folder, rows, self.tail.unreadable, plans)
        plan = plans[-1] if plans else {}
        since, price = when(plan.get("started_at")), plan.get("price_per_hour")  # of the last command
        recent = [row for row in rows if since is None or (when(row["started_at"]) or now) >= since]
        cost = None
        if since is not None and isinstance(price, int | float) and not isinstance(price, bool):
            cost = price * (now - since).total_seconds() / 3600
        running = running_attempts(self.folder, rows, now) if found.state == "running" else ()
        return Seen(found, now, rate(recent, now), failures(rows), running, cost)

    def ended(self, seen: Seen, clock: float) -> tuple[bool, Seen]:
        """Return whether the sweep has ended: no journal was locked for as long as a command may take between two
        batches. Also return `seen`, as a running sweep while its launcher may be between two."""
        if seen.status.state in ("running", "waiting"):
            self.quiet_since = None
            return False, seen
        self.quiet_since = clock if self.quiet_since is None else self.quiet_since
        alive = [journal_lock.is_alive(one.get("launcher") or {}) for one in journal.plans(self.folder)] or [None]
        if clock - self.quiet_since >= max(GRACE[one] for one in alive):
            return True, seen
        return False, replace(seen, status=replace(seen.status, state="running")) if any(alive) else seen


def _watch(folders: Sequence[Path], named: bool, text: str, as_json: bool) -> int:
    if as_json:
        raise UserError("--watch and --json cannot be combined: --json prints the state once; leave one out")
    try:
        seconds = float(text)  # 0 and nan are numbers too; the check of the range refuses them
    except ValueError:
        try:
            seconds = units.parse_seconds(text)
        except UserError:
            raise UserError(f"--watch {text}: allowed is a number of seconds; the folder goes before --watch") from None
    if not 0.1 <= seconds <= 3600:
        raise UserError(f"--watch {text}: allowed is 0.1 to 3600 seconds")
    if not named:
        folders = [folder for folder in folders if any(map(journal_lock.is_locked, journal.files(folder)))]
        if not folders:
            raise UserError("no sweep under results/ is running; `vramsweep status` shows the progress of all")
    return watch(folders, seconds)


def watch(folders: Sequence[Path], seconds: float) -> int:
    """Show the sweeps until all have ended, or Ctrl-C; return the exit status. Raises UserError if one is no sweep."""
    console = Console()
    watched = [Watched(folder) for folder in folders]
    said: dict[Path, str] = {}
    live = Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext()
    with contextlib.suppress(KeyboardInterrupt), live as shown:
        while True:
            looks = [one.ended(one.look(datetime.now(UTC)), time.monotonic()) for one in watched]
            seen = [found for _, found in looks]
            if shown is not None:
                shown.update(Text("\n".join(line for one in seen for line in lines(one))), refresh=True)
            else:
                for one, found in zip(watched, seen, strict=True):
                    if said.get(one.folder) != (text := found.log()):
                        said[one.folder] = text
                        print(f"{found.now:%H:%M:%S}Z {text}", flush=True)
            if all(ended for ended, _ in looks):
                return 0
            time.sleep(seconds)
    return 0


def lines(seen: Seen) -> list[str]:
    """Return the lines that a terminal shows of a watched sweep."""
    of = seen.status
    running = (f"running: {text}" for text in seen.running)
    shown = (progress(of), seen.speed(), *running, *seen.failures)
    return [f"{of.folder}  {of.state}", *(f"  {text}" for text in shown)]


def running_attempts(folder: Path, rows: Sequence[Row], now: datetime) -> tuple[str, ...]:
    """Describe the attempts that have begun and have no row, the oldest first: trial, attempt, how long it has run."""
    done = {row["trial_id"] for row in rows if row["terminal"] and row["attempt"] and is_answer(row["outcome"])}
    tried = {row["trial_id"]: row["attempt"] or 0 for row in rows}
    found = []
    for place in _subfolders(own_files(folder) / "attempts"):
        number, trial_id = row_builder.count_attempts(place), place.name
        attempt = place / str(number)
        if number == 0 or trial_id in done or number <= tried.get(trial_id, 0):
            continue
        if together(trial_id) and (attempt / RESULT).exists():
            continue
        with contextlib.suppress(OSError):  # a folder so new that it has no specification yet
            began = datetime.fromtimestamp((attempt / SPEC).lstat().st_mtime, UTC)
            name = "a batch of predictions" if together(trial_id) else _describe_attempt(attempt / SPEC, trial_id)
            again = f", attempt {number}" if number > 1 else ""
            found.append((began, f"{name}{again}, {duration(max((now - began).total_seconds(), 0.0))}"))
    return tuple(text for _, text in sorted(found))


def _subfolders(place: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        return [place / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def _describe_attempt(spec: Path, trial_id: str) -> str:
    """Name the attempt's trial by its settings, or by its id if they cannot be read."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        read = json.loads(read_content(spec, SPEC_LIMIT, links=False))
        return describe_trial(Trial.model_validate(read["trial"]))
    return trial_id


def rate(rows: Sequence[Row], now: datetime) -> float | None:
    """Return trials a minute, of the last attempts that started a process; None before there is one.

    A batch of predictions counts as a whole, because all began at one time.
    """
    began = sorted(start for row in rows if row["attempt"] and row["terminal"] and (start := when(row["started_at"])))
    if not began:
        return None
    first = began[-RECENT:][0]
    return 60 * sum(start >= first for start in began) / max((now - first).total_seconds(), 1.0)


def failures(rows: Sequence[Row]) -> tuple[str, ...]:
    """Describe the last trials whose last row is no answer, the newest first."""
    last = {row["trial_id"]: row for row in rows}
    failed = [row for row in last.values() if not is_answer(row["outcome"])]
    failed.sort(key=lambda row: str(row["started_at"] or ""), reverse=True)
    began = (when(row["started_at"]) for row in failed)
    return tuple(
        f"{row['outcome']}: {label(row)}: {' '.join(str(row['reason']).split())}{f' ({at:%H:%M:%S}Z)' if at else ''}"
        for row, at in zip(failed[:FAILURES], began, strict=False)
    )


def label(row: Row) -> str:
    """Describe a row's trial by its columns."""
    said = {"seq_len": "seq ", "micro_batch": "batch "}
    plain = {"sharding": "none", "allocator": "default"}
    return " · ".join(f"{said.get(name, '')}{row[name]}" for name in AXES if row[name] not in (None, plain.get(name)))


def when(text: Any) -> datetime | None:
    """Return the time in a column of a row, in UTC if it names no zone; None if it is no time."""
    with contextlib.suppress(TypeError, ValueError):
        found = datetime.fromisoformat(text)
        return found if found.tzinfo else found.replace(tzinfo=UTC)
    return None
