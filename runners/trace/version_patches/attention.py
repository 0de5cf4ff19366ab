"""Masks and heads as attention gets them in transformers."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from transformers import masking_utils
from transformers.models.gpt_bigcode import modeling_gpt_bigcode
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel

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
        dtype = _embeds(kwargs).dtype
        return torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask.logical_not(), torch.finfo(dtype).min)

    return create_mask


def always(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """Llama's attention is given a mask in the model's precision even where it would do without."""

    def made(embeds: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        length, least = embeds.shape[1], torch.finfo(embeds.dtype).min
        mask = torch.full((length, length), least, dtype=embeds.dtype, device=embeds.device).triu(diagonal=1)
        whole = mask[None, None].expand(embeds.shape[0], 1, -1, -1)
        return whole if padding is None else whole.clone()

    return mock.patch.object(modeling_llama, "create_causal_mask", _unless_flash(modeling_llama, made))


def always_one(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """GPTBigCode's attention is given a mask in the model's precision even where it would do without: one for all
    samples where none is padded."""

    def made(embeds: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        length, least = embeds.shape[1], torch.finfo(embeds.dtype).min
        mask = torch.full((1, 1, length, length), least, dtype=embeds.dtype, device=embeds.device).triu(diagonal=1)
        return mask if padding is None else mask.repeat(embeds.shape[0], 1, 1, 1)

    return mock.patch.object(modeling_gpt_bigcode, "create_causal_mask", _unless_flash(modeling_gpt_bigcode, made))


def of_all_positions(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """Llama's mask has all positions that it knows, for each sample, and each layer cuts out its own."""

    def made(embeds: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        kept = earlier[0]
        return kept[None, None].repeat(embeds.shape[0], 1, 1, 1).to(embeds.dtype) * torch.finfo(embeds.dtype).min

    earlier: list[torch.Tensor] = []
    forward, attend = LlamaModel.forward, LlamaAttention.forward

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        earlier[:] = [self._earlier_mask]  # buffers.llama
        return forward(self, *args, **kwargs)

    def cut(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        if isinstance(mask, torch.Tensor) and mask.dim() == 4:
            length = hidden_states.shape[1]
            rows = torch.arange(length, device=hidden_states.device)
            kwargs["attention_mask"] = mask[:, :, rows, :length]
        return attend(self, hidden_states, **kwargs)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(modeling_llama, "create_causal_mask", _unless_flash(modeling_llama, made)))
    stack.enter_context(mock.patch.object(LlamaModel, "forward", noted))
    stack.enter_context(mock.patch.object(LlamaAttention, "forward", cut))
    return stack


def _unless_flash(module: Any, made: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]) -> Any:
    original = module.create_causal_mask

    def create_mask(*args: Any, **kwargs: Any) -> Any:
        if kwargs["config"]._attn_implementation not in ("sdpa", "eager"):
            return original(*args, **kwargs)
        return made(_embeds(kwargs), kwargs["attention_mask"])

    return create_mask


def _embeds(given: dict[str, Any]) -> torch.Tensor:
    """Its name changed with transformers 5."""
    found: torch.Tensor = given["inputs_embeds"] if "inputs_embeds" in given else given["input_embeds"]
    return found


def repeated_heads(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """Attention never shares heads in its kernel."""
    module = importlib.import_module("transformers.integrations.sdpa_attention")
    return mock.patch.object(module, "use_gqa_in_sdpa", lambda *args, **kwargs: False)


def contiguous_heads(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """Attention copies what is not contiguous before torch's gets it."""
    original = F.scaled_dot_product_attention

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = original(query.contiguous(), key.contiguous(), value.contiguous(), *args, **kwargs)
        return made

    return mock.patch.object(F, "scaled_dot_product_attention", attend)


def without_padding(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """One sequence a row is taken for several documents packed into it."""

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor:
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)

    return mock.patch.object(masking_utils, "find_packed_sequence_indices", find_packed_sequence_indices)
