"""What a running sweep says of how far it is: a live region on a terminal, plain lines elsewhere.

Trials are called by what varies in their sweep (labels.py). Not covered: a sweep as another process sees it (watch.py),
what is said once it is over (analysis/report/summary.py).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vramsweep.harness import interrupts, outcome
from vramsweep.harness.card_state import CardState
from vramsweep.harness.console import Console
from vramsweep.harness.labels import Labels
from vramsweep.harness.plan import Planned
from vramsweep.harness.row import Outcome, Row
from vramsweep.harness.terminal import escape_others

MIB = 1 << 20
LAST = 5  # rows that the region shows
RUNNING = 4  # trials that it names
COLOURS = {"ok": "green", "oom": "yellow", "invalid": "dim", "skipped": "dim"}


class Progress(Protocol):
    """Is told what a sweep does. `total` is how many trials there are to do, `cards` says which of them fail."""

    total: int
    cards: Sequence[str]

    def began(self, text: str) -> None:
        """How many trials there are, how many were finished before, and where."""
        ...

    def starts(self, item: Planned) -> None:
        """A trial is started, or tried again; from the thread that sees it through."""
        ...

    def show(self, row: Row, item: Planned) -> None:
        """A trial has come to its end."""
        ...

    def tracing(self, done: int, of: int) -> None:
        """Of the points that predictions rest on, so many are traced."""
        ...

    def note(self, text: str) -> None:
        """An answer to what the user asks for meanwhile; from within a signal's handler."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


Made = Callable[[int, Sequence[Planned]], Progress]  # of how many trials to do, and of all the sweep's


class Counts:
    """Of finished trials: how many, what came out, and the time left. `of` are all the sweep's, which it names."""

    def __init__(self, total: int, of: Sequence[Planned] = ()) -> None:
        self.total, self.done = total, 0
        self.cards: Sequence[str] = ()
        self.label = Labels(of)
        self._began = time.monotonic()
        self._since = (self._began, 0)  # of what the time left is reckoned from, and how many were done by then
        self.counts: Counter[str] = Counter()

    def began(self, text: str) -> None:
        """Say it."""
        print(text, flush=True)

    def starts(self, item: Planned) -> None:
        """Nothing is said."""

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

    def note(self, text: str) -> None:
        """Say it."""
        interrupts.to_stderr(text)

    def text(self) -> str:
        """In words."""
        counts = f"oom {self.counts['oom']} · failed {self.counts['failed']} · ETA {self.left()}"
        return " · ".join([counts, *(said.partition(" and ")[0] for said in self.cards)])

    def close(self) -> None:
        """Say of each card that fails what to do."""
        for said in self.cards:
            print(said, flush=True)


class Lines(Counts):
    """One line for each finished trial: done/total, what came out, oom, failed, ETA."""

    def show(self, row: Row, item: Planned) -> None:
        """Count the row and print its line."""
        self.add(row)
        result = " · ".join(filter(None, [self.label(item), *_result(row)]))
        print(f"[{self.done}/{self.total}] {row['outcome']:<9} {result} · {self.text()}", flush=True)


class Few(Counts):
    """A line for each tenth of the trials, for tracing and for each trial that failed: for a log."""

    tenths = 0
    traced = -1

    def show(self, row: Row, item: Planned) -> None:
        """Count the row, and print a line if there is something to say."""
        self.add(row)
        if not outcome.is_answer(row["outcome"]):
            print(f"{row['outcome']}: {self.label(item)}: {row['reason']}", flush=True)
        if 10 * self.done // self.total > self.tenths:
            self.tenths = 10 * self.done // self.total
            print(f"[{self.done}/{self.total}] {self.text()}", flush=True)

    def tracing(self, done: int, of: int) -> None:
        """Print it where more than before are to be traced."""
        super().tracing(done, of)
        if done < of and of > self.traced:
            self.traced = of
            print(f"tracing {done} of {of} points", flush=True)


class Region(Counts):
    """One live region: a bar, what came out so far, the card, what runs, the last rows. What failed is a line above it.

    It is drawn anew once a second and when a row comes, by a thread: nothing in it is asked of the workers.
    """

    def __init__(self, total: int, of: Sequence[Planned] = (), console: Console | None = None) -> None:
        super().__init__(total, of)
        self._console = console or Console()
        self._rows: deque[tuple[str, Row]] = deque(maxlen=LAST)
        self._running: dict[str, tuple[str, float]] = {}
        self._note, self._traced = "", ""
        self._card = CardState() if any(p.trial and p.trial.device.name == "cuda" for p in of) else None
        self._live = Live(console=self._console, get_renderable=self.drawn, refresh_per_second=1, transient=True)

    def began(self, text: str) -> None:
        """Say it, above the region."""
        super().began(text)
        self._live.start()
        escape_others()  # Rich has taken the streams over, until the region is gone

    def starts(self, item: Planned) -> None:
        """It runs from now on."""
        self._running[item.trial_id] = (self.label(item), time.monotonic())

    def show(self, row: Row, item: Planned) -> None:
        """Count the row; one that failed is also a line."""
        self.add(row)
        label = self.label(item)
        self._running.pop(item.trial_id, None)
        self._rows.append((label, row))
        if not outcome.is_answer(row["outcome"]):
            self._console.print(Text(f"{row['outcome']}: {label}: {row['reason']}", style="red"))
        if item.trial is None or item.trial.device.name != "simulated":  # of those there may be hundreds a second
            self._live.refresh()

    def tracing(self, done: int, of: int) -> None:
        """Say it while it lasts."""
        super().tracing(done, of)
        self._traced = f"tracing {done} of {of} points" if done < of else ""

    def note(self, text: str) -> None:
        """Show it in the region from now on: nothing is written here."""
        self._note = text

    def close(self) -> None:
        """The region goes; what came out stays, in a line."""
        self._live.stop()
        if self._card is not None:
            self._card.close()
        if self.done:
            came = " · ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
            print(f"{self.done} of {self.total} in {duration(time.monotonic() - self._began)}: {came}", flush=True)
        super().close()

    def drawn(self) -> RenderableType:
        """What there is to see now."""
        narrow = self._console.width < 72
        head = Table.grid(padding=(0, 1))
        head.add_row(
            ProgressBar(total=max(self.total, 1), completed=self.done, width=12 if narrow else 30),
            f"{self.done}/{self.total}", self._tally(), f"ETA {self.left()}",
        )  # fmt: skip
        parts: list[RenderableType] = [head]
        if self._card is not None and (state := self._card.text()):
            parts.append(Text(state, style="dim"))
        parts += [Text(said, style="red") for said in self.cards]
        if self._traced:
            parts.append(self._traced)
        now = time.monotonic()
        running = list(self._running.values())
        for label, since in running[:RUNNING]:
            parts.append(Text(f"▸ {label} · {duration(now - since)}", style="bold"))
        if len(running) > RUNNING:
            parts.append(f"  and {len(running) - RUNNING} more")
        if self._rows:
            parts.append(self._table(narrow))
        if self._note:
            parts.append(Text(self._note, style="yellow"))
        return Group(*parts)

    def _tally(self) -> Text:
        found = {kind: self.counts[kind] for kind in ("ok", "oom", "failed")}
        found |= {kind: n for kind, n in list(self.counts.items()) if n}
        parts = [Text(f"{n} {kind}", style=COLOURS.get(kind, "red") if n else "dim") for kind, n in found.items()]
        return Text(" · ").join(parts)

    def _table(self, narrow: bool) -> Table:
        """The last rows, the newest first."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        table.header_style = table.border_style = "dim"
        table.add_column("outcome", no_wrap=True)
        table.add_column("trial")
        table.add_column("allocated", justify="right", no_wrap=True)
        if not narrow:
            table.add_column("reserved", justify="right", no_wrap=True)
        table.add_column("tokens/s", justify="right", no_wrap=True)
        for label, row in list(self._rows)[: -1 - (3 if narrow else LAST) : -1]:
            sizes = [_size(row.get("peak_allocated_bytes")), *([] if narrow else [_size(_reserved(row))])]
            outcome_text = Text(row["outcome"], style=COLOURS.get(row["outcome"], "red"))
            table.add_row(outcome_text, label, *sizes, _speed(row))
        return table


def shown(total: int, of: Sequence[Planned] = ()) -> Progress:
    """The region on a terminal, where there is anything to do; else a line for each trial."""
    return Region(total, of) if total and Console().redraws else Lines(total, of)


def few(total: int, of: Sequence[Planned] = ()) -> Progress:
    """The same, with few lines: for predictions, of which there are thousands."""
    return Region(total, of) if total and Console().redraws else Few(total, of)


def _reserved(row: Row) -> int | None:
    """What the allocator took; a process's resident set says something else."""
    found: int | None = row.get("peak_reserved_bytes")
    return None if row.get("memory_source") == "cpu_tensors_and_rss" else found


def _size(value: int | None) -> str:
    return "–" if value is None else f"{value / MIB:,.1f} MiB" if value < 1 << 30 else f"{value / (1 << 30):,.2f} GiB"


def _speed(row: Row) -> str:
    """Measured, else by published speeds, else what a roofline allows at most."""
    for name, text in (("tokens_per_s", ""), ("calibrated_tokens_per_s", "≈ "), ("estimated_tokens_per_s", "≤ ")):
        if row.get(name) is not None:
            return f"{text}{row[name]:,.0f}"
    return "–"


def _result(row: Row) -> list[str]:
    """What came out, in words."""
    if row["outcome"] != Outcome.OK:
        return [str(row["reason"])]
    allocated, speed = row.get("peak_allocated_bytes"), row.get("tokens_per_s")
    memory = "memory unknown" if allocated is None else f"{allocated / MIB:,.1f} MiB allocated"
    reserved = row.get("peak_reserved_bytes")
    if speed is None:
        return [memory if reserved is None else f"{memory}, {reserved / MIB:,.1f} MiB reserved"]
    return [f"{memory}, {speed:,.0f} tokens/s"]


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
