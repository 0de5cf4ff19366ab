"""torch's SGD."""

from __future__ import annotations

from typing import Any

import torch

from vramsweep.harness.trial import Trial


def optimizer(trial: Trial, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """SGD without momentum, which keeps no state."""
    return torch.optim.SGD, {"lr": 1e-5}
