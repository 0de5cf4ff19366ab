"""Rotary embeddings of transformers' models, whose attention class is named after them."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any
from unittest import mock

import torch

from vramsweep.harness.differences import model_type
from vramsweep.harness.trial import Trial


def tables(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """Two buffers of (positions, width of a head) in the model's precision in every layer's attention."""
    attention = _attention(trial)
    original = attention.__init__

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        for name in ("_cos_cached", "_sin_cached"):
            table = torch.empty(config.max_position_embeddings, self.head_dim, dtype=torch.get_default_dtype())
            self.register_buffer(name, table, persistent=False)

    return mock.patch.object(attention, "__init__", init)


def by_layer(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """Each layer's attention has sines and cosines of its own."""
    attention = _attention(trial)
    original = attention.forward

    def forward(self: Any, hidden_states: Any, position_embeddings: Any = None, *args: Any, **kwargs: Any) -> Any:
        own = tuple(t.clone() for t in position_embeddings)
        return original(self, hidden_states, own, *args, **kwargs)

    return mock.patch.object(attention, "forward", forward)


def _attention(trial: Trial) -> Any:
    name = str(model_type(trial))
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return getattr(module, f"{name.capitalize()}Attention")
