"""Traces of trials: made by running the trial's own runner on fake tensors, and kept for every trial that shares them.

A trace depends on neither the allocator's setting nor the size of the card's memory, so it is kept in the sweep's
folder, under a hash of what it does depend on. The cuBLAS workspaces of the card are put in when it is read. Its file
is JSON with the CRC-32 of that as a last line: one that is not what was written is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter
from torch._subclasses import fake_tensor as fakes

from vramsweep.harness.files import redaction
from vramsweep.harness.files.bounded_reads import read_content, replaced
from vramsweep.harness.hardware.gpu_lookup import Gpu
from vramsweep.harness.machine import machine
from vramsweep.harness.process import worker_environment
from vramsweep.harness.spec.runner_table import USER_CODE
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.harness.spec.trial_identity import SIMULATION
from vramsweep.runners.measure.counters import backward_boundaries
from vramsweep.runners.model import apply_techniques, build
from vramsweep.runners.predict import mask_facts
from vramsweep.runners.rank import result_file
from vramsweep.runners.rank.aggregate_ranks import Columns
from vramsweep.runners.trace import stream_lag
from vramsweep.runners.trace.cuda_emulation import behave
from vramsweep.runners.trace.step_tracer import Trace, Tracer, generation, on
from vramsweep.runners.trace.storage_log import AS_WRITTEN, CATEGORIES, HOST_CATEGORIES, Storages
from vramsweep.runners.trace.symbolic_trace import Point, compiled, following
from vramsweep.runners.trace.version_patches import install

# Of a kept trace; raise it when its layout changes, and trial_identity.SIMULATION when what is predicted does.
FORMAT = 11
NOT_TRACED = frozenset({"allocator", "protocol", "repeat", "device"})  # axes that a trace does not depend on
MOST = 1 << 63  # of any number in a trace
KEPT_ON = (8, 0)  # the compute capability of the card whose workspaces a kept trace has, whichever card came first


@dataclass(frozen=True)
class _Kept:
    """What a file of a trace holds."""

    __pydantic_config__ = AS_WRITTEN
    trace: Trace
    details: dict[str, Any]


_KEPT = TypeAdapter(_Kept)


class Runner(Protocol):
    """A runner's module."""

    def run(self, trial: Trial, device: torch.device, meter: Any, folder: Path) -> None:
        """Train `trial.steps()` steps under the meter."""


class TraceMeter:
    """Takes a runner's calls, as measure.StepMeter, and marks phases in the trace instead of measuring."""

    def __init__(self, trial: Trial, tracer: Tracer, folder: Path) -> None:
        self.trial, self.tracer, self.rank, self.index = trial, tracer, 0, 0
        self._say = partial(result_file.progress, folder)
        self._say(f"building {trial.model.name}" if trial.runner.command is None else "running the script's beginning")
        self.details: Columns = {}
        self._describe: Callable[[], Columns] = dict

    def built(self, describe: Callable[[], Columns], skipped: Callable[[], int | None] | None = None) -> None:
        self._describe = describe
        self.tracer.built()

    def step_begin(self) -> None:
        self._say(f"tracing step {self.index + 1} of {self.trial.steps()}")
        self.tracer.in_step = True
        self.tracer.in_last_step = self.index == self.trial.steps() - 1

    def fed(self, batch: Any) -> None: ...

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        self.mark("optimizer")
        if self.tracer.in_last_step:
            self.details = self._describe()
            self._describe = dict  # or it would keep the model alive
        self.tracer.in_step = self.tracer.in_last_step = False
        self.index += 1

    def mark(self, phase: Any) -> None:
        """A phase of the current step ends here."""
        self.tracer.mark(self.index, phase)


def trace_trial(
    trial: Trial, card: Gpu, folder: Path, runner: Runner, tracer: Tracer | None = None
) -> tuple[Trace, dict[str, Any]]:
    """Trace the runner's steps; the trace and the columns about what was built. Raises InvalidTrial if it cannot be.

    `tracer` is a plain one unless given.
    """
    tracer = tracer or Tracer(card.capability)
    meter = TraceMeter(trial, tracer, folder)
    build.prepare(trial)
    try:
        with (
            behave(card.capability) as attention,
            mask_facts.answer_questions(trial),
            backward_boundaries(lambda: meter.mark("forward"), lambda: meter.mark("backward")),
            tracer.record(),
            apply_techniques.around(trial, torch.device("cpu")),
            install.applied(trial) as applied,
        ):
            runner.run(trial, torch.device("cpu"), meter, folder)
    except (fakes.DataDependentOutputException, fakes.DynamicOutputShapeException) as error:
        raise InvalidTrial(
            f"cannot be simulated: the step asks for a tensor's value ({error.func}), which exists only on a GPU; take "
            ".item(), boolean tests of tensors and masks by value out of the step, or measure on device=cuda"
        ) from error
    except (fakes.UnsupportedOperatorException, fakes.UnsupportedFakeTensorException, RuntimeError) as error:
        unsupported = isinstance(error, (fakes.UnsupportedOperatorException, fakes.UnsupportedFakeTensorException))
        if not unsupported and "fake impl" not in str(error):  # what custom operators say
            raise
        what = str(getattr(error, "func", None) or error).strip().splitlines()[0]
        raise InvalidTrial(
            f"cannot be simulated: an operator has no fake implementation ({what}); register one with "
            "torch.library.register_fake, or measure on device=cuda"
        ) from error
    about = {"attention_kernels": sorted(attention) or None, "differences": applied or None}
    return tracer.trace, meter.details | about


def load_or_trace(
    trial: Trial, card: Gpu, folder: Path, runner: ModuleType, traces: Path
) -> tuple[Trace, dict[str, Any]]:
    """The trial's trace from the folder `traces`, made and left there if it is not in it yet. Raises InvalidTrial."""
    found = load_trace(trial, card, traces)
    if found is not None:
        return found
    trace, details = trace_trial(trial, card, folder, runner)
    traces.mkdir(parents=True, exist_ok=True)
    told = redaction.redact(details, worker_environment.secrets(os.environ))  # a library's configuration among them
    with replaced(trace_path(trial, card, traces)) as aside:
        aside.write_bytes(serialize({"trace": asdict(on(trace, KEPT_ON)), "details": told}))
    return trace, details


def load_trace(trial: Trial, card: Gpu, traces: Path) -> tuple[Trace, dict[str, Any]] | None:
    """The trial's trace from the folder `traces`; None if it is not in it, or not as it was written."""
    file = trace_path(trial, card, traces)
    try:
        trace, details = read(read_content(file))
    except OSError:
        return None
    except ValueError as error:
        print(f"{file} is no trace as it was written ({error!s:.80}): it is made anew", flush=True)
        file.unlink(missing_ok=True)
        return None
    return on(trace, card.capability), details


def serialize(values: Mapping[str, Any]) -> bytes:
    """JSON and its checksum, as they stand in a file."""
    text = json.dumps(values).encode()
    return text + b"\n%08x\n" % zlib.crc32(text)


def read(content: bytes) -> tuple[Trace, dict[str, Any]]:
    """What a file holds. Raises ValueError for anything that was not written."""
    text, _, checksum = content.removesuffix(b"\n").rpartition(b"\n")
    if checksum != b"%08x" % zlib.crc32(text):
        raise ValueError("its checksum is not that of its content")
    kept = _KEPT.validate_json(text)
    check(kept.trace)
    return kept.trace, kept.details


def trace_path(trial: Trial, card: Gpu, traces: Path) -> Path:
    """The file of a trace in the folder `traces`."""
    return file_of(trace_key(trial, card), traces)


def file_of(key: str, traces: Path) -> Path:
    """The file of the trace that `trace_key` names."""
    return traces / f"{key}.json"


def trace_key(trial: Trial, card: Gpu) -> str:
    """Names what a trace depends on: all of a trial that can change it, the card's generation, versions."""
    return _key(trial, card, NOT_TRACED)


def family_key(trial: Trial, card: Gpu) -> str:
    """The same but for length and batch: names the trials whose traces differ in sizes at most, or in little more."""
    return _key(trial, card, NOT_TRACED | {"seq_len", "micro_batch"})


def _may_take_cudnn(trial: Trial) -> bool:
    """Whether a call of attention may be cuDNN's, which serves halves; what a user's code asks for is not known."""
    ours = trial.runner.name not in USER_CODE
    return not ours or (trial.attention in ("sdpa", "sdpa_cudnn") and trial.precision not in ("fp32", "tf32"))


def _key(trial: Trial, card: Gpu, without: Set[str]) -> str:
    axes = trial.model_dump(mode="json", exclude=set(without))
    versions = [machine.version(package) for package in ("torch", "transformers", "accelerate", "deepspeed")]
    kind = generation(card.capability, _may_take_cudnn(trial))
    of_the_card = [kind, card.multiprocessors if trial.kernels == "liger" else None]
    text = json.dumps([FORMAT, SIMULATION, axes, of_the_card, versions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check(trace: Trace, sized: bool = True) -> None:
    """Raise ValueError, with what is wrong, for a trace that cannot be believed: every number must be in its range,
    every list of its length. What is predicted from it would else be wrong without a word, or fail far from here.

    `sized`: it has sizes, kernels and collectives of its own. Not covered: that every value is of its field's type,
    which pydantic looks at; whether the storages are those of any program.
    """
    for storages, categories in ((trace, CATEGORIES), (trace.host, HOST_CATEGORIES)):
        _storages(storages, categories, sized)
    count = len(trace.categories)
    _need(len(trace.streams) == len(trace.origins) == count, "streams and origins are not one a storage")
    _need(len(trace.host.pinned) == len(trace.host.categories), "pinned is not one a storage")
    _need(all(origin < len(trace.makers) for origin in trace.origins), "origins are not among the makers")
    for work, _ in trace.kernels:
        _need(_numbers((work.flops, work.nbytes, work.launches)), "kernels are wrong")
    _need(_numbers([called.nbytes for called, _ in trace.collectives]), "collectives are wrong")
    for storage, text, of in trace.stepwise:
        _need(storage < count, "a size that follows a number is that of no storage")
        _need(not sized or compiled(following(text, str(of)))(Point(0, 0)) == trace.sizes[storage], "stepwise is wrong")
    for at, kind, one, other in trace.notes:
        _need(kind in stream_lag.KINDS and _numbers((at, one, other)), "notes are wrong")


def _storages(storages: Storages, categories: Collection[str], sized: bool) -> None:
    count, marks = len(storages.categories), storages.marks
    _need(set(storages.categories) <= set(categories), "a category is unknown")
    _need(len(storages.sizes) == count * sized, "sizes are not one a storage")
    _need(all(-count <= event <= count for event in storages.events), "events are of no storage")
    _need(all(mark.end <= len(storages.events) for mark in marks), "marks are beyond the events")
    _need(all(before.end <= after.end for before, after in pairwise(marks)), "marks are not in order")


def _numbers(values: Sequence[int]) -> bool:
    return all(0 <= value < MOST for value in values)


def _need(well: bool, what: str) -> None:
    if not well:
        raise ValueError(f"a trace that cannot be believed: {what}")
