"""The Trainer's `fsdp` arguments, of FSDP1 and FSDP2 alike, and what accelerate needs to take them without a card.

`runner.options.fsdp_config` is the user's fsdp_config; what axes say is not in it (harness/registry.py). Precision is
accelerate's: with bf16 and fp16 a policy that gathers, computes and reduces in half precision, and parameters in fp32
(accelerate/state.py AcceleratorState, utils/fsdp_utils.py fsdp2_prepare_model, accelerator.py prepare_model).

On a CPU accelerate would leave FSDP out and wrap the model in DistributedDataParallel (AcceleratorState: MULTI_CPU is
none of the kinds that take a plugin), so it is told that the ranks are cards.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import accelerate.utils.dataclasses as plugins
import torch
import torch.distributed as dist
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerate.utils.constants import FSDP_BACKWARD_PREFETCH, FSDP_SHARDING_STRATEGY
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import _init_utils as fsdp1_init
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp2_collectives
from torch.distributed.fsdp._fully_shard import _fsdp_init as fsdp2_init
from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp2_api
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import TrainingArguments

from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners import ranks, shardings
from vramsweep.runners.shardings.asked import Asked

optimizers = importlib.import_module("torch.optim.optimizer")

_DEFAULT_MESH = next(
    name for name in ("_init_default_mesh", "_init_default_fully_shard_mesh") if hasattr(fsdp2_api, name)
)


def arguments(trial: Trial, version: int) -> dict[str, Any]:
    """TrainingArguments for this version of FSDP."""
    own = trial.runner.options.get("fsdp_config", {})
    for key, value in own.items():
        wanted = _wanted(key.removeprefix("fsdp_"), value, version)
        if wanted:
            where = f"runner.options.fsdp_config.{key}"
            raise InvalidTrial(f"{where} is {value}; with sharding=fsdp{version} it must be {wanted}")
    told: dict[str, Any] = {"fsdp": True, "fsdp_config": Asked({"version": version, **own})}
    if trial.offload_param:
        told["fsdp_config"]["cpu_offload"] = True
        if trial.device.name == "cuda" and "ddp_backend" not in trial.runner.options:
            told["ddp_backend"] = "cuda:nccl,cpu:gloo"  # as `accelerate launch` does: norms are taken on the host
    return told


def _wanted(key: str, value: Any, version: int) -> str | None:
    """What a value of fsdp_config must be, where it is not: accelerate meets it with a KeyError or less."""
    if key == "reshard_after_forward" and version == 2:
        return None if str(value).lower() in ("true", "false") else "true or false"
    if key == "transformer_layer_cls_to_wrap":
        names = value if isinstance(value, list) else [value]
        return None if all(isinstance(name, str) for name in names) else "a name or a list of names"
    listed = {
        "reshard_after_forward": FSDP_SHARDING_STRATEGY,  # as accelerate calls FSDP1's sharding_strategy
        "sharding_strategy": FSDP_SHARDING_STRATEGY,
        "backward_prefetch": FSDP_BACKWARD_PREFETCH,
    }.get(key)
    fits = listed is None or value is None or version == 2 or str(value).isdigit() or str(value).upper() in listed
    return None if fits else " or ".join(listed or ())


def place(trial: Trial, device: torch.device) -> torch.device:
    """The model is made on the host; FSDP moves it unit by unit."""
    return shardings.host(trial)


def fitting(trial: Trial, net: torch.nn.Module, made: TrainingArguments) -> None:
    """Raise InvalidTrial for a key that is not heeded, and for a class to wrap that the model lacks."""
    config: Any = made.fsdp_config
    ignored = next((key for key in config if key not in config.asked), None)
    if ignored == "version":  # ours, which 4.57 has no word for: it would not wrap layers either
        raise InvalidTrial(
            f"sharding={trial.sharding} with runner=trainer: TrainingArguments of transformers "
            f"{transformers.__version__} know no version of FSDP; install a newer one, or use runner=torch"
        )
    if ignored is not None:
        raise InvalidTrial(
            f"runner.options.fsdp_config.{ignored}: transformers {transformers.__version__} does not look at it with "
            f"sharding={trial.sharding}; it would have no effect"
        )
    asked = {key.removeprefix("fsdp_"): value for key, value in trial.runner.options.get("fsdp_config", {}).items()}
    named = asked.get("transformer_layer_cls_to_wrap") or []
    there = {type(module).__name__ for module in net.modules()}
    for name in [named] if isinstance(named, str) else named:
        if name not in there:
            usual = ", ".join(getattr(net, "_no_split_modules", None) or ()) or "none that it names itself"
            raise InvalidTrial(
                f"runner.options.fsdp_config.transformer_layer_cls_to_wrap: {type(net).__name__} has no {name}; its "
                f"layers are {usual}, which is the default"
            )


@contextlib.contextmanager
def on_cpu(trial: Trial) -> Iterator[None]:
    """The process group joined, and accelerate's belief in cards where there are none."""
    device = torch.device("cpu")
    mesh = ranks.mesh(trial, device)
    replaced: list[tuple[Any, str, Any]] = [
        (PartialState, "_prepare_backend", lambda *args: (dist.get_backend(), DistributedType.MULTI_GPU)),
        (PartialState, "set_device", lambda self: setattr(self, "device", device)),
        (plugins, "is_cuda_available", lambda: True),  # it asks where sync_module_states is to make parameters
        (torch.cuda, "current_device", lambda: device),
        (fsdp1_init, "_check_module_states_for_sync_module_states", lambda states: None),  # which are to be on a card
        (torch.Tensor, "pin_memory", lambda tensor, *args: tensor),  # torch refuses to, without a card to pin for
        (torch.cpu.Stream, "synchronize", lambda self: None),
        (fsdp2_api, _DEFAULT_MESH, lambda *args, **kwargs: mesh),
    ]
    with contextlib.ExitStack() as stack:
        for owner, attribute, value in replaced:
            stack.enter_context(mock.patch.object(owner, attribute, value, create=True))
        yield


@contextlib.contextmanager
def traced(trial: Trial) -> Iterator[None]:
    """FSDP on fake tensors: host memory, on device meta, is moved, not taken for what is to be made later."""
    replaced: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "cpu", _to_host),
        (fsdp2_collectives, "torch", _TorchOnTheHost()),
        (FSDPParamGroup, "_validate_cpu_offload_params", lambda self: None),
        (FSDPParamGroup, "_validate_no_meta_params", lambda self: None),
        (fsdp2_init, "_move_states_to_device", _moved),
        (fsdp1_init, "_move_module_to_device", _module_moved),
        (fsdp1_init, "_need_to_materialize_module", lambda *args: (False, False)),
        # an offloaded optimizer's state, which fused kernels step on the host
        (optimizers, "_get_fused_kernels_supported_devices", lambda: ["cuda", "cpu", "meta"]),
        # accelerate tells parameters apart by it
        (torch.Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata),
    ]
    with contextlib.ExitStack() as stack:
        for owner, attribute, value in replaced:
            stack.enter_context(mock.patch.object(owner, attribute, value))
        yield


def _moved(parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor], device: torch.device) -> None:
    """In the place of what moves a module's tensors; those that are there already stay.

    The tensor's object goes on: modules and an optimizer know it. `.data` cannot be exchanged across devices for fake
    tensors.
    """
    for tensor in itertools.chain(parameters, buffers):
        if tensor.device != device:
            there = tensor.detach().to(device).requires_grad_(tensor.requires_grad)
            torch._C._swap_tensor_impl(tensor, there)
            if isinstance(tensor, FakeTensor):
                tensor.fake_device = device


def _module_moved(module: torch.nn.Module, ignored: Any, ignored_buffers: Any, device: torch.device) -> None:
    """In the place of FSDP1's, which leaves out what an inner FSDP has flattened."""
    buffers = [buffer for buffer in module.buffers() if buffer not in ignored_buffers]
    _moved(list(fsdp1_init._get_orig_params(module, ignored)), buffers, device)


class _TorchOnTheHost:
    """torch as FSDP2 uses it to send gradients to host memory: what it names "cpu" is there."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(name: str) -> torch.device:
        return torch.device("meta" if name == "cpu" else name)


_cpu = torch.Tensor.cpu


def _to_host(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.cpu`, of FSDP to host memory."""
    ours = str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.distributed.fsdp.")
    return tensor.to("meta") if ours else _cpu(tensor, *args, **kwargs)
