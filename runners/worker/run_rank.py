"""One rank of an attempt: choose its device, read the allocator's settings back, run its runner, return the columns."""

import os
from pathlib import Path
from typing import Any

import torch

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.machine import machine
from vramsweep.harness.messages.errors import EnvironmentFault
from vramsweep.harness.process import worker_environment
from vramsweep.harness.spec import runner_table
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.measure import model_description
from vramsweep.runners.measure.rank_instruments import Gauges
from vramsweep.runners.measure.step_meter import Meter, meter_spec
from vramsweep.runners.model import apply_techniques, build
from vramsweep.runners.rank import oom_details, result_file
from vramsweep.runners.rank.aggregate_ranks import Columns, over_ranks
from vramsweep.runners.rank.entry_modules import import_entry


class AllocatorMismatch(RuntimeError):
    """The allocator settings in force are not the trial's."""


def run(trial: Trial, folder: Path) -> dict[str, Any] | None:
    """Train and measure; return the columns on rank 0, None on the others.

    Until the measured steps are over, raises what training raises; after them, result_file.EndedEarly.
    """
    runner = import_entry(runner_table.module(trial))
    rank = int(os.environ.get("RANK", "0"))
    if trial.world_size > 1:  # torch in a forked rank read the variable before the fork
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
    device = _device(trial)
    build.prepare(trial)

    def publish(own: Columns) -> Columns:
        every = [own] * trial.world_size
        if trial.world_size > 1:
            torch.distributed.all_gather_object(every, own)
        row = over_ranks(every)
        if told:
            row["notes"] = [*(row.get("notes") or ()), *told]
        if rank == 0:
            result_file.values(folder, row | about, complete=False)
        if trial.world_size > 1:
            torch.distributed.barrier()  # no rank continues, and perhaps fails, before the result is written
        return row

    gauges = Gauges(device)
    if trial.protocol.job:
        gauges.begin_job(counted=trial.compile == "none")
    meter = Meter(meter_spec(trial), folder, gauges, rank, publish)
    effective, told = effective_allocator(trial) if device.type == "cuda" else (None, [])
    about = {
        "environment": worker_environment.recorded_variables(os.environ),
        "allocator_conf_effective": effective,
        "cuda_version": torch.version.cuda,
        "torch_version": torch.__version__,
        "cpu_threads": torch.get_num_threads(),
        "deepspeed_version": machine.deepspeed_version(trial.sharding),
    }
    try:
        with apply_techniques.around(trial, device):
            runner.run(trial, device, meter, folder)
        meter.gauges.synchronize()
        if trial.world_size > 1:
            torch.distributed.barrier()  # if a rank exits, collectives of other ranks that still wait for it fail
    except Exception as error:
        if meter.row is None:
            full = oom_details.oom_columns(error)
            if full:
                meter.stopped(oom_details.phase(error))
            error.columns = about | meter.seen() | full  # type: ignore[attr-defined] # others may be why memory ran out
            error.card_memory = oom_details.card_memory(device)  # type: ignore[attr-defined]
            raise
        text = meter.failed(error)
        if trial.world_size > 1:
            text = f"rank {rank}: {text}"
        if rank == 0:
            result_file.values(folder, meter.columns() | about, complete=False)
        raise result_file.EndedEarly(text) from error
    columns = meter.columns()
    return columns | about if rank == 0 else None


def _device(trial: Trial) -> torch.device:
    """Return the rank's device without touching it, because the meter first reads how much of it is in use."""
    if trial.device.name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EnvironmentFault("torch finds no CUDA device; run `vramsweep doctor` for more, or use device=cpu")
    rank, visible = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= visible > 0:
        raise InvalidTrial(f"world_size={trial.world_size} needs as many GPUs, but torch finds {visible}; lower it")
    return torch.device("cuda", rank)


def effective_allocator(trial: Trial) -> tuple[str, list[str]]:
    """Return the settings in force, as torch reports them in canonical form, and notes.

    The notes name settings that torch does not report, and settings without effect. Raises AllocatorMismatch if a
    reported setting is not the trial's.
    """
    torch.cuda.init()
    told = model_description.allocator()
    asked_for = allocator_config.parse(trial.allocator.conf)
    found = allocator_config.read_back(asked_for, told["backend"], told["allocator_settings"])
    if found.mismatch:
        raise AllocatorMismatch(found.mismatch)
    return found.effective, found.notes
