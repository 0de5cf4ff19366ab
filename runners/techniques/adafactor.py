"""Adafactor of transformers, as the Trainer sets it up: without scaling by the parameter, without relative steps.

For each matrix it keeps the second moments of rows and of columns, and the weights' norm, all in fp32. Everything else
is made anew in each step, parameter by parameter.
"""

from typing import Any

import torch
from transformers.optimization import Adafactor

from vramsweep.harness.spec.trial import Trial


def optimizer(trial: Trial, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class and the arguments of transformers' get_optimizer_cls_and_kwargs."""
    return Adafactor, {"lr": 1e-5, "scale_parameter": False, "relative_step": False}
