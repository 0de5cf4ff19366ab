"""Recurrent layers on a GPU: what torch allocates around cuDNN's call, and the least that cuDNN must keep.

cuDNN keeps its reserve space from the forward pass to the backward pass, in a layout that is its own. Backward needs of
each row, layer and direction what cannot be computed from inputs and outputs alone (`KEPT`), and the outputs of all
layers but the last. That is the lower bound traced here, and the trace says that more is not covered. Around the call,
requests are those of aten/src/ATen/native/cudnn/RNN.cpp (_cudnn_rnn, _cudnn_rnn_backward). Cells of one step run
torch's own kernels, so all that they allocate is known (aten/src/ATen/native/cuda/RNN.cu).

Not covered: cuDNN's scratch, the state of dropout between layers, launches of more than one kernel.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from vramsweep.harness.hardware.roofline import Work
from vramsweep.runners.trace.operator_cost import KINDS
from vramsweep.runners.trace.step_tracer import active

aten = torch.ops.aten
RECURRENT = "recurrent_layers"  # the code in Trace.not_covered
# Values of each row, layer, direction and hidden unit: four gates and the cell; three gates and the hidden part of the
# candidate, which the reset gate multiplies; nothing, as the output gives the derivative of tanh and of relu.
KEPT = {"lstm": 5, "gru": 4, "rnn_tanh": 0, "rnn_relu": 0}


def kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the operators of recurrent layers and cells by name, each with what CUDA runs instead."""
    for name, kept in KEPT.items():
        yield f"{name}.input", _layers(name, kept, False)
        yield f"{name}.data", _layers(name, kept, True)

    def lstm_cell(rows: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        return aten._thnn_fused_lstm_cell(rows @ w_ih.t(), hx[0] @ w_hh.t(), hx[1], b_ih, b_hh)[:2]

    def gru_cell(rows: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        return aten._thnn_fused_gru_cell(rows @ w_ih.t(), hx @ w_hh.t(), hx, b_ih, b_hh)[0]

    yield "lstm_cell", lstm_cell
    yield "gru_cell", gru_cell


def metas() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the shapes of CUDA's operators for which torch has none: their names, each with its meta function."""

    def forward(rows: Any, hidden: Any, hx: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        return torch.empty_like(hx), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))

    def backward(grad: Any, workspace: Any, has_bias: bool) -> Any:
        gates = [workspace.new_empty((grad.shape[0], 3 * grad.shape[1])) for _ in range(2)]
        return *gates, torch.empty_like(grad), *(one.sum(0) if has_bias else None for one in gates)

    yield "_thnn_fused_gru_cell", forward
    yield "_thnn_fused_gru_cell_backward", backward


def _layers(name: str, kept: int, packed: bool) -> Callable[..., Any]:
    """Return what CUDA runs on rows of shape (..., features), and, if `packed`, the numbers of rows of each step.

    It returns the outputs and the last states.
    """

    def run(rows: torch.Tensor, *args: Any) -> Any:
        hx, params, _, number, _, train, bidirectional, *batch_first = args[packed:]
        if (tracer := active()) is not None and not tracer.on_host(params[0]):
            tracer.leave_out(RECURRENT, name)
            if tracer.in_last_step:  # each row meets each weight, and twice more for their gradients
                weights = sum(one.numel() for one in params if one.dim() == 2)
                flops = (6 if train else 2) * rows.shape[:-1].numel() * weights
                tracer.trace.kernels.append((Work(KINDS.get(rows.dtype, str(rows.dtype)), flops, 0, 1), 1))
                tracer.touched.append([])
        states = [hx] if isinstance(hx, torch.Tensor) else list(hx)
        tensors = [rows, *states, *params]
        if torch.is_autocast_enabled("cpu"):  # _cudnn_rnn_cast_reflatten
            tensors = [one.to(torch.get_autocast_dtype("cpu")) for one in tensors]
        directions = 1 + bidirectional
        width, cell = states[0].shape[-1], states[-1].shape[-1]  # they differ if an LSTM projects its outputs
        reserve = directions * (number * kept * cell + (number - 1) * width) if train else 0
        return _Layers.apply(reserve, directions * width, any(batch_first), len(states), *tensors)

    return run


class _Layers(torch.autograd.Function):
    """Autograd of recurrent layers; `reserve` and `wide` are values of a row: kept for backward, and of the output."""

    @staticmethod
    def forward(ctx: Any, reserve: int, wide: int, batch_first: bool, states: int, *tensors: torch.Tensor) -> Any:
        """Return the outputs (..., wide) and the last states, and keep what backward needs."""
        rows, given = tensors[0], tensors[1 : 1 + states]
        by_time = rows.transpose(0, 1).contiguous() if batch_first else rows.contiguous()
        outputs = by_time.new_empty((*by_time.shape[:-1], wide))
        last = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in given]
        space = by_time.new_empty((*by_time.shape[:-1], reserve))
        ctx.save_for_backward(*tensors, outputs, space)
        ctx.batch_first, ctx.states = batch_first, states
        return outputs.transpose(0, 1) if batch_first else outputs, *last

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *of_last: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of rows, states and weights; cuDNN computes that of the rows even if nobody asks."""
        rows, *rest = ctx.saved_tensors[:-2]
        ordered = [one.transpose(0, 1) if ctx.batch_first else one for one in (grad, rows)]
        copies = [one.contiguous() for one in ordered]
        of_rows = torch.empty_like(copies[1])
        made = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in rest]
        return None, None, None, None, of_rows.transpose(0, 1) if ctx.batch_first else of_rows, *made
