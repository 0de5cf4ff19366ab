"""FSDP2 (`torch.distributed.fsdp.fully_shard`): the plain loop over a model whose blocks are sharded over the ranks.

Each transformer block is a unit of its own and the rest of the model another. Precision is FSDP's own, without
autocast: bf16 keeps weights, gradients and optimizer state in fp32, gathers and computes in bf16 and reduces gradients
in fp32; bf16_pure holds everything in bf16; fp32 and tf32 change no dtype. `runner.options` are arguments of
`fully_shard`: reshard_after_forward (true: a block's gathered weights are freed after its forward pass and gathered
again for its backward pass).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners import build, ranks
from vramsweep.runners.measure import StepMeter


def run(trial: Trial, device: torch.device, meter: StepMeter, folder: Path) -> None:
    """Train `trial.steps()` optimizer steps under `meter`."""
    mesh = ranks.mesh(trial, device)
    with weightless():  # no rank ever holds the whole model
        net = build.model(trial, device)
    half = trial.precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    shared = {"mesh": mesh, "mp_policy": policy, **trial.runner.options}
    for unit in (*blocks(net), net):
        fully_shard(unit, **shared)
    materialize(net, device)
    optimizer = build.optimizer(trial, net.parameters())
    data = build.data(trial)
    meter.built(
        lambda: {
            **build.describe(net, optimizer),
            "padding_fraction": data.padding_fraction,
            "runner_config": {"units": len(blocks(net)) + 1, "mp_policy": str(policy), **trial.runner.options},
        },
        lambda: 0,  # there is no scaler
    )
    micro = 0
    for _ in range(trial.steps()):
        meter.step_begin()
        for _ in range(trial.grad_accum):
            index = micro * trial.runner.world_size + meter.rank
            batch = {k: v.to(device, non_blocking=True) for k, v in data.batch(index, trial.micro_batch).items()}
            loss = net(**batch).loss / trial.grad_accum
            loss.backward()
            micro += 1
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.step_end(loss)


def blocks(net: torch.nn.Module) -> list[torch.nn.Module]:
    """The transformer blocks: the elements of the module list that holds most parameters.

    Raises InvalidTrial for a model without one.
    """
    lists = [list(m) for m in net.modules() if isinstance(m, torch.nn.ModuleList)]
    if not lists:
        raise InvalidTrial("runner=fsdp: the model has no list of blocks (torch.nn.ModuleList) to shard one by one")
    return max(lists, key=lambda found: sum(map(build.parameters, found)))


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Modules made inside have their parameters on device meta, each from the moment it is theirs."""
    register = torch.nn.Module.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(net: torch.nn.Module, device: torch.device) -> None:
    """Give this rank's shards memory on the device and random values: those a transformer usually starts from."""
    net._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            shard = cast(DTensor, parameter).to_local()
            if parameter.dim() > 1:
                shard.normal_(0, 0.02)
            else:
                shard.fill_(0 if name.endswith("bias") else 1)
