"""Predictions, one or many in an attempt: trace what each family of trials needs, then predict every trial.

For many trials this process only coordinates. It forks processes to trace and to predict, because a crash or hang must
not take others along. Also, DeepSpeed keeps its process groups as long as a process lives. Trials without an answer
get attempts of their own. The parent reads answers as they come (harness/sweep/batch_prediction.py).
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

from vramsweep.harness.process.worker_files import PREDICTIONS, STEPS
from vramsweep.harness.spec import length_distribution
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.predict import predicted_row, trace_cache
from vramsweep.runners.rank import process_end, result_file
from vramsweep.runners.symbolic import trace_family, varying_lengths
from vramsweep.runners.symbolic.trace_family import curve, point
from vramsweep.runners.symbolic.trace_workers import Job, Tracer, at_once, forked, import_makers, write_answers
from vramsweep.runners.trace.symbolic_trace import Point

AT_A_TIME = 16  # most trials that one process predicts; the next process has its own deadline
Trials = Mapping[str, Trial]  # by id
Predict = Callable[[Trial], predicted_row.Predicted | None]


@dataclass(frozen=True)
class Predictor:
    """The predictor of a family's trials, after tracing. `predict` returns None for a trial that could not be traced;
    `refused` returns the error that says why, if known. `at_a_time` trials share a process."""

    predict: Predict
    refused: Callable[[Trial], dict[str, Any] | None]
    at_a_time: int


def main(folder: Path, spec: Mapping[str, Any]) -> int:
    """Answer the trials of the spec as far as possible; return the exit status."""
    trials = {one["trial_id"]: Trial.model_validate(one["trial"]) for one in spec["trials"]}
    fixed, varying = (
        families({i: t for i, t in trials.items() if length_distribution.has_varying_lengths(t) is vary})
        for vary in (False, True)
    )
    alone = [family for family in fixed.values() if len(set(map(point, family.values()))) == 1]
    others = [family for family in fixed.values() if len(set(map(point, family.values()))) > 1] + [*varying.values()]
    tracer = Tracer(folder, spec["timeout_s"], families=len(alone) + len(others), alone=len(alone))
    tracer.trace([next(iter(family.values())) for family in alone])  # all at once; other families choose their points
    limit, small = spec["timeout_s"], [family for family in alone if len(family) <= AT_A_TIME]
    others = [family for family in alone if len(family) > AT_A_TIME] + others
    if padded := [one for family in small for one in family.values() if one.padding]:
        import_makers(padded[0])  # torch counts the padding: import it once for all forks
    if small:
        tracer.known = len(small)
        tracer.tell("predicting")
    jobs: list[Job] = [
        (partial(_load_and_answer, family, tracer, folder, number, limit), limit * (1 + len(family)))
        for number, family in enumerate(small)
    ]
    for _ in forked(jobs, at_once()):
        pass
    for number, family in enumerate(others, len(small)):
        known = trace_points(family, tracer)
        tracer.known += 1
        tracer.tell("predicting")
        _answer_family(family, known, folder, number, limit)
    result_file.values(folder, {}, complete=True)
    return 0


def lacks_traces(folder: Path, spec: Mapping[str, Any]) -> bool:
    """Return whether an attempt that predicts will have to trace, as far as that is known before."""
    asked = spec.get("trials", [spec])
    trials = {str(number): Trial.model_validate(one.get("trial", one)) for number, one in enumerate(asked)}
    tracer, axis = Tracer(folder, 0.0), spec.get("axis")
    for family in families(trials).values():
        points = {point(trial): trial for trial in family.values()}
        if axis is not None:
            along = (one.model_copy(update={axis: value}) for one in points.values() for value in spec["values"])
            points = {point(one): one for one in along}
        anyone = next(iter(family.values()))
        if length_distribution.has_varying_lengths(anyone) or trace_family.lacks_traces(anyone, points, tracer):
            return True
    return False


def predict_trial(trial: Trial, folder: Path) -> dict[str, Any]:
    """Predict one trial in this process and return the row's columns. Write its phases to the attempt's folder.

    Raises SimulatedOutOfMemoryError if it does not fit on the GPU, SimulatedHostOutOfMemoryError if the node's memory
    is full before, InvalidTrial if a step cannot be traced.
    """
    forks = length_distribution.has_varying_lengths(trial)  # as it needs several traces
    known = trace_points({"": trial}, Tracer(folder, math.inf, forks))
    if forks and (refused := known.refused(trial)) is not None:
        raise InvalidTrial(refused["error"]["message"])
    result_file.progress(folder, "replaying its allocations")
    predicted = known.predict(trial)
    assert predicted is not None  # else tracing had raised
    # like a worker's records of steps: the last phase of the replay is where memory ran out
    lines = [json.dumps(predicted_row.record(*phase)) for phase in predicted.phases]
    if lines:  # else the records of tracing say where it ended
        (folder / STEPS).write_text("".join(f"{line}\n" for line in lines))
    if predicted.error is not None:
        raise predicted.error
    return predicted.columns


def trace_points(family: Trials, tracer: Tracer) -> Predictor:
    """Trace a family once, only at the points that its trials need, and return their predictor."""
    anyone = next(iter(family.values()))
    if length_distribution.has_varying_lengths(anyone):  # hundreds of steps a trial
        return _trace_varying(list(family.values()), tracer)
    points = sorted({point(trial) for trial in family.values()})
    found = curve(anyone, points, tracer)
    found.trace([trace_family.at(anyone, where) for where in points])

    @cache
    def refused(where: Point) -> dict[str, Any] | None:  # cached, because one point may have many trials
        return tracer.refused(trace_family.at(anyone, where))

    return Predictor(found.predict, lambda trial: refused(point(trial)), AT_A_TIME)


def _trace_varying(trials: Sequence[Trial], tracer: Tracer) -> Predictor:
    found = varying_lengths.family(trials, tracer)

    def predict(trial: Trial) -> predicted_row.Predicted:
        try:
            return varying_lengths.predict(trial, found)
        except InvalidTrial as error:  # an attempt of its own would trace hundreds of steps for the same error
            return predicted_row.Predicted({}, (), error)

    return Predictor(predict, lambda trial: varying_lengths.refused(trial, tracer), 1)


def families(trials: Trials) -> dict[str, dict[str, Trial]]:
    """Group trials by family, whose traces (if lengths vary, those of its batches) differ in sizes at most."""
    found: dict[str, dict[str, Trial]] = defaultdict(dict)
    for trial_id, trial in trials.items():
        varying = length_distribution.has_varying_lengths(trial)
        traced = varying_lengths.representative_trial(trial, True, point(trial)) if varying else trial
        found[trace_cache.family_key(traced, trial.device.card)][trial_id] = trial
    return found


def _load_and_answer(family: Trials, tracer: Tracer, *how: Any) -> None:
    """Load one point's kept trace and answer its trials, in a fork, because loading takes as long as a replay."""
    _answer_family(family, trace_points(family, tracer), *how)


def _answer_family(family: Trials, known: Predictor, folder: Path, at: int, deadline_s: float) -> None:
    """Answer the trials of a family, some in each process that is forked for it.

    If `predict` raises or returns None, an attempt of the trial's own will report why.
    """
    files = (folder / PREDICTIONS.replace("*", f"{at}-{number}") for number in count())
    refused = {name: error for name, trial in family.items() if (error := known.refused(trial)) is not None}
    if refused:
        next(files).write_bytes(b"".join(_answer(name, error) for name, error in refused.items()))
    by_point: dict[Point, list[str]] = defaultdict(list)  # trials of one point share its trace
    for name, trial in family.items():
        by_point[point(trial)].append(name)
    wanted = [name for names in by_point.values() for name in names if name not in refused]
    parts = [wanted[at : at + known.at_a_time] for at in range(0, len(wanted), known.at_a_time)]
    own = [{name: family[name] for name in part} for part in parts]
    encode = partial(_encode_answer, known.predict)
    jobs: list[Job] = [(partial(write_answers, one.items(), encode, next(files)), deadline_s * len(one)) for one in own]
    for _ in forked(jobs, at_once()):
        pass


def _encode_answer(predict: Predict, asked: tuple[str, Trial]) -> bytes:
    began, (trial_id, trial) = time.monotonic(), asked
    if (predicted := predict(trial)) is None:  # it could not be traced: its own attempt will show why
        return b""
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
