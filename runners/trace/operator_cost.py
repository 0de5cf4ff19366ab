"""The cost of one operator of a traced step on the GPU: FLOPs, bytes moved, kernel launches.

FLOPs are those of matrix products, convolutions and attention (runners/measure/dispatch_modes.py has the formulas).
Attention that the kernel knows to be causal skips half of its products. Bytes are the least that a kernel can move:
inputs read once and outputs written once, an expanded tensor as what is stored of it. An operator that makes no new
tensor and changes none is a view and costs nothing. Each other operator counts as one kernel; those over lists of
tensors launch as many as their lists need.

Not covered: arithmetic other than matrix products, because moving its tensors takes longer; operators that launch
several kernels (sorting in the backward pass of an embedding); copies between host and GPU.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from vramsweep.harness.hardware.gpu_lookup import Capability
from vramsweep.harness.hardware.interconnects import Collective
from vramsweep.harness.hardware.roofline import ATTENTION, BACKWARD, UNALIGNED, UNKNOWN, Work
from vramsweep.runners.measure.dispatch_modes import FORMULAS

# Operators by name: `free` run no kernel, `overwriting` do not read the tensor that they change, `sparse` touch the
# first tensor only where the others point, so for no more bytes than these hold.
_TABLE = json.loads(Path(__file__).with_name("operators.json").read_text("utf-8"))
FREE, OVERWRITING, SPARSE = (frozenset(_TABLE[name]) for name in ("free", "overwriting", "sparse"))
STREAMED: dict[str, str] = _TABLE["streamed"]  # kinds of those over lists, by how their names begin
KINDS: dict[torch.dtype, str] = {getattr(torch, name): kind for name, kind in _TABLE["dtypes"].items()}

# Parts of the names of fused attention operators: torch's, and flash-attn's (techniques/attention.py).
FUSED_ATTENTION = ("attention", "flash")

# A launch of a multi-tensor kernel takes at most 320 chunks of 65,536 elements, and as many tensors as its arguments
# hold, by number of lists (aten/src/ATen/native/cuda/MultiTensorApply.cuh, 4 KiB of arguments; CUDA 13 takes more).
FUSED = ("_fused_ada", "_fused_sgd")
MULTI_TENSOR = tuple(STREAMED)
CHUNK = 65_536
MOST_CHUNKS = 320
MOST_TENSORS = (110, 64, 48, 36, 30)


class Lists(NamedTuple):
    """Numbers of tensors and of their chunks in a multi-tensor kernel, and the most tensors that a launch takes."""

    tensors: int
    chunks: int
    most: int


def work(func: Any, args: Any, kwargs: Any, out: Any, capability: Capability) -> Work | None:
    """Return the call's cost on a GPU of this compute capability; None for a view or whatever else launches nothing."""
    if _launches_nothing(func) or func.namespace in C10D:  # interconnects.py times the latter
        return None
    name = _name(func)
    given = _unique((*args, *kwargs.values()))
    changed = _unique([args[at] if isinstance(at, int) else kwargs.get(at) for at in _mutated(func, len(args))])
    if name.startswith(FUSED) and kwargs.get("grad_scale") is None:  # else it writes the gradients too, unscaled
        for key in _unique(args[1]):
            changed.pop(key, None)
    held = {tensor.untyped_storage()._cdata for tensor in given.values()}
    made = {key: t for key, t in _unique((out,)).items() if t.untyped_storage()._cdata not in held}
    if not made and not changed:
        return None
    read = {} if name.endswith("_like") or name.startswith("new_") else dict(given)
    if name == "fused":  # techniques/kernel_stubs.py: its last list is only written
        read = {key: tensor for key, tensor in read.items() if key not in _unique(args[2])}
    if name in OVERWRITING:
        read = {key: tensor for key, tensor in read.items() if key not in changed}
    if name == "nll_loss_backward":  # the log-probabilities are passed only for their shape
        read.pop(id(args[1]))
    moved = [nbytes(tensor) for group in (read, changed, made) for tensor in group.values()]
    if name in SPARSE:
        whole = nbytes(args[0])
        times = 1 + (id(args[0]) in changed)
        rest = sum(moved) - times * whole
        moved = [rest, times * torch.sym_min(whole, rest)]
    kind, flops = _arithmetic(func, args, kwargs, out, given, capability)
    return Work(kind, flops, sum(moved), launches(find_lists(func, args, out)))


# c10d's operators, and DTensor's for norms: the kind of each, and the position of the argument with all that is moved.
COLLECTIVES: dict[str, tuple[str, int]] = {name: tuple(entry) for name, entry in _TABLE["collectives"].items()}
C10D = ("c10d", "_c10d_functional")


def collective(func: Any, args: Any) -> Collective | None:
    """Return the collective that an operator of `C10D` is, or None if it moves nothing (barriers, waiting).

    An operator missing in COLLECTIVES has its name as the kind, for which nobody has a formula.
    """
    name = _name(func)
    if name in ("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"):
        return None
    kind, at = COLLECTIVES.get(name, (name, 0))
    return Collective(kind, sum(map(nbytes, _unique((args[at],)).values())))


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the different elements of a tensor: a dimension of stride 0 is stored once."""
    stored = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return cast(int, torch.sym_min(stored * tensor.element_size(), tensor.untyped_storage().nbytes()))


def _unique(values: Any) -> dict[int, torch.Tensor]:
    """Return the strided tensors in nested lists, each once, by identity."""
    found: dict[int, torch.Tensor] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                found[id(value)] = value
        elif isinstance(value, (list, tuple)):
            found |= _unique(value)
    return found


def _arithmetic(
    func: Any, args: Any, kwargs: Any, out: Any, given: dict[int, torch.Tensor], capability: Capability
) -> tuple[str, int]:
    """Return kind and number of the FLOPs; the kind is unknown if the operator's formula does not fit the call.

    The memory-efficient attention kernel makes each fp32 product of three tf32 ones if the GPU has tf32 tensor cores
    (cutlass's OpMultiplyAddFastF32), whatever allow_tf32 says.
    """
    formula = FORMULAS.get(func._overloadpacket)
    if formula is None:
        if _name(func) == "fused" and any(tensor.dtype is torch.uint8 for tensor in args[1]):
            return "optimizer 8bit", 0
        return next((kind for start, kind in STREAMED.items() if _name(func).startswith(start)), ""), 0
    try:
        counted: Any = formula(*args, **kwargs, out_val=out)
        flops: Any = counted if isinstance(counted, torch.SymInt) else int(counted)
    except Exception:  # attention over lengths that only the GPU knows: no reason to give up predicting memory
        return UNKNOWN, 1
    dtype = next((t.dtype for t in given.values() if t.is_floating_point()), None)
    kind = KINDS.get(dtype, str(dtype)) if dtype else ""
    at = _position(func, "is_causal")
    causal = at is not None and (args[at] if at < len(args) else kwargs.get("is_causal", False))
    if kind == "fp32" and capability >= (8, 0) and "efficient_attention" in _name(func):
        kind = "3xtf32"
    if any(word in _name(func) for word in FUSED_ATTENTION):
        kind = (BACKWARD if "backward" in _name(func) else ATTENTION) + kind
    elif not all(map(_aligned, given.values())):
        kind = UNALIGNED + kind
    return kind, flops // 2 if causal else flops


def _aligned(tensor: torch.Tensor) -> bool:
    """Return whether rows of a matrix begin at multiples of 16 bytes, as cuBLAS's tensor core kernels need it.

    A batch of matrices counts as aligned, because the rows of attention's are as long as the length, which a trace
    leaves open.
    """
    rows = [stride for stride in tensor.stride() if isinstance(stride, int) and stride > 1]
    return tensor.dim() != 2 or not any(stride * tensor.element_size() % 16 for stride in rows)


def find_lists(func: Any, args: Any, out: Any) -> Lists | None:
    """Return what a kernel over lists of tensors goes through, or None for any other kernel."""
    if not (name := _name(func)).startswith(MULTI_TENSOR):
        return None
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and len(arg) and isinstance(arg[0], torch.Tensor)]
    depth = len(lists) + (isinstance(out, (list, tuple)) and not name.endswith("_"))
    chunks = sum(math.ceil(tensor.numel() / CHUNK) for tensor in lists[0])
    return Lists(len(lists[0]), chunks, MOST_TENSORS[min(depth, len(MOST_TENSORS)) - 1])


def launches(lists: Lists | None) -> int:
    """Return the number of launches of a kernel over these lists; 1 for any other kernel (None)."""
    if lists is None:
        return 1
    return int(max(math.ceil(lists.tensors / lists.most), math.ceil(lists.chunks / MOST_CHUNKS)))


@functools.cache
def _name(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


@functools.cache
def _launches_nothing(func: Any) -> bool:
    """Return whether an operator is a view (its schema aliases and does not write) or only makes or sets up tensors."""
    aliases = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    return _name(func) in FREE or bool(aliases and not any(alias.is_write for alias in aliases))


@functools.cache
def _position(func: Any, argument: str) -> int | None:
    return next((i for i, a in enumerate(func._schema.arguments) if a.name == argument), None)


@functools.cache
def _mutated(func: Any, given: int) -> tuple[int | str, ...]:
    """Return the arguments that the operator changes: by position if among `given` positional ones, else by name."""
    arguments = enumerate(func._schema.arguments)
    changed = [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return tuple(i if i < given else name for i, name in changed)
