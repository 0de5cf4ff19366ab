"""What a running sweep says of how far it is: a line for each trial, and on a terminal a live bar below them.

Trials are called by what varies in their sweep (labels.py). Not covered: a sweep as another process sees it
(harness/verbs/status.py), what is said once it is over (analysis/report/summary.py).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vramsweep.harness.messages.activity import Activity, duration
from vramsweep.harness.messages.console import Console
from vramsweep.harness.messages.units import format_estimate, format_size
from vramsweep.harness.process import signals
from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.sweep.labels import Labels
from vramsweep.harness.sweep.pace import Pace
from vramsweep.harness.sweep.plan import Planned

RUNNING = 4  # trials that the bar's region names
MANY = 50  # predictions, of which there may be hundreds a second


class Progress:
    """Is told what a sweep does, and counts: finished trials, what came out, the time left.

    `total` is how many trials there are to do, `of` are all the sweep's, which it names; `cards` says which cards fail;
    `batches` are to be predicted after this one, which nobody knows how long they take.
    """

    def __init__(self, total: int, of: Sequence[Planned] = (), console: Console | None = None) -> None:
        self.total, self.done = total, 0
        self.cards: Sequence[str] = ()
        self.label = Labels(of)
        predicted = all(item.trial is None or item.trial.device.name == "simulated" for item in of)
        self.many = total >= MANY and bool(of) and predicted
        self.batches = 0
        self._began, self._pace = time.monotonic(), Pace()
        self._running: dict[str, tuple[str, float]] = {}  # by id: label, and since when
        self._doing: dict[str | None, str] = {}  # what the worker of a trial does, under None that of a batch
        self.counts: Counter[str] = Counter()
        self._console = console or Console(file=sys.stderr)
        self._activity = Activity(self.drawn, self._console)

    def began(self, text: str) -> None:
        """Say how many trials there are, how many were finished before, and where; from now on what runs is shown."""
        print(text, flush=True)
        if self.total:
            self._activity.__enter__()

    def starts(self, item: Planned) -> None:
        """Hear that a trial is started, or tried again."""
        told = self.label(item) if self.label.keys else ""  # what nothing tells apart was said by the command
        self._running[item.trial_id] = (told, time.monotonic())

    def works(self, trial_id: str | None, record: Mapping[str, Any]) -> None:
        """Hear what the worker of a trial, or of a batch, does (attempt.read_progress)."""
        self._doing[trial_id] = record["text"]
        if trial_id is None and {"done", "total"} <= record.keys():
            self._pace.count_traced(record["done"], record["total"], record["text"].startswith("tracing"))

    def show(self, row: Row, item: Planned) -> None:
        """Count a trial that has come to its end."""
        self.done += 1
        self._running.pop(item.trial_id, None)
        self._doing.pop(item.trial_id, None)
        if item.trial is not None:
            self._pace.count_row()
        kind = row["outcome"]
        self.counts["failed" if outcome.is_verdict(kind) and not outcome.is_answer(kind) else kind] += 1

    def line(self, row: Row, item: Planned) -> str | None:
        """What came of a trial; None of many predictions, unless one failed."""
        if self.many and outcome.is_answer(row["outcome"]):
            return None
        result = " · ".join(filter(None, [self.label(item), describe_result(row)]))
        return f"[{self.done}/{self.total}] {row['outcome']:<9} {result}"

    def left(self) -> str:
        """The time that the others will take, with what is still to be traced for them."""
        seconds = None if self.batches else self._pace.seconds_left(self.total - self.done)
        return "unknown" if seconds is None else duration(seconds)

    def drawn(self) -> RenderableType:
        """What runs, in a line."""
        running = [" · ".join(filter(None, [label, self._doing.get(key)])) for key, (label, _) in self._running.items()]
        doing = next(filter(None, [self._doing.get(None), *running]), "working")
        more = f" and {len(running) - 1} more" if len(running) > 1 else ""
        passed = duration(time.monotonic() - self._began)
        return f"[{self.done}/{self.total}] {doing}{more} · ETA {self.left()} ({passed})"

    def note(self, text: str) -> None:
        """Answer what the user asks for meanwhile; from within a signal's handler."""
        signals.to_stderr(text)

    def close(self) -> None:
        """Nothing runs any more. Say of each card that fails what to do."""
        self._activity.__exit__()
        for said in self.cards:
            print(said, flush=True)


class Lines(Progress):
    """For a log: a line for each finished trial, of many predictions for each tenth and failure; on stderr what runs,
    where nothing was said for a while."""

    tenths = 0

    def show(self, row: Row, item: Planned) -> None:
        """Count the row, and print its line if there is something to say."""
        super().show(row, item)
        if (line := self.line(row, item)) is not None:
            print(f"{line} · {self.text()}", flush=True)
        elif 10 * self.done // self.total > self.tenths:
            self.tenths = 10 * self.done // self.total
            print(f"[{self.done}/{self.total}] {self.text()}", flush=True)
        else:
            return
        self._activity.postpone()

    def text(self) -> str:
        """The counts in words."""
        counts = f"oom {self.counts['oom']} · failed {self.counts['failed']} · ETA {self.left()}"
        return " · ".join([counts, *(said.partition(" and ")[0] for said in self.cards)])


class Region(Progress):
    """Lines, and below them a live region: a bar, what came out so far, what runs.

    It is drawn anew now and then and when a row comes, by a thread: nothing in it is asked of the workers.
    """

    _note = ""

    def __init__(self, total: int, of: Sequence[Planned] = (), console: Console | None = None) -> None:
        super().__init__(total, of, console or Console())

    def show(self, row: Row, item: Planned) -> None:
        """Count the row, and print its line above the region."""
        super().show(row, item)
        if (line := self.line(row, item)) is not None:
            self._console.print(Text(line, style="" if outcome.is_answer(row["outcome"]) else "red"))
        if not self.many:
            self._activity.look()

    def note(self, text: str) -> None:
        """Show it in the region from now on: nothing is written here."""
        self._note = text

    def close(self) -> None:
        """The region goes; what came out stays, in a line."""
        super().close()
        if self.done:
            came = " · ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
            print(f"{self.done} of {self.total} in {duration(time.monotonic() - self._began)}: {came}", flush=True)

    def drawn(self) -> RenderableType:
        """What there is to see now."""
        head = Table.grid(padding=(0, 1))
        counts = dict.fromkeys(("ok", "oom", "failed"), 0) | dict(self.counts)
        head.add_row(
            ProgressBar(total=max(self.total, 1), completed=self.done, width=12 if self._console.width < 72 else 30),
            f"{self.done}/{self.total}", " · ".join(f"{n} {kind}" for kind, n in counts.items()), f"ETA {self.left()}",
        )  # fmt: skip
        parts: list[RenderableType] = [head, *(Text(said, style="red") for said in self.cards)]
        if doing := self._doing.get(None):
            parts.append(doing)
        running, now = list(self._running.items()), time.monotonic()
        parts += [
            Text("▸ " + " · ".join(filter(None, [label, self._doing.get(key), duration(now - since)])), style="bold")
            for key, (label, since) in running[:RUNNING]
        ]
        if len(running) > RUNNING:
            parts.append(f"  and {len(running) - RUNNING} more")
        if self._note:
            parts.append(Text(self._note, style="yellow"))
        return Group(*parts)


def choose_progress(total: int, of: Sequence[Planned] = ()) -> Progress:
    """The region on a terminal, where there is anything to do; else lines."""
    return Region(total, of) if total and Console().redraws else Lines(total, of)


def describe_result(row: Row) -> str:
    """What came out, in words: the reason, or memory and speed; measured, else by published speeds (≈), else what a
    roofline allows at most (≤)."""
    if row["outcome"] == Outcome.OOM and (need := row.get("unlimited_peak_reserved_bytes")) is not None:
        return f"needs {format_size(need)} reserved"
    if row["outcome"] != Outcome.OK:
        return str(row["reason"])
    allocated, reserved = row.get("peak_allocated_bytes"), row.get("peak_reserved_bytes")
    parts = ["memory unknown" if allocated is None else f"{format_size(allocated)} allocated"]
    if reserved is not None and row.get("memory_source") != "cpu_tensors_and_rss":  # a resident set is something else
        parts.append(f"{format_size(reserved)} reserved")
    for name, sign in (("tokens_per_s", ""), ("calibrated_tokens_per_s", "≈ "), ("estimated_tokens_per_s", "≤ ")):
        if row.get(name) is not None:
            speed = format_estimate(row[name]) if sign else f"{row[name]:,.0f}"
            return ", ".join([*parts, f"{sign}{speed} tokens/s"])
    return ", ".join(parts)
