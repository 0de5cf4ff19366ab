"""What a running sweep says of how far it is."""

from __future__ import annotations

import time
from collections import Counter
from typing import Protocol

from vramsweep.harness import outcome
from vramsweep.harness.plan import Planned
from vramsweep.harness.row import Outcome, Row

MIB = 1 << 20


class Progress(Protocol):
    """Is told what a sweep does. `total` is how many trials there are to do."""

    total: int

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
        self.total, self.done, self.began = total, 0, time.monotonic()
        self.counts: Counter[str] = Counter()

    def add(self, row: Row) -> None:
        """One more."""
        self.done += 1
        kind = row["outcome"]
        self.counts["failed" if outcome.is_verdict(kind) and not outcome.is_answer(kind) else kind] += 1

    def left(self) -> str:
        """The time that the others will take, if they are as these."""
        if not self.done:
            return "?"
        return duration((time.monotonic() - self.began) / self.done * (self.total - self.done))

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

    def tracing(self, done: int, of: int) -> None:
        """Nothing: the rows come soon."""

    def close(self) -> None:
        """Nothing is open."""


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
