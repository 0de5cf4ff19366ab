"""The key-value cache while a model of transformers trains, and what checkpointing makes of it."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
from transformers import Trainer
from transformers.cache_utils import DynamicLayer
from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeBlock, GPTBigCodeModel

from vramsweep.harness.trial import Trial


def left_on(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """The Trainer leaves it as the model's configuration has it: on, for most."""
    original = Trainer.__init__

    def init(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        config: Any = getattr(model, "config", None)
        chosen = getattr(config, "use_cache", None)
        original(self, model, *args, **kwargs)
        if chosen is not None:
            config.use_cache = chosen

    return mock.patch.object(Trainer, "__init__", init)


def of_references(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """It refers to the keys and values of a layer as they were made, where the installed one copies them."""

    def update(self: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.keys, self.values, self.is_initialized = key, value, True
        return key, value

    return mock.patch.object(DynamicLayer, "update", update)


def of_views(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """GPTBigCode's is a list of slices of what each layer's c_attn made, so it keeps the queries too: as long as the
    model's output is kept, and with checkpointing no less than without. None where the model's configuration has no
    cache and nobody asked for one."""
    begin, original = GPTBigCodeModel.__init__, GPTBigCodeModel.forward

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, config, *args, **kwargs)
        self._earlier_cache = config.use_cache or trial.use_cache == "on"  # before the installed Trainer sets it

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._earlier_cache:
            return original(self, *args, **kwargs)
        kept: list[torch.Tensor] = []
        hooks = [
            block.attn.c_attn.register_forward_hook(lambda _module, _inputs, made: kept.append(made))
            for block in self.h
        ]
        try:
            found = original(self, *args, **kwargs | {"use_cache": False})
        finally:
            for hook in hooks:
                hook.remove()
        found.past_key_values = kept
        return found

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(GPTBigCodeModel, "__init__", init))
    stack.enter_context(mock.patch.object(GPTBigCodeModel, "forward", forward))
    return stack


def nothing_checkpointed(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """GPTBigCode's layers do not heed it."""
    never = property(lambda _: False, lambda _, asked: None)
    return mock.patch.object(GPTBigCodeBlock, "gradient_checkpointing", never)
