"""Attention before transformers' models had torch's scaled_dot_product_attention, and GPT-2's own."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.models.gpt2 import modeling_gpt2

from vramsweep.harness.differences import holding
from vramsweep.harness.trial import Trial


def made(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """The model makes its scores, which is all it can do."""
    original = AutoModelForCausalLM.from_config

    def from_config(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs | {"attn_implementation": "eager"})

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(AutoModelForCausalLM, "from_config", from_config))
    if any(one.name == "gpt2_mask_buffers" for one in holding(trial)):  # else the installed one does it itself
        stack.enter_context(masked(trial))
    return stack


def masked(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """GPT-2 chooses between scores and the least number, where the installed one adds a mask."""

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        dropout: float = 0.0,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.matmul(query, key.transpose(-1, -2)) / value.size(-1) ** 0.5
        length, least = scores.shape[-1], torch.finfo(scores.dtype).min
        causal = module._earlier_mask[None, None, :length, :length]  # buffers.gpt2
        scores = torch.where(causal, scores, torch.full([], least, dtype=scores.dtype, device=scores.device))
        if trial.padding:
            scores = scores + mask
        weights = F.dropout(scores.softmax(dim=-1).type(value.dtype), p=dropout, training=module.training)
        return torch.matmul(weights, value).transpose(1, 2), weights

    return mock.patch.object(modeling_gpt2, "eager_attention_forward", attend)
