"""Known differences of earlier versions of packages, by which a simulated run is predicted as it really ran.

A simulated run traces the code that is installed. `versions` names others: every entry whose range holds the version,
and not the installed one, changes the trace as upstream's code of that version did. Each was found by reading that
code and is cited; none is a setting. What is not listed here is predicted as the installed version does it.

Not covered: how an entry changes the run (runners/differences/).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vramsweep.harness import plain_json, techniques

if TYPE_CHECKING:
    from vramsweep.harness.trial import Trial


@dataclass(frozen=True)
class Difference:
    """`versions` is the range of `package` that it holds for, `source` where upstream's code is, in that version and
    the one that ended it. `place` is the module of runners/differences and the function in it, a context manager
    that is entered around the traced run; `when` says which trials meet that code at all."""

    name: str
    package: str
    versions: str
    source: str
    meaning: str
    place: tuple[str, str]
    when: Callable[[Trial], bool]


def _zero3(trial: Trial) -> bool:
    return trial.sharding == "zero3"


def model_type(trial: Trial) -> str | None:
    """Of the architecture that we ship or that a local directory describes; None where a hub would have to be asked."""
    found = trial.model.model_type
    if found is None and trial.model.path is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no such file, or no such description
            found = plain_json.read((Path(trial.model.path) / "config.json").read_bytes()).get("model_type")
    return found


def _of(*models: str) -> Callable[[Trial], bool]:
    return lambda trial: model_type(trial) in models


def _cache(trial: Trial) -> bool:
    """Versions before 5.0 leave it on where the Trainer runs."""
    return trial.use_cache == "on" or (trial.use_cache == "default" and trial.runner.name == "trainer")


def _kept_cache(trial: Trial) -> bool:
    return _cache(trial) and trial.checkpointing == "none"


def _sdpa(trial: Trial) -> bool:
    """torch's attention, whichever kernel of it is asked for."""
    return trial.attention.startswith("sdpa")


def _by_default(model: str) -> Callable[[Trial], bool]:
    return lambda trial: model_type(trial) == model and _sdpa(trial)


def _with_loss(trial: Trial) -> bool:
    return trial.runner.name != "custom" and trial.loss == "default"


LIKE_LLAMA = ("llama", "qwen2", "mistral", "mixtral", "gemma", "gemma2", "phi", "phi3")
"""Models whose code in transformers follows Llama's."""

LT_WORKSPACES = ("torch", ">=2.9,<2.12")
"""Where cuBLASLt's handles keep a workspace of their own: pytorch #156495 to #173002. Seen on a card with 2.11."""

FLASH_FIRST = ("torch", "<2.11")
"""Where flash attention comes before cuDNN's on every card: 2.10 goes by cuDNN's version, and brings one too old; 2.11
brings 9.19."""
ANY_DROPOUT = ("torch", "<2.12")
"""Where cuDNN's attention takes every probability of dropout: before pytorch #174245. Seen on a card with 2.11."""

DIFFERENCES = (
    Difference(
        "flash_first",
        *FLASH_FIRST,
        "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention (2.10; the wheels of 2.11 "
        "bring cuDNN 9.19, later than the 9.15 that it asks for)",
        "scaled_dot_product_attention takes flash attention before cuDNN's on Hopper and data centres' Blackwell too",
        ("attention", "flash_first"),
        _sdpa,
    ),
    Difference(
        "any_dropout",
        *ANY_DROPOUT,
        "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, can_use_cudnn_attention (pytorch #174245 in 2.12)",
        "cuDNN's attention is taken for every probability of dropout, not only for sixteenths",
        ("attention", "any_dropout"),
        _sdpa,
    ),
    Difference(
        "lt_workspaces",
        *LT_WORKSPACES,
        "aten/src/ATen/cuda/CublasHandlePool.cpp, getCUDABlasLtWorkspace (pytorch #156495 in 2.9; shared with cuBLAS "
        "since #173002 in 2.12)",
        "products that add a bias, which cuBLASLt does, keep another MiB for each thread's handle",
        ("workspaces", "lt_apart"),
        lambda trial: True,
    ),
    Difference(
        "zero_linear_by_init",
        "deepspeed",
        "<0.19.4",
        "runtime/zero/partition_parameters.py, Init.__init__ and patch_init_and_builtins (0.14.2; ended by #8189)",
        "linear layers keep no gathered weight for the backward pass only where the model was made under zero.Init; "
        "otherwise autograd holds all of them",
        ("zero", "linear_by_init"),
        _zero3,
    ),
    Difference(
        "zero_live_parameters",
        "deepspeed",
        "<0.15.4",
        "runtime/zero/stage3.py, backward: reset_step (0.14.2, 0.15.3); runtime/zero/parameter_offload.py, "
        "_start_of_forward_hook (0.15.4)",
        "what is still gathered when the backward pass ends, the embeddings, is taken off a count that was set to 0 "
        "before; so stage3_max_live_parameters allows for as much more, which is prefetched and kept",
        ("zero", "live_parameters"),
        _zero3,
    ),
    Difference(
        "zero_half_buffers",
        "deepspeed",
        "<0.19.2",
        "runtime/engine.py, _configure_distributed_model: module.half() (0.14.2; ended by #8066)",
        "buffers are cast to the precision of the weights; later they stay as the model has them",
        ("zero", "half_buffers"),
        lambda trial: trial.sharding.startswith("zero") and trial.precision in ("bf16", "fp16"),
    ),
    Difference(
        "llama_rotary_tables",
        "transformers",
        "<4.41,!=4.38.0,!=4.38.1",
        "models/llama/modeling_llama.py, LlamaRotaryEmbedding (4.37.2, 4.38.2, 4.40.0; not in 4.38.0 and 4.38.1; gone "
        "in 4.41.0)",
        "every layer keeps tables of sines and cosines of all positions",
        ("rotary", "tables"),
        _of("llama"),
    ),
    Difference(
        "qwen2_rotary_tables",
        "transformers",
        "<4.45",
        "models/qwen2/modeling_qwen2.py, Qwen2RotaryEmbedding._set_cos_sin_cache (4.40.0; gone in 4.45.0)",
        "every layer keeps tables of sines and cosines of all positions",
        ("rotary", "tables"),
        _of("qwen2"),
    ),
    Difference(
        "llama_rotary_by_layer",
        "transformers",
        "<4.43",
        "models/llama/modeling_llama.py, LlamaSdpaAttention.forward (4.40.0; shared from 4.43.0)",
        "every layer makes its own sines and cosines and keeps them for the backward pass",
        ("rotary", "by_layer"),
        _of("llama"),
    ),
    Difference(
        "qwen2_rotary_by_layer",
        "transformers",
        "<4.45",
        "models/qwen2/modeling_qwen2.py, Qwen2SdpaAttention.forward (4.40.0; shared from 4.45.0)",
        "every layer makes its own sines and cosines and keeps them for the backward pass",
        ("rotary", "by_layer"),
        _of("qwen2"),
    ),
    Difference(
        "mistral_rotary_tables",
        "transformers",
        "<4.42",
        "models/mistral/modeling_mistral.py, MistralRotaryEmbedding._set_cos_sin_cache (4.40.0, 4.41.2; not in 4.42.4)",
        "every layer keeps tables of sines and cosines of all positions",
        ("rotary", "tables"),
        _of("mistral"),
    ),
    Difference(
        "mistral_rotary_by_layer",
        "transformers",
        "<4.48",
        "models/mistral/modeling_mistral.py, MistralSdpaAttention.forward (4.45.2, 4.47.1; shared in 4.48.1)",
        "every layer makes its own sines and cosines and keeps them for the backward pass",
        ("rotary", "by_layer"),
        _of("mistral"),
    ),
    Difference(
        "additive_mask",
        "transformers",
        "<4.53",
        "models/llama/modeling_llama.py, LlamaModel._update_causal_mask (4.40.0; masking_utils from 4.53.0)",
        "the causal mask with padding is made once, in the model's precision; later each layer makes its own from "
        "booleans",
        ("masks", "additive"),
        _of(*LIKE_LLAMA, "gpt2"),
    ),
    Difference(
        "repeated_heads",
        "transformers",
        "<4.54",
        "models/llama/modeling_llama.py, repeat_kv (4.40.0); integrations/sdpa_attention.py, use_gqa_in_sdpa (4.54.0)",
        "shared key and value heads are copied for each query head, mask or not",
        ("masks", "repeated_heads"),
        lambda trial: model_type(trial) in LIKE_LLAMA and _sdpa(trial),
    ),
    Difference(
        "mask_without_padding",
        "transformers",
        ">=4.53.1,<5.0",
        "masking_utils.py, find_packed_sequence_indices (4.53.3, 4.57.3; None for one sequence in 5.0.0)",
        "where neither a padding mask nor a cache is given, attention gets a mask of booleans as if documents were "
        "packed, so torch's flash kernel is not used (the Trainer gives one or the other)",
        ("masks", "without_padding"),
        lambda trial: (
            model_type(trial) in (*LIKE_LLAMA, "gpt2", "gpt_neox", "gpt_bigcode", "qwen3")
            and trial.attention != "flash_attention_2"
            and trial.runner.name != "trainer"
            and trial.padding == 0
            and not _kept_cache(trial)
        ),
    ),
    Difference(
        "contiguous_heads",
        "transformers",
        ">=4.48,<4.56",
        "integrations/sdpa_attention.py, sdpa_attention_forward (4.48.0, 4.55.4; not in 4.56.2)",
        "queries, keys and values are copied to be contiguous, so torch's flash kernel gives what is copied once more",
        ("masks", "contiguous_heads"),
        lambda trial: model_type(trial) in (*LIKE_LLAMA, "gpt2", "qwen3") and _sdpa(trial),
    ),
    Difference(
        "gpt_neox_contiguous_heads",
        "transformers",
        ">=4.49,<4.56",
        "models/gpt_neox/modeling_gpt_neox.py, GPTNeoXAttention.forward (4.49.0: by integrations/sdpa_attention.py)",
        "queries, keys and values are copied to be contiguous, so torch's flash kernel gives what is copied once more",
        ("masks", "contiguous_heads"),
        lambda trial: model_type(trial) == "gpt_neox" and _sdpa(trial),
    ),
    Difference(
        "gpt_bigcode_contiguous_heads",
        "transformers",
        ">=4.54,<4.56",
        "models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeAttention.forward (4.54.1: by "
        "integrations/sdpa_attention.py)",
        "queries, keys and values are copied to be contiguous, so torch's flash kernel gives what is copied once more",
        ("masks", "contiguous_heads"),
        lambda trial: model_type(trial) == "gpt_bigcode" and _sdpa(trial),
    ),
    Difference(
        "fp32_logits",
        "transformers",
        "<4.46",
        "models/llama/modeling_llama.py, LlamaForCausalLM.forward (4.40.0; loss/loss_utils.py from 4.46.0)",
        "logits are fp32 from the start: those of half precision are gone before the loss",
        ("loss", "fp32_logits"),
        lambda trial: (
            model_type(trial) in LIKE_LLAMA and model_type(trial) not in ("mistral", "gemma2") and _with_loss(trial)
        ),
    ),
    Difference(
        "mistral_fp32_logits",
        "transformers",
        "<4.48",
        "models/mistral/modeling_mistral.py, MistralForCausalLM.forward (4.40.0, 4.47.1; loss/loss_utils.py in 4.48.1)",
        "logits are fp32 from the start: those of half precision are gone before the loss",
        ("loss", "fp32_logits"),
        lambda trial: model_type(trial) == "mistral" and _with_loss(trial),
    ),
    Difference(
        "shifted_logits",
        "transformers",
        "<4.49",
        "models/llama/modeling_llama.py, LlamaForCausalLM.forward (4.40.0); loss/loss_utils.py, ForCausalLMLoss "
        "(4.48.0; from 4.49.0 it shifts labels)",
        "the loss copies the logits of all positions but the last",
        ("loss", "shifted_logits"),
        lambda trial: model_type(trial) in LIKE_LLAMA and _with_loss(trial),
    ),
    Difference(
        "own_loss_shifted_logits",
        "transformers",
        ">=4.48.3,<4.49",
        "loss/loss_utils.py, ForCausalLMLoss (4.48.3; from 4.49.0 it shifts labels)",
        "the loss copies the logits of all positions but the last",
        ("loss", "shifted_logits"),
        lambda trial: model_type(trial) in ("gpt2", "gpt_bigcode") and _with_loss(trial),
    ),
    Difference(
        "gpt2_own_loss",
        "transformers",
        "<4.48.3",
        "models/gpt2/modeling_gpt2.py, GPT2LMHeadModel.forward (4.40.0, 4.48.2; loss/loss_utils.py from 4.48.3)",
        "the loss is taken in the precision of the logits, of a copy of all positions but the last",
        ("loss", "own_precision"),
        lambda trial: model_type(trial) == "gpt2" and _with_loss(trial),
    ),
    Difference(
        "gpt_bigcode_own_loss",
        "transformers",
        "<4.48.3",
        "models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeForCausalLM.forward (4.40.0, 4.48.2; "
        "loss/loss_utils.py from 4.48.3)",
        "the loss is taken in the precision of the logits, of a copy of all positions but the last",
        ("loss", "own_precision"),
        lambda trial: model_type(trial) == "gpt_bigcode" and _with_loss(trial),
    ),
    Difference(
        "gpt2_mask_buffers",
        "transformers",
        "<5.2",
        "models/gpt2/modeling_gpt2.py, GPT2Attention.__init__: bias (4.57.3, 5.1.0; gone in 5.2.0)",
        "every layer keeps a mask of all positions as a buffer, a byte an element",
        ("buffers", "gpt2"),
        _of("gpt2"),
    ),
    Difference(
        "gpt_bigcode_mask_buffer",
        "transformers",
        "<5.15",
        "models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeModel.__init__: bias (4.38.2, 5.14.0; gone in 5.15.0)",
        "the model keeps a mask of all positions as a buffer, a byte an element",
        ("buffers", "gpt_bigcode"),
        _of("gpt_bigcode"),
    ),
    Difference(
        "gpt_bigcode_cache",
        "transformers",
        "<4.54",
        "models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeAttention.forward: present (4.40.2, 4.53.3; a Cache in "
        "4.54.1)",
        "the key-value cache is slices of what each layer's projection made, which stays whole with the model's output",
        ("cache", "of_views"),
        lambda trial: _cache(trial) and model_type(trial) == "gpt_bigcode" and trial.checkpointing == "none",
    ),
    Difference(
        "gpt_bigcode_checkpointed_cache",
        "transformers",
        "<4.53",
        "models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeModel.forward: presents (4.40.2, 4.52.4; use_cache is "
        "False while checkpointing in 4.53.3)",
        "the key-value cache, slices of what each layer's projection made, is kept while checkpointing too",
        ("cache", "of_views"),
        lambda trial: _cache(trial) and model_type(trial) == "gpt_bigcode" and trial.checkpointing != "none",
    ),
    Difference(
        "gpt_bigcode_always_masked",
        "transformers",
        "<4.54",
        "models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeModel.forward: self_attention_mask (4.40.2, 4.53.3; "
        "masking_utils in 4.54.1)",
        "attention gets a mask in the model's precision with padding or without, so torch's flash kernel is not used",
        ("masks", "always_one"),
        lambda trial: model_type(trial) == "gpt_bigcode" and _sdpa(trial),
    ),
    Difference(
        "gpt_bigcode_not_checkpointed",
        "transformers",
        ">=4.54,<5.0",
        "models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeBlock(nn.Module) (4.54.1, 4.57.3; a "
        "GradientCheckpointingLayer in 4.53.3 and 5.0.0)",
        "checkpointing that is asked for checkpoints nothing",
        ("cache", "nothing_checkpointed"),
        lambda trial: model_type(trial) == "gpt_bigcode" and trial.checkpointing != "none",
    ),
    Difference(
        "llama_mask_buffer",
        "transformers",
        ">=4.38,<4.39",
        "models/llama/modeling_llama.py, LlamaModel.__init__: causal_mask (4.38.2; of eight bytes an element in 4.38.0 "
        "and 4.38.1; gone in 4.39.3)",
        "the model keeps a mask of all positions as a buffer",
        ("buffers", "llama"),
        _of("llama"),
    ),
    Difference(
        "llama_always_masked",
        "transformers",
        ">=4.38,<4.40",
        "models/llama/modeling_llama.py, LlamaModel._update_causal_mask (4.38.2, 4.39.3; None where torch's attention "
        "needs none from 4.40.0)",
        "attention gets a mask in the model's precision with padding or without, so torch's flash kernel is not used",
        ("masks", "always"),
        _of("llama"),
    ),
    Difference(
        "llama_mask_of_all_positions",
        "transformers",
        ">=4.38,<4.39",
        "models/llama/modeling_llama.py, LlamaModel._update_causal_mask, LlamaSdpaAttention.forward (4.38.2; of the "
        "batch's length in 4.39.3)",
        "that mask has all positions that the model knows, for each sample; every layer keeps a copy of its part",
        ("masks", "of_all_positions"),
        _of("llama"),
    ),
    *(
        Difference(
            f"{model}_without_sdpa",
            "transformers",
            f"<{first}",
            f"models/{model}/modeling_{model}.py, _supports_sdpa ({last}; True in {first}.0)",
            "attention makes its scores and keeps them, as there is no other",
            ("scores", "made"),
            _by_default(model),
        )
        for model, last, first in (
            ("gpt2", "4.41.2", "4.42"),
            ("gpt_neox", "4.41.2", "4.42"),
            ("phi", "4.38.2", "4.39"),
            ("phi3", "4.44.2", "4.45"),
        )
    ),
    Difference(
        "gpt2_masked_scores",
        "transformers",
        "<5.2",
        "models/gpt2/modeling_gpt2.py, eager_attention_forward (4.57.3, 5.1.0; GPT2Attention._attn before 4.48)",
        "attention that makes its scores makes them twice: without a mask and with",
        ("scores", "masked"),
        lambda trial: model_type(trial) == "gpt2" and trial.attention == "eager",
    ),
    Difference(
        "cache_of_references",
        "transformers",
        "<4.56",
        "cache_utils.py, DynamicCache.update (4.38.2, 4.53.3), DynamicLayer.update (4.55.4; a copy in 4.56.0)",
        "the key-value cache refers to keys and values, it copies none",
        ("cache", "of_references"),
        _kept_cache,
    ),
    Difference(
        "trainer_cache",
        "transformers",
        "<5.0",
        "trainer.py, Trainer.__init__ (4.57.3; 5.0.0 sets the model's use_cache to that of TrainingArguments)",
        "the Trainer leaves the key-value cache on where the model's configuration has it so",
        ("cache", "left_on"),
        lambda trial: trial.runner.name == "trainer" and trial.use_cache == "default" and trial.checkpointing == "none",
    ),
)


def holding(trial: Trial) -> list[Difference]:
    """The differences that the versions named by a simulated trial have from the installed ones."""
    return [one for one in DIFFERENCES if one.when(trial) and _differs(one, trial.versions.get(one.package))]


def installed_is(package_and_versions: tuple[str, str]) -> bool:
    """Whether the installed version of a package is in a range."""
    package, versions = package_and_versions
    version = techniques.version(package)
    return version is not None and SpecifierSet(versions).contains(version, prereleases=True)


def _differs(one: Difference, asked: str | None) -> bool:
    installed = techniques.version(one.package)
    held, holds = (
        version is not None and SpecifierSet(one.versions).contains(version, prereleases=True)
        for version in (installed, asked)
    )
    return holds and not held


def rule(trial: Trial) -> str | None:
    """Why the trial's `versions` cannot be heeded."""
    if not trial.versions:
        return None
    known = sorted({one.package for one in DIFFERENCES})
    if trial.device.name != "simulated":
        return "versions: they can be predicted only; take them out, or use device=simulated"
    for package, version in trial.versions.items():
        if package not in known:
            return f"versions.{package}: no differences of its versions are known, only of {', '.join(known)}"
        try:
            asked = Version(version)
        except InvalidVersion:
            return f"versions.{package}={version} is no version; write it as 0.14.2"
        installed = techniques.version(package)
        # "+cu130" and "+cpu" are builds of one version
        if installed is not None and Version(asked.public) > Version(Version(installed).public):
            return (
                f"versions.{package}={version} is later than {installed}, which is installed and traced; "
                "install it and leave versions out"
            )
    return None
