"""torch's own AdamW: `default` and `adamw_torch` as torch chooses to run it, which is foreach on CUDA; or fused."""

from __future__ import annotations

from typing import Any

import torch

from vramsweep.harness.trial import Trial

LEARNING_RATE = 1e-5


def optimizer(trial: Trial, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """AdamW and how it runs."""
    return torch.optim.AdamW, {"lr": LEARNING_RATE, "fused": True if trial.optimizer == "adamw_torch_fused" else None}
