"""One rank of one attempt: device, read-back of the allocator's settings, the runner, and the columns it yields."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch

from vramsweep.harness import machine, registry
from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners import build, simulated
from vramsweep.runners.measure import Meter


class AllocatorMismatch(RuntimeError):
    """The allocator settings in force are not those that the trial asked for."""


def run(trial: Trial, folder: Path) -> dict[str, Any] | None:
    """Train and measure, or predict; the columns on rank 0, None on the others. Raises what training raises."""
    runner = importlib.import_module(registry.runner(trial.runner.name).module)
    if trial.device.name == "simulated":
        return simulated.run(trial, folder, runner)
    rank = int(os.environ.get("RANK", "0"))
    device = _device(trial)
    build.prepare(trial)
    meter = Meter(trial, folder, device, rank)
    effective = effective_allocator(trial) if device.type == "cuda" else None
    details: dict[str, Any] = runner.run(trial, device, meter, folder)
    columns = meter.columns() | details
    columns |= {
        "allocator_conf_effective": effective,
        "cuda_version": torch.version.cuda,
        "torch_version": torch.__version__,
        "cpu_threads": torch.get_num_threads(),
        "deepspeed_version": machine.version("deepspeed") if trial.runner.name == "deepspeed" else None,
        **_over_ranks(trial, columns),
    }
    return columns if rank == 0 else None


def _device(trial: Trial) -> torch.device:
    if trial.device.name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidTrial("device=cuda, but torch sees no CUDA device; `make doctor` tells more, or use device=cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def effective_allocator(trial: Trial) -> str:
    """The settings that took effect, canonical, read back from torch. Raises AllocatorMismatch if they differ."""
    torch.cuda.init()
    backend = torch.cuda.get_allocator_backend()
    asked = allocator_config.parse(trial.allocator.conf)
    if backend == "native":
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        effective = allocator_config.from_settings(settings)
    else:
        effective = allocator_config.AllocatorConfig(backend=backend)
    found = allocator_config.differences(asked, effective)
    if found:
        raise AllocatorMismatch("; ".join(found))
    return effective.render()


def _over_ranks(trial: Trial, columns: dict[str, Any]) -> dict[str, Any]:
    names = ("peak_allocated_bytes", "peak_reserved_bytes")
    own = [columns[name] for name in names]
    every = [own]
    if trial.world_size > 1:
        gathered: list[Any] = [None] * trial.world_size
        torch.distributed.all_gather_object(gathered, own)
        every = gathered
    return {f"rank_{name}": [values[i] for values in every] for i, name in enumerate(names)}
