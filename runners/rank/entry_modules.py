"""Import of modules that the harness's tables (harness/spec/) name; names of the runners' begin with a dot."""

import importlib
import sys
from collections.abc import Iterable
from functools import cache
from types import ModuleType


def import_entry(name: str) -> ModuleType:
    """Import the module that an entry names: `.loops.torch_loop` of this package, or a library's, as `deepspeed`."""
    return importlib.import_module(name, "vramsweep.runners")


def import_entries(names: Iterable[str]) -> None:
    """Import what will be needed; a module that cannot be imported fails only the trials that need it."""
    for name in names:
        _import_or_say(name)


@cache
def _import_or_say(name: str) -> None:
    try:
        import_entry(name)
    except Exception as error:  # it is not installed, or broken: libraries raise any exception
        print(f"not preloaded: {name}: {type(error).__name__}: {error}", file=sys.stderr)
