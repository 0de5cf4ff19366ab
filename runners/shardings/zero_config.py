"""The DeepSpeed configuration of a trial: made from its axes, merged with overrides, checked for ignored keys."""

import contextlib
import functools
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import deepspeed
import torch
from accelerate.state import DistributedType, PartialState
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.cpu.no_impl import NotImplementedBuilder
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ValidationError
from transformers import training_args

from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.spec import runner_table
from vramsweep.harness.spec.deepspeed_config import ACCUM, AUTO, BATCH, MICRO, OFFLOADED_ONCE, OFFLOADS, read
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.measure import model_description
from vramsweep.runners.measure.patches import patched
from vramsweep.runners.rank import process_group
from vramsweep.runners.shardings import interface, zero_traced
from vramsweep.runners.shardings.key_usage import KeyUsage
from vramsweep.runners.trace import step_tracer

OWN_ADAM = ("deepspeed_fused_adam", "deepspeed_cpu_adam")
WHERE = "ds_config (the file, or runner.options)"
PASSED_ON = ("optimizer.params.", "scheduler.params.")  # to classes that raise for unknown keys
traced = zero_traced.traced


def on_cpu(trial: Trial) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a CPU is a device of DeepSpeed's, and ranks meet over gloo or over the simulated group.

    Otherwise DeepSpeed compiles a kernel for its shared memory for 20 s, and accelerate without a GPU takes each rank
    for the only one. TrainingArguments accept bf16 on a CPU only with use_cpu, which switches DeepSpeed off.
    """
    if trial.device.name == "cpu" and trial.precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise InvalidTrial("precision=fp16: DeepSpeed has no fp16 on this CPU; use bf16 or fp32, or device=cuda")
    meeting = ("fake" if trial.device.name == "simulated" else process_group.BACKENDS["cpu"], DistributedType.NO)
    return patched(
        (
            (deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False),
            (PartialState, "_prepare_backend", lambda *args: meeting),
            (training_args, "is_torch_bf16_gpu_available", lambda: True),
            (NotImplementedBuilder, "load", _no_kernel),
        )
    )


def _no_kernel(builder: Any, verbose: bool = True) -> None:
    raise InvalidTrial(
        "DeepSpeed lacks a CPU kernel that its configuration needs (zero_quantized_*, or an optimizer other than Adam)"
        "; remove that setting, or measure on device=cuda"
    )


def ds_config(trial: Trial) -> dict[str, Any]:
    """Return the configuration for DeepSpeed's engine: the axes', overridden by the user's file, then by the options.

    "auto" is a value for the Trainer: here it leaves a key to the axes, or else to DeepSpeed's own default.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": trial.micro_batch,
        "gradient_accumulation_steps": trial.grad_accum,
        "steps_per_print": 1 << 30,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": _zero_optimization(trial),
    }
    if trial.precision in ("bf16", "fp16"):
        config[trial.precision] = {"enabled": True}
    if trial.offload_optimizer:
        config["zero_force_ds_cpu_optimizer"] = False  # the trial's optimizer, not DeepSpeed's own
    return merged(merged(config, _decided(_file(trial))), trial.runner.options)


def trainer_config(trial: Trial) -> dict[str, Any]:
    """Return the Trainer's `deepspeed`: the user's file over what the axes set and no TrainingArguments do.

    The Trainer fills in what is "auto" (transformers/integrations/deepspeed.py: HfTrainerDeepSpeedConfig). Without a
    file, that is everything it can fill in, as in its documentation.
    """
    config: dict[str, Any] = {
        **dict.fromkeys((MICRO, ACCUM, BATCH), AUTO),
        "bf16": {"enabled": AUTO},
        "fp16": {"enabled": AUTO},
        "zero_optimization": _zero_optimization(trial),
    }
    if trial.ds_config is None:
        config["gradient_clipping"] = AUTO
    given = _file(trial)
    zero = given.get("zero_optimization", {})
    given["zero_optimization"] = {  # the Trainer does not fill in the offloads and the stage
        key: _decided(value) if key in OFFLOADS and isinstance(value, Mapping) else value
        for key, value in zero.items()
        if (key, value) != ("stage", AUTO)
    }
    if "optimizer" not in given:
        if trial.optimizer in OWN_ADAM:
            config["optimizer"] = {
                "type": "AdamW",
                "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO),
            }
        elif trial.offload_optimizer and trial.optimizer != "default":  # else accelerate would use DeepSpeed's
            config["zero_force_ds_cpu_optimizer"] = False
    return merged(config, given)


def _zero_optimization(trial: Trial) -> dict[str, Any]:
    offloads = [axis for axis in OFFLOADS if getattr(trial, axis)]
    stage = runner_table.sharding(trial.sharding).stage
    return {"stage": stage, **{axis: {"device": "cpu"} for axis in offloads}}


def _file(trial: Trial) -> dict[str, Any]:
    """Return the user's configuration, {} without one; former keys get today's name, or are left to the axis."""
    if trial.ds_config is None:
        return {}
    try:
        found = read(trial.ds_config)
    except UserError as error:  # it was there when the trial was planned
        raise InvalidTrial(str(error)) from None
    if "bfloat16" in found and "bf16" not in found:
        found["bf16"] = found.pop("bfloat16")
    for once in OFFLOADED_ONCE.values():  # the axis sets it, by today's name
        found.get("zero_optimization", {}).pop(once.rpartition(".")[2], None)
    return found


def _decided(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without the keys that it leaves to others ("auto")."""
    nodes = {k: _decided(v) if isinstance(v, Mapping) else v for k, v in config.items()}
    return {key: value for key, value in nodes.items() if value != AUTO}


def divided(trial: Trial) -> bool:
    """Return whether the model is made under zero.Init."""
    return trial.sharding == "zero3" and trial.zero_init


def place(trial: Trial, device: torch.device) -> torch.device:
    """Return where the model is made: the host, if it is whole and others move it to the device; else the device."""
    if divided(trial) or (trial.runner.name == "deepspeed" and trial.sharding != "zero3"):
        return device
    return interface.host(trial)


def arguments(trial: Trial) -> dict[str, Any]:
    """Return TrainingArguments. With use_cpu (or ACCELERATE_USE_CPU) accelerate would silently leave DeepSpeed out."""
    return {"deepspeed": trainer_config(trial), "use_cpu": False}


def fitting(trial: Trial, net: torch.nn.Module, arguments: Any = None) -> None:
    """Raise RuntimeError if the model was not made as `zero_init` says: under zero.Init every parameter has a ds_id.

    Adapters are added to the finished model, and the engine divides them later.
    """
    base = [p for p in net.parameters() if trial.adapter == "none" or not p.requires_grad]
    found = {hasattr(parameter, "ds_id") for parameter in base}
    if found != {divided(trial)}:
        raise RuntimeError(
            f"zero_init={trial.zero_init} does not match the model's parameters (divided: {sorted(found)})"
        )


def checked(trial: Trial, net: Any) -> None:
    """Raise InvalidTrial unless DeepSpeed's engine trains with the trial's stage, batch, ranks, precision, offloads."""
    if not isinstance(net, deepspeed.DeepSpeedEngine):
        raise InvalidTrial(f"sharding={trial.sharding} needs DeepSpeed's engine, but {type(net).__name__} trains")
    stage = runner_table.sharding(trial.sharding).stage
    precision = trial.precision if trial.precision in ("bf16", "fp16") else "fp32"
    half = {"bf16": net.bfloat16_enabled(), "fp16": net.fp16_enabled()}
    offloads = (net.zero_offload_optimizer(), net.zero_offload_param())
    compared = {
        "stage": (net.zero_optimization_stage(), stage),
        "ranks": (net.dp_world_size, trial.world_size),
        "micro_batch": (net.train_micro_batch_size_per_gpu(), trial.micro_batch),
        "grad_accum": (net.gradient_accumulation_steps(), trial.grad_accum),
        "precision": (next((name for name, on in half.items() if on), "fp32"), precision),
        **{
            axis: (node is not None and node.device == "cpu", getattr(trial, axis))
            for axis, node in zip(OFFLOADS, offloads, strict=True)
        },
    }
    for what, (found, asked) in compared.items():
        if found != asked:
            raise InvalidTrial(f"DeepSpeed's engine has {what} {found}, but the trial has {asked}")
    tracer = step_tracer.active()
    if tracer is not None:
        tracer.held = functools.partial(zero_traced.held, net.optimizer)


def agreed(trial: Trial, arguments: Any) -> None:
    """Raise InvalidTrial for values of the file that the Trainer's arguments contradict, or that DeepSpeed ignores.

    The Trainer would report the former when training begins (HfTrainerDeepSpeedConfig.trainer_config_finalize).
    zero.Init would be the first to meet the latter.
    """
    given = arguments.hf_deepspeed_config
    if given.mismatches:
        wrong = ", ".join(text.removeprefix("- ds ") for text in given.mismatches)
        raise InvalidTrial(
            f'ds_config and TrainingArguments differ: {wrong}; change one, or write "{AUTO}" in the file'
        )
    heeded(_decided(given.config))


def told(net: Any) -> dict[str, Any]:
    """Return columns: the names of DeepSpeed's optimizer and of the one in it, and the configuration in force."""
    config = json.loads(json.dumps(net.config, default=str), parse_constant=str)  # accelerate prints every inf steps
    return {"optimizer_effective": wrapped(net.optimizer), "runner_config": {"deepspeed": config}}


def skipped(net: Any) -> int:
    """Return the number of updates that were skipped because of an overflow."""
    return int(net.skipped_steps)


def wrapped(optimizer: Any) -> str:
    """Return the names of DeepSpeed's optimizer and of the one in it, which at stage 0 in fp32 are the same."""
    name, inner = model_description.optimizer_name(optimizer), getattr(optimizer, "optimizer", None)
    return name if inner is not None else f"{name}({name})"


def heeded(config: Mapping[str, Any]) -> None:
    """Raise InvalidTrial for a key of the configuration that DeepSpeed does not read, with the closest one it reads.

    DeepSpeed reads its whole configuration when it makes a DeepSpeedConfig. Its pydantic models forbid unknown keys;
    elsewhere unknown keys have no effect. Nodes of which it reads no key are passed on.
    """
    asked = KeyUsage(config)
    try:
        taken = deepspeed.DeepSpeedConfig(asked)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        hint = _closest(str(first["loc"][-1]), _fields()) if first["type"] == "extra_forbidden" else ""
        text = f"{WHERE}: DeepSpeed's {error.title} does not take {key}: {first['msg']}{hint}"
        raise InvalidTrial(text) from None
    except deepspeed.DeepSpeedConfigError as error:
        raise InvalidTrial(f"{WHERE}: {error}") from None
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:  # a value of another type
        raise InvalidTrial(f"{WHERE}: DeepSpeed cannot read it: {error}") from None
    if taken.optimizer_name not in (None, *DEEPSPEED_OPTIMIZERS) and not hasattr(torch.optim, taken.optimizer_name):
        raise InvalidTrial(
            f"{WHERE}, optimizer.type: DeepSpeed {deepspeed.__version__} has no {taken.optimizer_name}; it has "
            f"{', '.join(DEEPSPEED_OPTIMIZERS)} and torch.optim's"
        )
    _schedule(taken)
    ignored = next(_ignored(asked), None)
    if ignored is not None:
        path, known = ignored
        raise InvalidTrial(
            f"{WHERE}, {path}: DeepSpeed {deepspeed.__version__} ignores it, so it would have no effect"
            f"{_closest(path.rpartition('.')[2], known)}"
        )


def _schedule(taken: Any) -> None:
    """Raise InvalidTrial for a schedule that DeepSpeed does not have, or whose arguments do not fit."""
    name = taken.scheduler_name
    if name is None:
        return
    kind = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
    if kind is None:
        said = f"{WHERE}, scheduler.type: {name}"
        raise InvalidTrial(suggestions.no_such_value(said, "scheduler", name, lr_schedules.VALID_LR_SCHEDULES))
    try:
        inspect.signature(kind).bind(None, **(taken.scheduler_params or {}))
    except TypeError as error:
        raise InvalidTrial(f'{WHERE}, scheduler.params of {name}: {error} (only the Trainer fills in "auto")') from None


def _ignored(node: KeyUsage, before: str = "") -> Iterator[tuple[str, set[str]]]:
    """Yield the dotted names of the keys that nobody read, each with the keys that were read in the same node."""
    if not node.asked or before in PASSED_ON:
        return
    for key, value in dict.items(node):
        if key not in node.asked:
            yield f"{before}{key}", node.asked
        elif isinstance(value, KeyUsage):
            yield from _ignored(value, f"{before}{key}.")


def _fields(model: Any = DeepSpeedConfigModel) -> set[str]:
    """Return the fields of all of DeepSpeed's pydantic models."""
    return set(model.model_fields).union(*(_fields(kind) for kind in model.__subclasses__()))


def _closest(name: str, known: Iterable[str]) -> str:
    near = suggestions.find_closest(name, sorted(known))
    return f"; the closest is {near}" if near else ""


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings: `base`, with those of `over` in place of its own."""
    found = dict(base)
    for key, value in over.items():
        held = found.get(key)
        found[key] = merged(held, value) if isinstance(held, Mapping) and isinstance(value, Mapping) else value
    return found
