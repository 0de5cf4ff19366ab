"""One rank of one attempt: device, read-back of the allocator's settings, the runner, and the columns it yields."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch

from vramsweep.harness import machine, registry, variables
from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.errors import EnvironmentFault
from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners import build, ran_out, result, simulated, techniques
from vramsweep.runners.gauges import Gauges
from vramsweep.runners.measure import Meter, asked
from vramsweep.runners.over_ranks import Columns, over_ranks


class AllocatorMismatch(RuntimeError):
    """The allocator settings in force are not those that the trial asked for."""


def run(trial: Trial, folder: Path) -> dict[str, Any] | None:
    """Train and measure, or predict; the columns on rank 0, None on the others.

    Raises what training raises until the measured steps are over, and result.EndedEarly from then on.
    """
    runner = importlib.import_module(registry.module(trial))
    if trial.device.name == "simulated":
        return simulated.run(trial, folder, runner)
    rank = int(os.environ.get("RANK", "0"))
    if trial.world_size > 1:  # a forked rank's library read the variable long ago
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
    device = _device(trial)
    build.prepare(trial)

    def publish(own: Columns) -> Columns:
        row = over_ranks(_gathered(trial, own))
        if told:
            row["notes"] = [*(row.get("notes") or ()), *told]
        if rank == 0:
            result.values(folder, row | about, complete=False)
        if trial.world_size > 1:
            torch.distributed.barrier()  # no rank goes on, and perhaps fails, before the result is there
        return row

    gauges = Gauges(device)
    if trial.protocol.job:
        gauges.begin_job(counted=trial.compile == "none")
    meter = Meter(asked(trial), folder, gauges, rank, publish)
    effective, told = effective_allocator(trial) if device.type == "cuda" else (None, [])
    about = {
        "environment": variables.recorded(os.environ),
        "allocator_conf_effective": effective,
        "cuda_version": torch.version.cuda,
        "torch_version": torch.__version__,
        "cpu_threads": torch.get_num_threads(),
        "deepspeed_version": machine.version("deepspeed") if trial.sharding in registry.ZERO else None,
    }
    try:
        with techniques.around(trial, device):
            runner.run(trial, device, meter, folder)
        meter.gauges.synchronize()
        if trial.world_size > 1:
            torch.distributed.barrier()  # a rank that is gone takes along what collectives of others still wait for
    except Exception as error:
        if meter.row is None:
            full = ran_out.columns(error)
            if full:
                meter.stopped(ran_out.phase(error))
            error.columns = about | meter.seen() | full  # type: ignore[attr-defined] # others may be why memory ran out
            error.card_memory = ran_out.card_memory(device)  # type: ignore[attr-defined]
            raise
        text = meter.failed(error)
        if trial.world_size > 1:
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
        raise EnvironmentFault("torch sees no CUDA device; `vramsweep doctor` tells more, or use device=cpu")
    rank, visible = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= visible > 0:
        raise InvalidTrial(f"world_size {trial.world_size} needs as many GPUs, and torch sees {visible} here; lower it")
    return torch.device("cuda", rank)


def effective_allocator(trial: Trial) -> tuple[str, list[str]]:
    """The settings that took effect, canonical, as torch reports them, and notes: what it does not report, what of them
    does nothing.

    Raises AllocatorMismatch where a reported one is not what the trial asks for.
    """
    torch.cuda.init()
    backend = torch.cuda.get_allocator_backend()
    settings = torch.cuda.memory._snapshot()["allocator_settings"] if backend == "native" else {}
    found = allocator_config.read_back(allocator_config.parse(trial.allocator.conf), backend, settings)
    if found.mismatch:
        raise AllocatorMismatch(found.mismatch)
    return found.effective, found.notes


def _gathered(trial: Trial, own: Columns) -> list[Columns]:
    """The columns of every rank."""
    if trial.world_size == 1:
        return [own]
    every: list[Any] = [None] * trial.world_size
    torch.distributed.all_gather_object(every, own)
    return every
