"""Attention: one kernel of torch's scaled_dot_product_attention (`sdpa_*`), or the flash-attn package.

A forced kernel (SDPBackend) is the only one that torch may choose. If it cannot serve a call, torch refuses, and so do
the simulated kernels (sdpa_kernels.py). Then the trial is invalid, with torch's reasons.

flash-attn 2 has a stand-in where only memory and time are traced: its functions, for transformers' own code.
transformers calls flash_attn_func, or flash_attn_varlen_func for samples without their padding and for documents, from
`modeling_flash_attention_utils`; `stands_in` puts these functions there. It passes only what a function names, and
raises for a `softcap` that one does not name. What changes no memory has no name here (`others`). The tensors are those
of flash-attn 2.8 (csrc/flash_attn/flash_api.cpp: mha_fwd, mha_varlen_fwd, mha_bwd, mha_varlen_bwd;
flash_attn/flash_attn_interface.py: FlashAttnFunc, FlashAttnVarlenFunc), which has allocated the same since 2.3. The
forward pass makes no copies for shared heads. The backward pass makes dK and dV of every head, and then sums them.

Not covered: FLASH_ATTENTION_DETERMINISTIC; partial results of sequences that are split over a GPU's processors, which
happens if batch, heads and length are too small to fill the GPU (set_params_splitkv).
"""

import contextlib
import functools
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import modeling_flash_attention_utils as utils

from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.measure.dispatch_modes import FORMULAS
from vramsweep.runners.measure.patches import patched
from vramsweep.runners.trace.sdpa_kernels import accumulated_width

BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}
REFUSED_BY_TORCH = ("No available kernel", "No viable backend")  # select_sdp_backend, scaled_dot_product_attention
REFUSED_BY_TRANSFORMERS = ("attention implementation", "Flash Attention", "FlashAttention", "flash_attn")
# transformers keeps the functions that it has found under these names.
STATE = ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn",
         "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn")  # fmt: skip
_library = torch.library.Library("vramsweep", "FRAGMENT")
_FORWARD = "(Tensor query, Tensor key, Tensor value, bool is_causal, SymInt sequences) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor(a!) dq, Tensor(b!) dk, "
    "Tensor(c!) dv, bool is_causal, SymInt sequences) -> ()"
)


@contextlib.contextmanager
def around(trial: Trial, device: torch.device) -> Iterator[None]:
    """Allow only the attention that the trial asks for, until the context is left."""
    chosen: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if trial.attention in BACKENDS:
        chosen = _forced(trial)
    elif trial.attention == "flash_attention_2" and trial.device.name == "simulated":
        chosen = stands_in()
    with _supported(trial), chosen:
        yield


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """Return the model; simulated, it calls the stand-in for flash-attn."""
    if trial.attention == "flash_attention_2" and trial.device.name == "simulated":
        call(net)
    return net


@contextlib.contextmanager
def _supported(trial: Trial) -> Iterator[None]:
    """Turn transformers' refusal of a model or of a GPU into InvalidTrial with its reason."""
    try:
        yield
    except (ImportError, ValueError) as error:
        first = (str(error).strip().splitlines() or [""])[0].partition(". ")[0]
        if not any(said in first for said in REFUSED_BY_TRANSFORMERS):
            raise
        other = "eager" if trial.attention.startswith("sdpa") else "sdpa"
        raise InvalidTrial(f"attention={trial.attention}: {first}; use attention={other}") from error


@contextlib.contextmanager
def _forced(trial: Trial) -> Iterator[None]:
    """Allow one kernel only, and turn torch's refusal into InvalidTrial with its reasons."""
    with _torch_s_reasons() as reasons:
        try:
            with sdpa_kernel(BACKENDS[trial.attention]):
                yield
        except RuntimeError as error:
            if not str(error).startswith(REFUSED_BY_TORCH):
                raise
            told = [text for line in (*str(error).splitlines()[1:], *reasons) if (text := line.strip(" ."))]
            why = f" ({'; '.join(dict.fromkeys(told))})" if told else ""
            raise InvalidTrial(
                f"attention={trial.attention} cannot run this model's attention{why}; use attention=sdpa, with which "
                "torch chooses a suitable kernel"
            ) from error


@contextlib.contextmanager
def _torch_s_reasons() -> Iterator[list[str]]:
    """Collect torch's warnings about its kernels (sdp_utils), which it gives if it finds no kernel."""
    found: list[str] = []
    show = warnings.showwarning

    def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        text, _, where = str(message).partition("(Triggered internally at ")
        if "sdp_utils" in where and "not used because" not in text:
            found.append(text)
        show(message, *args, **kwargs)

    with patched([(warnings, "showwarning", note)]):
        yield found


def _forward(query: Any, key: Any, value: Any, is_causal: bool, sequences: int) -> tuple[Tensor, ...]:
    """Return the output, the logarithms of the sums of exponentials, and the generator's state."""
    *rows, heads, _ = query.shape
    of_each_head = (rows[0], heads, rows[1]) if len(rows) == 2 else (heads, *rows)
    lse = query.new_empty(of_each_head, dtype=torch.float32)
    return torch.empty_like(query), lse, query.new_empty(2, dtype=torch.int64)


def _flops(products: int, at: int, *given: Any, out_val: Any = None) -> int:
    """Count the FLOPs of products of queries, the argument `at`, with keys: 2 for each pair of a sequence and element
    of a head. The last argument is the number of sequences, all taken as equally long."""
    query, sequences = given[at], given[-1]
    *rows, heads, width = query.shape
    tokens = math.prod(rows)
    return cast(int, products * (2 * heads * width * tokens * tokens // sequences))


for _name, _schema, _kernel, _products, _at in (
    ("flash_forward", _FORWARD, _forward, 2, 0),
    ("flash_backward", _BACKWARD, lambda *args: None, 5, 1),
):
    _library.define(f"{_name}{_schema}")
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    FORMULAS[getattr(torch.ops.vramsweep, _name)] = functools.partial(_flops, _products, _at)
_ops = torch.ops.vramsweep


class _Attention(torch.autograd.Function):
    """The autograd of both functions; `sequences` is their number in (tokens, heads, width), None for (batch, ...)."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, causal: bool, sequences: int | None) -> Tensor:
        width = query.size(-1)
        query, key, value = (F.pad(t, (0, -width % 8)) if width % 8 else t for t in (query, key, value))
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        out, lse, state = _ops.flash_forward(query, key, value, causal, sequences or query.size(0))
        ctx.save_for_backward(query, key, value, out, lse, state)
        ctx.causal, ctx.sequences = causal, sequences
        return cast(Tensor, out[..., :width])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse, _ = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(t) for t in (query, key, value))
        width = grad.size(-1)
        if width % 8:
            grad = F.pad(grad, (0, -width % 8))
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        heads, shared, padded = query.size(-2), key.size(-2), query.size(-1)
        rows = scratch_rows(query.shape[:-2], ctx.sequences)
        sums = query.new_empty((heads, rows), dtype=torch.float32)
        accumulated = query.new_empty((rows, heads, accumulated_width(padded)), dtype=torch.float32)
        every = (*key.shape[:-2], heads, padded)
        both = [key.new_empty(every) for _ in range(2)] if shared != heads else [dk, dv]
        _ops.flash_backward(grad, query, key, value, out, lse, dq, *both, ctx.causal, ctx.sequences or query.size(0))
        if shared != heads:
            for whole, part in zip(both, (dk, dv), strict=True):
                torch.sum(whole.view(*key.shape[:-2], shared, heads // shared, padded), -2, out=part)
        del sums, accumulated, both
        return dq[..., :width], dk[..., :width], dv[..., :width], None, None


def scratch_rows(shape: Sequence[int], sequences: int | None = None) -> int:
    """Count rows of the backward kernels' accumulators: lengths rounded up to 128, or 128 more for each sequence."""
    if sequences is not None:
        return shape[0] + 128 * sequences
    batch, length = shape
    return batch * -(-length // 128) * 128


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, causal: bool = False, softcap: float = 0.0, **others: Any
) -> Tensor:
    """Stand in for flash_attn.flash_attn_func, with tensors of shape (batch, length, heads, width)."""
    return _attend(q, k, v, causal, None)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softcap: float = 0.0,
    **others: Any,
) -> Tensor:
    """Stand in for flash_attn.flash_attn_varlen_func, with tensors of shape (tokens, heads, width)."""
    return _attend(q, k, v, causal, cu_seqlens_q.numel() - 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, sequences: int | None) -> Tensor:
    """Return the output of `_Attention`. Raises InvalidTrial for tensors that mha_fwd refuses."""
    dtypes = {tensor.dtype for tensor in (q, k, v)}
    if len(dtypes) > 1 or not dtypes <= {torch.float16, torch.bfloat16}:
        raise InvalidTrial("attention=flash_attention_2 takes fp16 and bf16 only; use precision=bf16 or attention=sdpa")
    if q.size(-1) > 256:
        raise InvalidTrial("attention=flash_attention_2 takes a head width of at most 256; use attention=sdpa")
    return cast(Tensor, _Attention.apply(q, k, v, causal, sequences))


@contextlib.contextmanager
def stands_in() -> Iterator[None]:
    """Let transformers find these functions in the place of flash-attn's, installed or not."""
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    for function in (flash_attn_func, flash_attn_varlen_func):
        setattr(package, function.__name__, function)
    package.flash_attn_with_kvcache = None  # type: ignore[attr-defined] # for inference
    padding.pad_input, padding.unpad_input = utils._pad_input, utils._unpad_input  # type: ignore[attr-defined]
    found = [(sys.modules, "flash_attn", package), (sys.modules, "flash_attn.bert_padding", padding)]
    with patched((utils, name, None) for name in STATE if hasattr(utils, name)):
        with patched([*found, (utils, "is_flash_attn_2_available", lambda: True)]):
            utils.lazy_import_flash_attention("flash_attention_2")  # it keeps what it finds
        yield


def call(net: torch.nn.Module) -> None:
    """Let the model's layers call flash_attention_2. Raises InvalidTrial if transformers has none for the model."""
    known = getattr(net, "_supports_flash_attn", getattr(net, "_supports_flash_attn_2", False))
    if not known:
        raise InvalidTrial(f"attention=flash_attention_2: transformers lacks it for {type(net).__name__}; use sdpa")
    for module in net.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "flash_attention_2"
