"""In a checkout, `harness.x` is another name of `vramsweep.harness.x`: the same module, never a second copy.

Two copies of a module would have two `Trial` classes and two registries. The `__init__` of each top-level folder calls
`alias` when it is imported under its short name; nothing of this runs in an installed package.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGES = ("harness", "runners", "analysis")


class _Alias(MetaPathFinder, Loader):
    """Finds `harness.x` and puts `vramsweep.harness.x` in its place; `python -m harness` keeps its own `__main__`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        return ModuleSpec(name, self) if package in PACKAGES and rest not in ("", "__main__") else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(f"vramsweep.{module.__name__}")


def alias(package: str) -> None:
    """Make the top-level `package`, one of `PACKAGES`, another name of `vramsweep.<package>`."""
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias())
    sys.modules[package] = importlib.import_module(f"vramsweep.{package}")
