"""Values of a traced script's integers and booleans, so that what comes from the host is known on the GPU too.

Token ids, labels, attention masks and positions come from real data (traced_devices.py). All that depends on them alone
is computed for real next to the fake tensors: whether a mask hides anything, how many labels count, where they are.
Memory in a training step nearly always depends on nothing else. A value is a real tensor that a fake one carries; a
view's value is a view, so a write into one is seen in the other.

Not covered: what depends on weights, as losses do; large tensors; random numbers made on the GPU.
"""

import contextlib
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_iter, tree_map

LIMIT = 1 << 24  # elements of a tensor whose value is kept
FLOATS = 1 << 22  # elements of a floating-point one: shares of counts, and images, of which models drop black ones
ASKS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2")
) | {torch.ops.aten.unique_consecutive.default, torch.ops.aten.repeat_interleave.Tensor}
INDEXING = frozenset((torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default))
UNKNOWN: Any = object()


class KnownValues:
    """Computes known values during a trace, and keeps them with the fake tensors."""

    def __init__(self) -> None:
        self._lost: dict[int, torch.UntypedStorage] = {}  # storages of values into which something unknown was written

    def of(self, tensor: Any) -> torch.Tensor | None:
        """Return a fake tensor's value, or None if it is not known."""
        value: torch.Tensor | None = getattr(tensor, "_known_value", None)
        return None if value is None or value.untyped_storage()._cdata in self._lost else value

    def give(self, tensor: Any, value: Any) -> None:
        """Set the fake tensor's value, if it is small enough to be kept."""
        if not (isinstance(tensor, FakeTensor) and isinstance(value, torch.Tensor) and tensor.shape == value.shape):
            return
        if small(value):
            tensor._known_value = value  # type: ignore[attr-defined]

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what the operator makes of known values; UNKNOWN if one is unknown or the result too large."""
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if tensors and all(self.of(tensor) is not None for tensor in fakes) and not _random(func):
            values = tree_map(lambda one: self.of(one) if isinstance(one, FakeTensor) else one, (args, kwargs))
        elif not tensors and _made_of_numbers(func, kwargs):
            values = args, kwargs
        else:
            values = None
        if values is not None and _result_is_small(func, args, kwargs):
            with contextlib.suppress(Exception), unset_fake_temporarily(), torch.no_grad():
                return func(*values[0], **values[1])
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.lose(value)
        return UNKNOWN

    def lose(self, written: Any) -> None:
        """Forget the values of these tensors."""
        for tensor in tree_iter(written):
            if (known := self.of(tensor)) is not None:
                self._lost[known.untyped_storage()._cdata] = known.untyped_storage()

    def keep(self, out: Any, value: Any) -> None:
        """Set the values of what an operator returned."""
        if value is not UNKNOWN:
            for tensor, one in zip(tree_iter(out), tree_iter(value), strict=False):
                self.give(tensor, one)

    def by_place(self, indices: Any) -> list[Any]:
        """Return the indices with boolean masks as positions, as the GPU's kernels have them."""
        found: list[Any] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
            else:
                found += torch.ops.aten.nonzero.default(index).unbind(1)
        return found


def small(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's value would be kept."""
    return tensor.numel() <= (FLOATS if tensor.is_floating_point() or tensor.is_complex() else LIMIT)


def _result_is_small(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the operator's result would be kept, by its fake result, because a value takes host memory."""
    if func in ASKS or func._schema.is_mutable:  # no larger than what is known already
        return True
    try:
        out = func(*args, **kwargs)
    except DynamicOutputShapeException:  # positions in a known tensor, such as a mask: at most its elements
        return True
    except Exception:  # the trace will report it
        return False
    return all(small(one) for one in tree_iter(out) if isinstance(one, torch.Tensor))


def _random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _made_of_numbers(func: Any, kwargs: Any) -> bool:
    """Return whether the operator makes whole numbers from its arguments alone, as arange does."""
    device = kwargs.get("device")
    if _random(func) or (device is not None and device.type != "cpu") or func.namespace != "aten":
        return False
    return func._schema.name.removeprefix("aten::") in ("arange", "zeros", "ones", "full", "eye", "tril_indices")
