"""Masks that transformers' models kept as buffers of (positions, positions)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from packaging.version import Version
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeModel
from transformers.models.llama.modeling_llama import LlamaModel

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import Replacement


def gpt2(trial: Trial) -> Iterator[Replacement]:
    """Give every layer's attention of GPT-2 a mask."""
    yield _with_mask(GPT2Attention)


def gpt_bigcode(trial: Trial) -> Iterator[Replacement]:
    """Give GPTBigCode one mask for the model."""
    yield _with_mask(GPTBigCodeModel)


def llama(trial: Trial) -> Iterator[Replacement]:
    """Give Llama one mask for the model, of int64 before transformers 4.38.2."""
    first = Version(trial.versions["transformers"]) < Version("4.38.2")
    yield _with_mask(LlamaModel, torch.int64 if first else torch.bool)


def _with_mask(kind: Any, dtype: torch.dtype = torch.bool) -> Replacement:
    original = kind.__init__

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        positions = config.max_position_embeddings
        self.register_buffer("_earlier_mask", torch.ones((positions, positions), dtype=dtype), persistent=False)

    return kind, "__init__", init
