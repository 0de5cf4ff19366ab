"""Many predictions in one attempt: trace what each family of trials needs, then predict every trial.

This process only coordinates. Traces are made and predictions are computed in processes that it forks: DeepSpeed keeps
its process groups for one process, and what crashes or hangs must not take others along. A trial that it leaves without
an answer is for an attempt of its own. The parent reads the answers as they come (harness/predictions.py).
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
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import psutil

from vramsweep.harness import gpus, node, registry
from vramsweep.harness.attempt import PREDICTIONS, RESULT, STEPS
from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.harness.waiting import readable
from vramsweep.runners import build, pieces, result, simulated, tracing, worker
from vramsweep.runners.symbolic import Point
from vramsweep.runners.trace import Trace

TRACE_BYTES = 1 << 30  # what a process that traces may need; 8 billion parameters take less than half
AT_A_TIME = 16  # trials that one process predicts, at most: then another one does, with its own deadline

Trials = Mapping[str, Trial]  # by id
Job = tuple[Callable[[], object], float]  # what to do, and the seconds that it may take


def main(folder: Path, spec: Mapping[str, Any]) -> int:
    """Answer the trials of the spec as far as that goes; returns the exit status."""
    trials = {one["trial_id"]: Trial.model_validate(one["trial"]) for one in spec["trials"]}
    grouped = families(trials)
    tracer = Tracer(folder, spec["timeout_s"])
    alone = [next(iter(family.values())) for family in grouped.values() if len(set(map(point, family.values()))) == 1]
    tracer.trace(alone)  # all at once; the others know better which of their points to trace
    files = (folder / PREDICTIONS.replace("*", str(number)) for number in count())
    for family in grouped.values():
        _predict_family(family, tracer, files, spec["timeout_s"])
    result.values(folder, {}, complete=True)
    return 0


def families(trials: Trials) -> dict[str, dict[str, Trial]]:
    """The trials of each family, whose traces differ in sizes at most."""
    found: dict[str, dict[str, Trial]] = defaultdict(dict)
    for trial_id, trial in trials.items():
        found[tracing.family_key(trial, gpus.named(trial.device.gpu))][trial_id] = trial
    return found


def point(trial: Trial) -> Point:
    """Where in its family a trial is."""
    padded = build.padded_tokens(trial.padding, trial.seq_len) if trial.data == "synthetic" else 0
    return Point(trial.seq_len, trial.micro_batch, trial.seq_len - padded if padded else None)


def at(trial: Trial, where: Point) -> Trial:
    """The trial of the same family at another point."""
    return trial.model_copy(update={"seq_len": where.seq_len, "micro_batch": where.micro_batch})


def _predict_family(family: Trials, tracer: Tracer, files: Iterator[Path], deadline_s: float) -> None:
    by_point: dict[Point, list[str]] = defaultdict(list)
    for trial_id, trial in family.items():
        by_point[point(trial)].append(trial_id)
    anyone = next(iter(family.values()))

    cover = pieces.cover(list(by_point), tracer.asker(anyone), known(anyone))
    tracer.trace([at(anyone, where) for where in sorted(cover.left)])
    refused = [(where, error) for where in by_point if (error := tracer.refused(at(anyone, where))) is not None]
    if refused:
        answers = (_answer(trial_id, error, None, None) for where, error in refused for trial_id in by_point[where])
        next(files).write_bytes(b"".join(answers))
    wanted = [trial_id for where, ids in by_point.items() if where not in dict(refused) for trial_id in ids]
    jobs: list[Job] = []
    for first in range(0, len(wanted), AT_A_TIME):
        some = {trial_id: family[trial_id] for trial_id in wanted[first : first + AT_A_TIME]}
        jobs.append((_predicting(some, cover, tracer, next(files)), deadline_s * len(some)))
    for _ in forked(jobs, at_once()):
        pass


def known(anyone: Trial) -> pieces.Known:
    """What of the details is known of each point of a trial's family without a trace."""

    def of(where: Point) -> dict[str, Any]:
        return {"padding_fraction": build.data(at(anyone, where)).padding_fraction} if anyone.padding else {}

    return of


def look_up(trial: Trial, cover: pieces.Cover, tracer: Tracer) -> tuple[Trace, dict[str, Any], str] | None:
    """The trial's trace, the details and what it rests on; None if it could not be traced."""
    found = cover.at(point(trial))
    if found is None and (own := tracer.found(trial)) is not None:
        found = (*own, simulated.TRACED)
    return found


def _predicting(trials: Trials, cover: pieces.Cover, tracer: Tracer, file: Path) -> Callable[[], None]:
    def predict() -> None:
        at_hand: tuple[Point, Any] | None = None
        with file.open("ab", buffering=0) as lines:
            for trial_id, trial in trials.items():
                began = time.monotonic()
                try:
                    if at_hand is None or at_hand[0] != point(trial):
                        at_hand = point(trial), look_up(trial, cover, tracer)
                    if at_hand[1] is None:  # could not be traced: its own attempt will show why
                        continue
                    predicted = simulated.predict(trial, *at_hand[1])
                    told: dict[str, Any] = {"values": predicted.columns, "complete": True}
                    if predicted.error is not None:
                        told = worker.told(predicted.error)
                    last = simulated.record(*predicted.phases[-1]) if predicted.phases else None
                    lines.write(_answer(trial_id, told, last, time.monotonic() - began))
                except Exception:
                    traceback.print_exc()

    return predict


def _answer(trial_id: str, told: Mapping[str, Any], record: Mapping[str, Any] | None, seconds: float | None) -> bytes:
    line = {"trial_id": trial_id, "result": told, "record": record, "duration_s": seconds}
    return json.dumps(line).encode() + b"\n"


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
        jobs: list[Job] = []
        for trial in trials:
            key = _key(trial)
            if key not in self.asked and not self.place(trial).is_file():
                jobs.append((self._tracing(trial, self.folder / key), self.deadline_s))
            self.asked.add(key)
        self._say(len(jobs))
        for _ in forked(jobs, at_once()):
            self.traced += 1
            self._say(0)

    def asker(self, anyone: Trial) -> pieces.Ask:
        """What traces points of this trial's family."""

        def ask(points: Sequence[Point]) -> Mapping[Point, pieces.Traced]:
            trials = {where: at(anyone, where) for where in points}
            self.trace(trials.values())
            return Kept(trials, self)

        return ask

    def found(self, trial: Trial) -> tuple[Any, dict[str, Any]] | None:
        """Its trace and the columns about what was built, if there is one."""
        return tracing.stored(trial, gpus.named(trial.device.gpu), self._traces())

    def refused(self, trial: Trial) -> dict[str, Any] | None:
        """The error that says why it cannot be traced, if that is known."""
        with contextlib.suppress(FileNotFoundError):
            error: dict[str, Any] = json.loads((self.folder / _key(trial) / RESULT).read_bytes())
            return error
        return None

    def place(self, trial: Trial) -> Path:
        """The file that holds its trace, once it has been traced."""
        return tracing.place(trial, gpus.named(trial.device.gpu), self._traces())

    def _traces(self) -> Path:
        return self.folder.parents[2] / "traces"

    def _tracing(self, trial: Trial, place: Path) -> Callable[[], None]:
        def trace() -> None:
            place.mkdir()
            runner = importlib.import_module(registry.runner(trial.runner.name).module)
            try:
                tracing.kept(trial, gpus.named(trial.device.gpu), place, runner, self._traces())
            except InvalidTrial as error:
                result.error(place, worker.told(error))

        return trace

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


def _key(trial: Trial) -> str:
    return tracing.trace_key(trial, gpus.named(trial.device.gpu))


def at_once() -> int:
    """How many processes to have at work: as many as cores, if there is memory for each to trace."""
    free = min(psutil.virtual_memory().available, node.memory_here())
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
