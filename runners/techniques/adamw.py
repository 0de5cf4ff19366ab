"""torch's own AdamW: `default` and `adamw_torch` as torch chooses to run it, which is foreach on CUDA; or told how."""

from __future__ import annotations

from typing import Any

import torch

from vramsweep.harness.trial import Trial

LEARNING_RATE = 1e-5
WAYS: dict[str, dict[str, bool]] = {
    "adamw_torch_fused": {"fused": True},
    "adamw_torch_foreach": {"foreach": True},
    "adamw_torch_loop": {"foreach": False},
}


def optimizer(trial: Trial, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """AdamW and how it runs.

    What is offloaded and simulated steps in host memory, which is not traced, and has no fused kernel for what has no
    values.
    """
    on_host = trial.device.name == "simulated" and trial.offload_optimizer
    return torch.optim.AdamW, {"lr": LEARNING_RATE, **({} if on_host else WAYS.get(trial.optimizer, {}))}
