"""4-bit base weights of bitsandbytes (NF4, blocks of 64), with or without quantised statistics: QLoRA.

Simulated runs have layers of ours that keep the tensors of bitsandbytes and allocate what its kernels do
(bitsandbytes 0.50: functional.py, nn/modules.py, autograd/_functions.py, backends/cuda/ops.py).

Not covered beyond 4 tokens: the kernel that multiplies with packed weights, without temporaries in the forward pass.
bitsandbytes takes it for at most 4 tokens, and by a table of measurements (`_gemm_4bit_use_custom_cuda`) for up to 512,
in small layers for up to 1,536. From 5 tokens on the stand-in always unpacks the weight, as bitsandbytes before 0.50
did. That is at most one layer's weight too much, and the backward pass unpacks it in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.techniques import quantized_base
from vramsweep.runners.techniques.kernel_stubs import fused

BLOCK, NESTED_BLOCK = 64, 256
FEW = 4  # tokens; backends/cuda/ops.py: _GEMM_4BIT_CUSTOM_FLOOR_M


def construct(trial: Trial, make: Callable[[torch.dtype], Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Return the model with random quantised weights. It has the quantisation's own dtype instead of `dtype`."""
    dtype = quantized_base.dtype(trial)
    net = quantized_base.skeleton(make, dtype)
    simulated = trial.device.name == "simulated"
    return _stood_in(trial, net, device, dtype) if simulated else _with_library(trial, net, device)


def pretrained(trial: Trial, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `from_pretrained`."""
    _count_products()
    return {"quantization_config": _config(trial), "dtype": quantized_base.dtype(trial), "device_map": {"": device}}


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """Return the quantised model, ready for adapters: frozen, and in fp32 where it is not quantised."""
    if trial.device.name == "simulated":
        quantized_base.prepare(net)
        return net
    from peft import prepare_model_for_kbit_training

    return prepare_model_for_kbit_training(net, use_gradient_checkpointing=False)


def _config(trial: Trial) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=trial.quantization == "nf4_double",
        bnb_4bit_compute_dtype=quantized_base.dtype(trial),
    )


def _count_products() -> None:
    """Add bitsandbytes' product with packed weights to torch's registry of FLOPs."""
    import bitsandbytes  # noqa: F401  (registers the operator)
    from torch.utils.flop_counter import flop_registry

    def flops(a: torch.Tensor, packed: torch.Tensor, shape: Any, *rest: Any, out_val: Any = None, **kwargs: Any) -> int:
        return int(2 * a.numel() * shape[0])

    if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        flop_registry[torch.ops.bitsandbytes.gemm_4bit] = flops


def _with_library(trial: Trial, net: Any, device: torch.device) -> Any:
    """Quantise as `from_pretrained` does (transformers/integrations/bitsandbytes.py), with random values."""
    import bitsandbytes
    from transformers.quantizers.auto import AutoHfQuantizer

    _count_products()
    quantizer = AutoHfQuantizer.from_config(_config(trial))
    quantizer.preprocess_model(model=net, device_map={"": device}, keep_in_fp32_modules=[])

    def quantize(module: nn.Module, name: str, values: torch.Tensor) -> nn.Parameter | None:
        if not isinstance(module, bitsandbytes.nn.Linear4bit) or name != "weight":
            return None
        made = bitsandbytes.nn.Params4bit(values, requires_grad=False, **module.weight.__dict__)
        return cast(nn.Parameter, made.to(device))

    quantized_base.fill(net, device, quantized_base.dtype(trial), quantize)
    quantizer.postprocess_model(net)
    net.hf_quantizer = quantizer
    return net


def _stood_in(trial: Trial, net: Any, device: torch.device, dtype: torch.dtype) -> Any:
    dynamic = torch.empty(256, device=device) if trial.quantization == "nf4_double" else None
    net.dynamic_map = dynamic  # functional.py: name2qmap, made once and kept

    def quantize(module: nn.Module, name: str, values: torch.Tensor) -> nn.Parameter | None:
        if not isinstance(module, Linear4bit) or name != "weight":
            return None
        packed, module.quant_state = pack(values, dynamic)
        return packed

    quantized_base.replace(net, lambda entering, leaving, bias: Linear4bit(entering, leaving, bias, dtype))
    quantized_base.fill(net, device, dtype, quantize)
    return net


@dataclass
class QuantState:
    """bitsandbytes' statistics of a weight, with its `shape` and `dtype` before packing (functional.py: QuantState).

    `absmax` is fp32, one per block. With `state2` it is uint8, and `state2.absmax` is one per block of those.
    """

    absmax: torch.Tensor
    code: torch.Tensor
    blocksize: int
    shape: torch.Size
    dtype: torch.dtype
    offset: Any = None  # a tensor of one number, with `state2`
    state2: QuantState | None = None
    quant_type: str = "nf4"

    @property
    def nested(self) -> bool:
        """Return whether `absmax` is quantised itself, as bitsandbytes' functions ask."""
        return self.state2 is not None


def pack(weight: torch.Tensor, dynamic: torch.Tensor | None) -> tuple[nn.Parameter, QuantState]:
    """Return the packed weight, uint8 of (elements / 2, 1), and its statistics, which the map `dynamic` quantises.

    functional.py: quantize_4bit and quantize_blockwise; backends/cuda/ops.py: their kernels.
    """
    absmax = torch.empty(math.ceil(weight.numel() / BLOCK), device=weight.device)
    packed = torch.empty(((weight.numel() + 1) // 2, 1), dtype=torch.uint8, device=weight.device)
    fused([weight], made=[absmax, packed])
    code = torch.empty(16, device=weight.device)
    state = QuantState(absmax, code, BLOCK, weight.shape, weight.dtype)
    if dynamic is not None:
        state.offset = absmax.mean()
        centred = absmax - state.offset
        nested = torch.empty(math.ceil(centred.numel() / NESTED_BLOCK), device=weight.device)
        state.absmax = torch.empty_like(centred, dtype=torch.uint8)
        fused([centred, dynamic], made=[nested, state.absmax])
        state.state2 = QuantState(nested, dynamic.clone(), NESTED_BLOCK, centred.shape, centred.dtype)
    return nn.Parameter(packed, requires_grad=False), state


class Linear4bit(nn.Module):
    """Stand-in for bitsandbytes.nn.Linear4bit: packed weights, unpacked for each product (nn/modules.py)."""

    quant_state: QuantState

    def __init__(self, in_features: int, out_features: int, bias: bool, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.compute_dtype = in_features, out_features, compute_dtype
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device="meta"), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, device="meta"), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product in `compute_dtype`, with the bias cast to it, and return it in the dtype of `x`."""
        dtype = x.dtype
        x = x.to(self.compute_dtype)
        bias: torch.Tensor | None = self.bias
        if bias is not None:
            if bias.dtype != x.dtype:
                bias.data = bias.data.to(x.dtype)
            bias = bias.to(self.compute_dtype)
        # no name for the product, because it would outlive `x`
        return MatMul4Bit.apply(x, self.weight, bias, self.quant_state).to(dtype)  # type: ignore[no-any-return]


class MatMul4Bit(torch.autograd.Function):
    """Stand-in for autograd/_functions.py: MatMul4Bit, with the operators of backends/cuda/ops.py."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: Any, state: QuantState) -> torch.Tensor:
        """Return the product; keep only the packed weight and its statistics for the backward pass."""
        ctx.packed, ctx.state = packed, state
        return _product(x, packed, bias, state)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of `x`, for which the weight is unpacked again; nothing else has one."""
        (grad,) = grads
        return torch.matmul(grad, _unpacked(ctx.packed, ctx.state).to(grad.dtype)), None, None, None


def _product(x: torch.Tensor, packed: torch.Tensor, bias: Any, state: QuantState) -> torch.Tensor:
    """Do _dequant_linear_fallback of backends/cuda/ops.py; for few tokens, the kernel that reads the packed weight."""
    if x.numel() // x.shape[-1] <= FEW:
        out = x.new_empty((*x.shape[:-1], state.shape[0]))
        fused([x, packed, state.absmax], made=[out])
        return out
    absmax = state.absmax
    if state.state2 is not None:
        unnested = torch.empty_like(state.absmax, dtype=torch.float32)
        fused([state.absmax, state.state2.absmax], made=[unnested])
        absmax = unnested + state.offset  # both stay until the product is done
    weight = torch.empty(state.shape, dtype=x.dtype, device=x.device)
    fused([packed, absmax], made=[weight])
    return F.linear(x, weight, bias)


def _unpacked(packed: torch.Tensor, state: QuantState) -> torch.Tensor:
    """Return the unpacked weight, as functional.py: dequantize_4bit."""
    absmax = state.absmax
    if state.state2 is not None:
        absmax = torch.empty_like(state.absmax, dtype=torch.float32)
        fused([state.absmax, state.state2.absmax], made=[absmax])
        absmax += state.offset
    weight = torch.empty(state.shape, dtype=state.dtype, device=packed.device)
    fused([packed, absmax], made=[weight])
    return weight
