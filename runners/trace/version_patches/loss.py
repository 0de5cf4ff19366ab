"""Earlier logits and loss of transformers' causal language models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.loss import loss_utils

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import Replacement


def fp32_logits(trial: Trial) -> Iterator[Replacement]:
    """Make the model's last layer return fp32, whatever it computes in."""
    original = AutoModelForCausalLM.from_config

    def from_config(*args: Any, **kwargs: Any) -> Any:
        net = original(*args, **kwargs)
        head = net.get_output_embeddings()
        if head is not None:
            head.register_forward_hook(lambda module, given, logits: logits.float())
        return net

    yield AutoModelForCausalLM, "from_config", from_config


def shifted_logits(trial: Trial) -> Iterator[Replacement]:
    """Compute the loss over a copy without the last position."""
    original: Any = loss_utils.LOSS_MAPPING["ForCausalLM"]

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, *args: Any, **kwargs: Any) -> Any:
        logits = logits.float()
        shifted = logits[..., :-1, :].contiguous()
        kwargs["shift_labels"] = labels[..., 1:].contiguous()
        return original(shifted, labels, vocab_size, *args, **kwargs)

    yield loss_utils.LOSS_MAPPING, "ForCausalLM", loss


def own_precision(trial: Trial) -> Iterator[Replacement]:
    """Compute the loss over a copy without the last position, in whatever precision the logits have."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shifted, wanted = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        return F.cross_entropy(shifted.view(-1, shifted.size(-1)), wanted.view(-1))

    yield loss_utils.LOSS_MAPPING, "ForCausalLM", loss
