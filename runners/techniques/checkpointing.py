"""Activation checkpointing, layer by layer, through the model's own `gradient_checkpointing_enable`."""

from __future__ import annotations

from typing import Any

import torch

from vramsweep.harness.trial import Trial


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """The model, each of whose layers recomputes its activations in the backward pass."""
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": trial.checkpointing_reentrant})
    return net
