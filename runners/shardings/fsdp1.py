"""FSDP1 (`torch.distributed.fsdp.FullyShardedDataParallel`): each block flattened to one parameter, divided over ranks.

The plain loop wraps each transformer block and the rest of the model, as fsdp2.py does, with the same precision.
`runner.options` are arguments of the class (`OPTIONS`); sharding_strategy and backward_prefetch by their names.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners import build, described, ranks, shardings
from vramsweep.runners.shardings import fsdp2, fsdp_trainer

place, fitting, told = fsdp_trainer.place, fsdp_trainer.fitting, fsdp_trainer.told
on_cpu, traced = fsdp_trainer.on_cpu, fsdp_trainer.traced


def arguments(trial: Trial) -> dict[str, Any]:
    """TrainingArguments for FSDP1."""
    return fsdp_trainer.arguments(trial, 1)


def checked(trial: Trial, net: torch.nn.Module) -> None:
    """Raise InvalidTrial unless the model is an FSDP of as many ranks as asked for."""
    if not isinstance(net, FSDP):
        raise InvalidTrial(f"sharding=fsdp1: {type(net).__name__} is no FullyShardedDataParallel")
    if net.world_size != trial.world_size:
        raise InvalidTrial(
            f"sharding=fsdp1: the model is divided over {net.world_size} ranks, and world_size is {trial.world_size}"
        )


def sharded(trial: Trial, device: torch.device) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The model, made on the host, with this rank's parts on the device, what FSDP was told, what the model counts."""
    ranks.join(trial, device)
    net = build.model(trial, shardings.host(trial))
    counts = described.counts(net)
    units = set(fsdp2.blocks(net))
    options = dict(trial.runner.options)
    for name, kind in (("sharding_strategy", ShardingStrategy), ("backward_prefetch", BackwardPrefetch)):
        if options.get(name) is not None:
            options[name] = _named(name, kind, str(options[name]))
    half = trial.precision == "bf16"
    wrapped = FSDP(
        net,
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=units.__contains__),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if half else None,
        cpu_offload=CPUOffload(trial.offload_param),
        device_id=device,
        **options,
    )
    told = {"units": len(units) + 1, "mixed_precision": str(wrapped.mixed_precision), **trial.runner.options}
    return wrapped, told, counts


def _named(option: str, kind: Any, name: str) -> Any:
    known = [member.name for member in kind if "HYBRID" not in member.name]  # which need groups of ranks within a node
    if name.upper() not in known:
        raise InvalidTrial(f"runner.options.{option}: {name} is none of {', '.join(known)}")
    return kind[name.upper()]
