"""The plain training loop: forward, backward, optimizer step; autocast and GradScaler as the precision asks."""

from __future__ import annotations

from pathlib import Path

import torch

from vramsweep.harness.trial import Trial
from vramsweep.runners import build
from vramsweep.runners.instruments import scaler_skips
from vramsweep.runners.measure import StepMeter


def run(trial: Trial, device: torch.device, meter: StepMeter, folder: Path) -> None:
    """Train `trial.steps()` optimizer steps under `meter`."""
    net = build.model(trial, device)
    optimizer = build.optimizer(trial, net.parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=trial.precision == "fp16")
    data = build.data(trial)
    meter.built(
        lambda: build.describe(net, optimizer) | {"padding_fraction": data.padding_fraction},
        scaler_skips(scaler, trial.steps()),
    )
    micro = 0
    for _ in range(trial.steps()):
        meter.step_begin()
        for _ in range(trial.grad_accum):
            batch = {k: v.to(device, non_blocking=True) for k, v in data.batch(micro, trial.micro_batch).items()}
            with build.autocast(trial, device):
                loss = net(**batch).loss / trial.grad_accum
            scaler.scale(loss).backward()
            micro += 1
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        meter.step_end(loss)
