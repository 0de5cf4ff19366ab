"""Tensors that libraries make while they are imported: constants, which are no memory of a training.

A script imports as it goes, so every first import of a library is followed. The script's own modules are no libraries,
because what they make, such as a data set, belongs to the script.
"""

import builtins
import functools
import gc
import sys
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class _Made(TorchDispatchMode):
    """A mode that keeps the host storages of tensors that operators return."""

    def __init__(self, storages: list[torch.UntypedStorage]) -> None:
        super().__init__()
        self.storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [one for one in tree_iter(out) if isinstance(one, torch.Tensor) and one.layout is torch.strided]
        self.storages += [one.untyped_storage() for one in made if one.device.type == "cpu"]
        return out


def constants_so_far() -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in host memory that imports have made so far."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return [t.untyped_storage() for t in tensors if t.device.type == "cpu" and t.layout is torch.strided]


def collect(storages: list[torch.UntypedStorage]) -> Callable[[], None]:
    """Add storages that libraries make during imports to the list from now on; return a function that ends this."""
    original = builtins.__import__
    inside = False
    others: set[str] = set()  # names of no libraries, kept because a step may retry a missing import each time

    @functools.wraps(original)
    def watched(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        nonlocal inside
        root = name.partition(".")[0]
        if level or inside or root in sys.modules or root in others:  # a relative import's package is loaded already
            return original(name, globals, locals, fromlist, level)
        if not _library(root):
            others.add(root)
            return original(name, globals, locals, fromlist, level)
        inside = True
        try:
            with _Made(storages):
                return original(name, globals, locals, fromlist, level)
        finally:
            inside = False

    builtins.__import__ = watched

    def end() -> None:
        if builtins.__import__ is watched:
            builtins.__import__ = original

    return end


def _library(root: str) -> bool:
    """Return whether this is an installed package."""
    try:
        spec = find_spec(root)
    except (ImportError, ValueError):
        return False
    places = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    return spec is not None and str(spec.origin).startswith(places)
