"""Many predictions in one attempt: trace what each family of trials needs, then predict every trial.

This process only coordinates. Traces are made and predictions are computed in processes that it forks: DeepSpeed keeps
its process groups for one process, and what crashes or hangs must not take others along. A trial that it leaves without
an answer is for an attempt of its own. The parent reads the answers as they come (harness/predictions.py).
"""

from __future__ import annotations

import json
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from vramsweep.harness import lengths
from vramsweep.harness.attempt import PREDICTIONS
from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners import result, simulated, tracing, varying, worker
from vramsweep.runners.curve import Curve, at, curve, point
from vramsweep.runners.symbolic import Point
from vramsweep.runners.tracer import Job, Tracer, at_once, forked

AT_A_TIME = 16  # trials that one process predicts, at most: then another one does, with its own deadline

Trials = Mapping[str, Trial]  # by id


def main(folder: Path, spec: Mapping[str, Any]) -> int:
    """Answer the trials of the spec as far as that goes; returns the exit status."""
    trials = {one["trial_id"]: Trial.model_validate(one["trial"]) for one in spec["trials"]}
    of_lengths = {trial_id: trial for trial_id, trial in trials.items() if lengths.varying(trial)}
    grouped = families({trial_id: trial for trial_id, trial in trials.items() if trial_id not in of_lengths})
    tracer = Tracer(folder, spec["timeout_s"])
    alone = [next(iter(family.values())) for family in grouped.values() if len(set(map(point, family.values()))) == 1]
    tracer.trace(alone)  # all at once; the others know better which of their points to trace
    files = (folder / PREDICTIONS.replace("*", str(number)) for number in count())
    for family in grouped.values():
        _predict_family(family, tracer, files, spec["timeout_s"])
    for family in families(of_lengths).values():
        _predict_lengths(family, tracer, files, spec["timeout_s"])
    result.values(folder, {}, complete=True)
    return 0


def families(trials: Trials) -> dict[str, dict[str, Trial]]:
    """The trials of each family, whose traces differ in sizes at most; where lengths vary those of its batches."""
    found: dict[str, dict[str, Trial]] = defaultdict(dict)
    for trial_id, trial in trials.items():
        traced = varying.standin(trial, True, point(trial)) if lengths.varying(trial) else trial
        found[tracing.family_key(traced, trial.device.card)][trial_id] = trial
    return found


def _predict_family(family: Trials, tracer: Tracer, files: Iterator[Path], deadline_s: float) -> None:
    by_point: dict[Point, list[str]] = defaultdict(list)
    for trial_id, trial in family.items():
        by_point[point(trial)].append(trial_id)
    anyone = next(iter(family.values()))

    found = curve(anyone, by_point, tracer)
    found.trace([at(anyone, where) for where in sorted(by_point)])
    refused = [(where, error) for where in by_point if (error := tracer.refused(at(anyone, where))) is not None]
    if refused:
        answers = (_answer(trial_id, error, None, None) for where, error in refused for trial_id in by_point[where])
        next(files).write_bytes(b"".join(answers))
    wanted = [trial_id for where, ids in by_point.items() if where not in dict(refused) for trial_id in ids]
    jobs: list[Job] = []
    for first in range(0, len(wanted), AT_A_TIME):
        some = {trial_id: family[trial_id] for trial_id in wanted[first : first + AT_A_TIME]}
        jobs.append((_predicting(some, found, next(files)), deadline_s * len(some)))
    for _ in forked(jobs, at_once()):
        pass


def _predict_lengths(family: Trials, tracer: Tracer, files: Iterator[Path], deadline_s: float) -> None:
    """The trials of a family whose lengths vary, each in a process of its own: it has hundreds of steps."""
    found = varying.family(list(family.values()), tracer)
    jobs: list[Job] = []
    for trial_id, trial in family.items():
        error = varying.refused([trial], found, tracer)
        if error is not None:
            next(files).write_bytes(_answer(trial_id, error, None, None))
        else:
            jobs.append((_predicting_lengths(trial_id, trial, found, next(files)), deadline_s))
    for _ in forked(jobs, at_once()):
        pass


def _predicting_lengths(trial_id: str, trial: Trial, found: varying.Family, file: Path) -> Callable[[], None]:
    def predict() -> None:
        began = time.monotonic()
        try:
            predicted = varying.predict(trial, found)
        except InvalidTrial as error:
            file.write_bytes(_answer(trial_id, worker.told(error), None, time.monotonic() - began))
        else:
            file.write_bytes(_told(trial_id, predicted, began))

    return predict


def _told(trial_id: str, predicted: simulated.Predicted, began: float) -> bytes:
    told: dict[str, Any] = {"values": predicted.columns, "complete": True}
    if predicted.error is not None:
        told = worker.told(predicted.error)
    last = simulated.record(*predicted.phases[-1]) if predicted.phases else None
    return _answer(trial_id, told, last, time.monotonic() - began)


def _predicting(trials: Trials, found: Curve, file: Path) -> Callable[[], None]:
    def predict() -> None:
        at_hand: tuple[tuple[Point, str | None], Any] | None = None
        with file.open("ab", buffering=0) as lines:
            for trial_id, trial in trials.items():
                began = time.monotonic()
                try:
                    where = point(trial), trial.device.gpu
                    if at_hand is None or at_hand[0] != where:
                        at_hand = where, found.at(trial)
                    if at_hand[1] is None:  # could not be traced: its own attempt will show why
                        continue
                    lines.write(_told(trial_id, simulated.predict(trial, *at_hand[1]), began))
                except Exception:
                    traceback.print_exc()

    return predict


def _answer(trial_id: str, told: Mapping[str, Any], record: Mapping[str, Any] | None, seconds: float | None) -> bytes:
    line = {"trial_id": trial_id, "result": told, "record": record, "duration_s": seconds}
    return json.dumps(line).encode() + b"\n"
