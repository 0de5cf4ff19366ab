"""Training steps of a user's objects, traced: their twins, or what their function makes, under a loop of ours.

In: a `Request`. Out: a trace, a trial that stands for it, and sentences on what the trace does not cover.
"""

import contextlib
import inspect
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.spec import fit_text, runner_table
from vramsweep.harness.spec.not_covered import EAGER, describe
from vramsweep.harness.spec.shardings import FSDP
from vramsweep.harness.spec.trial import AllocatorAxis, DeviceAxis, ModelAxis, ProtocolAxis, RunnerAxis, Trial
from vramsweep.runners.estimate.fake_twin import COMPILED, copy_without_values, empty_like
from vramsweep.runners.estimate.kept_state import kept_state
from vramsweep.runners.loops import custom
from vramsweep.runners.model.build import AUTOCAST, Data
from vramsweep.runners.predict import make_trace, mask_facts
from vramsweep.runners.rank import process_group
from vramsweep.runners.rank.entry_modules import import_entries
from vramsweep.runners.shardings import interface
from vramsweep.runners.trace import fake_placement
from vramsweep.runners.trace.step_tracer import Tracer
from vramsweep.runners.trace.trace_data import Trace

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16_pure")
# What a caller can fix, in words that take more than a line.
MISTAKES: dict[str, str] = json.loads(Path(__file__).with_name("mistakes.json").read_text("utf-8"))
SHARDINGS = ("none", "ddp", "fsdp1", "fsdp2")


class Sizes(NamedTuple):
    """Shape and dtype of a tensor of the batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Request:
    """What is estimated: the user's objects, and the settings of a trial. `batch` has `Sizes` in place of tensors.

    `facts` are about the batch's masks, None if it has no values; `notes` are on what the objects are taken as.
    """

    model: Any
    batch: Any
    optimizer: Any
    loss: Callable[[Any, Any], torch.Tensor] | None
    gpu: str
    precision: str | None
    allocator: str
    world_size: int
    sharding: str
    facts: mask_facts.Facts | None
    checkpointing: bool = False
    notes: tuple[str, ...] = ()

    def trial(self) -> Trial:
        """Return the trial that stands for the request: of runner custom, with the batch's first dimensions."""
        shapes = [one.shape for one in sizes_of(self.batch)]
        name = type(self.model).__name__ if isinstance(self.model, nn.Module) else getattr(self.model, "__name__", "")
        return Trial(
            model=ModelAxis(name=name if name.isidentifier() else "model"),
            seq_len=max((shape[1] for shape in shapes if len(shape) == 2), default=1) or 1,
            micro_batch=max((shape[0] for shape in shapes if shape), default=1) or 1,
            precision=self.precision or "fp32",
            allocator=AllocatorAxis(name=self.allocator or "default", conf=self.allocator),
            runner=RunnerAxis(name="custom", target=name),
            sharding=self.sharding,
            world_size=self.world_size,
            device=DeviceAxis(name="simulated", gpu=self.gpu),
            protocol=ProtocolAxis(name="brief", warmup_steps=1, measured_steps=1),
            checkpointing="full" if self.checkpointing else "none",
        )


def is_sizes(value: Any) -> bool:
    """Return whether the value stands for a tensor of the batch."""
    return isinstance(value, Sizes)


def sizes_of(batch: Any) -> list[Sizes]:
    """Return all `Sizes` of a batch."""
    return [one for one in tree_leaves(batch, is_leaf=is_sizes) if is_sizes(one)]


def read_batch(batch: Any) -> tuple[Any, mask_facts.Facts | None]:
    """Return the batch with `Sizes` in place of tensors, and the facts that its masks' values tell.

    Raises UserError if the batch has no tensor.
    """
    batch = dict(batch) if isinstance(batch, Mapping) else batch

    def pair(value: Any) -> bool:
        return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)

    def sizes(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Sizes(tuple(value.shape), value.dtype)
        return Sizes(tuple(map(int, value[0])), value[1]) if pair(value) else value

    found = tree_map(sizes, batch, is_leaf=pair)
    if not sizes_of(found):
        raise UserError(MISTAKES["no_tensors"].format(type(batch).__name__))
    return found, _read_masks(batch)


def _read_masks(batch: Any) -> mask_facts.Facts | None:
    asked = ("input_ids", "attention_mask", "position_ids")
    if not isinstance(batch, dict) or not {*asked[1:]} & batch.keys():
        return None
    there = {name: batch[name] for name in asked if isinstance(batch.get(name), torch.Tensor)}
    first = next(iter(there.values()), None)
    if first is None or any(one.is_meta or one.dim() != 2 or one.shape != first.shape for one in there.values()):
        return None
    there = {"input_ids": first} | {name: one.detach().cpu() for name, one in there.items()}
    return mask_facts.facts(Data([{name: one[i] for name, one in there.items()} for i in range(len(first))], {}))


def unwrap(model: Any) -> tuple[Any, int, tuple[str, ...]]:
    """Return the model inside what wraps it, the ranks of its DistributedDataParallel (0: none), and notes.

    Raises UserError for a model that is divided already, of which no rank has whole tensors.
    """
    ranks, notes = 0, []
    while isinstance(model, nn.Module):
        if isinstance(model, DistributedDataParallel):
            ranks = dist.get_world_size(model.process_group)
            model = model.module
        elif isinstance(model, nn.DataParallel):
            notes.append("data_parallel: DataParallel is taken as its module on one GPU, with the whole batch")
            model = model.module
        elif type(model).__name__ == COMPILED:
            model = model._orig_mod
            notes.append(_COMPILED)
        else:
            break
    if not isinstance(model, nn.Module):
        return model, ranks, tuple(notes)
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError("model: TorchScript cannot be traced; give the module from which it was made")
    every, tensors = list(model.modules()), [*model.parameters(), *model.buffers()]
    divided = any(isinstance(one, (FSDPModule, FullyShardedDataParallel)) for one in every)
    if divided or any(isinstance(one, DTensor) or hasattr(one, "ds_id") for one in tensors):
        raise UserError(MISTAKES["divided"])
    if any(torch.nn.parameter.is_lazy(one) for one in tensors):
        raise UserError("model: lazy modules have no shapes yet; run the model once, then estimate")
    if any(getattr(one, "bnb_quantized", True) is False for one in tensors):
        raise UserError("model: its weights are not quantized yet; move it to its device first: model.to('cuda')")
    kinds = {type(one).__module__.partition(".")[0] for one in (*every, *tensors)}
    if _COMPILED not in notes and any(m._compiled_call_impl is not None or type(m).__name__ == COMPILED for m in every):
        notes.append(_COMPILED)
    if any(map(is_traceable_wrapper_subclass, tensors)) or "bitsandbytes" in kinds:
        notes.append("quantized: scratch memory of the library's own kernels is unknown; weights count as they are now")
    if any(one.is_cuda for one in tensors):
        notes.append("cuda: the estimate starts from an empty GPU; what the process has on it now is not counted")
    return model, ranks, tuple(notes)


_COMPILED = f"{EAGER}: {describe(EAGER)}"


def trace_request(request: Request) -> tuple[Trace, tuple[str, ...]]:
    """Trace three training steps; return the trace and all notes. Raises UserError, and changes nothing."""
    trial = request.trial()
    card = trial.device.card
    loop = _Loop(request)
    import_entries(runner_table.sharding(trial.sharding).preload)
    with kept_state(groups=request.sharding != "none"), tempfile.TemporaryDirectory() as folder:
        try:
            trace, _ = make_trace.trace_steps(trial, card, Path(folder), loop, Tracer(card.capability))
        except UserError:
            raise
        except Exception as error:
            text = (str(error).strip().splitlines() or ["no message"])[0]
            raise UserError(MISTAKES["raised"].format(type(error).__name__, text)) from error
    if not trace.events:
        raise UserError("the training step allocates nothing; give a model with parameters or a batch with tensors")
    told = (f"{code}: {describe(code, of)}" for code, of in trace.not_covered.items())
    notes = (*request.notes, *told, *loop.notes, *_notes(request, trial))
    return trace, tuple({one.partition(":")[0]: one for one in notes}.values())


def _notes(request: Request, trial: Trial) -> Iterator[str]:
    masked = isinstance(request.batch, dict) and "attention_mask" in request.batch
    if masked and request.facts is None:
        yield "mask: attention_mask has no values here, so it is taken to hide tokens; give a batch with values"
    if getattr(request.optimizer, "state", None):
        yield "state: the optimizer is taken as new, so its state is made in the first step"
    if fit_text.communication_bytes(trial):
        yield "communication: NCCL's buffers take 1 to 2 GiB more of each GPU"


class _Loop:
    """Runner of steps: forward, loss, backward, optimizer step, zero_grad. The output is freed before backward."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.notes: list[str] = []

    def run(self, trial: Trial, device: torch.device, meter: Any, folder: Path) -> None:
        """Train `trial.steps()` steps under the meter."""
        facts = self.request.facts
        answered = contextlib.nullcontext() if facts is None else mask_facts.answers(lambda: facts)
        with answered:
            custom.train(trial, device, meter, lambda asked: self._build(trial, device))

    def _build(self, trial: Trial, device: torch.device) -> Any:
        asked = self.request
        weights = {None: None, "bf16_pure": torch.bfloat16}.get(asked.precision, torch.float32)
        lower = None if trial.sharding in FSDP else AUTOCAST.get(trial.precision)  # FSDP casts itself
        net, optimizer, criterion = self._made(trial, device, weights)
        if not net.training:
            net.train()
        if asked.checkpointing:
            (getattr(net, "activation_checkpointing_enable", None) or net.gradient_checkpointing_enable)()
        forward = net.forward
        wrapped: Any = net
        if trial.sharding == "ddp":
            wrapped = DistributedDataParallel(net)
        elif trial.sharding in FSDP:
            from vramsweep.runners.shardings import fsdp  # with accelerate, whose import takes seconds

            if trial.sharding == "fsdp1":
                wrapped = fsdp.flatten(trial, net, device)[0]
            else:
                wrapped = fsdp.divide_tensors(trial, net, process_group.mesh(trial, device), device)[0]
        if optimizer is None:
            optimizer = (asked.optimizer or torch.optim.AdamW)(list(wrapped.parameters()))
        scaler = torch.amp.GradScaler("cpu", enabled=asked.precision == "fp16")
        parameters = inspect.signature(forward).parameters

        def lose(batch: Any) -> torch.Tensor:
            with torch.autocast("cuda", lower) if lower else contextlib.nullcontext():
                return self._loss(criterion, call(wrapped, parameters, batch, asked.loss is not None), batch)

        def step(batch: Any) -> torch.Tensor:
            loss = lose(batch)
            if not loss.requires_grad:
                raise UserError("loss: no weight that is trained leads to it; check requires_grad, or a detach()")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            return loss

        def batches(index: int) -> Any:
            empty = lambda one: torch.empty(one.shape, dtype=one.dtype) if is_sizes(one) else one  # noqa: E731
            return tree_map(empty, asked.batch, is_leaf=is_sizes)

        return wrapped, optimizer, step, batches

    def _made(self, trial: Trial, device: torch.device, weights: torch.dtype | None) -> tuple[Any, Any, Any]:
        """Return the model, its optimizer (None: still to make) and its loss: twins, or what the function makes."""
        asked, sharding = self.request, trial.sharding
        given = asked.optimizer if isinstance(asked.optimizer, torch.optim.Optimizer) else None
        if sharding in FSDP and given is not None:
            raise UserError("optimizer: FSDP replaces the parameters; give a class or a function of parameters")
        held = asked.model if isinstance(asked.model, nn.Module) else nn.Module()
        own = {id(one) for one in (*held.parameters(), *held.buffers())}

        def empty(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in own:  # of the loss, for example
                return empty_like(tensor, None, "cpu")
            if sharding == "fsdp2" and isinstance(tensor, nn.Parameter):
                with fake_placement.without_memory():
                    return empty_like(tensor, weights, "meta")
            return empty_like(tensor, weights, "meta" if sharding == "fsdp1" else "cpu")

        with fake_placement.on_host() if sharding == "fsdp1" else contextlib.nullcontext():
            net, optimizer, loss = copy_without_values(held, given, asked.loss, empty)
            if held is asked.model:
                return net, optimizer, loss
            weightless = fake_placement.weightless() if sharding == "fsdp2" else contextlib.nullcontext()
            with interface.host(trial) if sharding == "fsdp1" else device, weightless:
                net = asked.model()
        net, _, notes = unwrap(net)
        self.notes += notes
        if not isinstance(net, nn.Module):
            raise UserError(f"model: the function must return a torch.nn.Module, not a {type(net).__name__}")
        return (net if weights is None else net.to(weights)), None, loss

    def _loss(self, criterion: Any, output: Any, batch: Any) -> torch.Tensor:
        if isinstance(criterion, nn.modules.loss._Loss) and not isinstance(batch, torch.Tensor):
            raise UserError("loss: it gets (output, batch); give lambda output, batch: loss(output, batch[1])")
        if criterion is not None:
            return cast(torch.Tensor, criterion(output, batch))
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None and isinstance(output, torch.Tensor):
            if output.dim():
                note = "loss: the mean of the output stands for the loss; give loss= for the memory of your own"
                self.notes += [note] * (note not in self.notes)
            loss = output.mean() if output.dim() else output
        if not isinstance(loss, torch.Tensor):
            raise UserError(MISTAKES["no_loss"].format(type(output).__name__))
        return loss


def call(net: Any, parameters: Mapping[str, inspect.Parameter], batch: Any, partly: bool) -> Any:
    """Call the model with the batch: a dict by name, a tuple in order, else as one argument.

    `partly`: the batch is the loss's too, so the model gets the names that its forward has, or its required arguments.
    """
    kinds = [one.kind for one in parameters.values()]
    if isinstance(batch, dict):
        every = not partly or inspect.Parameter.VAR_KEYWORD in kinds
        return net(**{name: value for name, value in batch.items() if every or name in parameters})
    if not isinstance(batch, (tuple, list)):
        return net(batch)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = sum(one.kind in positional and one.default is one.empty for one in parameters.values())
    return net(*(batch[: max(needed, 1)] if partly else batch))
