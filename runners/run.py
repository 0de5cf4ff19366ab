"""One rank of one attempt: device, read-back of the allocator's settings, the runner, and the columns it yields."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch

from vramsweep.harness import machine
from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners import build, result, simulated
from vramsweep.runners.measure import Meter
from vramsweep.runners.over_ranks import Columns, over_ranks

RUNNERS = {
    "torch": "vramsweep.runners.torch_loop",
    "trainer": "vramsweep.runners.trainer",
    "deepspeed": "vramsweep.runners.deepspeed_zero",
    "fsdp": "vramsweep.runners.fsdp",
    "custom": "vramsweep.runners.custom",
}


class AllocatorMismatch(RuntimeError):
    """The allocator settings in force are not those that the trial asked for."""


def run(trial: Trial, folder: Path) -> dict[str, Any] | None:
    """Train and measure, or predict; the columns on rank 0, None on the others.

    Raises what training raises until the measured steps are over, and result.EndedEarly from then on.
    """
    runner = importlib.import_module(RUNNERS[trial.runner.name])
    if trial.device.name == "simulated":
        return simulated.run(trial, folder, runner)
    rank = int(os.environ.get("RANK", "0"))
    device = _device(trial)
    build.prepare(trial)

    def publish(own: Columns) -> Columns:
        row = over_ranks(_gathered(trial, own))
        if rank == 0:
            result.values(folder, row | about, complete=False)
        if trial.runner.world_size > 1:
            torch.distributed.barrier()  # no rank goes on, and perhaps fails, before the result is there
        return row

    meter = Meter(trial, folder, device, rank, publish)
    about = {
        "allocator_conf_effective": effective_allocator(trial) if device.type == "cuda" else None,
        "cuda_version": torch.version.cuda,
        "torch_version": torch.__version__,
        "cpu_threads": torch.get_num_threads(),
        "deepspeed_version": machine.version("deepspeed") if trial.runner.name == "deepspeed" else None,
    }
    try:
        runner.run(trial, device, meter, folder)
    except Exception as error:
        if meter.row is None:
            raise
        text = meter.failed(error)
        if trial.runner.world_size > 1:
            text = f"rank {rank}: {text}"
        if rank == 0:
            result.values(folder, meter.columns() | about, complete=False)
        raise result.EndedEarly(text) from error
    columns = meter.columns()
    return columns | about if rank == 0 else None


def _device(trial: Trial) -> torch.device:
    """The rank's device, not touched yet: the meter first reads what is in use there."""
    if trial.device.name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidTrial("device=cuda, but torch sees no CUDA device; `make doctor` tells more, or use device=cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


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


def _gathered(trial: Trial, own: Columns) -> list[Columns]:
    """The columns of every rank."""
    if trial.runner.world_size == 1:
        return [own]
    every: list[Any] = [None] * trial.runner.world_size
    torch.distributed.all_gather_object(every, own)
    return every
