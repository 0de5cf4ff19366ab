"""What libraries make of tensors while they are imported: constants, which are nothing of a training's.

A script imports as it goes, so every import of a library that is not there yet is looked into. Its own modules are no
libraries: what these make, such as a data set, is the script's.
"""

from __future__ import annotations

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
    """Keeps the storages that operators return."""

    def __init__(self, storages: list[torch.UntypedStorage]) -> None:
        super().__init__()
        self.storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [one for one in tree_iter(out) if isinstance(one, torch.Tensor) and one.layout is torch.strided]
        self.storages += [one.untyped_storage() for one in made if one.device.type == "cpu"]
        return out


def constants_so_far() -> list[torch.UntypedStorage]:
    """What the imports until now hold of tensors in host memory."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return [t.untyped_storage() for t in tensors if t.device.type == "cpu" and t.layout is torch.strided]


def collect(storages: list[torch.UntypedStorage]) -> Callable[[], None]:
    """From now on add to the list what libraries make while they are imported; returns what ends that."""
    original = builtins.__import__
    inside = False
    others: set[str] = set()  # no libraries; a step may try to import what is not installed each time

    @functools.wraps(original)
    def watched(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        nonlocal inside
        root = name.partition(".")[0]
        if level or inside or root in sys.modules or root in others:  # a package asks itself relatively: it is there
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
    """Whether this is a package that is installed."""
    try:
        spec = find_spec(root)
    except (ImportError, ValueError):
        return False
    places = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    return spec is not None and str(spec.origin).startswith(places)
