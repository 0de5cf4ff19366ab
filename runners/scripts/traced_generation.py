"""Text that a traced script generates with transformers: no text ends before the most tokens that are allowed.

Which token comes next exists only on a GPU. So the end-of-text token never comes, which is an upper bound, and each
new token has the value of one that is neither it nor padding. Each decoded token is traced like the one before, with a
longer cache; so most of a long text's are skipped, if the cache is transformers' plain one: it grows by them at once.
"""

import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from vramsweep.runners.measure.patches import Replacement
from vramsweep.runners.trace.known_values import KnownValues
from vramsweep.runners.trace.step_tracer import Tracer

DECODED = 4  # tokens at a text's beginning, and as many at its end, that are decoded one by one


class Generation:
    """The running call of `generate`: how many of its tokens are decoded, skipped and left."""

    def __init__(self, known: KnownValues, tracer: Tracer) -> None:
        self.known, self.tracer = known, tracer
        self.decoded = self.skipped = self.left = 0
        self.ends: set[int] = set()  # end-of-text tokens

    def replacements(self) -> Iterator[Replacement]:
        """Yield what to replace of transformers, if it is installed: owner, name, stand-in."""
        if importlib.util.find_spec("transformers") is None:
            return
        from transformers import cache_utils
        from transformers.generation import GenerationMixin, stopping_criteria

        generate, update = GenerationMixin.generate, GenerationMixin._update_model_kwargs_for_generation
        at_end, at_length = stopping_criteria.EosTokenCriteria.__call__, stopping_criteria.MaxLengthCriteria.__call__

        def generated(model: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            self.decoded = self.skipped = self.left = 0
            out = generate(model, inputs, *args, **kwargs)
            ids = getattr(out, "sequences", out)
            if not isinstance(ids, FakeTensor):
                return out
            self.tracer.leave_out("decoding", f"{self.skipped} of {self.skipped + self.decoded} tokens skipped")
            config = kwargs.get("generation_config") or model.generation_config
            token = next(n for n in itertools.count() if n not in {*self.ends, config.pad_token_id})
            ids = torch.cat([ids, ids[:, -1:].expand(-1, self.skipped)], dim=1) if self.skipped else ids
            prompt = self.known.of(kwargs.get("input_ids") if inputs is None else inputs)
            with _disable_current_modes():
                value = torch.full(ids.shape, token)
                if prompt is not None and not model.config.is_encoder_decoder:
                    value[:, : prompt.shape[1]] = prompt.repeat_interleave(len(value) // len(prompt), 0)
                self.known.give(ids, value)
            return ids if out is not getattr(out, "sequences", None) and isinstance(out, torch.Tensor) else out

        def updated(model: Any, outputs: Any, kwargs: Any, *args: Any, **others: Any) -> Any:
            self.decoded += 1
            cache, more = getattr(outputs, "past_key_values", None), self.left - DECODED
            plain = all(type(layer) is cache_utils.DynamicLayer for layer in getattr(cache, "layers", [None]))
            if self.decoded == DECODED and more > 0 and plain and not model.config.is_encoder_decoder:
                self.skipped = more
                for layer in cache.layers:
                    for name in ("keys", "values"):
                        batch, heads, length, size = getattr(layer, name).shape
                        setattr(layer, name, getattr(layer, name).new_empty(batch, heads, length + more, size))
                others["num_new_tokens"] = 1 + more
            return update(model, outputs, kwargs, *args, **others)

        def ended(criteria: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(ids, FakeTensor):
                return at_end(criteria, ids, *args, **kwargs)
            self.ends |= {*map(int, self.known.of(criteria.eos_token_id).tolist())}
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        def longest(criteria: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(ids, FakeTensor):
                return at_length(criteria, ids, *args, **kwargs)
            self.left = criteria.max_length - ids.shape[1] - self.skipped
            return torch.full((len(ids),), self.left <= 0, device=ids.device, dtype=torch.bool)

        yield GenerationMixin, "generate", generated
        yield GenerationMixin, "_update_model_kwargs_for_generation", updated
        yield stopping_criteria.EosTokenCriteria, "__call__", ended
        yield stopping_criteria.MaxLengthCriteria, "__call__", longest
