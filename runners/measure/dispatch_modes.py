"""Modes that watch every operator of an untimed step: live tensor bytes, FLOPs, attention kernels, resized storages.

They slow a step down several times, so they never run in a measured step.
"""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.utils._python_dispatch as python_dispatch
from torch import overrides
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from vramsweep.runners.measure.patches import patched


@contextlib.contextmanager
def storage_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` with each storage whose size is changed in place, because no operator reports that."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        resized(storage)
        return result

    with patched([(torch.UntypedStorage, "resize_", resize)]):
        yield


def sharded(types: Iterable[type]) -> bool:
    """Check whether an operator got DTensors. A mode declines those, and is called again for this rank's part."""
    return any(issubclass(kind, DTensor) for kind in types)


def _on_host(tensor: torch.Tensor) -> bool:
    """Check whether a tensor holds host memory. A wrapper only claims a size, because the tensors it wraps hold the
    memory. A fake tensor, such as the compiler keeps, has none, and a lazy module's parameter has no shape yet."""
    hollow = is_lazy(tensor) or isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor)
    return not hollow and tensor.device.type == "cpu" and tensor.layout is torch.strided


# Storages that only C++ code holds (a reducer's buckets). The garbage collector finds no tensor for them, so the code
# that sees them made adds them.
HELD_BY_CODE: list[weakref.ref[torch.UntypedStorage]] = []


def held_by_code() -> list[torch.UntypedStorage]:
    """Return those of `HELD_BY_CODE` that are alive."""
    return [storage for reference in HELD_BY_CODE if (storage := reference()) is not None]


def storages_alive() -> list[torch.UntypedStorage]:
    """Return the storages in host memory that exist at this moment."""
    return [tensor.untyped_storage() for tensor in tensors_alive() if _on_host(tensor)]


def tensors_alive() -> list[torch.Tensor]:
    """Return every tensor that the garbage collector knows, which excludes those from before a `gc.freeze`."""
    # type() instead of isinstance(), because reading a lazy module's __class__ may import it
    return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]


def gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a leaf; None for a leaf without one and for any other tensor."""
    try:
        leaf = tensor.is_leaf
    except RuntimeError:  # autograd raises for some views whose base was changed in place; they are no leaves
        return None
    return tensor.grad if leaf else None


class Beneath:
    """A mode that enters beneath all active modes, and leaves from any place in their stack.

    A script's own modes (`with torch.device(...)`, a profiler) may begin before a step of ours and end in the middle of
    it. torch would then take the mode on top for theirs.
    """

    def __enter__(self) -> Any:
        above = self._lifted(everything=True)
        try:
            return super().__enter__()  # type: ignore[misc]
        finally:
            self._put_back(above)

    def __exit__(self, *error: Any) -> None:
        above = self._lifted()
        try:
            super().__exit__(*error)  # type: ignore[misc]
        finally:
            self._put_back(above)

    def _lifted(self, everything: bool = False) -> list[Any]:
        """Pop the modes above this one, or all modes, off the stack, and return them, uppermost first."""
        stack = list(_stacks(self)[0]())
        count = len(stack) if everything or self not in stack else len(stack) - 1 - stack.index(self)
        return [_stacks(self)[1]() for _ in range(count)]

    def _put_back(self, modes: list[Any]) -> None:
        for mode in reversed(modes):
            _stacks(self)[2](mode)


def _stacks(mode: Any) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the functions that look at, pop from and push on the stack of modes of this kind."""
    if isinstance(mode, TorchFunctionMode):
        return overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode
    return python_dispatch._get_current_dispatch_mode_stack, python_dispatch._pop_mode, python_dispatch._push_mode


class LiveBytes(Beneath, TorchDispatchMode):
    """Bytes of the live tensor storages in host memory, each storage once, including those alive on entry.

    `others` are storages that are not counted, such as constants of imported libraries. They must stay alive.
    """

    def __init__(self, others: Iterable[torch.UntypedStorage] = ()) -> None:
        super().__init__()
        self._others = {storage._cdata for storage in others}
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._resizes = storage_resizes(self._resized)

    def __enter__(self) -> LiveBytes:
        for tensor in tensors_alive():
            self._track(tensor)
            if (grad := gradient(tensor)) is not None:
                self._track(grad)
        for storage in held_by_code():
            self._follow(storage)
        self.peak = self.live
        self._resizes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizes.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sharded(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._track(leaf)
        return out

    def take(self) -> int:
        """Return the peak since the last call, in bytes."""
        peak, self.peak = self.peak, self.live
        return peak

    def _track(self, tensor: torch.Tensor) -> None:
        if _on_host(tensor):
            self._follow(tensor.untyped_storage())

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._others:
            return
        self._sizes[key] = 0
        self._resized(storage)
        weakref.finalize(storage, self._release, key).atexit = False

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            self.live += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
            self.peak = max(self.peak, self.live)

    def _release(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def _attention(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
    return cast(int, sdpa_flop_count(query.shape, *_every_head(query, key, value)))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
    return cast(int, sdpa_backward_flop_count(grad.shape, query.shape, *_every_head(query, key, value)))


def _every_head(query: Any, key: Any, value: Any) -> tuple[torch.Size, torch.Size]:
    """Return the shapes of key and value with the query's number of heads, because heads of the query share theirs.

    torch's own formulas accept shared heads in 2.13 and raise in 2.11.
    """
    keys, values = (torch.Size((t.shape[0], query.shape[1], *t.shape[2:])) for t in (key, value))
    return keys, values


def _product(a: Any, b: Any, *rest: Any, **more: Any) -> int:
    """Count 2 FLOPs per element of `a` and column of `b`, also in stacks of matrices (batched or grouped products)."""
    grouped = a.dim() == 3 and b.dim() == 2  # the groups divide the columns of `b`
    rows, columns = (a.shape[-2], b.numel()) if grouped else (a.numel(), b.shape[-1] if b.dim() > 1 else 1)
    return cast(int, 2 * rows * columns)  # no int(): it may be symbolic


_aten = torch.ops.aten
_NAMES = json.loads(Path(__file__).with_name("flop_operators.json").read_text("utf-8"))
FUSED_ATTENTION: list[str] = _NAMES["fused_attention"]  # after "_scaled_dot_product_"
_OURS: dict[Any, Any] = {}
for _kernel in FUSED_ATTENTION:  # for shared heads, and the CPU's fused kernel, which torch's registry lacks
    _OURS[getattr(_aten, f"_scaled_dot_product_{_kernel}")] = _attention
    _OURS[getattr(_aten, f"_scaled_dot_product_{_kernel}_backward")] = _attention_backward
# torch's own formulas of mm, bmm, addmm, baddbmm raise if a dtype is given for the output (`addmm.dtype`)
for _list, _formula in (
    ("products", _product),
    ("products_added", lambda bias, *given, **more: _product(*given, **more)),
):
    _OURS |= {getattr(_aten, _name): _formula for _name in _NAMES[_list] if hasattr(_aten, _name)}
# By operator; formulas that a user registers with torch.utils.flop_counter.register_flop_formula count too.
FORMULAS: ChainMap[Any, Any] = ChainMap(_OURS, flop_registry)

# Namespaces whose operators multiply no matrices: torch's own, collectives, bookkeeping, bitsandbytes' unpacking and
# optimizers. FORMULALESS has the operators of aten and bitsandbytes that do, and for which nobody has a formula.
PRODUCTLESS = frozenset(_NAMES["productless_namespaces"])
FORMULALESS = frozenset(_NAMES["formulaless"])


class FlopCount(Beneath, TorchDispatchMode):
    """Floating-point operations of matrix products, convolutions and attention (2 per multiply-add).

    Source of the formulas: torch.utils.flop_counter. An operator without a formula is decomposed if possible. If not,
    it counts nothing, and its name is in `uncounted` if it may multiply matrices. Attention is counted in full, causal
    or not. Kernels launched past torch's operators (an extension called from an autograd.Function) are not seen.

    `repeated` is the part of `total` that a backward pass spends on results that the forward pass had computed. It has
    checkpointed layers, and the scores: one of the five products in the backward pass of fused attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.repeated = 0
        self.uncounted: set[str] = set()
        self.operators = 0  # without views, which launch nothing
        self.waits = 0  # calls that make the host wait for a GPU that has work

    def waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its calls counted in `waits`, once the step has given the GPU products."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.waits += self.total > 0
            return original(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sharded(types):
            return NotImplemented
        kwargs = kwargs or {}
        formula = FORMULAS.get(func._overloadpacket)
        if formula is None and func is not torch.ops.prim.device.default:
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        out = func(*args, **kwargs)
        self.operators += not func.is_view
        self.waits += self.total > 0 and _waits(func, args, kwargs, out)
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=out))
            self.total += flops
            if _recomputes():
                self.repeated += flops
            elif formula is _attention_backward:
                self.repeated += flops // 5
        elif func.namespace not in PRODUCTLESS or func._opname in FORMULALESS:
            self.uncounted.add(f"{func.namespace}::{func._opname}")
        return out


def _waits(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Check whether the host waits for a GPU in this operator: it needs a value from there, or a copy that blocks."""
    devices = {one.device.type for one in tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)}
    if devices <= {"cpu"}:
        return False
    if func._opname.startswith("index"):  # only masks become indices of unknown number
        masks = args[1] if isinstance(args[1], (list, tuple)) else ()
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in masks)
    if func._opname in ("_to_copy", "copy_"):
        return "cpu" in devices and not (kwargs.get("non_blocking") or args[2:3] == (True,))
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def _recomputes() -> bool:
    """Check whether a backward pass runs a forward pass again, whose gradients are on (torch.utils.checkpoint).

    An autograd.Function's forward has them off, like formulas of gradients, but it alone also has forward-mode AD off.
    """
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and (torch.is_grad_enabled() or not torch._C._is_fwd_grad_enabled())


class SdpaKernels(Beneath, TorchFunctionMode):
    """Kernels that `scaled_dot_product_attention` runs, in `seen`: flash, efficient, cudnn, math.

    Fused kernels are operators of their own. The plain formula is not, so a call without a fused kernel is math.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        with _Fused() as fused:
            out = func(*args, **(kwargs or {}))
        self.seen |= fused.names or {"math"}
        return out


class _Fused(TorchDispatchMode):
    """Names of the fused attention kernels among the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sharded(types):
            return NotImplemented
        name = func._opname
        if name.startswith("_scaled_dot_product_") and name.removesuffix("_for_cpu").endswith("_attention"):
            self.names.add(name.removeprefix("_scaled_dot_product_").partition("_")[0])
        return func(*args, **(kwargs or {}))
