"""Optimizers without kernels of their own: AdamW as torch chooses to run it (foreach on CUDA) or as the trial says,
SGD, and Adafactor of transformers.

Adafactor is set up as the Trainer does it: without scaling by the parameter, without relative steps. For each matrix it
keeps the second moments of rows and of columns, and the weights' norm, all in fp32. Everything else is made anew in
each step, parameter by parameter.
"""

from typing import Any

import torch
from transformers.optimization import Adafactor

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
    if trial.optimizer == "adafactor":  # with the arguments of transformers' get_optimizer_cls_and_kwargs
        return Adafactor, {"lr": LEARNING_RATE, "scale_parameter": False, "relative_step": False}
    if trial.optimizer in MOMENTUM:
        return torch.optim.SGD, {"lr": LEARNING_RATE, "momentum": MOMENTUM[trial.optimizer]}
    on_host = trial.device.name == "simulated" and trial.offload_optimizer
    return torch.optim.AdamW, {"lr": LEARNING_RATE, **({} if on_host else WAYS.get(trial.optimizer, {}))}
