"""What a running sweep says of how far it is."""

from __future__ import annotations

import time
from collections import Counter
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars

from vramsweep.harness import outcome
from vramsweep.harness.console import Console
from vramsweep.harness.plan import Planned
from vramsweep.harness.row import Outcome, Row
from vramsweep.harness.terminal import escape_others

MIB = 1 << 20


class Progress(Protocol):
    """Is told what a sweep does. `total` is how many trials there are to do."""

    total: int

    def began(self, text: str) -> None:
        """How many trials there are, how many were finished before, and where."""
        ...

    def show(self, row: Row, item: Planned) -> None:
        """A trial has come to its end."""
        ...

    def tracing(self, done: int, of: int) -> None:
        """Of the points that predictions rest on, so many are traced."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class Counts:
    """Of finished trials: how many, what came out, and the time left."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._since = (time.monotonic(), 0)  # of what the time left is reckoned from, and how many were done by then
        self.counts: Counter[str] = Counter()

    def began(self, text: str) -> None:
        """Say it."""
        print(text, flush=True)

    def add(self, row: Row) -> None:
        """One more."""
        self.done += 1
        kind = row["outcome"]
        self.counts["failed" if outcome.is_verdict(kind) and not outcome.is_answer(kind) else kind] += 1

    def left(self) -> str:
        """The time that the others will take, if they are as these."""
        began, before = self._since
        if self.done == before:
            return "?"
        return duration((time.monotonic() - began) / (self.done - before) * (self.total - self.done))

    def tracing(self, done: int, of: int) -> None:
        """What comes after it takes less time."""
        if done < of:
            self._since = (time.monotonic(), self.done)

    def text(self) -> str:
        """In words."""
        return f"oom {self.counts['oom']} · failed {self.counts['failed']} · ETA {self.left()}"


class Lines(Counts):
    """One line for each finished trial: done/total, what came out, oom, failed, ETA."""

    def show(self, row: Row, item: Planned) -> None:
        """Count the row and print its line."""
        self.add(row)
        label = item.trial.label() if item.trial else str(item.resolved.get("model", {}).get("name"))
        print(
            f"[{self.done}/{self.total}] {row['outcome']:<9} {label} · {_result(row)} · {self.text()}",
            flush=True,
        )

    def close(self) -> None:
        """Nothing is open."""


class Few(Counts):
    """A line for each tenth of the trials, for tracing and for each trial that failed: for a log."""

    tenths = 0
    traced = -1

    def show(self, row: Row, item: Planned) -> None:
        """Count the row, and print a line if there is something to say."""
        self.add(row)
        if not outcome.is_answer(row["outcome"]):
            print(_failed(row, item), flush=True)
        if 10 * self.done // self.total > self.tenths:
            self.tenths = 10 * self.done // self.total
            print(f"[{self.done}/{self.total}] {self.text()}", flush=True)

    def tracing(self, done: int, of: int) -> None:
        """Print it where more than before are to be traced."""
        super().tracing(done, of)
        if done < of and of > self.traced:
            self.traced = of
            print(f"tracing {done} of {of} points", flush=True)

    def close(self) -> None:
        """Nothing is open."""


class _Bar(Counts):
    """A bar on a terminal."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self._bar = Bars(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[counts]}", markup=False),
            console=Console(),
        )  # fmt: skip
        self._task = self._bar.add_task("predicting", total=total, counts="")

    def began(self, text: str) -> None:
        """Say it, above the bar."""
        super().began(text)
        self._bar.start()
        if self._bar.console.is_terminal:  # where Rich has taken the streams over, until the bar stops
            escape_others()

    def show(self, row: Row, item: Planned) -> None:
        """Count the row; one that failed is also a line."""
        self.add(row)
        if not outcome.is_answer(row["outcome"]):
            self._bar.console.print(_failed(row, item))
        self._bar.update(self._task, completed=self.done, total=self.total, counts=self.text())

    def tracing(self, done: int, of: int) -> None:
        """Say it in front of the bar while it lasts."""
        super().tracing(done, of)
        text = f"tracing {done} of {of} points" if done < of else "predicting"
        self._bar.update(self._task, description=text)

    def close(self) -> None:
        """The bar stays as it is."""
        self._bar.stop()


def bar(total: int) -> Progress:
    """A bar, where there is anything to do."""
    return _Bar(total) if total else Few(total)


def _failed(row: Row, item: Planned) -> str:
    return f"{row['outcome']}: {item.trial.label() if item.trial else item.trial_id}: {row['reason']}"


def _result(row: Row) -> str:
    if row["outcome"] != Outcome.OK:
        return str(row["reason"])
    allocated, speed = row.get("peak_allocated_bytes"), row.get("tokens_per_s")
    memory = "memory unknown" if allocated is None else f"{allocated / MIB:,.1f} MiB allocated"
    if speed is None:
        reserved = row.get("peak_reserved_bytes")
        return memory if reserved is None else f"{memory}, {reserved / MIB:,.1f} MiB reserved"
    return f"{memory}, {speed:,.0f} tokens/s"


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
