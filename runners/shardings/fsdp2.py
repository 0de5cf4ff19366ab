"""FSDP2 (`torch.distributed.fsdp.fully_shard`): a model whose blocks are sharded over the ranks, for the plain loop.

Each transformer block is a unit of its own and the rest of the model another. Precision is FSDP's own, without
autocast: bf16 keeps weights, gradients and optimizer state in fp32, gathers and computes in bf16 and reduces gradients
in fp32; bf16_pure holds everything in bf16; fp32 and tf32 change no dtype. `runner.options` are arguments of
`fully_shard`: reshard_after_forward (true: a block's gathered weights are freed after its forward pass and gathered
again for its backward pass).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners import build, described, places, ranks, shardings
from vramsweep.runners.shardings import fsdp_trainer

place, fitting, told = fsdp_trainer.place, fsdp_trainer.fitting, fsdp_trainer.told
on_cpu, traced = fsdp_trainer.on_cpu, fsdp_trainer.traced


def arguments(trial: Trial) -> dict[str, Any]:
    """TrainingArguments for FSDP2."""
    return fsdp_trainer.arguments(trial, 2)


def checked(trial: Trial, net: torch.nn.Module) -> None:
    """Raise InvalidTrial unless the model's parameters are divided over as many ranks as asked for."""
    found = next((p for p in net.parameters() if isinstance(p, DTensor)), None)
    if not any(isinstance(module, FSDPModule) for module in net.modules()) or found is None:
        raise InvalidTrial(f"sharding=fsdp2: {type(net).__name__} was not passed to fully_shard, nor anything in it")
    if found.device_mesh.size() != trial.world_size:
        size = found.device_mesh.size()
        raise InvalidTrial(
            f"sharding=fsdp2: the model is divided over {size} ranks, and world_size is {trial.world_size}"
        )


def sharded(trial: Trial, device: torch.device) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The model with this rank's shards on the device, what `fully_shard` was told, and what the model counts."""
    groups = trial.runner.options.get("reshard_after_forward")
    if trial.device.name == "simulated" and type(groups) is int and groups not in (1, trial.world_size):
        raise InvalidTrial(
            f"runner.options.reshard_after_forward={groups}: groups of ranks cannot be simulated; use true or false"
        )
    mesh = ranks.mesh(trial, device)
    with weightless():  # no rank ever holds the whole model
        net = build.model(trial, device)
    half = trial.precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    offload = CPUOffloadPolicy() if trial.offload_param else OffloadPolicy()
    shared = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload, **trial.runner.options}
    units = (*blocks(net), net)
    for unit in units:
        fully_shard(unit, **shared)
    materialize(net, shardings.host(trial) if trial.offload_param else device)
    told = {"units": len(units), "mp_policy": str(policy), "offload_policy": str(offload), **trial.runner.options}
    return net, told, described.counts(net)


def blocks(net: torch.nn.Module) -> list[torch.nn.Module]:
    """The transformer blocks: the elements of the module list that holds most parameters.

    Raises InvalidTrial for a model without one.
    """
    lists = [list(m) for m in net.modules() if isinstance(m, torch.nn.ModuleList)]
    if not lists:
        raise InvalidTrial("the model has no list of blocks (torch.nn.ModuleList) for FSDP to divide one by one")
    return max(lists, key=lambda found: sum(map(described.parameters, found)))


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Modules made inside have their parameters on device meta, each from the moment it is theirs."""
    register = torch.nn.Module.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            with places.nowhere():
                parameter = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(net: torch.nn.Module, device: torch.device) -> None:
    """Give this rank's shards memory on the device and random values: those a transformer usually starts from."""
    with places.host():  # if the device is
        net._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            shard = cast(DTensor, parameter).to_local()
            if parameter.dim() > 1:
                shard.normal_(0, 0.02)
            else:
                shard.fill_(0 if name.endswith("bias") else 1)
