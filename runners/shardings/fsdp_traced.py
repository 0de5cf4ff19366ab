"""FSDP1 and FSDP2 without a GPU: over gloo on a CPU, and on fake tensors.

On a CPU accelerate would leave FSDP out and wrap the model in DistributedDataParallel, because its kind MULTI_CPU takes
no plugin (AcceleratorState). So accelerate is told that the ranks are GPUs. Every replacement uses private names of
torch 2.13 and accelerate 1.15; a run on a GPU does not load this module.
"""

import contextlib
import importlib
import itertools
import sys
from collections.abc import Iterable
from typing import Any

import accelerate.utils.dataclasses as plugins
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import _flat_param as fsdp1_flat
from torch.distributed.fsdp import _init_utils as fsdp1_init
from torch.distributed.fsdp import _runtime_utils as fsdp1_runtime
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp2_collectives
from torch.distributed.fsdp._fully_shard import _fsdp_init as fsdp2_init
from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp2_api
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.measure.patches import patched
from vramsweep.runners.rank import process_group
from vramsweep.runners.shardings import stream_events
from vramsweep.runners.trace import fake_placement, step_tracer

optimizers = importlib.import_module("torch.optim.optimizer")

DEFAULT_MESH = next(
    name for name in ("_init_default_mesh", "_init_default_fully_shard_mesh") if hasattr(fsdp2_api, name)
)


def on_cpu(trial: Trial) -> contextlib.AbstractContextManager[None]:
    """Join the process group; return a context manager in which accelerate takes the ranks for GPUs."""
    device = torch.device("cpu")
    mesh = process_group.mesh(trial, device)
    replaced = [
        (PartialState, "_prepare_backend", lambda *args: (dist.get_backend(), DistributedType.MULTI_GPU)),
        (PartialState, "set_device", lambda self: setattr(self, "device", device)),
        (plugins, "is_cuda_available", lambda: True),  # decides where sync_module_states makes parameters
        (torch.cuda, "current_device", lambda: device),
        (fsdp1_init, "_check_module_states_for_sync_module_states", lambda states: None),  # wants them on a GPU
        # torch refuses to pin memory without a GPU
        (torch.Tensor, "pin_memory", lambda tensor, *args: fake_placement.pinned(tensor) if tensor.is_meta else tensor),
        (torch.cpu.Stream, "synchronize", lambda self: None),
        (fsdp2_api, DEFAULT_MESH, lambda *args, **kwargs: mesh),
    ]
    return patched(replaced, create=True)


def traced(trial: Trial) -> contextlib.AbstractContextManager[None]:
    """Return a context for FSDP on fake tensors: host memory (device meta) is moved, not taken as still to be made."""
    replaced: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "cpu", _to_host),
        (fsdp2_collectives, "torch", _TorchOnTheHost()),
        (FSDPParamGroup, "_validate_cpu_offload_params", lambda self: None),
        (FSDPParamGroup, "_validate_no_meta_params", lambda self: None),
        (FSDPParam, "reset_sharded_param", _reset),
        (fsdp2_init, "_move_states_to_device", _moved),
        (fsdp1_init, "_move_module_to_device", _module_moved),
        (fsdp1_init, "_need_to_materialize_module", lambda *args: (False, False)),
        # fused kernels update an offloaded optimizer's state on the host (device meta)
        (optimizers, "_get_fused_kernels_supported_devices", lambda: ["cuda", "cpu", "meta"]),
        # accelerate tells parameters apart by their addresses
        (torch.Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata),
        (DistributedDataParallel, "__init__", _no_ddp),  # its reducer needs the replacements of ddp.py
    ]
    tracer = step_tracer.active()
    if tracer is not None and trial.sharding == "fsdp1":  # FSDP2 frees nothing that another stream may use
        replaced += stream_events.replaced(tracer)
        for module in (fsdp1_flat, fsdp1_runtime):  # their own leaves out a CPU's tensors
            replaced.append((module, "_no_dispatch_record_stream", lambda tensor, stream: tensor.record_stream(stream)))
    return patched(replaced)


def _no_ddp(*args: Any, **kwargs: Any) -> None:
    raise InvalidTrial("sharding is FSDP but the code makes a DistributedDataParallel; use sharding=ddp or fully_shard")


def _moved(parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move a module's tensors, in place of FSDP's function; skip those already there and those without memory.

    Each tensor's object stays, because modules and an optimizer refer to it. `.data` of fake tensors cannot be
    exchanged across devices.
    """
    for tensor in itertools.chain(parameters, buffers):
        if tensor.device != device and not _without_memory(tensor):
            there = tensor.detach().to(device).requires_grad_(tensor.requires_grad)
            torch._C._swap_tensor_impl(tensor, there)
            if isinstance(tensor, FakeTensor):
                tensor.fake_device = device


def _without_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is on device meta as such, not in host memory."""
    tracer = step_tracer.active()
    return tensor.is_meta and not (tracer is not None and tracer.holds(tensor))


def _reset(parameter: FSDPParam) -> None:
    """Run `FSDPParam.reset_sharded_param`, and do for a shard on device meta what it does for one in a CPU's memory."""
    _reset_sharded_param(parameter)
    shard: Any = parameter.sharded_param
    local = shard._local_tensor
    known = parameter._sharded_param_data.untyped_storage()._cdata == local.untyped_storage()._cdata
    if local.is_meta and not known and not _without_memory(local):
        if parameter.pin_memory:
            local = shard._local_tensor = fake_placement.pinned(local)
        parameter._sharded_param_data = local.view(-1)


def _module_moved(module: torch.nn.Module, ignored: Any, ignored_buffers: Any, device: torch.device) -> None:
    """Move a module, in place of FSDP1's function, which also leaves out what an inner FSDP has flattened."""
    buffers = [buffer for buffer in module.buffers() if buffer not in ignored_buffers]
    _moved(list(fsdp1_init._get_orig_params(module, ignored)), buffers, device)


class _TorchOnTheHost:
    """Stand-in for torch where FSDP2 sends gradients to host memory: its device "cpu" is device meta."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(name: str) -> torch.device:
        return torch.device("meta" if name == "cpu" else name)


_cpu = torch.Tensor.cpu
_reset_sharded_param = FSDPParam.reset_sharded_param


def _to_host(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace `Tensor.cpu`: calls by FSDP move the tensor to host memory (device meta), others run as usual."""
    ours = str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.distributed.fsdp.")
    return tensor.to("meta") if ours else _cpu(tensor, *args, **kwargs)
