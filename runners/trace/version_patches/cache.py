"""The earlier key-value cache while a transformers model trains, and what checkpointing does to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer
from transformers.cache_utils import DynamicLayer
from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeBlock, GPTBigCodeModel

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import Replacement


def left_on(trial: Trial) -> Iterator[Replacement]:
    """Make the Trainer leave the cache as the model's configuration has it, which is on for most."""
    original = Trainer.__init__

    def init(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        config: Any = getattr(model, "config", None)
        chosen = getattr(config, "use_cache", None)
        original(self, model, *args, **kwargs)
        if chosen is not None:
            config.use_cache = chosen

    yield Trainer, "__init__", init


def of_references(trial: Trial) -> Iterator[Replacement]:
    """Make the cache refer to a layer's keys and values as they were made; the installed version copies them."""

    def update(self: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.keys, self.values, self.is_initialized = key, value, True
        return key, value

    yield DynamicLayer, "update", update


def of_views(trial: Trial) -> Iterator[Replacement]:
    """Make GPTBigCode's cache a list of slices of what each layer's c_attn made, so that it keeps the queries too.
    It lives as long as the model's output, and is no smaller with checkpointing than without. There is none if the
    model's configuration has no cache and nobody asked for one."""
    begin, original = GPTBigCodeModel.__init__, GPTBigCodeModel.forward

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, config, *args, **kwargs)
        self._earlier_cache = config.use_cache or trial.use_cache == "on"  # before the installed Trainer sets it

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._earlier_cache:
            return original(self, *args, **kwargs)
        kept: list[torch.Tensor] = []
        with contextlib.ExitStack() as stack:
            for block in self.h:
                hook = block.attn.c_attn.register_forward_hook(lambda _module, _inputs, made: kept.append(made))
                stack.enter_context(hook)
            found = original(self, *args, **kwargs | {"use_cache": False})
        found.past_key_values = kept
        return found

    yield GPTBigCodeModel, "__init__", init
    yield GPTBigCodeModel, "forward", forward


def nothing_checkpointed(trial: Trial) -> Iterator[Replacement]:
    """Make GPTBigCode's layers ignore checkpointing."""
    never = property(lambda _: False, lambda _, asked: None)
    yield GPTBigCodeBlock, "gradient_checkpointing", never
