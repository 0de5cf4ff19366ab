"""The plain training loop: forward, backward, optimizer step; autocast and GradScaler as the precision asks.

The model is sharded first. DistributedDataParallel with no_sync sends gradients only with the last accumulated pass.
FSDP (shardings/fsdp.py) has its own precision, without autocast.
"""

import contextlib
import functools
from pathlib import Path

import torch

from vramsweep.harness.spec.shardings import DDP, FSDP
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure import model_description
from vramsweep.runners.measure.counters import scaler_skips
from vramsweep.runners.measure.step_meter import StepMeter
from vramsweep.runners.model import build
from vramsweep.runners.shardings import interface


def run(trial: Trial, device: torch.device, meter: StepMeter, folder: Path) -> None:
    """Train `trial.steps()` optimizer steps under `meter`."""
    with interface.without_card(trial):
        _run(trial, device, meter)


def _run(trial: Trial, device: torch.device, meter: StepMeter) -> None:
    if trial.sharding == "none":
        net, config = build.model(trial, device), None
        counts = model_description.counts(net)
    else:
        net, config, counts = interface.hook(trial, "sharded")(trial, device)
    interface.call(trial, "checked", net)
    optimizer = build.optimizer(trial, net.parameters(), device)
    scaler = torch.amp.GradScaler(device.type, enabled=trial.precision == "fp16")
    data = build.data(trial)
    about = {**counts, **data.columns, "runner_config": config}
    skipped = scaler_skips(scaler, trial.steps())
    meter.built(lambda: model_description.describe(getattr(net, "module", net), optimizer) | about, skipped)
    micro = 0
    loss: torch.Tensor | None = None

    def run_pass(batch: dict[str, torch.Tensor], left: int) -> torch.Tensor:
        nonlocal loss
        with net.no_sync() if trial.sharding in DDP and trial.no_sync and left else contextlib.nullcontext():
            with contextlib.nullcontext() if trial.sharding in FSDP else build.autocast(trial, device):
                loss = net(**batch).loss / trial.grad_accum  # frees the one before
            scaler.scale(loss).backward()
        return loss

    for _ in range(trial.steps()):
        meter.step_begin()
        for left in reversed(range(trial.grad_accum)):
            index = micro * trial.world_size + meter.rank
            batch = {k: v.to(device, non_blocking=True) for k, v in data.batch(index, trial.micro_batch).items()}
            meter.fed(batch)
            loss = meter.run_pass(functools.partial(run_pass, batch, left))
            micro += 1
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        meter.step_end(loss)
