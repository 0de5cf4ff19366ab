"""Predictors of a family's trials. A family is traced once, only at the points that its trials need.

The traces come from trace_workers.py; the predictions run in runners/worker/batch_server.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from vramsweep.harness.spec import length_distribution
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.predict import predicted_row
from vramsweep.runners.symbolic import varying_lengths
from vramsweep.runners.symbolic.trace_family import at, curve, point
from vramsweep.runners.symbolic.trace_workers import Tracer
from vramsweep.runners.trace.symbolic_trace import Point

AT_A_TIME = 16  # most trials that one process predicts; the next process has its own deadline
Predict = Callable[[Trial], predicted_row.Predicted | None]


@dataclass(frozen=True)
class Predictor:
    """The predictor of a family's trials, after tracing. `predict` returns None for a trial that could not be traced;
    `refused` returns the error that says why, if known. `at_a_time` trials share a process."""

    predict: Predict
    refused: Callable[[Trial], dict[str, Any] | None]
    at_a_time: int


def trace_family(family: Mapping[str, Trial], tracer: Tracer) -> Predictor:
    """Trace what the trials of a family need, and return their predictor."""
    anyone = next(iter(family.values()))
    if length_distribution.has_varying_lengths(anyone):  # hundreds of steps a trial
        return _trace_varying(list(family.values()), tracer)
    points = sorted({point(trial) for trial in family.values()})
    found = curve(anyone, points, tracer)
    found.trace([at(anyone, where) for where in points])

    @cache
    def refused(where: Point) -> dict[str, Any] | None:  # cached, because one point may have many trials
        return tracer.refused(at(anyone, where))

    return Predictor(found.predict, lambda trial: refused(point(trial)), AT_A_TIME)


def _trace_varying(trials: Sequence[Trial], tracer: Tracer) -> Predictor:
    found = varying_lengths.family(trials, tracer)

    def predict(trial: Trial) -> predicted_row.Predicted:
        try:
            return varying_lengths.predict(trial, found)
        except InvalidTrial as error:  # an attempt of its own would trace hundreds of steps for the same error
            return predicted_row.Predicted({}, (), error)

    return Predictor(predict, lambda trial: varying_lengths.refused(trial, tracer), 1)
