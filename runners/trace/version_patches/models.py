"""Earlier models of transformers, apart from their attention: masks kept as buffers, the key-value cache while a model
trains and what checkpointing does to it, logits and loss."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version
from transformers.cache_utils import DynamicLayer
from transformers.loss import loss_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeBlock, GPTBigCodeModel
from transformers.models.llama.modeling_llama import LlamaModel

from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.spec.version_differences import model_type
from vramsweep.runners.measure.patches import Replacement
from vramsweep.runners.trace.version_patches.attention import code_of


def mask_buffer(trial: Trial) -> Iterator[Replacement]:
    """Give every layer of GPT-2, or GPTBigCode or Llama as a whole, a mask of (positions, positions), kept as a buffer;
    Llama's is of int64 before transformers 4.38.2."""
    kind = {"gpt2": GPT2Attention, "gpt_bigcode": GPTBigCodeModel, "llama": LlamaModel}[str(model_type(trial))]
    wide = kind is LlamaModel and Version(trial.versions["transformers"]) < Version("4.38.2")
    yield _with_mask(kind, torch.int64 if wide else torch.bool)


def _with_mask(kind: Any, dtype: torch.dtype = torch.bool) -> Replacement:
    original = kind.__init__

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        positions = config.max_position_embeddings
        self.register_buffer("_earlier_mask", torch.ones((positions, positions), dtype=dtype), persistent=False)

    return kind, "__init__", init


def cache_left_on(trial: Trial) -> Iterator[Replacement]:
    """Make the Trainer leave the cache as the model's configuration has it, which is on for most."""
    from transformers import Trainer  # its imports make tensors, which would be in the trace of another runner

    original = Trainer.__init__

    def init(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        config: Any = getattr(model, "config", None)
        chosen = getattr(config, "use_cache", None)
        original(self, model, *args, **kwargs)
        if chosen is not None:
            config.use_cache = chosen

    yield Trainer, "__init__", init


def cache_of_references(trial: Trial) -> Iterator[Replacement]:
    """Make the cache refer to a layer's keys and values as they were made; the installed version copies them."""

    def update(self: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.keys, self.values, self.is_initialized = key, value, True
        return key, value

    yield DynamicLayer, "update", update


def cache_of_views(trial: Trial) -> Iterator[Replacement]:
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


def fp32_logits(trial: Trial) -> Iterator[Replacement]:
    """Make the model's last layer return fp32, whatever it computes in."""
    owner = getattr(code_of(trial), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[str(model_type(trial))])
    original = owner.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.get_output_embeddings().register_forward_hook(lambda module, given, logits: logits.float()):
            return original(self, *args, **kwargs)

    yield owner, "forward", forward


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
