"""Known differences of earlier versions of transformers: which of a model's tensors its code made, kept or copied then.

Not covered: other packages, and which differences a trial meets (version_differences.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vramsweep.harness.files import plain_json
from vramsweep.harness.spec import runner_table

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

When = Callable[["Trial"], bool]


@dataclass(frozen=True)
class Difference:
    """One known difference of an earlier version of a package.

    `versions` is the range of `package` that it holds for, `source` where upstream's code is, in that version and the
    one that ended it. `place` is the module of runners/trace/version_patches and the function in it, whose replacements
    are there while a run is traced; `when` says which trials meet that code at all.
    """

    name: str
    package: str
    versions: str
    source: str
    meaning: str
    place: tuple[str, str]
    when: When


def uses_sdpa(trial: Trial) -> bool:
    """Whether a trial takes torch's attention, whichever kernel of it is asked for."""
    return trial.attention.startswith("sdpa")


def model_type(trial: Trial) -> str | None:
    """Of the architecture that we ship or that a local directory describes; None where a hub would have to be asked."""
    found = trial.model.model_type
    if found is None and trial.model.path is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no such file, or no such description
            found = plain_json.read((Path(trial.model.path) / "config.json").read_bytes()).get("model_type")
    return found


def _of(*models: str, also: When = lambda trial: True) -> When:
    return lambda trial: model_type(trial) in models and also(trial)


def _cache(trial: Trial) -> bool:
    """Versions before 5.0 leave it on where the Trainer runs."""
    return trial.use_cache == "on" or (trial.use_cache == "default" and trial.runner.name == "trainer")


def _checkpointed(trial: Trial) -> bool:
    return trial.checkpointing != "none"


def _kept_cache(trial: Trial) -> bool:
    return _cache(trial) and not _checkpointed(trial)


def _with_loss(trial: Trial) -> bool:
    return trial.runner.name not in runner_table.TARGETED and trial.loss == "default"


def _maskless(trial: Trial) -> bool:
    """The Trainer gives a padding mask or a cache."""
    masked = trial.padding != 0 or trial.runner.name == "trainer" or _kept_cache(trial)
    return trial.attention != "flash_attention_2" and not masked


def _was(name: str, versions: str, source: str, meaning: str, place: tuple[str, str], when: When) -> Difference:
    return Difference(name, "transformers", versions, source, meaning, place, when)


LIKE_LLAMA = ("llama", "qwen2", "mistral", "mixtral", "gemma", "gemma2", "phi", "phi3")
"""Models whose code in transformers follows Llama's."""

_FP32 = "logits are fp32 from the start: those of half precision are gone before the loss"
_SHIFTED = "the loss copies the logits of all positions but the last"
_MASKED = "attention gets a mask in the model's precision with padding or without, so torch's flash kernel is not used"

# fmt: off
TRANSFORMERS = (
    *(_was(f"{model}_rotary_{name}", versions, f"models/{model}/modeling_{model}.py, {where}", meaning,
           ("attention", f"rotary_{name}"), _of(model))
      for name, meaning, cases in (
          ("tables", "every layer keeps tables of sines and cosines of all positions", (
              ("llama", "<4.41,!=4.38.0,!=4.38.1", "LlamaRotaryEmbedding (4.37.2, 4.38.2, 4.40.0; not in 4.38.0 and "
               "4.38.1; gone in 4.41.0)"),
              ("qwen2", "<4.45", "Qwen2RotaryEmbedding._set_cos_sin_cache (4.40.0; gone in 4.45.0)"),
              ("mistral", "<4.42", "MistralRotaryEmbedding._set_cos_sin_cache (4.40.0, 4.41.2; not in 4.42.4)"))),
          ("by_layer", "every layer makes its own sines and cosines and keeps them for the backward pass", (
              ("llama", "<4.43", "LlamaSdpaAttention.forward (4.40.0; shared from 4.43.0)"),
              ("qwen2", "<4.45", "Qwen2SdpaAttention.forward (4.40.0; shared from 4.45.0)"),
              ("mistral", "<4.48", "MistralSdpaAttention.forward (4.45.2, 4.47.1; shared in 4.48.1)"))))
      for model, versions, where in cases),
    _was("additive_mask", "<4.53",
         "models/llama/modeling_llama.py, LlamaModel._update_causal_mask (4.40.0; masking_utils from 4.53.0)",
         "the causal mask with padding is made once, in the model's precision; later each layer makes its own from "
         "booleans", ("attention", "additive"), _of(*LIKE_LLAMA, "gpt2")),
    _was("repeated_heads", "<4.54",
         "models/llama/modeling_llama.py, repeat_kv (4.40.0); integrations/sdpa_attention.py, use_gqa_in_sdpa (4.54.0)",
         "shared key and value heads are copied for each query head, mask or not", ("attention", "repeated_heads"),
         _of(*LIKE_LLAMA, also=uses_sdpa)),
    _was("mask_without_padding", ">=4.53.1,<5.0",
         "masking_utils.py, find_packed_sequence_indices (4.53.3, 4.57.3; None for one sequence in 5.0.0)",
         "where neither a padding mask nor a cache is given, attention gets a mask of booleans as if documents were "
         "packed, so torch's flash kernel is not used (the Trainer gives one or the other)",
         ("attention", "without_padding"),
         _of(*LIKE_LLAMA, "gpt2", "gpt_neox", "gpt_bigcode", "qwen3", also=_maskless)),
    *(_was(name, versions, source, "queries, keys and values are copied to be contiguous, so torch's flash kernel "
           "gives what is copied once more", ("attention", "contiguous_heads"), _of(*models, also=uses_sdpa))
      for name, versions, source, models in (
          ("contiguous_heads", ">=4.48,<4.56", "integrations/sdpa_attention.py, sdpa_attention_forward (4.48.0, "
           "4.55.4; not in 4.56.2)", (*LIKE_LLAMA, "gpt2", "qwen3")),
          ("gpt_neox_contiguous_heads", ">=4.49,<4.56", "models/gpt_neox/modeling_gpt_neox.py, "
           "GPTNeoXAttention.forward (4.49.0: by integrations/sdpa_attention.py)", ("gpt_neox",)),
          ("gpt_bigcode_contiguous_heads", ">=4.54,<4.56", "models/gpt_bigcode/modeling_gpt_bigcode.py, "
           "GPTBigCodeAttention.forward (4.54.1: by integrations/sdpa_attention.py)", ("gpt_bigcode",)))),
    _was("fp32_logits", "<4.46",
         "models/llama/modeling_llama.py, LlamaForCausalLM.forward (4.40.0; loss/loss_utils.py from 4.46.0)", _FP32,
         ("loss", "fp32_logits"), _of(*sorted({*LIKE_LLAMA} - {"mistral", "gemma2"}), also=_with_loss)),
    _was("mistral_fp32_logits", "<4.48", "models/mistral/modeling_mistral.py, MistralForCausalLM.forward (4.40.0, "
         "4.47.1; loss/loss_utils.py in 4.48.1)", _FP32, ("loss", "fp32_logits"), _of("mistral", also=_with_loss)),
    _was("shifted_logits", "<4.49",
         "models/llama/modeling_llama.py, LlamaForCausalLM.forward (4.40.0); loss/loss_utils.py, ForCausalLMLoss "
         "(4.48.0; from 4.49.0 it shifts labels)", _SHIFTED, ("loss", "shifted_logits"),
         _of(*LIKE_LLAMA, also=_with_loss)),
    _was("own_loss_shifted_logits", ">=4.48.3,<4.49",
         "loss/loss_utils.py, ForCausalLMLoss (4.48.3; from 4.49.0 it shifts labels)", _SHIFTED,
         ("loss", "shifted_logits"), _of("gpt2", "gpt_bigcode", also=_with_loss)),
    *(_was(f"{model}_own_loss", "<4.48.3", f"models/{model}/modeling_{model}.py, {kind}.forward (4.40.0, 4.48.2; "
           "loss/loss_utils.py from 4.48.3)",
           "the loss is taken in the precision of the logits, of a copy of all positions but the last",
           ("loss", "own_precision"), _of(model, also=_with_loss))
      for model, kind in (("gpt2", "GPT2LMHeadModel"), ("gpt_bigcode", "GPTBigCodeForCausalLM"))),
    _was("gpt2_mask_buffers", "<5.2",
         "models/gpt2/modeling_gpt2.py, GPT2Attention.__init__: bias (4.57.3, 5.1.0; gone in 5.2.0)",
         "every layer keeps a mask of all positions as a buffer, a byte an element", ("buffers", "gpt2"), _of("gpt2")),
    _was("gpt_bigcode_mask_buffer", "<5.15", "models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeModel.__init__: "
         "bias (4.38.2, 5.14.0; gone in 5.15.0)",
         "the model keeps a mask of all positions as a buffer, a byte an element", ("buffers", "gpt_bigcode"),
         _of("gpt_bigcode")),
    _was("gpt_bigcode_cache", "<4.54", "models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeAttention.forward: "
         "present (4.40.2, 4.53.3; a Cache in 4.54.1)", "the key-value cache is slices of what each layer's projection "
         "made, which stays whole with the model's output", ("cache", "of_views"),
         _of("gpt_bigcode", also=_kept_cache)),
    _was("gpt_bigcode_checkpointed_cache", "<4.53", "models/gpt_bigcode/modeling_gpt_bigcode.py, "
         "GPTBigCodeModel.forward: presents (4.40.2, 4.52.4; use_cache is False while checkpointing in 4.53.3)",
         "the key-value cache, slices of what each layer's projection made, is kept while checkpointing too",
         ("cache", "of_views"), _of("gpt_bigcode", also=lambda trial: _cache(trial) and _checkpointed(trial))),
    _was("gpt_bigcode_always_masked", "<4.54", "models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeModel.forward: "
         "self_attention_mask (4.40.2, 4.53.3; masking_utils in 4.54.1)", _MASKED, ("attention", "always_one"),
         _of("gpt_bigcode", also=uses_sdpa)),
    _was("gpt_bigcode_not_checkpointed", ">=4.54,<5.0",
         "models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeBlock(nn.Module) (4.54.1, 4.57.3; a "
         "GradientCheckpointingLayer in 4.53.3 and 5.0.0)", "checkpointing that is asked for checkpoints nothing",
         ("cache", "nothing_checkpointed"), _of("gpt_bigcode", also=_checkpointed)),
    _was("llama_mask_buffer", ">=4.38,<4.39", "models/llama/modeling_llama.py, LlamaModel.__init__: causal_mask "
         "(4.38.2; of eight bytes an element in 4.38.0 and 4.38.1; gone in 4.39.3)",
         "the model keeps a mask of all positions as a buffer", ("buffers", "llama"), _of("llama")),
    _was("llama_always_masked", ">=4.38,<4.40", "models/llama/modeling_llama.py, LlamaModel._update_causal_mask "
         "(4.38.2, 4.39.3; None where torch's attention needs none from 4.40.0)", _MASKED, ("attention", "always"),
         _of("llama")),
    _was("llama_mask_of_all_positions", ">=4.38,<4.39",
         "models/llama/modeling_llama.py, LlamaModel._update_causal_mask, LlamaSdpaAttention.forward (4.38.2; of the "
         "batch's length in 4.39.3)",
         "that mask has all positions that the model knows, for each sample; every layer keeps a copy of its part",
         ("attention", "of_all_positions"), _of("llama")),
    *(_was(f"{model}_without_sdpa", f"<{first}",
           f"models/{model}/modeling_{model}.py, _supports_sdpa ({last}; True in {first}.0)",
           "attention makes its scores and keeps them, as there is no other", ("attention", "made_scores"),
           _of(model, also=uses_sdpa))
      for model, last, first in (("gpt2", "4.41.2", "4.42"), ("gpt_neox", "4.41.2", "4.42"), ("phi", "4.38.2", "4.39"),
                                 ("phi3", "4.44.2", "4.45"))),
    _was("gpt2_masked_scores", "<5.2",
         "models/gpt2/modeling_gpt2.py, eager_attention_forward (4.57.3, 5.1.0; GPT2Attention._attn before 4.48)",
         "attention that makes its scores makes them twice: without a mask and with", ("attention", "masked_scores"),
         _of("gpt2", also=lambda trial: trial.attention == "eager")),
    _was("cache_of_references", "<4.56", "cache_utils.py, DynamicCache.update (4.38.2, 4.53.3), DynamicLayer.update "
         "(4.55.4; a copy in 4.56.0)", "the key-value cache refers to keys and values, it copies none",
         ("cache", "of_references"), _kept_cache),
    _was("trainer_cache", "<5.0", "trainer.py, Trainer.__init__ (4.57.3; 5.0.0 sets the model's use_cache to that of "
         "TrainingArguments)",
         "the Trainer leaves the key-value cache on where the model's configuration has it so", ("cache", "left_on"),
         lambda trial: trial.use_cache == "default" and _kept_cache(trial)),
)
# fmt: on
