"""A user's own script on a simulated GPU: its command's Python file, run here on fake tensors.

The observer's events (observer.py) drive the trace. `torch.cuda` answers the script as the simulated GPU would
(traced_counters.py), and tensors put there are traced. If the script reads a floating-point value that exists only on
the GPU (`loss.item()`, to print it), it gets nan, and the row says so. A single whole number or truth value cannot be
had, because it decides something. The script is left once the trace has its steps, and what it would
evaluate or save later is reported (unreached_calls.py). Tensors in host memory have their values (traced_devices.py).

Of torchrun and accelerate launch rank 0 is traced (traced_ranks.py). Another Python than ours cannot be simulated.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import inspect
import io
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor as fakes
from torch.utils._python_dispatch import _disable_current_modes

from vramsweep.harness.process import interpreter
from vramsweep.harness.rows.schema import COLUMNS
from vramsweep.harness.spec import command_template
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.harness.spec.trial_parser import require_unchanged_files
from vramsweep.runners.measure import model_description
from vramsweep.runners.measure.patches import Replacement, patched
from vramsweep.runners.scripts.observation_files import WATCH
from vramsweep.runners.scripts.observed_row import called_with, trained_elsewhere
from vramsweep.runners.scripts.observer import Observer
from vramsweep.runners.scripts.traced_counters import Counters
from vramsweep.runners.scripts.traced_devices import TwoMemories
from vramsweep.runners.scripts.traced_generation import Generation
from vramsweep.runners.scripts.traced_ranks import LAUNCHERS, Ranks, launched
from vramsweep.runners.scripts.unreached_calls import Reached
from vramsweep.runners.trace.known_values import KnownValues, small
from vramsweep.runners.trace.step_tracer import Tracer

# Notes, and messages of torch (torch/csrc/utils/tensor_numpy.cpp)
NOTES: dict[str, str] = json.loads(Path(__file__).with_name("traced_notes.json").read_text("utf-8"))
CARDLESS = ("bitsandbytes",)  # loads its CUDA part if a GPU is there when it is imported
LONGEST_SEARCH = 50  # optimizer steps in which a script may look for its batch
ESTIMATES = tuple(column.name for column in COLUMNS if column.group == "estimate")
_TOKENS = tuple(name for name in ESTIMATES if "tokens_per_s" in name)
_REFUSED = (
    *(fakes.DataDependentOutputException, fakes.DynamicOutputShapeException),
    *(fakes.UnsupportedFakeTensorException, fakes.UnsupportedOperatorException),
)


class _Over(BaseException):
    """Raised when the trace has its steps; no `except Exception` of the script may stop it."""


def run(trial: Trial, device: torch.device, meter: Any, folder: Path) -> None:
    """Run the script until `trial.steps()` of its steps are traced. Raises InvalidTrial if they cannot be."""
    if type(trial.seq_len) is not int or type(trial.micro_batch) is not int:
        raise RuntimeError("a command needs numbers, not symbols")
    require_unchanged_files(trial)
    output = (folder / command_template.OUTPUT).resolve()
    output.mkdir(exist_ok=True)
    (folder / WATCH).write_text(json.dumps({"stop": True}))
    with patched([(argparse.ArgumentParser, "error", _refused)]):
        file, module, arguments, variables = _python(trial, command_template.command_words(trial, str(output)))
    for package in CARDLESS:
        # a missing or broken package is left for the script to find
        with contextlib.suppress(Exception), _disable_current_modes():
            importlib.import_module(package)
    known, meter.tracer.scripted = KnownValues(), True
    meter.tracer.known = known
    values = _Values(known, meter.tracer)
    memories = TwoMemories(meter.tracer)
    triton = _Triton(known)
    counters, ranks = Counters(trial, meter.tracer), Ranks(trial, memories)
    observer = _Traced(folder, trial, meter, values, triton, counters, ranks)
    ended = "ended"
    beside = Path.cwd() if file is None else Path(file).resolve().parent  # as Python does, with -m or a file
    reached = Reached(beside)
    parts = (counters, values, memories, triton, reached, ranks, Generation(known, meter.tracer))
    replaced = (
        *_card(trial, counters.total, int(variables.get("LOCAL_WORLD_SIZE", trial.world_size))),
        *(one for part in parts for one in part.replacements()),
        (argparse.ArgumentParser, "error", _refused),
        (sys, "argv", [file or module, *arguments]),
        (sys, "path", [str(beside), *sys.path]),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        for function in _writing():
            stack.enter_context(_left_out(function))
        stack.enter_context(patched(replaced))
        observer.install()
        stack.callback(observer.uninstall)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # a script that is killed or ends at once leaves its lines
        stack.enter_context(memories)
        stack.enter_context(ranks)
        try:
            if file is not None:
                _left = runpy.run_path(file, run_name="__main__")
            else:
                _left = runpy.run_module(str(module), run_name="__main__", alter_sys=True)
        except _Over as end:
            if meter.tracer.trained == {"host"}:
                raise trained_elsewhere(trial, "cpu") from None
            for code, place in sorted(reached.find_unreached(end)):
                meter.tracer.leave_out(code, place)
            return
        except SystemExit as end:
            ended = "ended" if end.code in (None, 0) else f"ended with {end.code!r}"
        except (InvalidTrial, torch.OutOfMemoryError, *_REFUSED):
            raise  # make_trace.py explains it
        except Exception as error:
            if counters.refused:
                raise torch.OutOfMemoryError from error
            what = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
            own = [frame for frame in frames if beside in Path(frame.filename).resolve().parents]
            place = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
            remedy = "install it in this Python" if isinstance(error, ImportError) else "measure it"
            raise InvalidTrial(f"cannot be predicted, because the script fails{place} ({what}); {remedy}") from error
    if observer.problem is not None:
        raise RuntimeError(observer.problem)
    refused_first = counters.ends_full() and observer.counts["forwards"] == 1  # a search for a batch has more of them
    if ended == "ended" and not refused_first and observer.saw_all():
        return
    if counters.refused:
        raise torch.OutOfMemoryError  # the script ended by it
    raise InvalidTrial(
        f"cannot be predicted, because the script {ended} after {observer.counts['steps']} optimizer steps; it "
        + "; ".join([f"needs {trial.steps() + 1}", *values.notes()])
    )


class _Traced(Observer):
    """An observer that passes what it sees to the trace's meter."""

    def __init__(
        self, folder: Path, trial: Trial, meter: Any, values: _Values, triton: _Triton, counters: Counters, ranks: Ranks
    ) -> None:
        super().__init__(folder)
        self.trial, self.traced, self.values, self.triton = trial, meter, values, triton
        self.counters, self.ranks_of, self.searches = counters, ranks, 0
        self.described: dict[str, Any] = {}

    def unevaluated(self) -> bool:
        return not self.traced.tracer.trace.marks if self.meter is None else super().unevaluated()

    def evaluates(self, module: torch.nn.Module) -> None:
        if self.meter is None and any(one.is_cuda for one in module.parameters()):
            self.built_before(module)  # unless a training begins later
        super().evaluates(module)

    def built_before(self, module: torch.nn.Module | None) -> None:
        """End loading before this module's call."""
        self.described = {} if module is None else model_description.script([module], [])
        for book in self.traced.tracer.books:  # of an evaluation before the training
            book.kept.marks.clear()
        self.traced.built(self.describe)

    def saw_all(self) -> bool:
        """Return whether the script used the GPU without an optimizer step; then the trace has all that it did."""
        tracer = self.traced.tracer
        if self.counts["steps"] or not tracer.trace.sizes or tracer.trained == {"host"}:
            return False
        if not tracer.trace.marks:
            self.built_before(None)
        self.traced.mark("step")
        self.built, unknown = self.described, dict.fromkeys(("step_growth_bytes", "plateau", *_TOKENS))
        told = self.describe()
        self.traced.details = told | unknown | {"notes": [*(told["notes"] or ()), NOTES["no_step"]]}
        return True

    def begin(self, module: torch.nn.Module | None) -> None:
        self.meter = self.traced
        self.built_before(module)
        self.volume.begin_step()
        self.traced.step_begin()

    def boundary(self) -> None:
        self.stepped = self.forward_seen = False
        searches = self.counters.searches + self.counters.refused
        if searches != self.searches and self.volume.varying(2) and len(self.volume.inputs) < LONGEST_SEARCH:
            self.searches = searches  # it may be choosing its batch by the memory: the step goes on until two are alike
            self.volume.begin_step()
            return
        self.traced.step_end()
        if self.traced.index == self.trial.steps():
            raise _Over
        self.volume.begin_step()
        self.traced.step_begin()

    def close(self) -> None:
        self.done = True
        self.hooks.disarm()

    def write(self) -> None:
        """Write nothing, because the trace holds all."""

    def describe(self) -> dict[str, Any]:
        """Return columns about what was built, without estimates of speed that depend on settings the command lacks."""
        built = super().describe()
        counted = [name for name in built if "parameters" in name]
        found = {
            name: built[name] for name in (*counted, "attention_effective", "optimizer_effective") if name in built
        } | {"world_size": self.ranks_of.size}
        told = command_template.placeholder_names(str(self.trial.runner.command))
        shapes = {shape for step in self.volume.steps for shape in step}
        seen = {shape for shape in shapes if shape is not None}
        known = set() if None in shapes else seen
        filled, other = called_with(known, self.trial, told) if known else ({}, [])
        found |= filled
        batches = {self.volume.batches_of(step) for step in range(len(self.volume.steps))}
        if "precision" not in told or self.triton.launches or self.ranks_of.size != self.trial.world_size:
            found |= dict.fromkeys(ESTIMATES)
        if (known, batches) != ({(self.trial.micro_batch, self.trial.seq_len)}, {self.trial.grad_accum}):
            found |= dict.fromkeys(_TOKENS)
        notes = [*self.values.notes(), *self.counters.notes]
        if self.counters.refused:
            found["alloc_ooms"] = self.counters.refused
            notes.append(NOTES["refused"].format(self.counters.refused))
        if self.triton.launches:
            notes.append(NOTES["triton"].format(self.triton.launches // self.trial.steps()))
        every = ", ".join(f"{b} x {n}" for b, n in sorted(seen))
        if other and len(known) == 1:
            said = " and ".join(f"{name}={getattr(self.trial, name)}" for name in other)
            notes.append(f"in the traced steps the model was called with {every} tokens, but {said} is given")
        varying = self.volume.varying(self.trial.steps())
        if len(shapes) > 1 or varying:
            sizes = {"x".join(map(str, shape)) for shape in varying}
            found |= {"step_growth_bytes": None, "plateau": None}
            notes.append(NOTES["lengths"].format(f"{every} tokens" if every else ", ".join(sorted(sizes)[:8])))
            self.traced.tracer.leave_out("batch_shapes", every or "inputs")
        return found | {"notes": notes or None}


class _Triton:
    """Counter of launches of Triton kernels, which write into tensors that torch has made, and allocate none."""

    def __init__(self, known: KnownValues) -> None:
        self.known, self.launches = known, 0

    def replacements(self) -> Iterator[Replacement]:
        """Yield what to replace of Triton, if it is installed: owner, name, stand-in."""
        if importlib.util.find_spec("triton") is None:
            return
        from triton.runtime import autotuner, jit

        def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self.launches += 1
            self.known.lose((args, kwargs))

        for owner in (jit.JITFunction, autotuner.Autotuner):
            yield owner, "run", run


def _refused(parser: argparse.ArgumentParser, message: str) -> None:
    raise InvalidTrial(f"{parser.prog} does not take these options: {message}")


def _writing() -> Iterator[Any]:
    """Yield the functions to disable, because a checkpoint without values would overwrite the script's own."""
    yield torch.save
    if importlib.util.find_spec("safetensors") is not None:
        import safetensors.torch

        yield from (safetensors.torch.save_file, safetensors.torch.save)


@contextlib.contextmanager
def _left_out(function: Any) -> Iterator[None]:
    """Disable the function meanwhile, under all names and for all libraries that imported it."""
    function = inspect.unwrap(function)
    code, function.__code__ = function.__code__, (lambda *args, **kwargs: b"").__code__
    try:
        yield
    finally:
        function.__code__ = code


class _Values:
    """Answers to a script that asks for values of fake tensors: unknown ones are nan.

    Unknown whole numbers and truth values are 0. A module's forward pass gets none of these, because they decide what
    it allocates.
    """

    def __init__(self, known: KnownValues, tracer: Tracer) -> None:
        self.known, self.tracer = known, tracer
        self.asked: collections.Counter[str] = collections.Counter()  # by the text of the note

    def notes(self) -> list[str]:
        """Return the notes on values that were made up."""
        return [text.format("once" if n == 1 else f"{n} times") for text, n in self.asked.items() if n]

    def replacements(self) -> Iterator[Replacement]:
        """Yield what to replace of torch and torch.Tensor: owner, name, stand-in."""
        for name in ("item", "__float__", "__int__", "__bool__", "__format__"):
            yield torch.Tensor, name, self._made_up(getattr(torch.Tensor, name))
        for name in ("isnan", "isinf"):  # the Trainer calls them on every loss
            yield torch, name, self._fine(getattr(torch, name))
        to_list, to_numpy = torch.Tensor.tolist, torch.Tensor.numpy

        def listed(tensor: torch.Tensor) -> Any:
            with _disable_current_modes():
                return to_list(self._read(tensor))

        def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:  # np.asarray calls it too
            if not force and tensor.numel() and not self.tracer.on_host(tensor):
                raise TypeError(NOTES["not_numpy"])
            if not force and tensor.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(NOTES["no_graph"])
            with _disable_current_modes():
                return to_numpy(self._read(tensor))

        yield from ((fakes.FakeTensor, "tolist", listed), (fakes.FakeTensor, "numpy", numpy))

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real tensor for a fake one, outside all modes. Raises DataDependentOutputException."""
        floats = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if (value := self.known.of(tensor)) is not None:
            return value.clone()
        if tensor.numel() and not floats and self.tracer.in_module():
            raise fakes.DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
        self.asked[NOTES["made_up"] if floats else NOTES["whole"]] += bool(tensor.numel())
        made = torch.full((), float("nan") if floats else 0, dtype=tensor.dtype).expand(tensor.shape)
        return made.clone() if small(made) else made  # a large one takes no memory here

    def _fine(self, ask: Any) -> Any:
        def value(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, fakes.FakeTensor) and tensor.dim() == 0:
                self.asked[NOTES["made_up"]] += 1
                return False
            out = ask(tensor, *args, **kwargs)
            if isinstance(out, fakes.FakeTensor) and self.known.of(out) is None and not self.tracer.in_module():
                with _disable_current_modes():
                    self.known.give(out, torch.zeros(out.shape, dtype=torch.bool))
            return out

        return value

    def _made_up(self, ask: Any) -> Any:
        def value(tensor: torch.Tensor, *args: Any) -> Any:
            single = isinstance(tensor, fakes.FakeTensor) and tensor.numel() == 1 and self.known.of(tensor) is None
            if single and (tensor.is_floating_point() or not self.tracer.in_module()):
                with _disable_current_modes():
                    return ask(self._read(tensor), *args)
            return ask(tensor, *args)

        return value


def _python(trial: Trial, words: Sequence[str]) -> tuple[str | None, str | None, list[str], dict[str, str]]:
    """Return the file or module that the command runs, its arguments and variables. Raises InvalidTrial for others."""
    name, rest = Path(words[0]).name, list(words[1:])
    variables: dict[str, str] = {}
    if name in LAUNCHERS:
        rest = ["-m", LAUNCHERS[name], *(rest[1:] if name == "accelerate" else rest)]
    elif not name.startswith("python"):
        raise InvalidTrial(
            f"cannot be predicted, because {words[0]} starts other processes; give the script itself (python train.py "
            "..., torchrun train.py ...), or measure on device=cuda"
        )
    if interpreter.interpreter_facts(str(trial.runner.command)):
        ours = sys.executable + (f" -m {LAUNCHERS[name]}" if name in LAUNCHERS else "")
        raise InvalidTrial(
            f"cannot be predicted, because {words[0]} is not the Python that vramsweep runs in; write {ours}"
        )
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        if rest.pop(0) in ("-X", "-W") and rest:  # their value is a separate word
            rest.pop(0)
    if rest[:1] == ["-m"] and set(rest[1:2]) & set(LAUNCHERS.values()):
        rest, variables = launched(rest[1], rest[2:], trial)
    if not rest or rest[0] == "-c" or rest == ["-m"]:
        raise InvalidTrial("cannot be predicted, because the command runs no Python file or module")
    if rest[0] == "-m" and rest[1].startswith(("torch.distributed.", "accelerate.commands.", "deepspeed.launcher.")):
        raise InvalidTrial(f"cannot be predicted, because {rest[1]} starts other processes; write torchrun train.py")
    if rest[0] == "-m":
        return None, rest[1], rest[2:], variables
    if not Path(rest[0]).is_file():
        raise InvalidTrial(f"cannot be predicted, because there is no file {rest[0]}")
    return rest[0], None, rest[1:], variables


def _card(trial: Trial, total: int, cards: int) -> Iterator[Replacement]:
    """Yield the answers of torch.cuda about the simulated GPU: owner, name, stand-in."""
    card = trial.device.card
    (major, minor), cores = card.capability, card.multiprocessors
    properties = SimpleNamespace(
        name=card.name, total_memory=total, major=major, minor=minor, multi_processor_count=cores
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": cards,
        "current_device": 0,
        "get_device_name": card.name,
        "get_device_capability": card.capability,
        "get_device_properties": properties,
        "is_bf16_supported": card.capability >= (8, 0),
        "set_device": None,
    }
    random = dict.fromkeys(("manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all"))
    for owner, told in ((torch.cuda, answers | random), (torch.cuda.random, random)):
        for name, answer in told.items():
            yield owner, name, lambda *args, answer=answer, **kwargs: answer

    def state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)  # a seed and an offset: no random number on the GPU has a value

    for owner in (torch.cuda, torch.cuda.random):
        yield owner, "get_rng_state", state
        yield owner, "get_rng_state_all", lambda *args, **kwargs: [state()]
