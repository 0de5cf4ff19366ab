"""Processes that trace trials, and others that predict: forked from one that only coordinates, some at once.

DeepSpeed keeps its process groups for one process, and what crashes or hangs must not take others along.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from vramsweep.harness import node, registry
from vramsweep.harness.attempt import RESULT, STEPS
from vramsweep.harness.files import content
from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.harness.waiting import readable
from vramsweep.runners import pieces, result, shapes, tracing, worker
from vramsweep.runners.symbolic import Point

TRACE_BYTES = 1 << 30  # what a process that traces may need; 8 billion parameters take less than half
SYMBOLIC = "symbolic.json"  # a symbolic trace, or why there is none, from the process that made it
Job = tuple[Callable[[], object], float]  # what to do, and the seconds that it may take


@dataclass
class Tracer:
    """Traces trials, each in a process of its own and at most once, into the sweep's folder of traces."""

    folder: Path
    deadline_s: float
    asked: set[str] = field(default_factory=set)
    traced: int = 0
    of: int = 0

    def trace(self, trials: Iterable[Trial]) -> None:
        """See to it that they have been traced, as many at once as there is room for."""
        self._run(list(self._untraced(trials)))

    def kept(self, trials: Mapping[Point, Trial]) -> Mapping[Point, pieces.Traced]:
        """The traces of those that can be traced."""
        self.trace(trials.values())
        return Kept(trials, self)

    def symbolic(self, trial: Trial, beside: Iterable[Trial] = ()) -> shapes.Candidate | shapes.Refused | None:
        """A symbolic trace of the trial, if it comes to an end; others are traced directly in the meantime."""
        place = self.folder / f"{_key(trial)}-symbolic"
        self._run([(_tracing_symbols(trial, place), self.deadline_s), *self._untraced(beside)])
        try:
            found = shapes.of_plain(json.loads(content(place / SYMBOLIC, links=False)))
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ):  # it ended before that, or somebody else was at the file
            return None
        if isinstance(found, shapes.Refused):
            self.say(f"no symbolic trace: {found.reason}")
        return found

    def say(self, text: str) -> None:
        """A line for the attempt's log."""
        print(text, flush=True)

    def found(self, trial: Trial) -> tuple[Any, dict[str, Any]] | None:
        """Its trace and the columns about what was built, if there is one."""
        found = tracing.stored(trial, trial.device.card, self._traces())
        if found is None and (key := _key(trial)) in self.asked and not (self.folder / key).exists():
            self.asked.discard(key)  # it was there, and was not what had been written
            self.trace([trial])
            found = tracing.stored(trial, trial.device.card, self._traces())
        return found

    def refused(self, trial: Trial) -> dict[str, Any] | None:
        """The error that says why it cannot be traced, if that is known."""
        with contextlib.suppress(FileNotFoundError):
            error: dict[str, Any] = json.loads(content(self.folder / _key(trial) / RESULT, links=False))
            return error
        return None

    def place(self, trial: Trial) -> Path:
        """The file that holds its trace, once it has been traced."""
        return tracing.place(trial, trial.device.card, self._traces())

    def _traces(self) -> Path:
        return self.folder.parents[2] / "traces"

    def _tracing(self, trial: Trial, place: Path) -> Callable[[], None]:
        def trace() -> None:
            place.mkdir()
            runner = importlib.import_module(registry.module(trial))
            try:
                tracing.kept(trial, trial.device.card, place, runner, self._traces())
            except InvalidTrial as error:
                result.error(place, worker.told(error))

        return trace

    def _untraced(self, trials: Iterable[Trial]) -> Iterator[Job]:
        """What traces those that have not been traced, or tried, before."""
        for trial in trials:
            key = _key(trial)
            if key not in self.asked and not self.place(trial).is_file():
                yield self._tracing(trial, self.folder / key), self.deadline_s
            self.asked.add(key)

    def _run(self, jobs: Sequence[Job]) -> None:
        self._say(len(jobs))
        for _ in forked(jobs, at_once()):
            self.traced += 1
            self._say(0)

    def _say(self, more: int) -> None:
        """Leave a record of how far it is, for the parent."""
        self.of += more
        with (self.folder / STEPS).open("a") as records:
            records.write(json.dumps({"traced": self.traced, "of": self.of}) + "\n")


class Kept(Mapping[Point, pieces.Traced]):
    """The traces of those of the trials that could be traced, read when asked for: all at once may be too many."""

    def __init__(self, trials: Mapping[Point, Trial], tracer: Tracer) -> None:
        self._trials = {where: trial for where, trial in trials.items() if tracer.place(trial).is_file()}
        self._tracer = tracer

    def __getitem__(self, where: Point) -> pieces.Traced:
        found = self._tracer.found(self._trials[where])
        if found is None:
            raise KeyError(where)
        return pieces.Traced(*found)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._trials)

    def __len__(self) -> int:
        return len(self._trials)


def _tracing_symbols(trial: Trial, place: Path) -> Callable[[], None]:
    def trace() -> None:
        place.mkdir()
        runner = importlib.import_module(registry.module(trial))
        found = shapes.trace(trial, trial.device.card, place, runner)
        (place / SYMBOLIC).write_text(json.dumps(shapes.plain(found)))

    return trace


def _key(trial: Trial) -> str:
    return tracing.trace_key(trial, trial.device.card)


def at_once() -> int:
    """How many processes to have at work: as many as cores, if there is memory for each to trace."""
    free = node.room().available
    return max(1, min(len(os.sched_getaffinity(0)), free // TRACE_BYTES))


def forked(jobs: Iterable[Job], together: int) -> Iterator[int]:
    """Run each job in a process forked for it, `together` at once; yields its number when it has ended, however it did.

    One that takes longer than it may is killed. Raises OSError if the system gives no process at all.
    """
    gc.collect()
    gc.freeze()  # else the collector would copy in each of them every page that they share
    waiting = deque(enumerate(jobs))
    running: dict[int, tuple[int, int, float]] = {}  # by descriptor: number, process id, deadline
    while waiting or running:
        while waiting and len(running) < together:
            number, (job, seconds) = waiting[0]
            try:
                pid = _fork(job)
            except OSError:
                if not running:
                    raise
                break
            waiting.popleft()
            running[os.pidfd_open(pid)] = number, pid, time.monotonic() + seconds
        soonest = min(until for _, _, until in running.values())
        ended = readable(running, max(0.0, soonest - time.monotonic()))
        late = {one for one, (_, _, until) in running.items() if one not in ended and until <= time.monotonic()}
        for descriptor in ended | late:
            number, pid, _ = running.pop(descriptor)
            if descriptor in late:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(descriptor)
            yield number


def _fork(job: Callable[[], object]) -> int:
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run(job, own)
    return pid


def _run(job: Callable[[], object], parent: int) -> NoReturn:
    status = 1
    try:
        worker.die_with(parent)
        job()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        worker.leave(status)
