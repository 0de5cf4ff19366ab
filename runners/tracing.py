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
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch._subclasses import fake_tensor as fakes

from vramsweep.harness import credentials, machine, variables
from vramsweep.harness.files import content, replaced
from vramsweep.harness.gpus import Gpu
from vramsweep.harness.links import Collective
from vramsweep.harness.roofline import Work
from vramsweep.harness.trial import SIMULATION, InvalidTrial, Trial
from vramsweep.runners import believed, build, differences, masks, techniques
from vramsweep.runners.cuda_like import behave
from vramsweep.runners.instruments import backward_boundaries
from vramsweep.runners.over_ranks import Columns
from vramsweep.runners.storages import HostStorages, Mark
from vramsweep.runners.trace import Trace, Tracer, generation, on

FORMAT = 11  # of a kept trace; raise it when its layout changes (harness.trial.SIMULATION when what is predicted does)
NOT_TRACED = frozenset({"allocator", "protocol", "repeat", "device"})  # axes that a trace does not depend on
KEPT_ON = (8, 0)  # the compute capability of the card whose workspaces a kept trace has, whichever card came first
COUNTED = {"kernels": Work, "collectives": Collective}  # fields of a trace that count what they hold


class Runner(Protocol):
    """A runner's module."""

    def run(self, trial: Trial, device: torch.device, meter: Any, folder: Path) -> None:
        """Train `trial.steps()` steps under the meter."""


class TraceMeter:
    """Takes a runner's calls, as measure.StepMeter, and marks phases in the trace instead of measuring."""

    def __init__(self, trial: Trial, tracer: Tracer) -> None:
        self.trial, self.tracer, self.rank, self.index = trial, tracer, 0, 0
        self.details: Columns = {}
        self._describe: Callable[[], Columns] = dict

    def built(self, describe: Callable[[], Columns], skipped: Callable[[], int | None] | None = None) -> None:
        self._describe = describe
        self.tracer.built()

    def step_begin(self) -> None:
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
    meter = TraceMeter(trial, tracer)
    build.prepare(trial)
    try:
        with (
            behave(card.capability) as attention,
            masks.known(trial),
            backward_boundaries(lambda: meter.mark("forward"), lambda: meter.mark("backward")),
            tracer.record(),
            techniques.around(trial, torch.device("cpu")),
            differences.applied(trial) as applied,
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


def kept(trial: Trial, card: Gpu, folder: Path, runner: ModuleType, traces: Path) -> tuple[Trace, dict[str, Any]]:
    """The trial's trace from the folder `traces`, made and left there if it is not in it yet. Raises InvalidTrial."""
    found = stored(trial, card, traces)
    if found is not None:
        return found
    trace, details = trace_trial(trial, card, folder, runner)
    traces.mkdir(parents=True, exist_ok=True)
    told = credentials.cleaned(details, variables.secrets(os.environ))  # a library's configuration among them
    with replaced(place(trial, card, traces)) as aside:
        aside.write_bytes(written({"trace": plain(on(trace, KEPT_ON)), "details": told}))
    return trace, details


def stored(trial: Trial, card: Gpu, traces: Path) -> tuple[Trace, dict[str, Any]] | None:
    """The trial's trace from the folder `traces`; None if it is not in it, or not as it was written."""
    file = place(trial, card, traces)
    try:
        trace, details = read(content(file))
    except OSError:
        return None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        print(f"{file} is no trace as it was written ({error!s:.80}): it is made anew", flush=True)
        file.unlink(missing_ok=True)
        return None
    return on(trace, card.capability), details


def written(values: Mapping[str, Any]) -> bytes:
    """JSON and its checksum, as they stand in a file."""
    text = json.dumps(values).encode()
    return text + b"\n%08x\n" % zlib.crc32(text)


def read(content: bytes) -> tuple[Trace, dict[str, Any]]:
    """What a file holds. Raises KeyError, TypeError, ValueError or RecursionError for anything that was not written."""
    text, _, checksum = content.removesuffix(b"\n").rpartition(b"\n")
    if checksum != b"%08x" % zlib.crc32(text):
        raise ValueError("its checksum is not that of its content")
    found = json.loads(text)
    trace, details = of_plain(found["trace"]), found["details"]
    believed.check(trace)
    if not isinstance(details, dict):
        raise TypeError("its details are no object")
    return trace, details


def plain(trace: Trace) -> dict[str, Any]:
    """The trace in values that JSON can say."""
    values = asdict(trace)
    for storages in (values, values["host"]):
        storages["marks"] = [list(mark.values()) for mark in storages["marks"]]
    return values | {name: [(list(one.values()), count) for one, count in values[name]] for name in COUNTED}


def of_plain(values: Mapping[str, Any]) -> Trace:
    """The trace that `plain` told. Raises KeyError, TypeError or ValueError for anything else."""
    counted = {name: [(kind(*one), count) for one, count in values[name]] for name, kind in COUNTED.items()}
    made: dict[str, Any] = {
        **values,
        **counted,
        "marks": [Mark(*mark) for mark in values["marks"]],
        "host": HostStorages(**values["host"] | {"marks": [Mark(*mark) for mark in values["host"]["marks"]]}),
        "makers": [(module, operator) for module, operator in values["makers"]],
        "stepwise": [(storage, text, of) for storage, text, of in values["stepwise"]],
    }
    return Trace(**made)


def place(trial: Trial, card: Gpu, traces: Path) -> Path:
    """The file of a trace in the folder `traces`."""
    return traces / f"{trace_key(trial, card)}.json"


def trace_key(trial: Trial, card: Gpu) -> str:
    """Names what a trace depends on: all of a trial that can change it, the card's generation, versions."""
    return _key(trial, card, NOT_TRACED)


def family_key(trial: Trial, card: Gpu) -> str:
    """The same but for length and batch: names the trials whose traces differ in sizes at most, or in little more."""
    return _key(trial, card, NOT_TRACED | {"seq_len", "micro_batch"})


def _may_take_cudnn(trial: Trial) -> bool:
    """Whether a call of attention may be cuDNN's, which serves halves; what a user's code asks for is not known."""
    ours = trial.runner.name not in ("custom", "script")
    return not ours or (trial.attention in ("sdpa", "sdpa_cudnn") and trial.precision not in ("fp32", "tf32"))


def _key(trial: Trial, card: Gpu, without: Set[str]) -> str:
    axes = trial.model_dump(mode="json", exclude=set(without))
    versions = [machine.version(package) for package in ("torch", "transformers", "accelerate", "deepspeed")]
    kind = generation(card.capability, _may_take_cudnn(trial))
    of_the_card = [kind, card.multiprocessors if trial.kernels == "liger" else None]
    text = json.dumps([FORMAT, SIMULATION, axes, of_the_card, versions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
