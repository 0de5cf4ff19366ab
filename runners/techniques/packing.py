"""Documents of one sample that do not see each other; the positions of its tokens tell the model where each begins."""

import inspect
from typing import Any

import torch

from vramsweep.harness.spec.trial import InvalidTrial, Trial


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """Return the model. Raises InvalidTrial if it takes no positions, because it would see all documents as one."""
    base = net.get_base_model() if hasattr(net, "get_base_model") else net
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise InvalidTrial(f"packing=documents: {type(base).__name__} accepts no position_ids; use packing=wrapped")
    return net
