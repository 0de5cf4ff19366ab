"""torch.compile of the whole model, in place, in one of its modes."""

from typing import Any

import torch

from vramsweep.harness.spec.trial import Trial


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """Return the model, whose forward and backward passes are compiled when they first run."""
    net.compile(mode=trial.compile)
    return net
