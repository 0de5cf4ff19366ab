"""scaled_dot_product_attention on a GPU: which kernel runs, what it makes of a mask, what it allocates for itself.

The kernel is the first of torch's order that is enabled and can serve the call (sdp_utils.cpp); a test compares an
H200's choice in 390 calls. cuda_emulation.py puts it in place of the CPU's. Not covered: flash-attn's own kernels
(techniques/attention.py); that cuDNN takes no single key and, in torch's deterministic mode, nothing; that
GPUs of 8.6, 8.9 and 12.x train without flash attention if heads are 193 to 224 wide, or wider and with dropout.
"""

import math
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from vramsweep.harness.hardware.gpu_lookup import Capability
from vramsweep.harness.spec.version_differences import installed_has
from vramsweep.runners.trace.trace_data import prefers_cudnn, widest_cudnn

aten = torch.ops.aten
MASK_ALIGNMENT = 8  # elements; mem_eff_alignment of preprocess_mask
CUDNN_SCRATCH = 256  # bytes of each cuDNN kernel, in addition to _cudnn_scratch (seen: cuDNN 9.19, an H200)
IN_SIXTEENTHS = not installed_has("any_dropout")


class Attention(NamedTuple):
    """The arguments of scaled_dot_product_attention; its tensors have the shape (batch, heads, length, width)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def width(self) -> int:
        """Return the width of the query's heads."""
        return self.query.size(-1)

    @property
    def half(self) -> bool:
        """Return whether the query has half precision, fp16 or bf16."""
        return self.query.dtype in (torch.float16, torch.bfloat16)

    def fits_none(self) -> str | None:
        """Return why no fused kernel can serve the call, or None if one might."""
        tensors = (self.query, self.key, self.value)
        if any(t.dim() != 4 for t in tensors) or len({t.dtype for t in tensors}) > 1:
            return "it needs query, key and value of four dimensions and one dtype"
        equal = (0,) if self.enable_gqa else (0, 1)
        if any(other.size(n) != self.query.size(n) for other in tensors[1:] for n in equal):
            return "it needs query, key and value with equal numbers of samples and, without enable_gqa, of heads"
        if self.attn_mask is not None and self.attn_mask.requires_grad:
            return "the mask requires a gradient"
        return None


def chosen_kernel(asked: Attention, capability: Capability) -> str:
    """Return the kernel that runs on the GPU: the first of torch's order that is enabled and lacks nothing.

    Raises RuntimeError, as torch does, if there is none.
    """
    cudnn = ("cudnn", torch._C._get_cudnn_sdp_enabled(), _cudnn_lacks)
    others = (
        ("flash", torch._C._get_flash_sdp_enabled(), _flash_lacks),
        ("efficient", torch._C._get_mem_efficient_sdp_enabled(), _efficient_lacks),
        ("math", torch._C._get_math_sdp_enabled(), lambda asked, capability: None),
    )
    order = (cudnn, *others) if prefers_cudnn(capability) else (*others, cudnn)
    reasons = []
    for name, enabled, lacks in order:
        if enabled and (reason := lacks(asked, capability)) is None:
            return name
        if enabled:
            reasons.append(f"{name}: {reason}")
    raise RuntimeError("\n".join(("No available kernel. Aborting execution.", *reasons)))


def _flash_lacks(asked: Attention, capability: Capability) -> str | None:
    """Return why flash attention cannot serve the call, or None if it can (can_use_flash_attention)."""
    if capability < (8, 0):
        return "it needs compute capability 8.0"
    if not asked.half:
        return f"it takes fp16 and bf16, not {asked.query.dtype}"
    if asked.attn_mask is not None:
        return "it takes no mask"
    if not asked.width == asked.value.size(-1) <= 256:
        return "it takes one head width of at most 256"
    return asked.fits_none()


def _efficient_lacks(asked: Attention, capability: Capability) -> str | None:
    """Return why the efficient kernel cannot serve the call, or None if it can (can_use_mem_efficient_attention)."""
    modern = capability >= (8, 0)
    if asked.enable_gqa:
        return "it takes no shared heads"
    if asked.query.dtype is not torch.float32 and not (asked.half and (modern or asked.query.dtype is torch.float16)):
        return f"it does not take {asked.query.dtype} on this GPU"
    multiple = 16 // asked.query.element_size() if modern else 4
    if asked.width != asked.key.size(-1) or asked.width % multiple or asked.value.size(-1) % multiple:
        return f"it takes head widths that are multiples of {multiple}"
    return asked.fits_none()


def _cudnn_lacks(asked: Attention, capability: Capability) -> str | None:
    """Return why cuDNN's kernel cannot serve the call, or None if it can (can_use_cudnn_attention)."""
    if capability < (8, 0):
        return "it needs compute capability 8.0"
    if not asked.half:
        return f"it takes fp16 and bf16, not {asked.query.dtype}"
    widest, most = max(asked.width, asked.value.size(-1)), widest_cudnn(capability)
    if widest > most or asked.width % 8 or asked.value.size(-1) % 8:
        return f"it takes head widths of at most {most} that are multiples of 8"
    if asked.dropout_p * 16 % 1 and IN_SIXTEENTHS:
        return f"it takes dropout in steps of 1/16, not {asked.dropout_p}"
    return asked.fits_none()


def _flash(asked: Attention) -> torch.Tensor:
    width = asked.width
    scale = 1 / math.sqrt(width) if asked.scale is None else asked.scale
    padded = (F.pad(t, (0, -width % 8)) if width % 8 else t for t in asked[:3])
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(
        *padded, asked.dropout_p, asked.is_causal, scale=scale
    )[0]
    return out[..., :width] if width % 8 else out


def _efficient(asked: Attention) -> torch.Tensor:
    given = *asked[:3], _bias(asked), _saves(asked), asked.dropout_p, asked.is_causal
    return cast(torch.Tensor, aten._scaled_dot_product_efficient_attention(*given, scale=asked.scale)[0])


def _cudnn(asked: Attention) -> torch.Tensor:
    given = *asked[:3], _added(asked), _saves(asked), asked.dropout_p, asked.is_causal, False
    return cast(torch.Tensor, aten._scaled_dot_product_cudnn_attention(*given, scale=asked.scale)[0])


def _math(asked: Attention) -> torch.Tensor:
    given = *asked[:3], _added(asked), asked.dropout_p, asked.is_causal, None
    named = {"scale": asked.scale, "enable_gqa": asked.enable_gqa}
    return cast(torch.Tensor, aten._scaled_dot_product_attention_math(*given, **named)[0])


KERNELS = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn, "math": _math}


def _saves(asked: Attention) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in asked[:3])


class Freed(NamedTuple):
    """Entry in a list of what an operator allocates for itself: here it frees number `which`, counted from 0."""

    which: int


def scratch(func: Any, args: Any) -> list[Any]:
    """Return what an attention kernel allocates for itself: sizes in bytes, and `Freed`."""
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        return _flash_scratch(args)
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        return _efficient_scratch(args)
    if func is aten._scaled_dot_product_cudnn_attention.default:
        return [CUDNN_SCRATCH]
    if func is aten._scaled_dot_product_cudnn_attention_backward.default:
        return _cudnn_scratch(args)
    return []


def _flash_scratch(args: Any) -> list[Any]:
    """Return sizes: the rows' sums and the query's gradient in fp32, lengths rounded up to 128; if heads are shared, dK
    and dV of every head (mha_bwd in aten/native/transformers/cuda/flash_attn/flash_api.cpp)."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * -(-length // 128) * 128
    every = batch * heads * key.size(2) * width * key.element_size()
    return [4 * rows, 4 * rows * accumulated_width(width), *([every] * 2 if key.size(1) != heads else [])]


def _cudnn_scratch(args: Any) -> list[Any]:
    """Return one size: the rows' sums and the query's gradient in fp32; shared heads add dK and dV of every head.
    cuDNN 9.19 requested this on an H200 in 180 calls (results/reference/h200-141gb/operators.json)."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    every = batch * heads * key.size(2) * width * key.element_size()
    shared = 2 * every if key.size(1) != heads else 0
    return [4 * batch * heads * length * (width + 1) + shared + CUDNN_SCRATCH]


def _efficient_scratch(args: Any) -> list[Any]:
    """Return sizes: the gradient with each sample's tokens together, if it is not so; the rows' sums; the tiles.

    For fp32 the sums come from a product of their own. The tiles hold the query's gradient in fp32, each of 64 columns
    and 64 or 128 rows, with 16 bytes of locks. Source: _efficient_attention_backward in
    aten/native/transformers/cuda/attention_backward.cu; workspace_elements_gq in mem_eff_attention/kernel_backward.h.
    Not covered: dK and dV if half-precision heads are wider than 128.
    """
    grad, query, _, value = args[:4]
    batch, heads, length, width = query.shape
    wide = value.size(-1)
    high = 64 if max(width, wide) <= 64 else 128
    tiles = batch * heads * -(-length // high) * -(-width // 64) * (4 * 64 * high + 16)
    rows = 4 * batch * heads * length
    own = [] if grad.transpose(1, 2).is_contiguous() else [grad.numel() * grad.element_size()]
    if query.dtype is not torch.float32:
        return [*own, rows, tiles, Freed(len(own))]
    at = len(own)
    return [*own, rows * wide, rows, rows, Freed(at + 1), Freed(at), tiles, Freed(at + 2)]


def accumulated_width(width: int) -> int:
    """Return a head's width in flash attention's accumulators (head_size_rounded in mha_bwd)."""
    multiple = 32 if width <= 128 else 64
    return -(-width // multiple) * multiple


def _added(asked: Attention) -> torch.Tensor | None:
    """Return a boolean mask as one to add (convert_boolean_attn_mask_ in ATen/native/transformers/attention.cpp)."""
    mask = asked.attn_mask
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=asked.query.dtype, device=mask.device))


def _bias(asked: Attention) -> torch.Tensor | None:
    """Return the additive mask as the kernel wants it: the query's dtype, rows aligned to 8 elements, copied if needed.

    Source: aligned_tensor, pad_bias and preprocess_mask in ATen/native/transformers/attention.cpp.
    """
    mask = _added(asked)
    if mask is None:
        return None
    rows = reversed(mask.stride()[:-1])  # a row's stride first: usually it decides, for other lengths too
    if mask.stride(-1) != 1 or any(stride % MASK_ALIGNMENT for stride in rows):
        columns = mask.size(-1)
        mask = F.pad(mask, (0, MASK_ALIGNMENT - columns % MASK_ALIGNMENT))[..., :columns]
    return mask.expand(*asked.query.shape[:3], asked.key.size(2))
