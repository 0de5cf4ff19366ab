"""Modules of the runners that the harness's tables name, by names that begin with a dot (harness/spec/)."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_entry(name: str) -> ModuleType:
    """Import the module that an entry names: `.loops.torch_loop` of this package, or a library's, as `deepspeed`."""
    return importlib.import_module(name, "vramsweep.runners")
