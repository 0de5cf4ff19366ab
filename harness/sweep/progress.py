"""The progress that a running sweep shows: a line for each trial, and on a terminal a live bar below them.

The time left is estimated by what its rows, and the traces that predictions wait for, took so far. Trials are labelled
by what varies in their sweep (labels.py). Not covered: progress as another process sees it
(harness/verbs/status.py), the text at the end (analysis/report/summary.py).
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vramsweep.harness.messages.console import Activity, Console, duration
from vramsweep.harness.messages.units import format_estimate, format_size
from vramsweep.harness.process import signals
from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.sweep.budget import PREDICTED_S
from vramsweep.harness.sweep.labels import Labels
from vramsweep.harness.sweep.plan import Planned

RUNNING = 4  # running trials that the live region names
MANY = 50  # predictions from which on not each gets a line: there may be hundreds a second


class Pace:
    """A counter of rows and traced families, and of the seconds by `clock` that went by with each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._heard = clock, clock()
        self._counted = self._heard  # when a row or a family was counted last
        self._rows = self._traced = self._families = 0
        self._rows_s = self._traces_s = self._family_s = 0.0
        self._tracing = False

    def count_row(self) -> None:
        """Count another row."""
        self._counted = self._pass_time()
        self._rows += 1

    def count_traced(self, traced: int, families: int, tracing: bool) -> None:
        """Note that `traced` of the `families` are traced, and whether another one is being traced."""
        now = self._pass_time()
        if traced < self._traced or not self._families:  # a worker has finished its imports and begins
            self._traces_s, self._rows_s, self._traced = 0.0, self._rows_s if self._rows else 0.0, 0
        if traced > self._traced:
            self._counted, self._traced, self._family_s = now, traced, self._traces_s / traced
        self._families, self._tracing = families, tracing

    def seconds_left(self, rows: int) -> float | None:
        """Return the seconds that `rows` more rows will take; None if unknown, or if the estimate turned out wrong.

        Before the first row, each is assumed to need `PREDICTED_S` if each has a trace, which takes most time.
        """
        untraced = self._families - self._traced
        if (untraced and not self._traced) or not (self._rows or (self._traced and rows <= self._families)):
            return None if rows else 0.0
        each = self._rows_s / self._rows if self._rows else PREDICTED_S
        left = rows * each + untraced * self._family_s - (self._clock() - self._counted)
        return left if left > 0 else None if rows else 0.0

    def _pass_time(self) -> float:
        now = self._clock()
        if self._tracing:
            self._traces_s += now - self._heard
        else:
            self._rows_s += now - self._heard
        self._heard = now
        return now


class Progress:
    """The counts of a running sweep, which reports to it: finished trials, outcomes, the time left.

    `total` is the number of trials to do; `of` are all the sweep's, from which it makes labels. `cards` says which GPUs
    fail. How long the `batches` after this one take is unknown. `describe` returns a row's text, or "" for the usual.
    """

    def __init__(self, total: int, of: Sequence[Planned] = (), console: Console | None = None) -> None:
        self.total, self.done = total, 0
        self.cards: Sequence[str] = ()
        self.describe: Callable[[Row], str] = lambda row: ""
        self.label = Labels(of)
        predicted = all(item.trial is None or item.trial.device.name == "simulated" for item in of)
        self.many = total >= MANY and bool(of) and predicted
        self.batches = 0
        self._began, self._pace = time.monotonic(), Pace()
        self._running: dict[str, tuple[str, float]] = {}  # by id: label and start
        self._doing: dict[str | None, str] = {}  # what each trial's worker does, by id; None: a batch's
        self.counts: Counter[str] = Counter()
        self._console = console or Console(file=sys.stderr)
        self._activity = Activity(self.drawn, self._console)

    def began(self, text: str) -> None:
        """Print how many trials there are, how many were finished before, and where; show from now on what runs."""
        print(text, flush=True)
        if self.total:
            self._activity.__enter__()

    def starts(self, item: Planned) -> None:
        """Note that a trial is started, or tried again."""
        self._running[item.trial_id] = (self.label.apart(item), time.monotonic())

    def works(self, trial_id: str | None, record: Mapping[str, Any]) -> None:
        """Note what the worker of a trial, or of a batch, does (attempt.read_progress)."""
        self._doing[trial_id] = record["text"]
        if trial_id is None and {"done", "total"} <= record.keys():
            self._pace.count_traced(record["done"], record["total"], record["text"].startswith("tracing"))

    def show(self, row: Row, item: Planned) -> None:
        """Count a trial that has ended."""
        self.done += 1
        self._running.pop(item.trial_id, None)
        self._doing.pop(item.trial_id, None)
        if item.trial is not None:
            self._pace.count_row()
        kind = row["outcome"]
        self.counts["failed" if outcome.is_verdict(kind) and not outcome.is_answer(kind) else kind] += 1

    def line(self, row: Row, item: Planned) -> str | None:
        """Return the line of a finished trial; None for one of many predictions, unless it failed."""
        if not (told := self.describe(row)) and self.many and outcome.is_answer(row["outcome"]):
            return None
        result = told or " · ".join(filter(None, [self.label(item), describe_result(row)]))
        return f"[{self.done}/{self.total}] {row['outcome']:<9} {result}"

    def left(self) -> str:
        """Return in words the time that the other trials will take, including traces that are still to be made."""
        seconds = None if self.batches else self._pace.seconds_left(self.total - self.done)
        return "unknown" if seconds is None else duration(seconds)

    def drawn(self) -> RenderableType:
        """Return a line about what runs."""
        running = [" · ".join(filter(None, [label, self._doing.get(key)])) for key, (label, _) in self._running.items()]
        doing = next(filter(None, [self._doing.get(None), *running]), "working")
        more = f" and {len(running) - 1} more" if len(running) > 1 else ""
        passed = duration(time.monotonic() - self._began)
        return f"[{self.done}/{self.total}] {doing}{more} · ETA {self.left()} ({passed})"

    def note(self, text: str) -> None:
        """Print an answer to a request of the user; called from within a signal's handler."""
        signals.to_stderr(text)

    def close(self) -> None:
        """Stop showing what runs, and print for each GPU that fails what to do."""
        self._activity.__exit__()
        for said in self.cards:
            print(said, flush=True)


class Lines(Progress):
    """Progress for a log: a line for each finished trial; of many predictions, for each tenth and each failure. On
    stderr what runs, if no line came for a while."""

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
        """Return the counts in words."""
        counts = f"oom {self.counts['oom']} · failed {self.counts['failed']} · ETA {self.left()}"
        return " · ".join([counts, *(said.partition(" and ")[0] for said in self.cards)])


class Region(Progress):
    """Progress on a terminal: lines, and below them a live region with a bar, the outcomes so far, and what runs.

    A thread redraws it now and then and when a row comes; it asks the workers nothing.
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
        """Show the text in the region from now on; nothing is written here."""
        self._note = text

    def close(self) -> None:
        """Remove the region; a line with the outcomes stays."""
        super().close()
        if self.done:
            came = " · ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
            print(f"{self.done} of {self.total} in {duration(time.monotonic() - self._began)}: {came}", flush=True)

    def drawn(self) -> RenderableType:
        """Return what the region shows now."""
        head = Table.grid(padding=(0, 1))
        counts = dict.fromkeys(("ok", "oom", "failed"), 0) | dict(self.counts)
        head.add_row(
            ProgressBar(total=max(self.total, 1), completed=self.done, width=12 if self._console.width < 72 else 30),
            f"{self.done}/{self.total}", " · ".join(f"{n} {kind}" for kind, n in counts.items()), f"ETA {self.left()}",
        )  # fmt: skip
        parts: list[RenderableType] = [head, *(Text(said, style="red") for said in self.cards)]
        running, now = list(self._running.items()), time.monotonic()
        if doing := self._doing.get(None):
            parts.append(f"{doing} ({duration(now - self._began)})")
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
    """Return the region on a terminal if there is anything to do; else lines."""
    return Region(total, of) if total and Console().redraws else Lines(total, of)


def describe_result(row: Row) -> str:
    """Describe a result: the reason, or memory and speed. Speed is measured, else by speeds of other runs (≈), else the
    upper bound of a roofline (≤)."""
    if row["outcome"] == Outcome.OOM and (need := row.get("unlimited_peak_reserved_bytes")) is not None:
        return f"needs {format_size(need)} reserved"
    if row["outcome"] != Outcome.OK:
        return str(row["reason"])
    allocated, reserved = row.get("peak_allocated_bytes"), row.get("peak_reserved_bytes")
    parts = ["memory unknown" if allocated is None else f"{format_size(allocated)} allocated"]
    if reserved is not None and row.get("memory_source") != "cpu_tensors_and_rss":  # a resident set is something else
        parts.append(f"{format_size(reserved)} reserved")
    left, every, full = map(row.get, ("parameters_without_gradient", "trainable_parameters", "full_after_steps"))
    if left and every:
        parts.append(f"{left:,} of {every:,} trainable parameters had no gradient in any step")
    if full is not None:
        parts.append(f"full after about {full:,} steps")
    if codes := row.get("not_covered"):
        parts.append(f"not covered: {' and '.join(codes)}")
    for name, sign in (("tokens_per_s", ""), ("calibrated_tokens_per_s", "≈ "), ("estimated_tokens_per_s", "≤ ")):
        if row.get(name) is not None:
            speed = format_estimate(row[name]) if sign else f"{row[name]:,.0f}"
            return ", ".join([*parts, f"{sign}{speed} tokens/s"])
    return ", ".join(parts)
