"""Traces a trial by running its own runner on fake tensors.

In: a trial and a GPU. Out: the trace, and the row's columns about what was built.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch._dynamo import eval_frame
from torch._subclasses import fake_tensor as fakes
from torch.utils._pytree import tree_leaves

from vramsweep.harness.hardware.gpu_lookup import Gpu
from vramsweep.harness.spec import length_distribution, runner_table
from vramsweep.harness.spec.not_covered import CODES, EAGER, describe
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.measure.counters import backward_boundaries
from vramsweep.runners.measure.patches import patched
from vramsweep.runners.model import apply_techniques, build, model_task
from vramsweep.runners.predict import mask_facts
from vramsweep.runners.predict.mask_facts import UNPREDICTABLE
from vramsweep.runners.rank import result_file
from vramsweep.runners.rank.aggregate_ranks import Columns
from vramsweep.runners.rank.entry_modules import import_entries, import_entry
from vramsweep.runners.trace.alike_layers import FEW, Layered, Lengthened, find_layers, lengthen
from vramsweep.runners.trace.cuda_emulation import behave
from vramsweep.runners.trace.known_values import KnownValues
from vramsweep.runners.trace.repeated_passes import RepeatedPasses
from vramsweep.runners.trace.step_tracer import Tracer
from vramsweep.runners.trace.trace_data import Trace
from vramsweep.runners.trace.version_patches import install

FEWEST = 9  # layers from which on it is quicker to trace few of them
WORDS = re.compile(r"[\w-]+([,+][\w-]+)*")  # names of modules that are the same in every layer, no patterns


class Runner(Protocol):
    """Interface of a runner's module."""

    def run(self, trial: Trial, device: torch.device, meter: Any, folder: Path) -> None:
        """Train `trial.steps()` steps under the meter."""


class TraceMeter:
    """Stand-in for measure.StepMeter: it takes the same calls, and marks phases in the trace instead of measuring."""

    def __init__(self, trial: Trial, tracer: Tracer, folder: Path) -> None:
        self.trial, self.tracer, self.rank, self.index = trial, tracer, 0, 0
        self._folder, tracer.hear = folder, self._count
        self._say(f"building {trial.model.name}" if trial.runner.command is None else "running the script's first part")
        self.details: Columns = {}
        self._describe: Callable[[], Columns] = dict
        alike, sends = _has_alike_passes(trial), trial.sharding != "none"
        self._passes = RepeatedPasses(tracer, trial.grad_accum, sends) if alike else None

    def _say(self, text: str) -> None:
        self._text, self._before = text, len(self.tracer.operators)
        result_file.progress(self._folder, text)

    def _count(self) -> None:
        """Report how many operators ran since the text was said, because a step may take minutes."""
        count = len(self.tracer.operators) - self._before
        result_file.progress(self._folder, f"{self._text}: {count:,} operators")

    def built(self, describe: Callable[[], Columns], skipped: Callable[[], int | None] | None = None) -> None:
        """Keep `describe` for the end of the last step, and end the phase of loading in the trace."""
        self._describe = describe
        self.tracer.built()

    def step_begin(self) -> None:
        """Report progress, and tell the tracer that a step begins and whether it is the last."""
        self._say(f"tracing step {self.index + 1} of {self.trial.steps()}")
        self.tracer.in_step = True
        self.tracer.in_last_step = self.index == self.trial.steps() - 1

    def fed(self, batch: Any) -> None:
        """Ignore the batch, because a trace counts no tokens."""

    def run_pass(self, one: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run the pass; if the step's passes are alike, a pass may be recorded again instead."""
        return one() if self._passes is None else self._passes.run(one)

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        """End the optimizer's phase; after the last step, keep the columns about what was built."""
        self.mark("optimizer")
        if self.tracer.in_last_step:
            self.details = self._describe()
            self._describe = dict  # otherwise it would keep the model alive
        self.tracer.in_step = self.tracer.in_last_step = False
        self.index += 1

    def mark(self, phase: Any) -> None:
        """End a phase of the current step here."""
        self.tracer.mark(self.index, phase)


def _has_alike_passes(trial: Trial) -> bool:
    """Check that nothing in the trial makes a step's accumulated passes differ, except their batches' values.

    False for fewer than three passes. A model that reads what it drew at random, as LayerDrop does, cannot be traced.
    """
    told = "gradient_accumulation_steps" in trial.runner.options  # a number other than the trial's
    plain = trial.data == "synthetic" and not trial.padding and trial.packing == "none"
    return plain and not told and trial.grad_accum > 2 and not length_distribution.has_varying_lengths(trial)


def trace_trial(
    trial: Trial, card: Gpu, folder: Path, runner: Runner | None = None, tracer: Tracer | None = None
) -> tuple[Trace, dict[str, Any]]:
    """Trace the runner's steps; return the trace and the columns about what was built.

    `runner` defaults to the trial's own, `tracer` to a plain one. Raises InvalidTrial if the step cannot be traced.
    """
    runner = runner or cast(Runner, import_entry(runner_table.module(trial)))
    import_entries(runner_table.preload(runner_table.imports_name(trial)))  # else their tables would be in the trace
    build.prepare(trial)
    try:
        return trace_steps(trial, card, folder, runner, tracer or Tracer(card.capability))
    except torch.OutOfMemoryError:  # the script catches it and ends: what it would need is in a trace without the error
        tracer = Tracer(card.capability)
        tracer.raises_when_full = False
        return trace_steps(trial, card, folder, runner, tracer)


def trace_steps(trial: Trial, card: Gpu, folder: Path, runner: Runner, tracer: Tracer) -> tuple[Trace, dict[str, Any]]:
    """Trace the runner's steps as `trace_trial` does, in a process that is prepared and stays as it is."""
    meter = TraceMeter(trial, tracer, folder)
    if build.knows_values(trial) and tracer.fake.shape_env is None:  # symbols have none
        tracer.known = KnownValues()
    try:
        with (
            behave(card.capability) as attention,
            mask_facts.answer_questions(trial),
            backward_boundaries(lambda: meter.mark("forward"), lambda: meter.mark("backward")),
            tracer.record(),
            _run_eagerly(tracer.trace),
            apply_techniques.around(trial, torch.device("cpu")),
            install.applied(trial, tracer.leave_out) as applied,
        ):
            runner.run(trial, torch.device("cpu"), meter, folder)
    except (fakes.DataDependentOutputException, fakes.DynamicOutputShapeException) as error:
        why = "packed" if "pack_padded_sequence" in str(error.func) else "reads_value"
        raise InvalidTrial(UNPREDICTABLE[why].format(error.func)) from error
    except (fakes.UnsupportedOperatorException, fakes.UnsupportedFakeTensorException, RuntimeError) as error:
        unsupported = isinstance(error, (fakes.UnsupportedOperatorException, fakes.UnsupportedFakeTensorException))
        if "dummy base class" in str(error):  # a class that torch has only with CUDA, such as CUDAGraph
            raise InvalidTrial(UNPREDICTABLE["only_with_cuda"].format(str(error).split()[-1])) from error
        if not unsupported and "fake impl" not in str(error):  # the error of custom operators
            raise
        what = str(getattr(error, "func", None) or error).strip().splitlines()[0]
        raise InvalidTrial(UNPREDICTABLE["no_fake"].format(what)) from error
    about = {"attention_kernels": sorted(attention) or None, "differences": [*applied] or None, "layers_traced": None}
    left = tracer.trace.not_covered
    codes = sorted(left, key=list(CODES).index)
    told = [f"not covered: {describe(code, left[code])}" for code in codes if left[code]]
    about |= {"not_covered": codes, "notes": [*(meter.details.get("notes") or ()), *told] or None}
    return tracer.trace, meter.details | about


@contextlib.contextmanager
def _run_eagerly(trace: Trace) -> Iterator[None]:
    """Run what torch.compile would compile as it is, and put its first call into `trace.not_covered`."""
    choose = eval_frame._callback_from_stance

    def chosen(callback: Any) -> Any:
        if callback not in (None, False):  # None: torch itself disables the compiler
            trace.not_covered.setdefault(EAGER, [])
        return choose(callback)

    with torch.compiler.set_stance("force_eager"), patched([(eval_frame, "_callback_from_stance", chosen)]):
        yield


def trace_layers(trial: Trial, card: Gpu, folder: Path) -> tuple[Trace, dict[str, Any]]:
    """Trace the trial as `trace_trial` does, but only as many layers as needed if they are alike."""

    def trace(few: Trial) -> Layered:
        tracer = Tracer(card.capability)
        return find_layers(tracer, trace_trial(few, card, folder, tracer=tracer)[1])

    found = trace_alike(trial, trace)
    return (found.trace, found.details) if found is not None else trace_trial(trial, card, folder)


def trace_alike(trial: Trial, trace: Callable[[Trial], Layered]) -> Lengthened | None:
    """Return the trial's trace, made from traces of fewer layers (alike_layers.py); None if layers are not alike."""
    try:
        if (layers := count_alike_layers(trial)) is not None:
            return lengthen(trace(with_layers(trial, FEW)), trace(with_layers(trial, FEW + 1)), layers)
    except Exception as error:  # layers are unlike, or the whole trial reports the error better or has none
        print(f"every layer is traced: {type(error).__name__}: {error!s:.200}", flush=True)
    return None


def count_alike_layers(trial: Trial) -> int | None:
    """Return how many layers the trial's model has, if they are alike and tracing few is quicker; else None.

    Layers are alike if their modules, made from the configuration without weights, differ only in the layer's number.
    None for models from folders and hubs, users' code, compiled steps, and settings for some layers only
    (`checkpointing_every`, patterns of names). None for DDP, FSDP1 and DeepSpeed, because their buckets and streams go
    across layers. None for FSDP2 of the Trainer, or with parameters on the host.
    """
    ours = trial.model.path is None and trial.model.model_type is not None and trial.runner.name in ("torch", "trainer")
    known = trial.runner.command is None and trial.runner.target is None and trial.ds_config is None
    fsdp2 = trial.sharding == "fsdp2" and trial.runner.name == "torch" and not trial.offload_param
    apart = (trial.sharding == "none" or fsdp2) and trial.checkpointing_every == 1 and trial.compile == "none"
    asked = trial.model.config.get("num_hidden_layers", FEWEST)
    many = isinstance(asked, int) and asked >= FEWEST  # else the configuration need not be read
    named = [one for one in tree_leaves([trial.lora_target_modules, trial.runner.options]) if isinstance(one, str)]
    if not (ours and known and apart and many and all(map(WORDS.fullmatch, named))):
        return None
    config = build.read_config(trial)
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers < FEWEST:
        return None
    with torch.device("meta"):
        net = model_task.find_task(config).auto.from_config(config)
    lists = [one for one in net.modules() if isinstance(one, torch.nn.ModuleList) and len(one) == layers]
    told = [one for one in config.to_dict().values() if isinstance(one, list) and len(one) == layers]  # of each layer
    alike = len(lists) == 1 and all(_describe(layer) == _describe(lists[0][0]) for layer in lists[0])
    return layers if alike and all(of == one[0] for one in told for of in one) else None


def with_layers(trial: Trial, layers: int) -> Trial:
    """Return a copy of the trial whose model has `layers` layers."""
    config = build.read_config(trial)
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    fewer = {key: value[:layers] if isinstance(value, list) else value for key, value in trial.model.config.items()}
    fewer |= {key: layers for key in (name, "num_hidden_layers") if key == name or key in fewer}
    return trial.model_copy(update={"model": trial.model.model_copy(update={"config": fewer})})


def _describe(layer: torch.nn.Module) -> list[Any]:
    """Describe a layer's modules (names, types, plain attributes, shapes of parameters), without the layer's number."""

    def plain(module: torch.nn.Module) -> dict[str, Any]:
        said = {key: value for key, value in vars(module).items() if isinstance(value, (int, float, str, tuple))}
        return {key: value for key, value in said.items() if key not in ("layer_idx", "layer_index", "layer_id")}

    shapes = [[(name, one.shape) for name, one in module.named_parameters()] for module in layer.modules()]
    return [(name, type(one), plain(one)) for name, one in layer.named_modules()] + shapes
