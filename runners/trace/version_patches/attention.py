"""Earlier attention in transformers: masks and heads as it gets them, scores that it makes, rotary embeddings."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel
from transformers.models.t5 import modeling_t5
from transformers.models.t5.modeling_t5 import T5Attention

from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.spec.version_differences import model_type
from vramsweep.runners.measure.patches import Replacement


def additive(trial: Trial) -> Iterator[Replacement]:
    """Make the causal mask additive: it is added to the scores, and does not name what is let through."""
    module = code_of(trial)
    # the second is of models with a window, the third of encoders
    for maker in ("create_causal_mask", "create_sliding_window_causal_mask", "create_bidirectional_mask"):
        if hasattr(module, maker):
            yield module, maker, _added(getattr(module, maker))


def _added(original: Any) -> Any:
    def create_mask(*args: Any, **kwargs: Any) -> Any:
        mask = original(*args, **kwargs)
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.dim() != 4:
            return mask  # flash attention's, of two dimensions, is not added to anything
        dtype = _embeds(kwargs).dtype
        return torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask.logical_not(), torch.finfo(dtype).min)

    return create_mask


def always(trial: Trial) -> Iterator[Replacement]:
    """Give attention a mask in the model's precision even if it would do without: one for all samples if none is
    padded."""

    def made(embeds: Tensor, padding: Tensor | None) -> Tensor:
        length, least = embeds.shape[1], torch.finfo(embeds.dtype).min
        mask = torch.full((1, 1, length, length), least, dtype=embeds.dtype, device=embeds.device).triu(diagonal=1)
        return mask if padding is None else mask.repeat(embeds.shape[0], 1, 1, 1)

    yield code_of(trial), "create_causal_mask", _unless_flash(code_of(trial), made)


def of_all_positions(trial: Trial) -> Iterator[Replacement]:
    """Give Llama's mask all positions that the model knows, for each sample; each layer cuts out its own."""

    def made(embeds: Tensor, padding: Tensor | None) -> Tensor:
        kept = earlier[0]
        return kept[None, None].repeat(embeds.shape[0], 1, 1, 1).to(embeds.dtype) * torch.finfo(embeds.dtype).min

    earlier: list[Tensor] = []
    forward, attend = LlamaModel.forward, LlamaAttention.forward

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        earlier[:] = [self._earlier_mask]  # models.mask_buffer
        return forward(self, *args, **kwargs)

    def cut(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        if isinstance(mask, Tensor) and mask.dim() == 4:
            length = hidden_states.shape[1]
            rows = torch.arange(length, device=hidden_states.device)
            kwargs["attention_mask"] = mask[:, :, rows, :length]
        return attend(self, hidden_states, **kwargs)

    yield modeling_llama, "create_causal_mask", _unless_flash(modeling_llama, made)
    yield LlamaModel, "forward", noted
    yield LlamaAttention, "forward", cut


def _unless_flash(module: Any, made: Callable[[Tensor, Tensor | None], Tensor]) -> Any:
    original = module.create_causal_mask

    def create_mask(*args: Any, **kwargs: Any) -> Any:
        if kwargs["config"]._attn_implementation not in ("sdpa", "eager"):
            return original(*args, **kwargs)
        return made(_embeds(kwargs), kwargs["attention_mask"])

    return create_mask


def _embeds(given: dict[str, Any]) -> Tensor:
    """Return the input embeddings, an argument that transformers 5 renamed."""
    found: Tensor = given["inputs_embeds"] if "inputs_embeds" in given else given["input_embeds"]
    return found


def repeated_heads(trial: Trial) -> Iterator[Replacement]:
    """Make attention never share heads in its kernel."""
    module = importlib.import_module("transformers.integrations.sdpa_attention")
    yield module, "use_gqa_in_sdpa", lambda *args, **kwargs: False


def contiguous_heads(trial: Trial) -> Iterator[Replacement]:
    """Make attention copy what is not contiguous before torch's attention gets it."""
    attend: Any = F.scaled_dot_product_attention
    yield F, "scaled_dot_product_attention", lambda *a, **k: attend(*(t.contiguous() for t in a[:3]), *a[3:], **k)


def without_padding(trial: Trial) -> Iterator[Replacement]:
    """Take one sequence per row for several documents packed into it."""

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor:
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)

    yield masking_utils, "find_packed_sequence_indices", find_packed_sequence_indices


def made_scores(trial: Trial) -> Iterator[Replacement]:
    """Make the model compute its scores, because its earlier code has no other attention."""
    original = PreTrainedModel._check_and_adjust_attn_implementation

    def adjusted(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = original(self, *args, **kwargs)
        return "eager" if chosen == "sdpa" else chosen

    yield PreTrainedModel, "_check_and_adjust_attn_implementation", adjusted


def own_scores(trial: Trial) -> Iterator[Replacement]:
    """Make the model compute the weights of its scores in its own precision, and not in fp32; OPT also compares its
    scores with the least number, for which autograd keeps them."""
    compared = model_type(trial) == "opt"

    def attend(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, dropout: float, **_: Any
    ) -> Any:
        scores = torch.matmul(query, key.transpose(2, 3)) * scaling
        scores = scores if mask is None else scores + mask
        if compared:
            scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min, device=scores.device))
        weights = F.dropout(scores.softmax(dim=-1), p=dropout, training=module.training)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights

    yield code_of(trial), "eager_attention_forward", attend


def gemma2_with_sdpa(trial: Trial) -> Iterator[Replacement]:
    """Let Gemma 2 use torch's attention, without its cap on scores."""
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    yield Gemma2PreTrainedModel, "_supports_sdpa", True
    yield ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *a, **named: attend(*a, **named | {"softcap": None})


def t5_scores(trial: Trial) -> Iterator[Replacement]:
    """Make T5 add its mask to the bias of the positions, which all layers share and which so becomes as large as the
    batch, and compute the weights in fp32."""
    original = T5Attention.forward
    always = Version(trial.versions["transformers"]) < Version("5.0")  # there was a mask without padding, too

    def forward(self: Any, hidden_states: Any, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("position_bias") is None:
            keys = kwargs.get("key_value_states")
            rows, columns = hidden_states.shape[1], (hidden_states if keys is None else keys).shape[1]
            if self.has_relative_attention_bias:
                bias = self.compute_bias(rows, columns, device=hidden_states.device)
            else:
                bias = hidden_states.new_zeros(1, self.n_heads, rows, columns)
                bias.requires_grad_(self.gradient_checkpointing and self.training)
            if mask is None and always:
                mask = hidden_states.new_zeros(hidden_states.shape[0], 1, 1, columns)
            kwargs["position_bias"] = bias if mask is None else bias + mask
        return original(self, hidden_states, None, *args, **kwargs)

    def attend(
        module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float, position_bias: Any, **_: Any
    ) -> tuple[Tensor, Tensor]:
        scores = torch.matmul(query, key.transpose(3, 2))
        scores += position_bias
        weights = F.dropout(scores.float().softmax(dim=-1).type_as(scores), p=dropout, training=module.training)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights

    yield from made_scores(trial)
    yield T5Attention, "forward", forward
    yield modeling_t5, "eager_attention_forward", attend


def masked_scores(trial: Trial) -> Iterator[Replacement]:
    """Make GPT-2 choose between scores and the least number; the installed version adds a mask."""

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **_: Any) -> Any:
        scores = torch.matmul(query, key.transpose(-1, -2)) / value.size(-1) ** 0.5
        length, least = scores.shape[-1], torch.finfo(scores.dtype).min
        causal = module._earlier_mask[None, None, :length, :length]  # models.mask_buffer
        scores = torch.where(causal, scores, torch.full([], least, dtype=scores.dtype, device=scores.device))
        if trial.padding:
            scores = scores + mask
        weights = F.dropout(scores.softmax(dim=-1).type(value.dtype), p=dropout, training=module.training)
        return torch.matmul(weights, value).transpose(1, 2), weights

    yield modeling_gpt2, "eager_attention_forward", attend


def rotary_tables(trial: Trial) -> Iterator[Replacement]:
    """Give every layer's attention two buffers of (positions, width of a head) in the model's precision."""
    attention = _attention(trial)
    original = attention.__init__

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        for name in ("_cos_cached", "_sin_cached"):
            table = torch.empty(config.max_position_embeddings, self.head_dim, dtype=torch.get_default_dtype())
            self.register_buffer(name, table, persistent=False)

    yield attention, "__init__", init


def rotary_by_layer(trial: Trial) -> Iterator[Replacement]:
    """Give each layer's attention sines and cosines of its own."""
    attention = _attention(trial)
    original = attention.forward

    def forward(self: Any, hidden_states: Any, position_embeddings: Any = None, *args: Any, **kwargs: Any) -> Any:
        own = tuple(t.clone() for t in position_embeddings)
        return original(self, hidden_states, own, *args, **kwargs)

    yield attention, "forward", forward


def _attention(trial: Trial) -> Any:
    """Return the attention class, which is named after the model."""
    return getattr(code_of(trial), f"{str(model_type(trial)).capitalize()}Attention")


def code_of(trial: Trial) -> Any:
    """Return the module of the trial's model in transformers."""
    name = str(model_type(trial))
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")
