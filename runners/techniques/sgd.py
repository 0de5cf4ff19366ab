"""torch's SGD, without and with momentum."""

from __future__ import annotations

from typing import Any

import torch

from vramsweep.harness.trial import Trial

MOMENTUM = {"sgd": 0.0, "sgd_momentum": 0.9}


def optimizer(trial: Trial, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """SGD, whose only state is its momentum's."""
    return torch.optim.SGD, {"lr": 1e-5, "momentum": MOMENTUM[trial.optimizer]}
