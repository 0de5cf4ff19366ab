"""Stand-ins for Liger's kernels in a trace: the tensors that liger-kernel 0.8.5 makes on CUDA, in its order.

Liger's layers are autograd functions around Triton kernels. Their Python code allocates the tensors, and each function
here names that code. The kernels themselves are `fused` (kernel_stubs.py), because they only read and write.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vramsweep.harness.hardware.gpu_lookup import Capability
from vramsweep.runners.techniques.kernel_stubs import accumulate, fused


class RmsNorm(torch.autograd.Function):
    """ops/rms_norm.py, casting_mode "llama", in_place: the input's gradient overwrites the output's.

    The weight's gradient is the sum of partial ones in fp32, one for each of the GPU's multiprocessors.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, multiprocessors: int) -> Tensor:
        """Return the normed rows; keep rows, weight and one fp32 reciprocal per row for the backward pass."""
        rows = hidden.contiguous().view(-1, hidden.shape[-1])
        normed = torch.empty_like(rows)
        reciprocals = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        fused([rows, weight], [], [normed, reciprocals])
        ctx.save_for_backward(rows, weight, reciprocals)
        ctx.multiprocessors = multiprocessors
        return normed.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input and weight; the weight's is None if it is frozen."""
        rows, weight, reciprocals = ctx.saved_tensors
        changed = grad.contiguous().view(rows.shape)
        if ctx.needs_input_grad[1]:
            return changed.view(grad.shape), _of_norm(rows, weight, reciprocals, changed, ctx.multiprocessors), None
        fused([rows, weight, reciprocals], [changed])
        return changed.view(grad.shape), None, None


def _of_norm(rows: Tensor, weight: Tensor, reciprocals: Tensor, changed: Tensor, multiprocessors: int) -> Tensor:
    partial = torch.empty(multiprocessors, rows.shape[1], dtype=torch.float32, device=rows.device)
    fused([rows, weight, reciprocals], [changed], [partial])
    return partial.sum(dim=0).to(weight.dtype)


class SiluMul(torch.autograd.Function):
    """ops/swiglu.py: the gradients of both factors overwrite the factors."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Return the product of silu(gate) and up, and keep both factors."""
        gate, up = gate.contiguous(), up.contiguous()
        product = torch.empty_like(gate)
        fused([gate, up], [], [product])
        ctx.save_for_backward(gate, up)
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two factors, which now hold their gradients."""
        gate, up = ctx.saved_tensors
        fused([grad.contiguous()], [gate, up])
        return gate, up


class Rope(torch.autograd.Function):
    """ops/rope.py: queries and keys are rotated in place, as (batch, length, heads, width)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, rotated, and keep cosines and sines."""
        query, key = _rotated(query, key, cos, sin)
        ctx.save_for_backward(cos, sin)
        return query, key

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries and keys, rotated in place too; cosines and sines have none."""
        return *_rotated(query, key, *ctx.saved_tensors), None, None


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    query, key = (t.transpose(1, 2).contiguous() for t in (query, key))
    fused([cos.contiguous(), sin.contiguous()], [query, key])
    return query.transpose(1, 2), key.transpose(1, 2)


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Stand in for a transformers model's `apply_rotary_pos_emb`."""
    return cast(tuple[Tensor, Tensor], Rope.apply(query, key, cos, sin))


class FusedLinearCrossEntropy(torch.autograd.Function):
    """ops/fused_linear_cross_entropy.py: the forward pass makes the gradients of hidden states and weight.

    Tokens come in chunks of next_power_of_2(tokens / (V / H)), so that a chunk's logits take about as much as the
    hidden states. The cross entropy kernel overwrites the logits with their gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, capability: Capability
    ) -> Tensor:
        """Return the sum of the tokens' losses, and keep the gradients for the backward pass."""
        tokens, width = hidden.shape
        size = chunk_size(tokens, width, weight.shape[0])
        needed = hidden.requires_grad
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if needed and weight.requires_grad else None
        grad_bias = torch.zeros_like(bias) if needed and bias is not None else None
        losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
        counted = targets != -100  # kept to the end
        counted.sum()
        direct = _product_is_direct(hidden, weight)
        kept = None
        if direct and (bias is None or bias.dtype == hidden.dtype):
            kept = torch.empty(size, weight.shape[0], dtype=hidden.dtype, device=hidden.device)
        for start in range(0, tokens, size):
            part, at = hidden[start : start + size], slice(start, start + size)
            if kept is not None:
                logits = kept[: len(part)]
                torch.mm(part, weight.t(), out=logits)
                if bias is not None:
                    logits.add_(bias)
            else:
                logits = part @ weight.t()
                if bias is not None:
                    logits = logits + bias
            row = losses[at]
            fused([targets[at]], [logits], [row])
            if needed:
                if direct and logits.dtype == grad_hidden.dtype:
                    torch.mm(logits, weight, out=grad_hidden[at])
                else:
                    grad_hidden[at] = logits @ weight
            if grad_weight is not None:
                _add_product(grad_weight, logits, part, capability)
            if grad_bias is not None:
                torch.add(grad_bias, logits.sum(dim=0), out=grad_bias)
            del logits, part
        del kept
        ctx.save_for_backward(
            grad_hidden.detach(), *(None if g is None else g.detach() for g in (grad_weight, grad_bias))
        )
        return torch.sum(losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the kept gradients of hidden states, weight and bias, multiplied by `grad` in place."""
        found = ctx.saved_tensors
        (grad == torch.tensor(1.0)).all()  # torch.equal, which tells whether to multiply
        for gradient in found:
            if gradient is not None:
                fused([grad], [gradient])
        return *found, None, None


def chunk_size(tokens: int, width: int, vocabulary: int) -> int:
    """Return the number of tokens in a chunk."""
    share = -(-tokens // -(-vocabulary // width))
    return min(1 << (share - 1).bit_length(), tokens)


def _product_is_direct(hidden: Tensor, weight: Tensor) -> bool:
    """Check whether products go into a buffer, whose dtype autocast must not change (`_can_use_mm_out`)."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return hidden.dtype == weight.dtype and autocast in (None, hidden.dtype)


def _add_product(total: Tensor, logits: Tensor, part: Tensor, capability: Capability) -> None:
    """Add `logits`' gradient, transposed, times `part` to the weight's gradient; without temporaries from Ampere on.

    A total in fp32 needs addmm with out_dtype, which exists since torch 2.8.
    """
    half = logits.dtype in (torch.float16, torch.bfloat16)
    widened = total.dtype == torch.float32 and "dtype_out" in torch.ops.aten.addmm.overloads()
    if capability >= (8, 0) and half and (widened or total.dtype == logits.dtype):
        accumulate(logits.t(), part.to(logits.dtype), total)
    else:
        total += torch.mm(logits.t(), part).float()


def causal_loss(
    capability: Capability,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    width: int,
    num_items_in_batch: Any = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute the loss of Liger's transformers/model/loss_utils.py: LigerForCausalLMLoss."""
    labels = F.pad(labels, (0, 1), value=-100)
    targets = labels[..., 1:].contiguous().view(-1)
    loss: Tensor = FusedLinearCrossEntropy.apply(hidden.view(-1, width), weight, bias, targets, capability)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def patch(net: torch.nn.Module, multiprocessors: int) -> None:
    """Make norms and feed-forward layers of a Llama-like model run as Liger's, in place."""

    def normed(layer: Any, hidden: Tensor) -> Tensor:
        return cast(Tensor, RmsNorm.apply(hidden, layer.weight, multiprocessors))

    def fed_forward(layer: Any, hidden: Tensor) -> Tensor:
        product = SiluMul.apply(layer.gate_proj(hidden), layer.up_proj(hidden))
        return cast(Tensor, layer.down_proj(product))

    for module in net.modules():
        forward: Callable[..., Tensor]
        if type(module).__name__.endswith("RMSNorm"):
            forward = functools.partial(normed, module)
        elif type(module).__name__.endswith("MLP"):
            forward = functools.partial(fed_forward, module)
        else:
            continue
        module.forward = forward
