"""What watches every operator of an untimed step: live tensor bytes, FLOPs, storages resized in place.

They slow a step down several times, so they never run in a measured one.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


@contextlib.contextmanager
def storage_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` with each storage whose size was changed in place, which goes through no operator."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def sharded(types: Iterable[type]) -> bool:
    """Whether an operator was called on DTensors: a mode declines, and is called again for this rank's part."""
    return any(issubclass(kind, DTensor) for kind in types)


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensor storages that are alive, each storage once, from those alive on entry onwards."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._resizes = storage_resizes(self._resized)

    def __enter__(self) -> LiveBytes:
        # type(), not isinstance(): a lazy module's __class__ may import on being asked
        for tensor in [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]:
            self._track(tensor)
            if tensor.is_leaf and tensor.grad is not None:
                self._track(tensor.grad)
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
        """The peak since the last call, in bytes."""
        peak, self.peak = self.peak, self.live
        return peak

    def _track(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or isinstance(tensor, DTensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
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


def _attention(query: Any, key: Any, value: Any, *rest: Any, out_val: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, *_every_head(query, key, value)))


def _attention_backward(
    grad_out: Any, query: Any, key: Any, value: Any, *rest: Any, out_val: Any = None, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(grad_out.shape, query.shape, *_every_head(query, key, value)))


def _every_head(query: Any, key: Any, value: Any) -> tuple[torch.Size, torch.Size]:
    """Shapes of key and value with as many heads as the query's, which share them.

    torch's own formulas take shared heads in 2.13 and raise in 2.11.
    """
    keys, values = (torch.Size((t.shape[0], query.shape[1], *t.shape[2:])) for t in (key, value))
    return keys, values


_aten = torch.ops.aten
_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
# torch's registry of FLOP formulas; attention by ours, for shared heads and the CPU's fused kernel, which it lacks
FORMULAS: dict[Any, Any] = dict(flop_registry)
for _kernel in _KERNELS:
    FORMULAS[getattr(_aten, f"_scaled_dot_product_{_kernel}")] = _attention
    FORMULAS[getattr(_aten, f"_scaled_dot_product_{_kernel}_backward")] = _attention_backward


class FlopCount(TorchDispatchMode):
    """Floating-point operations of matrix products, convolutions and attention (2 per multiply-add).

    Source of the formulas: torch.utils.flop_counter. An operator without one is decomposed if it can be and counts
    nothing otherwise; attention is counted in full, causal or not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

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
        if formula is not None:
            self.total += int(formula(*args, **kwargs, out_val=out))
        return out
