"""Allocations of CUDA's operators that differ from those on fake tensors: scratch, their order, and what is in place.

Sources: recordings of a GPU (docs/h100.md), and the code cited with each. Other modules decide which operators
run (cuda_emulation.py, sdpa_kernels.py).
"""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramsweep.harness.hardware.gpu_lookup import Capability
from vramsweep.harness.spec.version_differences import installed_has
from vramsweep.runners.trace import sdpa_kernels

aten = torch.ops.aten
MATMULS = {getattr(aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "addbmm", "addr")}
# Operators that allocate their last output first: dropout's mask (aten/src/ATen/native/cuda/Dropout.cu, dropout_cuda).
LAST_FIRST = {aten.native_dropout.default}
# Outputs in host memory: the seed and the offset of dropout (Note [Seed and Offset Device] in aten)
ON_HOST = {aten._scaled_dot_product_efficient_attention.default: (2, 3)}

# Operators that run and allocate as several, but are one on a fake tensor (ATen/native/TensorCompare.cpp, isinf;
# ATen/native/cuda/IndexKernel.cpp, masked_select).
IN_PARTS: dict[Any, Callable[..., Any]] = {aten.isinf.default: lambda values: values.abs() == math.inf}
IN_PARTS[aten.masked_select.default] = lambda *both: (lambda one, mask: one[mask])(*torch.broadcast_tensors(*both))
# Operators of libraries that choose their own scratch: cuDNN, cuFFT, cuSOLVER
_OF_LIBRARIES = {
    getattr(aten, name).default
    for name in (
        *("convolution", "convolution_backward", "_ctc_loss", "_ctc_loss_backward", "_fft_r2c", "_fft_c2r", "_fft_c2c"),
        *("_linalg_svd", "_linalg_eigh", "linalg_eig", "linalg_qr", "linalg_cholesky_ex", "linalg_lu_factor_ex"),
        *("linalg_inv_ex", "_linalg_solve_ex", "_linalg_det", "_linalg_slogdet", "linalg_lu", "linalg_lstsq"),
    )
}
_SORTS = (aten.sort.default, aten.sort.stable)
ZEROS = {getattr(aten, name).default for name in ("zeros", "new_zeros", "zeros_like")}
# Autograd's formulas fill fresh zeros in place on a GPU, and out of place if they see a fake tensor.
IN_PLACE = {
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
}
# Reference counts of a gradient that only the engine holds, when an operator is called with it: Python's of the tensor,
# torch's of the tensor and of its storage.
UNHELD = (3, 4, 2)
SUMMED_IN_FP32 = (torch.float16, torch.bfloat16, torch.float32)
MOST_EACH = 256  # values of one thread of a sum (max_values_per_thread)
# Threads that a GPU runs at once: an H100's and H200's if it has bf16 tensor cores, else a T4's
AT_ONCE = {True: 132 * 2048, False: 40 * 1024}
use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
LT_APART = installed_has("lt_workspaces")


class Stepwise(NamedTuple):
    """A size that follows `of` in steps, within bounds; `text` is its formula (symbolic_trace.py), with {} for `of`."""

    size: Any
    text: str
    of: Any


def scratch(func: Any, args: Any, capability: Capability) -> list[Any]:
    """Return what an operator allocates for itself after its outputs: sizes in bytes or `Stepwise`, and `Freed`.

    `Freed` stands where it frees one of them before the next. It frees the rest at its end, the last first.

    Softmax's backward pass multiplies the gradient with the output (softmax_backward_cuda_out in
    aten/native/cuda/SoftMax.cu). Attention's own softmax looks for rows that are masked as a whole (_safe_softmax in
    aten/native/transformers/attention.cpp).
    """
    if func is aten._safe_softmax.default:
        return [args[0].numel(), args[0].numel() // args[0].size(-1), 4]
    if func is aten._softmax_backward_data.default:
        return [args[0].numel() * args[0].element_size()]
    if func is aten.sum.dim_IntList:
        return _of_a_sum(args[0], args[1], capability)
    return sdpa_kernels.scratch(func, args)


def _of_a_sum(tensor: torch.Tensor, dims: list[int] | None, capability: Capability) -> list[Stepwise]:
    """Return the scratch of a sum over all but the last dimension (a bias's gradient): partial sums and semaphores.
    Blocks that share an output use them. Both have size 0 if the rows are too few for that.

    Source: setReduceConfig, set_block_dimension, get_output_vec_size and global_memory_size in
    ATen/native/cuda/Reduce.cuh; a test compares 378 sums of an H200. Not covered: sums over the first of several
    dimensions, usually the few samples of a batch; dtypes summed in more than 4 bytes; more than 2 GiB, which is summed
    in parts. GPUs differ in multiprocessors, which bound the largest scratch, and take none at that very bound; both
    are ignored. If the columns are a length, each length has its own formula.
    """
    if tensor.dim() < 2 or tensor.dtype not in SUMMED_IN_FP32 or not dims or not tensor.is_contiguous():
        return []
    # no numel(), which takes sizes for plain numbers; and no branch on the rows, which would divide lengths
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    if sorted(d % tensor.dim() for d in dims) != list(range(tensor.dim() - 1)):
        return []
    if not isinstance(columns, int) or not columns:
        return []
    vector = next(n for n in (4, 2, 1) if columns % n == 0)
    threads, across = 512 // vector, columns // vector
    most_wide = min(threads, 1 << (across.bit_length() - 1))
    high = threads // min(most_wide, 32)  # if there are rows enough
    wide = min(most_wide, threads // high)
    grid = -(-across // wide)
    blocks = AT_ONCE[capability >= (8, 0)] // (wide * high)
    if grid > blocks:
        return []
    least, most, each = torch.sym_min, torch.sym_max, -(-rows // high)
    enough = least(1, each // MOST_EACH)
    shared = most(least(-(-blocks // grid), -(-each // 16)), -(-each // MOST_EACH))
    partial = 4 * columns * wide * vector
    text = f"-(-{{}} // {high})"
    if_enough = f"min(1, {text} // {MOST_EACH})"
    together = f"max(min({-(-blocks // grid)}, -(-({text}) // 16)), -(-({text}) // {MOST_EACH}))"
    return [
        Stepwise(enough * shared * partial, f"{if_enough} * {together} * {partial}", rows),
        Stepwise(enough * 4 * grid, f"{if_enough} * {4 * grid}", rows),
    ]


def as_run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], zeros: Callable[[], Any] | None) -> Any:
    """Return the operator that a GPU runs: in-place if autograd uses that on plain tensors, but not on fake ones.

    `zeros` returns the previous operator's result, if that was fresh zeros.
    """
    if func in IN_PLACE and zeros is not None and args[0] is zeros() and in_backward():
        return IN_PLACE[func]
    if func is aten.add.Tensor and not kwargs and _accumulates(args):
        return aten.add_.Tensor
    return func


def with_strides(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments that give a fake result the strides of CUDA's. A layer norm's gradient is contiguous, while
    fake tensors follow the output's gradient (layer_norm_backward_cuda in aten/native/cuda/layer_norm_kernel.cu)."""
    if func is not aten.native_layer_norm_backward.default:
        return args
    plain = torch.empty_like(args[1], memory_format=torch.contiguous_format)
    return (plain, plain, *args[2:])


def _accumulates(args: tuple[Any, ...]) -> bool:
    """Return whether autograd's engine adds two gradients of one tensor, and no other code holds the first.

    Then it adds in place; but out of place to a subclass like a fake tensor (torch/csrc/autograd/input_buffer.cpp)."""
    if not in_backward() or torch.is_grad_enabled() or not isinstance(args[0], FakeTensor):
        return False
    if not isinstance(args[1], torch.Tensor) or args[0].dtype is not args[1].dtype or args[0].shape != args[1].shape:
        return False
    if not torch._prims_common.is_non_overlapping_and_dense_or_false(args[0]):
        return False
    held = (sys.getrefcount(args[0]), use_count(args[0]), torch._C._storage_Use_Count(args[0].untyped_storage()._cdata))
    return held == UNHELD


def through_lt(operator: Any, tensors: list[torch.Tensor]) -> bool:
    """Check whether a product goes to cuBLASLt, which adds the bias too (aten/src/ATen/native/cuda/Blas.cpp, addmm)."""
    if operator is not aten.addmm.default:
        return False
    bias, _, right = tensors[:3]
    fits = bias.dim() == 1 and bias.is_contiguous() and bias.shape[0] == right.shape[1]
    return bool(fits and right.shape[0] > 1 and right.shape[1] > 1)


def in_backward() -> bool:
    """Return whether autograd's engine is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def has_unknown_scratch(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a library chooses the operator's scratch; CUB sorts more than 4,096 values (Sort.h)."""
    if func in _SORTS and args[0].dim():
        return bool(args[0].size(kwargs.get("dim", args[1] if len(args) > 1 else -1)) > 4096)
    return func in _OF_LIBRARIES
