"""GPTQ-quantised base weights: 4 bits, groups of 128. Symmetry and order change no size.

Measured from a checkpoint that is quantised already, with gptqmodel and optimum. Simulated from any model with layers
of ours, which stand for gptqmodel's TorchLinear; its Triton layer trains like that one. One compiled kernel unpacks the
weight, and autograd keeps it until the product's backward pass (gptqmodel 7.7: nn_modules/qlinear/torch.py:
_forward_eager, __init__.py: dequantize_weight and _register_gptq_buffers).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.techniques import quantized_base
from vramsweep.runners.techniques.kernel_stubs import fused

BITS, GROUP = 4, 128
PACKED = 32 // BITS  # weights in an int32


def construct(trial: Trial, make: Callable[[torch.dtype], Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Return the simulated model. It has the quantisation's own dtype instead of `dtype`."""
    net = quantized_base.skeleton(make, quantized_base.dtype(trial))
    quantized_base.replace(net, lambda entering, leaving, bias: QuantLinear(entering, leaving, bias, device))
    quantized_base.fill(net, device, quantized_base.dtype(trial), lambda module, name, values: None)
    return net


def pretrained(trial: Trial, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `from_pretrained`; the checkpoint gives the rest."""
    from transformers import GPTQConfig

    config = GPTQConfig(bits=BITS, backend="auto_trainable")
    return {"quantization_config": config, "dtype": quantized_base.dtype(trial), "device_map": {"": device}}


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """Return the quantised model, frozen. peft's prepare_model_for_kbit_training casts nothing in GPTQ's models."""
    net.requires_grad_(False)
    return net


class QuantLinear(nn.Module):
    """gptqmodel's layer of 4 bits and groups of 128: buffers, no parameters; scales and unpacked weights in fp16."""

    compute_dtype = torch.float16
    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    g_idx: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        groups = math.ceil(in_features / GROUP)

        def keep(name: str, dtype: torch.dtype, *shape: int) -> None:
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device=device))

        keep("qweight", torch.int32, math.ceil(in_features / PACKED), out_features)
        keep("qzeros", torch.int32, groups, math.ceil(out_features / PACKED))
        keep("scales", torch.float16, groups, out_features)
        keep("g_idx", torch.int32, in_features)
        if bias:
            keep("bias", torch.float16, out_features)
        else:
            self.bias = None
        keep("wf_unsqueeze_zero", torch.int32, 1, 1, PACKED)
        keep("wf_unsqueeze_neg_one", torch.int32, 1, PACKED, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Unpack the whole weight, multiply by it and add the bias; only autograd may keep the unpacked weight."""
        shape = (*x.shape[:-1], self.out_features)
        x = x.reshape(-1, x.shape[-1])
        weight = torch.empty(self.in_features, self.out_features, dtype=self.scales.dtype, device=x.device)
        fused([self.qweight, self.qzeros, self.scales, self.g_idx], made=[weight])
        if weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        out = torch.matmul(x, weight).reshape(shape)
        del weight
        if self.bias is not None:
            out.add_(self.bias if self.bias.dtype == out.dtype else self.bias.to(out.dtype))
        return out
