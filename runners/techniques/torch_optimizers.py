"""torch's own optimizers: AdamW as torch chooses to run it (foreach on CUDA) or as the trial says, and SGD."""

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
    """Return the class and its arguments, with the way that it runs. SGD's only state is its momentum's.

    A simulated, offloaded optimizer steps in host memory, which is not traced. No fused kernel exists there for tensors
    without values.
    """
    if trial.optimizer in MOMENTUM:
        return torch.optim.SGD, {"lr": LEARNING_RATE, "momentum": MOMENTUM[trial.optimizer]}
    on_host = trial.device.name == "simulated" and trial.offload_optimizer
    return torch.optim.AdamW, {"lr": LEARNING_RATE, **({} if on_host else WAYS.get(trial.optimizer, {}))}
