"""Float8 training: linear layers whose three products run on float8 tensor cores, as torchao's default config has them.

Each operand is cast when it is needed, scaled by its largest element (dynamic tensorwise scaling): activations and
weights to e4m3, gradients to e5m2. Weights stay as they are, and everything else is autocast to bf16. The output layer
is not changed, nor are layers with a dimension that 16 does not divide, because the kernels do not take them.

Without torch.compile every cast is several kernels with fp32 temporaries of the operand's size. torchao is meant to be
compiled (compile=default), but the prediction is of the eager step.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from vramsweep.harness.spec.trial import InvalidTrial, Trial

ALIGNED = 16


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """Return the model with float8 linear layers. Raises InvalidTrial if none of its layers can be one."""
    last = net.get_output_embeddings()
    taken = {m for m in net.modules() if isinstance(m, torch.nn.Linear) and m is not last and aligned(m)}
    if not taken:
        raise InvalidTrial(
            f"precision=fp8: {type(net).__name__} has no linear layer, except the output layer, whose dimensions "
            f"are multiples of {ALIGNED}; use precision=bf16"
        )
    (_stand_in if trial.device.name == "simulated" else _library)(net, taken)
    return net


def _library(net: torch.nn.Module, taken: Collection[torch.nn.Module]) -> None:
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(net, module_filter_fn=lambda layer, name: layer in taken)


def _stand_in(net: torch.nn.Module, taken: Collection[torch.nn.Module]) -> None:
    for layer in taken:
        layer.__class__ = Float8Linear


def aligned(layer: torch.nn.Linear) -> bool:
    """Check whether the kernels take the layer's weight."""
    return layer.in_features % ALIGNED == 0 and layer.out_features % ALIGNED == 0


class Float8Linear(torch.nn.Linear):
    """Stand-in for torchao 0.18's layer of that name (float8/float8_linear.py): the operators that it runs eagerly."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute F.linear, with float8 products."""
        if torch.is_autocast_enabled("cpu"):
            input = input.to(torch.get_autocast_dtype("cpu"))
        output: Tensor = _Products.apply(input, self.weight.t())
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output


class _Products(torch.autograd.Function):
    """`matmul_with_hp_or_float8_args`: saved tensors are not in float8; every product casts its operands anew."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        input8, scale = _cast(input, torch.float8_e4m3fn)
        weight8 = _cast(weight, torch.float8_e4m3fn)
        rows8 = _flat(input8)
        out = _product(rows8, scale, *weight8, input.dtype, fast=True)
        return out.reshape(*input.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        input, weight = ctx.saved_tensors
        rows = _flat(grad)
        rows8 = _cast(rows, torch.float8_e5m2)
        weight8 = _cast(weight, torch.float8_e4m3fn)
        grad_input = _product(*rows8, weight8[0].t(), weight8[1], grad.dtype)
        grad_input = grad_input.reshape(*grad.shape[:-1], grad_input.shape[-1])
        input_rows = _flat(input)
        again8 = _cast(rows, torch.float8_e5m2)  # as the library does, because the scaling could differ
        input8 = _cast(input_rows, torch.float8_e4m3fn)
        grad_weight = _product(again8[0].t(), again8[1], *input8, grad.dtype)
        return grad_input, grad_weight.t()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _cast(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the tensor in float8 and its scale (float8_utils.py: tensor_to_scale, to_fp8_saturated)."""
    largest = torch.finfo(dtype).max
    amax = torch.max(torch.abs(tensor)).to(torch.float64)
    scale = (largest / torch.clamp(amax, min=1e-12)).to(torch.float32)
    scaled = tensor.to(torch.float32) * scale
    return scaled.clamp(min=-largest, max=largest).to(dtype), scale


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return `a` (m, k) @ `b` (k, n); a's rows and b's columns become contiguous (float8_ops.preprocess_addmm)."""
    if not a.is_contiguous():
        a = a.contiguous()
    if b.is_contiguous():
        b = b.t().contiguous().t()
    return torch._scaled_mm(
        a, b, scale_a=a_scale.reciprocal(), scale_b=b_scale.reciprocal(), out_dtype=dtype, use_fast_accum=fast
    )
