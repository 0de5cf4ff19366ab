"""Server of an attempt that answers a question about traces instead of running trials.

Its spec has `question` (a name of `QUESTIONS`), `trials` (resolved), `traces` (the folder where traces are kept) and
`trace`: whether a missing trace is made. At most one is, because some libraries remember the first. The answer is a
list: for each trial its answer, in bytes, or null.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.hardware.gpu_lookup import memory_limit
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.predict import predicted_row, trace_cache
from vramsweep.runners.predict.explanation import explanation, group_storages
from vramsweep.runners.predict.memory_timeline import snapshot, timeline
from vramsweep.runners.rank import process_end, result_file
from vramsweep.runners.trace.trace_data import Trace

Answer = dict[str, Any] | None
Setting = tuple[AllocatorConfig, int]  # with the GPU's memory limit, in bytes


def _timeline(trace: Trace, trial: Trial, setting: Setting) -> Answer:
    found = timeline(trace, *setting)
    return None if found is None else asdict(found)


def _explanation(trace: Trace, trial: Trial, setting: Setting) -> Answer:
    if (found := explanation(trace, *setting)) is None:
        return None
    answer = asdict(found) | {"host_refused": predicted_row.host_refused(trial, predicted_row.host_of(trial, trace))}
    answer["speed"], answer["untimed"] = predicted_row.speed(trial, trace, trial.device.card)
    if found.refused is not None:
        answer["refused"]["mark"] = found.refused.mark._asdict()  # by name, as programs read it: `explain --json`
    return answer


def _peak(trace: Trace, trial: Trial, setting: Setting) -> Answer:
    if (found := explanation(trace, *setting)) is None:
        return None
    peak, *phases = (asdict(one) | {"storages": group_storages(trace, one)} for one in (found.peak, *found.phases))
    return {"fits": found.refused is None, "reserved": found.peak_reserved, "peak": peak, "phases": phases}


# Each answers from a trial's trace with plain data, in bytes; None for an empty trace.
QUESTIONS: dict[str, Callable[[Trace, Trial, Setting], Answer]] = {
    "timeline": _timeline,
    "snapshot": lambda trace, trial, setting: snapshot(trace, *setting),
    "explanation": _explanation,
    "peak": _peak,
}


def answer_trial(question: str, trial: Trial, folder: Path, traces: Path, trace: bool) -> Answer:
    """Return the trial's answer, in bytes; None if its trace is not kept and `trace` is false. Raises UserError."""
    card = trial.device.card
    if not trace:  # then nothing may run, even if the file disappears meanwhile
        found = trace_cache.load_trace(trial, card, traces)
    else:
        found = trace_cache.load_or_trace(trial, card, folder, traces)
    result_file.progress(folder, "replaying its allocations")
    setting = allocator_config.parse(trial.allocator.conf), memory_limit(card)
    return None if found is None else QUESTIONS[question](found[0], trial, setting)


def main(folder: Path, spec: Mapping[str, Any]) -> int:
    """Answer the question for each trial of the spec; return the exit status."""
    trials = [Trial.model_validate(values) for values in spec["trials"]]
    try:
        answers = [answer_trial(spec["question"], one, folder, Path(spec["traces"]), spec["trace"]) for one in trials]
    except Exception as error:
        process_end.print_traceback()
        result_file.error(folder, process_end.error_result(error))
        return result_file.FAILED
    result_file.answer(folder, answers)
    result_file.values(folder, {}, complete=True)
    return 0
