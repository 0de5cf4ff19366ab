"""Modules of the runners that the harness's tables name, by names that begin with a dot (harness/spec/)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from types import ModuleType


def import_entry(name: str) -> ModuleType:
    """Import the module that an entry names: `.loops.torch_loop` of this package, or a library's, as `deepspeed`."""
    return importlib.import_module(name, "vramsweep.runners")


def import_entries(names: Iterable[str]) -> None:
    """Import what will be needed; a module that this installation lacks is left to the trial to miss."""
    for name in names:
        try:
            import_entry(name)
        except ModuleNotFoundError as error:
            print(f"not preloaded: {error}", file=sys.stderr)
