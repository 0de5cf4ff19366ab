"""A check whether this process has started CUDA, through the driver library that it has already loaded, if any.

CUDA does not work in a child forked from a process that has called cuInit. torch.cuda.is_initialized() knows only about
torch, but DeepSpeed before 0.19.4 makes a context on import if triton is installed. This module never loads the
library, because a process without it has not started CUDA.
"""

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

SUCCESS, NOT_INITIALIZED = 0, 3  # CUresult; any call before cuInit returns the second
_LIBRARY = re.compile(r"\s(/\S*/libcuda\.so[.\d]*)(?: \(deleted\))?$", re.MULTILINE)


def loaded(maps: str) -> str | None:
    """Return the path of the driver library in the text of /proc/self/maps; None if it is not there."""
    found = _LIBRARY.search(maps)
    return found[1] if found else None


def verdict(code: int, active: bool) -> str | None:
    """Say why workers forked from this process could not use CUDA; None if they can.

    `code` is the CUresult of cuDevicePrimaryCtxGetState, `active` says whether device 0 has a primary context.
    """
    if code == NOT_INITIALIZED:
        return None
    if code != SUCCESS:
        return f"importing it left the CUDA driver with error {code}"
    return "importing it makes a CUDA context" if active else "importing it initialises CUDA"


def unclean(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Ask the loaded driver library why workers forked from this process could not use CUDA; None if they can."""
    path = loaded(maps.read_text(errors="surrogateescape"))
    if path is None:
        return None
    state = _state(path) or _state("libcuda.so.1")
    if state is None:
        return f"importing it loads {path}, which cannot report whether CUDA was initialised"
    flags, active = ctypes.c_uint(), ctypes.c_int()
    code = state(0, ctypes.byref(flags), ctypes.byref(active))
    return verdict(int(code), bool(active.value))


def _state(name: str) -> Callable[..., int] | None:
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        function: Callable[..., int] = library.cuDevicePrimaryCtxGetState
    except (OSError, AttributeError):
        return None
    return function
