"""A process that looks into traces: `python -m vramsweep.runners.look_worker REQUEST ANSWER`, both JSON files.

REQUEST has `question` (a name of `QUESTIONS`), `trials` (resolved), `traces` (the folder where traces are kept) and
`trace`: whether a trial whose trace is not there is traced, at most one, as some libraries remember the first. ANSWER
has `answers`, for each trial its answer or null, or `error`, one line for the user.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vramsweep.harness import registry
from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.errors import UserError
from vramsweep.harness.gpus import memory_limit
from vramsweep.harness.trial import Trial
from vramsweep.runners import simulated, tracing
from vramsweep.runners.explain import explanation
from vramsweep.runners.timeline import timeline
from vramsweep.runners.trace import Trace

Answer = dict[str, Any] | None


def _timeline(trace: Trace, trial: Trial) -> Answer:
    found = timeline(trace, allocator_config.parse(trial.allocator.conf), memory_limit(trial.device.card))
    return None if found is None else asdict(found)


def _explanation(trace: Trace, trial: Trial) -> Answer:
    found = explanation(trace, allocator_config.parse(trial.allocator.conf), memory_limit(trial.device.card))
    return None if found is None else asdict(found) | {"host_refused": simulated.host_refused(trial, trace)}


# Each is asked about a trial's trace, and answers with plain data, in bytes; None of an empty trace.
QUESTIONS: dict[str, Callable[[Trace, Trial], Answer]] = {"timeline": _timeline, "explanation": _explanation}


def of_trial(question: str, trial: Trial, traces: Path, trace: bool) -> Answer:
    """The trial's answer, in bytes; None where its trace is not kept and `trace` is false. Raises UserError."""
    card = trial.device.card
    if not trace:  # then nothing may run, whatever becomes of the file meanwhile
        found = tracing.stored(trial, card, traces)
        return None if found is None else QUESTIONS[question](found[0], trial)
    runner = importlib.import_module(registry.module(trial))
    with tempfile.TemporaryDirectory() as folder:
        traced, _ = tracing.kept(trial, card, Path(folder), runner, traces)
    return QUESTIONS[question](traced, trial)


def main(request: Path, answer: Path) -> None:
    """Answer one request."""
    asked = json.loads(request.read_text())
    trials = [Trial.model_validate(values) for values in asked["trials"]]
    try:
        traces, trace = Path(asked["traces"]), bool(asked["trace"])
        said = {"answers": [of_trial(asked["question"], trial, traces, trace) for trial in trials]}
    except UserError as error:
        said = {"error": str(error)}  # type: ignore[dict-item]
    answer.write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
