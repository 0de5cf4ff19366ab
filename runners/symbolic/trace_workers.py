"""Processes that trace trials, and others that predict: forked, some at once, from one process that only coordinates.

DeepSpeed keeps its process groups for a whole process, and a crash or hang must not affect other trials.
"""

import contextlib
import gc
import json
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from vramsweep.harness.files.bounded_reads import read_content
from vramsweep.harness.machine import host_memory
from vramsweep.harness.process.waiting import readable
from vramsweep.harness.process.worker_files import PROGRESS, RESULT, TRACES
from vramsweep.harness.spec import runner_table
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.predict import trace_cache
from vramsweep.runners.rank import process_end, result_file
from vramsweep.runners.rank.entry_modules import import_entries, import_entry
from vramsweep.runners.symbolic import piecewise_templates, symbolic_candidate
from vramsweep.runners.trace.symbolic_trace import Point, plain

TRACE_BYTES = 1 << 30  # memory that a tracing process may need; 8 billion parameters take less than half
SYMBOLIC = "symbolic.json"  # a symbolic trace, or why there is none, from the process that made it
Job = tuple[Callable[[], int | None], float]  # a call for process_end.py, and its limit in seconds


@dataclass
class Tracer:
    """Traces trials, each in a process of its own and at most once, into the sweep's folder of traces.

    If it does not fork, it traces in this process and raises what tracing raises.
    """

    folder: Path
    deadline_s: float
    forks: bool = True
    asked: set[str] = field(default_factory=set)
    traced: int = 0
    of: int = 0
    families: int = 0  # of which `known` are traced; `alone` of them have one point and are traced first
    known: int = 0
    alone: int = 0

    def trace(self, trials: Iterable[Trial]) -> None:
        """Trace the trials not traced yet, as many at once as cores and memory allow. Do nothing if it never forks."""
        if self.forks:
            self._run(list(self._untraced(trials)))

    def kept(self, trials: Mapping[Point, Trial]) -> Mapping[Point, piecewise_templates.Traced]:
        """Return the traces of the trials that can be traced, by point."""
        if not self.forks:
            return {where: piecewise_templates.Traced(*self._trace_here(trial)) for where, trial in trials.items()}
        self.trace(trials.values())
        there = {where: self.found(trial) for where, trial in trials.items() if self.is_kept(trial)}
        return {where: piecewise_templates.Traced(*found) for where, found in there.items() if found is not None}

    def symbolic(
        self, trial: Trial, beside: Iterable[Trial] = ()
    ) -> symbolic_candidate.Candidate | symbolic_candidate.Refused | None:
        """Return a symbolic trace of the trial, None if its process left none. Meanwhile trace `beside` directly."""
        place = self.folder / _symbolic_name(trial)
        kept, found = trace_cache.users_file(place.name, trial), None
        with contextlib.suppress(OSError):
            found = None if kept is None else symbolic_candidate.read(trace_cache.load(kept))
        self._run([*([] if found else [self._job(_trace_symbols, trial, place)]), *self._untraced(beside)])
        if found is None:
            with contextlib.suppress(OSError):  # its process ended before it wrote the file
                found = symbolic_candidate.read(content := read_content(place / SYMBOLIC, links=False))
                if found is not None and kept is not None:
                    trace_cache.keep(kept, content)
        if isinstance(found, symbolic_candidate.Refused):
            print(f"no symbolic trace: {found.reason}", flush=True)
        return found

    def is_symbolic_kept(self, trial: Trial) -> bool:
        """Return whether this user has a cached file of what `symbolic` found before."""
        kept = trace_cache.users_file(_symbolic_name(trial), trial)
        return kept is not None and kept.is_file()

    def found(self, trial: Trial) -> tuple[Any, dict[str, Any]] | None:
        """Return the trial's trace and the columns about what was built; None if there is no trace."""
        if not self.forks:
            return self._trace_here(trial)
        found = trace_cache.load_trace(trial, trial.device.card, self._traces())
        if found is None and (key := _key(trial)) in self.asked and not (self.folder / key).exists():
            self.asked.discard(key)  # its file was there, but its content was damaged
            self.trace([trial])
            found = trace_cache.load_trace(trial, trial.device.card, self._traces())
        return found

    def refused(self, trial: Trial) -> dict[str, Any] | None:
        """Return the error that says why the trial cannot be traced; None if that is unknown."""
        with contextlib.suppress(FileNotFoundError):
            return cast(dict[str, Any], json.loads(read_content(self.folder / _key(trial) / RESULT, links=False)))
        return None

    def is_kept(self, trial: Trial) -> bool:
        """Return whether there is a file of the trial's trace."""
        return trace_cache.is_kept(trial, trial.device.card, self._traces())

    def _traces(self) -> Path:
        return self.folder.parents[2] / "traces"

    def _trace(self, trial: Trial, place: Path) -> None:
        _make_folder(place)
        try:
            trace_cache.load_or_trace(trial, trial.device.card, place, self._traces())
        except InvalidTrial as error:
            result_file.error(place, process_end.error_result(error))

    def _trace_here(self, trial: Trial) -> tuple[Any, dict[str, Any]]:
        """Trace in this process, unless the trace is kept already; raise what tracing raises."""
        return trace_cache.load_or_trace(trial, trial.device.card, self.folder, self._traces())

    def _untraced(self, trials: Iterable[Trial]) -> Iterator[Job]:
        """Yield the jobs that trace those trials which have not been traced or tried before."""
        for trial in trials:
            key = _key(trial)
            if key not in self.asked and not self.is_kept(trial):
                yield self._job(self._trace, trial, self.folder / key)
            self.asked.add(key)

    def _job(self, trace: Callable[[Trial, Path], None], trial: Trial, place: Path) -> Job:
        import_makers(trial)
        return partial(trace, trial, place), self.deadline_s

    def _run(self, jobs: Sequence[Job]) -> None:
        if jobs:
            self._say(len(jobs))
        for _ in forked(jobs, at_once()):
            self.traced += 1
            self._say(0)

    def _say(self, more: int) -> None:
        """Record for the parent how many traces are done; `more` are added to their total."""
        self.of += more
        self.tell(f"tracing: {self.traced} of {self.of} done")

    def tell(self, text: str) -> None:
        """Record for the parent the current work, and how many families are traced."""
        done = max(self.known, min(self.traced, self.alone))
        result_file.progress(self.folder, text, done=done, total=self.families)


def import_makers(trial: Trial) -> None:
    """Import what tracing the trial needs, once for all processes that this one forks later."""
    import torch

    torch.set_num_threads(1)  # forked processes lack OpenMP's threads and would wait for them
    import_entries((".predict.make_trace", *runner_table.preload(runner_table.imports_name(trial))))


def _trace_symbols(trial: Trial, place: Path) -> None:
    from vramsweep.runners.symbolic import symbolic_shapes

    _make_folder(place)
    runner = import_entry(runner_table.module(trial))
    found = symbolic_shapes.trace(trial, trial.device.card, place, runner)
    (place / SYMBOLIC).write_bytes(trace_cache.serialize(plain(found)))


def _make_folder(place: Path) -> None:
    """Make the folder of a forked process, which reports its progress into a file for all of them."""
    place.mkdir()
    with contextlib.suppress(OSError):  # a file system without links
        (place / PROGRESS).symlink_to(Path("..", TRACES))


def _symbolic_name(trial: Trial) -> str:
    return f"{_key(trial)}-symbolic"


def _key(trial: Trial) -> str:
    return trace_cache.trace_key(trial, trial.device.card)


def at_once() -> int:
    """Return how many processes to run at once: one a core, or fewer if memory is short; at least 1."""
    free = host_memory.memory_room().available
    return max(1, min(len(os.sched_getaffinity(0)), free // TRACE_BYTES))


def forked(jobs: Iterable[Job], together: int) -> Iterator[int]:
    """Run each job in its own forked process, `together` at once; yield a job's number when it has ended in any way.

    A job that exceeds its deadline is killed. Raises OSError if the system gives no process at all.
    """
    gc.collect()
    gc.freeze()  # else the collector would copy every shared page in each process
    waiting = deque(enumerate(jobs))
    own = os.getpid()
    running: dict[int, tuple[int, int, float]] = {}  # by descriptor: number, process id, deadline
    while waiting or running:
        while waiting and len(running) < together:
            number, (job, seconds) = waiting[0]
            try:
                pid = os.fork()
            except OSError:
                if not running:
                    raise
                break
            if pid == 0:
                process_end.run_and_exit(job, own)
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


def write_answers(asked: Iterable[Any], encode: Callable[[Any], bytes], file: Path) -> None:
    """Append to the file the answer of each one asked, at once: written ones count, however this process ends."""
    with file.open("ab", buffering=0) as lines:
        for one in asked:
            try:
                lines.write(encode(one))
            except Exception:
                traceback.print_exc()
