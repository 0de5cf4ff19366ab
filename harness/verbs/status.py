"""`vramsweep status --watch`: a sweep as it runs, from its folder alone, in another terminal or on another machine.

Nothing is locked, and of a journal only what is new is read. `look` gathers what is shown at one moment, which
`table` and `line` show. Not covered: what the counts mean (status.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from vramsweep.harness import account, identity, journal, status
from vramsweep.harness.attempt import RESULT, SPEC
from vramsweep.harness.console import Console
from vramsweep.harness.files import content
from vramsweep.harness.outcome import is_answer
from vramsweep.harness.predictions import together
from vramsweep.harness.progress import duration
from vramsweep.harness.row import SYSTEM, Row
from vramsweep.harness.status import Status
from vramsweep.harness.trial import Trial

RECENT = 20  # trials that the rate is that of
FAILURES = 5
AXES = ("model", "runner", "sharding", "seq_len", "micro_batch", "precision", "allocator")
COLUMNS = (
    *("trial_id", "attempt", "terminal", "outcome", "reason", "started_at", "duration_s", "device", "simulated_gpu"),
    *("gpu_uuid", *SYSTEM, *AXES),
)
SPEC_LIMIT = 1 << 20  # bytes
# Between the batches of one command, and while its report is made, no journal is locked. So long a sweep is waited for,
# in seconds, by whether its launcher runs; None: on another machine, which cannot be told.
GRACE: Mapping[bool | None, float] = {True: 60.0, None: 10.0, False: 0.0}


@dataclass(frozen=True)
class Running:
    """An attempt that has no row yet: what it is of, and when it began."""

    label: str
    attempt: int
    began: datetime


@dataclass(frozen=True)
class Failure:
    """A trial without an answer: its last row."""

    label: str
    outcome: str
    reason: str
    began: datetime | None


@dataclass(frozen=True)
class Seen:
    """A sweep at one moment, `now`. What is not known is None.

    `since` is when its last command began; `rate` is in trials a minute, of the last `RECENT` attempts; `price` is of
    an hour of the machine. `cards` are those of the rows since then.
    """

    status: Status
    now: datetime
    since: datetime | None = None
    rate: float | None = None
    price: float | None = None
    cards: tuple[str, ...] = ()
    running: tuple[Running, ...] = ()
    failures: tuple[Failure, ...] = ()

    @property
    def left_s(self) -> float | None:
        """How long the trials that are planned will still take."""
        total = self.status.total
        return None if total is None or not self.rate else 60 * (total - self.status.done) / self.rate

    def cost(self) -> tuple[float, float | None] | None:
        """Of the command so far, and of what is left."""
        if self.price is None or self.since is None:
            return None
        left = self.left_s
        return self.price * _seconds(self.since, self.now) / 3600, None if left is None else self.price * left / 3600


@dataclass
class Watched:
    """A folder that is watched, and what of it has been read."""

    folder: Path
    tail: journal.Tail = field(init=False)
    labels: dict[str, str] = field(default_factory=dict)  # of attempts, by trial
    quiet_since: float | None = None  # by the monotonic clock

    def __post_init__(self) -> None:
        self.tail = journal.Tail(self.folder, COLUMNS)

    def look(self, now: datetime) -> Seen:
        """What there is to see. Raises UserError if there is no journal."""
        self.tail.look()
        plans = journal.plans(self.folder)
        plan = plans[-1] if plans else {}
        found = status.of(self.folder, self.tail.rows, self.tail.unreadable, plans)
        since = when(plan.get("started_at"))
        rows = self.tail.rows
        recent = [row for row in rows if since is None or (when(row["started_at"]) or now) >= since]
        price = plan.get("price_per_hour")
        running = _running(self.folder, rows, self.labels) if found.state == "running" else ()
        return Seen(found, now, since, rate(recent, now), price if type(price) in (int, float) else None,
                    _cards(recent), running, failures(rows))  # fmt: skip

    def ended(self, seen: Seen, clock: float) -> tuple[bool, Seen]:
        """Whether nothing more is to come: no journal is locked, and has not been for as long as a command may take
        between two batches. And what is seen, which is a sweep that runs while its launcher is between two."""
        if seen.status.state in ("running", "waiting"):
            self.quiet_since = None
            return False, seen
        self.quiet_since = clock if self.quiet_since is None else self.quiet_since
        alive = [identity.alive(one.get("launcher") or {}) for one in journal.plans(self.folder)] or [None]
        if clock - self.quiet_since >= max(GRACE[one] for one in alive):
            return True, seen
        return False, replace(seen, status=replace(seen.status, state="running")) if any(alive) else seen


def watch(folders: Sequence[Path], seconds: float) -> int:
    """Show the sweeps until all have ended, or Ctrl-C; returns the exit status. Raises UserError for what is none."""
    console = Console()
    watched = [Watched(folder) for folder in folders]
    said: dict[Path, str] = {}
    live = Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext()
    with contextlib.suppress(KeyboardInterrupt), live as shown:
        while True:
            looks = [one.ended(one.look(datetime.now(UTC)), time.monotonic()) for one in watched]
            seen = [found for _, found in looks]
            if shown is not None:
                shown.update(Group(*map(table, seen)), refresh=True)
            else:
                for one, found in zip(watched, seen, strict=True):
                    if said.get(one.folder) != (text := line(found)):
                        said[one.folder] = text
                        print(f"{found.now:%H:%M:%S}Z {text}", flush=True)
            if all(ended for ended, _ in looks):
                return 0
            time.sleep(seconds)
    return 0


def rate(rows: Sequence[Row], now: datetime) -> float | None:
    """Trials a minute, of the last attempts that a process was started for; None before there is one.

    A batch of predictions, which all began at one time, counts as a whole.
    """
    began = [start for row in rows if row["attempt"] and row["terminal"] and (start := when(row["started_at"]))]
    if not began:
        return None
    began.sort()
    first = began[-RECENT:][0]
    return 60 * sum(start >= first for start in began) / max(_seconds(first, now), 1.0)


def failures(rows: Sequence[Row]) -> tuple[Failure, ...]:
    """The last trials whose last row is no answer, the newest first."""
    last = {row["trial_id"]: row for row in rows}
    failed = sorted((row for row in last.values() if not is_answer(row["outcome"])), key=_started, reverse=True)
    return tuple(
        Failure(label(row), row["outcome"], str(row["reason"]), when(row["started_at"])) for row in failed[:FAILURES]
    )


def label(row: Row) -> str:
    """A row's trial in words, from its columns."""
    said = {"seq_len": "seq ", "micro_batch": "batch "}
    plain = {"sharding": "none", "allocator": "default"}
    parts = [f"{said.get(name, '')}{row[name]}" for name in AXES if row[name] not in (None, plain.get(name))]
    return " · ".join(parts)


def table(seen: Seen) -> RenderableType:
    """For a terminal."""
    of = seen.status
    grid = Table(title=f"{of.folder} · {of.state}", title_justify="left", show_header=False, box=None, expand=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    counts = Table.grid(padding=(0, 1))
    counts.add_row(
        ProgressBar(total=of.total or 1, completed=of.done if of.total else 0, width=32), status.progress(of)
    )
    grid.add_row("trials", counts)
    grid.add_row("speed", _speed(seen))
    if (cost := _cost(seen)) is not None:
        grid.add_row("cost", cost)
    if seen.cards:
        grid.add_row("cards", ", ".join(seen.cards))
    for number, one in enumerate(seen.running):
        again = f" (attempt {one.attempt})" if one.attempt > 1 else ""
        took = duration(_seconds(one.began, seen.now))
        grid.add_row("" if number else "running", f"{one.label}{again} · {took}")
    for number, failed in enumerate(seen.failures):
        at = f"{failed.began:%H:%M:%S}Z " if failed.began else ""
        grid.add_row("" if number else "failed", f"{at}{failed.outcome}: {failed.label}: {failed.reason}")
    return grid


def line(seen: Seen) -> str:
    """For a log: a line that changes when something has happened, not as time goes by."""
    of = seen.status
    failed = f"; last failure: {seen.failures[0].outcome}: {seen.failures[0].label}" if seen.failures else ""
    return f"{of.folder}  {of.state}  {status.progress(of)}{failed}"


def when(text: Any) -> datetime | None:
    """A moment as rows have it."""
    with contextlib.suppress(TypeError, ValueError):
        found = datetime.fromisoformat(text)
        return found if found.tzinfo else found.replace(tzinfo=UTC)
    return None


def _speed(seen: Seen) -> str:
    if seen.rate is None:
        return "not known yet"
    if seen.status.state != "running":
        return "nothing runs"
    left = seen.left_s
    end = "" if left is None else f", {duration(left)} left, until {seen.now + timedelta(seconds=left):%H:%M}Z"
    return f"{seen.rate:.2g} trials a minute{end}"


def _cost(seen: Seen) -> str | None:
    found = seen.cost()
    if found is None or seen.status.state != "running":
        return None
    so_far, left = found
    return f"{so_far:,.2f} so far" + ("" if left is None else f", {so_far + left:,.2f} in the end")


def _cards(rows: Sequence[Row]) -> tuple[str, ...]:
    known = dict.fromkeys((row["gpu_uuid"], row["gpu_name"] or row["simulated_gpu"] or row["cpu_name"]) for row in rows)
    names = [str(name) for _, name in known if name is not None]
    return tuple(f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names))


def _running(folder: Path, rows: Sequence[Row], labels: dict[str, str]) -> tuple[Running, ...]:
    """The attempts that have begun and have no row, the oldest first. `labels` keeps what they are of."""
    done = {row["trial_id"] for row in rows if row["terminal"] and row["attempt"] and is_answer(row["outcome"])}
    tried = {row["trial_id"]: row["attempt"] or 0 for row in rows}
    found = []
    for place in _folders(folder / "attempts"):
        number = account.attempts(place)
        spec, trial_id = place / str(number) / SPEC, place.name
        if number == 0 or trial_id in done or number <= tried.get(trial_id, 0):
            continue
        if together(trial_id) and (place / str(number) / RESULT).exists():
            continue
        with contextlib.suppress(OSError):  # it has only just been made
            began = datetime.fromtimestamp(spec.lstat().st_mtime, UTC)
            name = "predictions, many together" if together(trial_id) else _of_spec(spec, trial_id, labels)
            found.append(Running(name, number, began))
    return tuple(sorted(found, key=lambda one: (one.began, one.label)))


def _folders(place: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        return [place / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def _of_spec(spec: Path, trial_id: str, labels: dict[str, str]) -> str:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        if trial_id not in labels:
            read = json.loads(content(spec, SPEC_LIMIT, links=False))
            labels[trial_id] = Trial.model_validate(read["trial"]).label()
    return labels.get(trial_id, trial_id)


def _started(row: Row) -> str:
    return str(row["started_at"] or "")


def _seconds(first: datetime, last: datetime) -> float:
    return max((last - first).total_seconds(), 0.0)
