"""Whether this process has started CUDA, asked of the driver library that is already loaded in it, if any.

A process that has called cuInit cannot be forked: CUDA does not work in the child. torch.cuda.is_initialized() tells
only of torch; DeepSpeed before 0.19.4 makes a context while it is imported wherever triton is installed. The library
is never loaded here: a process without it has not started CUDA.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

SUCCESS, NOT_INITIALIZED = 0, 3  # of CUresult: any call before cuInit returns the second
_LIBRARY = re.compile(r"\s(/\S*/libcuda\.so[.\d]*)(?: \(deleted\))?$", re.MULTILINE)


def loaded(maps: str) -> str | None:
    """The path of the driver library in the text of /proc/self/maps, None if it is not there."""
    found = _LIBRARY.search(maps)
    return found[1] if found else None


def verdict(code: int, active: bool) -> str | None:
    """Why workers forked from here could not use CUDA, from what cuDevicePrimaryCtxGetState answers; None if they can.

    `code` is its CUresult, `active` whether device 0 has a primary context.
    """
    if code == NOT_INITIALIZED:
        return None
    if code != SUCCESS:
        return f"importing it left the CUDA driver in a state that it calls error {code}"
    return "importing it makes a CUDA context" if active else "importing it initialises CUDA"


def unclean(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Why workers forked from this process could not use CUDA, None if they can."""
    path = loaded(maps.read_text(errors="surrogateescape"))
    if path is None:
        return None
    state = _state(path) or _state("libcuda.so.1")
    if state is None:
        return f"importing it loads {path}, which cannot be asked whether CUDA was started"
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
