"""Twins of a user's model and optimizer: equal objects whose tensors are fake, so that weights are never copied.

Python's deepcopy makes them. Each tensor becomes a new fake one of its shape, dtype and strides, the same one wherever
it is used. Functions are copied if they hold modules, tensors or lists, so that hooks work on the twin. An object that
cannot be copied (a lock, a file, a stream) is shared.
"""

import contextlib
import copy
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from vramsweep.runners.measure.patches import patched

Memo = dict[int, Any]
Empty = Callable[[torch.Tensor], torch.Tensor]  # returns a new fake tensor of this tensor's shape, dtype and strides
STATE = (nn.Module, torch.Tensor, torch.optim.Optimizer, list, dict, set)  # what a function may hold and change
COMPILED = "OptimizedModule"


def copy_without_values(model: nn.Module, optimizer: Any, loss: Any, empty: Empty) -> tuple[nn.Module, Any, Any]:
    """Return twins of the model, the optimizer and the loss, with tensors by `empty`, the model's own in their order.

    The optimizer's twin has no state yet. The last two may be None.
    """
    memo: Memo = {}
    unfinished: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy_tensor(tensor: torch.Tensor, memo: Memo) -> torch.Tensor:
        if id(tensor) not in memo:
            memo[id(tensor)] = _twin(tensor, empty, memo)
            unfinished.append((tensor, memo[id(tensor)]))
        return cast(torch.Tensor, memo[id(tensor)])

    replaced: list[Any] = [(kind, "__deepcopy__", copy_tensor) for kind in (torch.Tensor, nn.Parameter)]
    replaced += [(kind, "__deepcopy__", copy_object) for kind in (nn.Module, torch.optim.Optimizer)]
    replaced.append((getattr(copy, "_deepcopy_dispatch"), types.FunctionType, copy_function))  # noqa: B009
    with patched(replaced, create=True):
        for module in model.modules():  # in the order in which most modules make them
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    copy_tensor(tensor, memo)
        found = *copy.deepcopy((model, optimizer), memo), _copied(loss, memo)
        while unfinished:
            _finish(*unfinished.pop(), memo)
    return found


def _twin(tensor: torch.Tensor, empty: Empty, memo: Memo) -> torch.Tensor:
    """Return a new tensor like this one; a single number that is no weight keeps its value."""
    weight = isinstance(tensor, nn.Parameter)
    if is_traceable_wrapper_subclass(tensor):  # as torchao's: made of other tensors
        names, context = tensor.__tensor_flatten__()
        inner = {name: copy.deepcopy(getattr(tensor, name), memo) for name in names}
        kind: Any = type(tensor)
        twin = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    elif tensor.dim() == 0 and not weight and not tensor.is_meta:
        with _disable_current_modes():
            twin = tensor.detach().cpu().clone()
    else:
        twin = empty(tensor)
    if weight:
        return nn.Parameter(twin, tensor.requires_grad)
    return twin.requires_grad_() if tensor.requires_grad and tensor.is_leaf else twin


def _finish(tensor: torch.Tensor, twin: torch.Tensor, memo: Memo) -> None:
    """Give the twin the tensor's attributes and hooks, once all own tensors have twins."""
    for name, value in vars(tensor).items():
        setattr(twin, name, _copied(value, memo))
    for hook in (tensor._backward_hooks or {}).values() if tensor.is_leaf else ():
        twin.register_hook(_copied(hook, memo))
    for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
        twin.register_post_accumulate_grad_hook(_copied(hook, memo))


def empty_like(tensor: torch.Tensor, dtype: torch.dtype | None, device: str) -> torch.Tensor:
    """Return a new tensor of this shape, with the strides that a copy of it to a GPU has; `dtype` None: its own."""
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if tensor.layout is torch.strided and is_non_overlapping_and_dense_or_false(tensor):
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=device)
    return torch.empty(tensor.size(), dtype=dtype, device=device)


def copy_object(one: Any, memo: Memo) -> Any:
    """Return the twin of a module or an optimizer: a compiled module's is not compiled, an optimizer's has no state."""
    if type(one).__name__ == COMPILED:
        return copy.deepcopy(one._orig_mod, memo)
    kind: Any = type(one)
    twin = memo[id(one)] = kind.__new__(kind)
    optimizer = isinstance(one, torch.optim.Optimizer)
    for name, value in list(vars(one).items()):
        if optimizer and name == "step":  # a scheduler's, which steps the original
            continue
        if optimizer and name == "state":
            vars(twin)[name] = defaultdict(dict)
        elif name == "_compiled_call_impl":
            vars(twin)[name] = None
        elif name == "_modules":
            vars(twin)[name] = {key: copy.deepcopy(module, memo) for key, module in value.items()}
        else:
            vars(twin)[name] = _copied(value, memo)
    return twin


def copy_function(function: types.FunctionType, memo: Memo) -> types.FunctionType:
    """Return the function, or one that holds twins if it holds what a step may change."""
    cells, outside = function.__closure__ or (), function.__globals__
    used = [name for name in function.__code__.co_names if isinstance(outside.get(name), STATE[:3])]
    if not used and not any(isinstance(_content(cell), STATE) for cell in cells):
        return function
    outside = dict(outside) if used else outside
    fresh = tuple(types.CellType() for _ in cells)
    twin = types.FunctionType(function.__code__, outside, function.__name__, function.__defaults__, fresh)
    memo[id(function)] = twin
    twin.__kwdefaults__ = function.__kwdefaults__
    vars(twin).update(vars(function))
    outside.update({name: _copied(outside[name], memo) for name in used})
    for cell, old in zip(fresh, cells, strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            cell.cell_contents = _copied(old.cell_contents, memo)
    return twin


def _content(cell: types.CellType) -> Any:
    with contextlib.suppress(ValueError):  # it is empty
        return cell.cell_contents
    return None


def _copied(value: Any, memo: Memo) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a stream, an open file
        return value
