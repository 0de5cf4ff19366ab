"""Text that a traced script generates with transformers: no text ends before the most tokens that are allowed.

Which token comes next exists only on a GPU. So the end-of-text token never comes, which is an upper bound, and each
new token has the value of another. Each decoded token needs what the one before needs, with a longer cache; so most of
a long text's are skipped, if the cache is transformers' plain one: it grows by them at once.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramsweep.runners.measure.patches import Replacement
from vramsweep.runners.trace.known_values import KnownValues
from vramsweep.runners.trace.step_tracer import Tracer

PER_TOKEN = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")  # kept for every token
DECODED = 4  # tokens at a text's beginning, and as many at its end, that are decoded one by one


class Generation:
    """The running call of `generate`: how many of its tokens are decoded, skipped and left."""

    def __init__(self, known: KnownValues, tracer: Tracer) -> None:
        self.known, self.tracer = known, tracer
        self.decoded = self.skipped = self.left = 0
        self.whole = False  # whether each token is decoded, because something of it is kept
        self.ends: set[int] = set()  # end-of-text tokens

    def replacements(self) -> Iterator[Replacement]:
        """Yield what to replace of transformers: owner, name, stand-in."""
        from transformers.cache_utils import DynamicLayer
        from transformers.generation import stopping_criteria
        from transformers.generation.utils import GenerationMixin

        generate, update = GenerationMixin.generate, GenerationMixin._update_model_kwargs_for_generation

        def generated(model: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            self.decoded = self.skipped = self.left = 0
            given = (one for one in (kwargs.get("generation_config"), *args) if hasattr(one, "pad_token_id"))
            config = next(given, model.generation_config)
            self.whole = any(kwargs.get(name, getattr(config, name, None)) for name in PER_TOKEN)
            out: Any = generate(model, inputs, *args, **kwargs)
            ids = getattr(out, "sequences", out)
            self.tracer.leave_out("decoding", f"{self.skipped} of {self.skipped + self.decoded} tokens")
            others = {*self.ends, config.pad_token_id}
            ids = torch.cat([ids, ids[:, -1:].expand(-1, self.skipped)], dim=1) if self.skipped else ids
            prompt = self.known.of(kwargs.get("input_ids") if inputs is None else inputs)
            with _disable_current_modes():
                value = torch.full(ids.shape, next(n for n in itertools.count() if n not in others))
                if prompt is not None and not model.config.is_encoder_decoder:
                    value[:, : prompt.shape[1]] = prompt.repeat_interleave(len(value) // len(prompt), 0)
                self.known.give(ids, value)
            return ids if isinstance(out, torch.Tensor) else type(out)(**{**out, "sequences": ids})

        def updated(model: Any, outputs: Any, kwargs: Any, *args: Any, **others: Any) -> Any:
            self.decoded += 1
            layers, more = getattr(outputs.get("past_key_values"), "layers", [None]), self.left - DECODED
            plain = all(type(layer) is DynamicLayer for layer in layers) and not model.config.is_encoder_decoder
            if plain and not self.whole and self.decoded == DECODED and more > 0:
                self.skipped, others["num_new_tokens"] = more, 1 + more
                for layer, name in itertools.product(layers, ("keys", "values")):
                    batch, heads, length, size = getattr(layer, name).shape
                    setattr(layer, name, getattr(layer, name).new_empty(batch, heads, length + more, size))
            return update(model, outputs, kwargs, *args, **others)

        def ended(criteria: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.ends |= {*criteria.eos_token_id.tolist()}
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        def longest(criteria: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.left = criteria.max_length - ids.shape[1] - self.skipped
            return torch.full((len(ids),), self.left <= 0, device=ids.device, dtype=torch.bool)

        yield GenerationMixin, "generate", generated
        yield GenerationMixin, "_update_model_kwargs_for_generation", updated
        yield stopping_criteria.EosTokenCriteria, "__call__", ended
        yield stopping_criteria.MaxLengthCriteria, "__call__", longest
