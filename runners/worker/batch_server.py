"""Many predictions in one attempt: trace what each family of trials needs, then predict every trial.

This process only coordinates. Traces are made and predictions are computed in processes that it forks: DeepSpeed keeps
its process groups for one process, and what crashes or hangs must not take others along. A trial that it leaves without
an answer is for an attempt of its own. The parent reads the answers as they come (harness/sweep/batch_prediction.py).
"""

from __future__ import annotations

import json
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from vramsweep.harness.process.worker_files import PREDICTIONS
from vramsweep.harness.spec import length_distribution
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.predict import predicted_row, trace_cache
from vramsweep.runners.rank import process_end, result_file
from vramsweep.runners.symbolic import varying_lengths
from vramsweep.runners.symbolic.trace_family import at, curve, point
from vramsweep.runners.symbolic.trace_workers import Job, Tracer, at_once, forked
from vramsweep.runners.trace.symbolic_trace import Point

AT_A_TIME = 16  # trials that one process predicts, at most: then another one does, with its own deadline

Trials = Mapping[str, Trial]  # by id
Predict = Callable[[Trial], predicted_row.Predicted | None]


def main(folder: Path, spec: Mapping[str, Any]) -> int:
    """Answer the trials of the spec as far as that goes; returns the exit status."""
    trials = {one["trial_id"]: Trial.model_validate(one["trial"]) for one in spec["trials"]}
    of_lengths = {
        trial_id: trial for trial_id, trial in trials.items() if length_distribution.has_varying_lengths(trial)
    }
    grouped = families({trial_id: trial for trial_id, trial in trials.items() if trial_id not in of_lengths})
    tracer = Tracer(folder, spec["timeout_s"])
    alone = [next(iter(family.values())) for family in grouped.values() if len(set(map(point, family.values()))) == 1]
    tracer.trace(alone)  # all at once; the others know better which of their points to trace
    files = (folder / PREDICTIONS.replace("*", str(number)) for number in count())
    for family in grouped.values():
        _predict_family(family, tracer, files, spec["timeout_s"])
    for family in families(of_lengths).values():
        _predict_lengths(family, tracer, files, spec["timeout_s"])
    result_file.values(folder, {}, complete=True)
    return 0


def families(trials: Trials) -> dict[str, dict[str, Trial]]:
    """The trials of each family, whose traces differ in sizes at most; where lengths vary those of its batches."""
    found: dict[str, dict[str, Trial]] = defaultdict(dict)
    for trial_id, trial in trials.items():
        traced = (
            varying_lengths.representative_trial(trial, True, point(trial))
            if length_distribution.has_varying_lengths(trial)
            else trial
        )
        found[trace_cache.family_key(traced, trial.device.card)][trial_id] = trial
    return found


def _predict_family(family: Trials, tracer: Tracer, files: Iterator[Path], deadline_s: float) -> None:
    by_point: dict[Point, list[str]] = defaultdict(list)
    for trial_id, trial in family.items():
        by_point[point(trial)].append(trial_id)
    anyone = next(iter(family.values()))

    found = curve(anyone, by_point, tracer)
    found.trace([at(anyone, where) for where in sorted(by_point)])
    refused = {where: error for where in by_point if (error := tracer.refused(at(anyone, where))) is not None}
    if refused:
        answers = (_answer(trial_id, error) for where, error in refused.items() for trial_id in by_point[where])
        next(files).write_bytes(b"".join(answers))
    wanted = [trial_id for where, ids in by_point.items() if where not in refused for trial_id in ids]
    at_hand: dict[tuple[Point, str | None], Any] = {}  # the last trace: trials of one point on one card are neighbours

    def predict(trial: Trial) -> predicted_row.Predicted | None:
        where = point(trial), trial.device.gpu
        if where not in at_hand:
            at_hand.clear()
            at_hand[where] = found.at(trial)
        return None if at_hand[where] is None else predicted_row.predict(trial, *at_hand[where])

    parts = [wanted[first : first + AT_A_TIME] for first in range(0, len(wanted), AT_A_TIME)]
    _predict([{trial_id: family[trial_id] for trial_id in part} for part in parts], predict, files, deadline_s)


def _predict_lengths(family: Trials, tracer: Tracer, files: Iterator[Path], deadline_s: float) -> None:
    """The trials of a family whose lengths vary, each in a process of its own: it has hundreds of steps."""
    found = varying_lengths.family(list(family.values()), tracer)
    wanted: list[Trials] = []
    for trial_id, trial in family.items():
        error = varying_lengths.refused([trial], found, tracer)
        if error is not None:
            next(files).write_bytes(_answer(trial_id, error))
        else:
            wanted.append({trial_id: trial})

    def predict(trial: Trial) -> predicted_row.Predicted:
        try:
            return varying_lengths.predict(trial, found)
        except InvalidTrial as error:  # its own attempt would trace hundreds of steps to say the same
            return predicted_row.Predicted({}, (), error)

    _predict(wanted, predict, files, deadline_s)


def _predict(wanted: Sequence[Trials], predict: Predict, files: Iterator[Path], deadline_s: float) -> None:
    """Predict some trials in each process; where `predict` raises or returns None, an attempt of its own tells why."""
    jobs: list[Job] = [(partial(_write, some, predict, next(files)), deadline_s * len(some)) for some in wanted]
    for _ in forked(jobs, at_once()):
        pass


def _write(trials: Trials, predict: Predict, file: Path) -> None:
    with file.open("ab", buffering=0) as lines:
        for trial_id, trial in trials.items():
            began = time.monotonic()
            try:
                predicted = predict(trial)
            except Exception:
                traceback.print_exc()
            else:
                if predicted is not None:  # else it could not be traced: its own attempt will show why
                    lines.write(_encode_answer(trial_id, predicted, began))


def _encode_answer(trial_id: str, predicted: predicted_row.Predicted, began: float) -> bytes:
    told: dict[str, Any] = {"values": predicted.columns, "complete": True}
    if predicted.error is not None:
        told = process_end.error_result(predicted.error)
    last = predicted_row.record(*predicted.phases[-1]) if predicted.phases else None
    return _answer(trial_id, told, last, time.monotonic() - began)


def _answer(
    trial_id: str, told: Mapping[str, Any], record: Mapping[str, Any] | None = None, seconds: float | None = None
) -> bytes:
    line = {"trial_id": trial_id, "result": told, "record": record, "duration_s": seconds}
    return json.dumps(line).encode() + b"\n"
