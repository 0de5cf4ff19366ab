"""torch's own optimizers: AdamW as torch chooses to run it, which is foreach on CUDA, or told how; SGD."""

from __future__ import annotations

from typing import Any

import torch

from vramsweep.harness.spec.trial import Trial

LEARNING_RATE = 1e-5
MOMENTUM = {"sgd": 0.0, "sgd_momentum": 0.9}
WAYS: dict[str, dict[str, bool]] = {
    "adamw_torch_fused": {"fused": True},
    "adamw_torch_foreach": {"foreach": True},
    "adamw_torch_loop": {"foreach": False},
}


def optimizer(trial: Trial, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and how it runs. SGD's only state is its momentum's.

    What is offloaded and simulated steps in host memory, which is not traced, and has no fused kernel for what has no
    values.
    """
    if trial.optimizer in MOMENTUM:
        return torch.optim.SGD, {"lr": LEARNING_RATE, "momentum": MOMENTUM[trial.optimizer]}
    on_host = trial.device.name == "simulated" and trial.offload_optimizer
    return torch.optim.AdamW, {"lr": LEARNING_RATE, **({} if on_host else WAYS.get(trial.optimizer, {}))}
