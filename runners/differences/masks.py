"""Masks and heads as attention gets them in transformers."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any
from unittest import mock

import torch

from vramsweep.harness.differences import model_type
from vramsweep.harness.trial import Trial


def additive(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """The causal mask is what is added to the scores, not what is let through."""
    name = str(model_type(trial))
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    stack = contextlib.ExitStack()
    for maker in ("create_causal_mask", "create_sliding_window_causal_mask"):  # of models with a window the second
        if hasattr(module, maker):
            stack.enter_context(mock.patch.object(module, maker, _added(getattr(module, maker))))
    return stack


def _added(original: Any) -> Any:
    def create_mask(*args: Any, **kwargs: Any) -> Any:
        mask = original(*args, **kwargs)
        if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool or mask.dim() != 4:
            return mask  # flash attention's, of two dimensions, is not added to anything
        dtype = kwargs["inputs_embeds"].dtype
        return torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask.logical_not(), torch.finfo(dtype).min)

    return create_mask


def repeated_heads(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """Attention never shares heads in its kernel."""
    module = importlib.import_module("transformers.integrations.sdpa_attention")
    return mock.patch.object(module, "use_gqa_in_sdpa", lambda *args, **kwargs: False)
