"""Details in torch's out-of-memory error of a measured run: the request, what was held, and the phase it came from.

Predicted runs do not need this module, because their replay knows all of it (predicted_row.py).
"""

from __future__ import annotations

import re
import traceback
from typing import Any

import torch

# Sizes of c10/cuda/CUDACachingAllocator.cpp, format_size: two decimals. CUDAMallocAsyncAllocator.cpp's message names no
# cache, because that is the driver's.
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_REQUEST = re.compile(rf"(?:Tried to allocate|Requested +:) {_SIZE}")
_ALLOCATED = re.compile(rf"Currently allocated +: {_SIZE}|{_SIZE} is allocated by PyTorch")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# Functions, by file, that run after the last backward pass: predictions count them all as the optimizer's. Every step
# of a torch.optim.Optimizer passes through torch/optim/optimizer.py, whoever wrote it.
_AFTER_BACKWARD = re.compile(
    r"(/torch/optim/.*:\w+"
    r"|/(deepspeed|bitsandbytes|accelerate|torchao|galore_torch|runners/techniques)/.*:step"
    r"|/torch/amp/grad_scaler\.py:(step|update|unscale_)"
    r"|:(clip_grad_norm_|clip_grad_value_|clip_grads_with_norm_|get_total_norm|unscale_|zero_grad))$"
)


def oom_columns(error: BaseException) -> dict[str, Any]:
    """Return the row's columns, in bytes, as far as the error tells; {} for an error of another kind."""
    if not isinstance(error, torch.OutOfMemoryError):
        return {}
    text = str(error)
    allocated, unallocated = _size(_ALLOCATED, text), _size(_UNALLOCATED, text)
    return {
        "oom_request_bytes": _size(_REQUEST, text),
        "oom_allocated_bytes": allocated,
        "oom_reserved_bytes": None if allocated is None or unallocated is None else allocated + unallocated,
    }


def card_memory(device: torch.device | None) -> list[int] | None:
    """Return free and total bytes of the GPU as CUDA has them right after an error; None if it does not answer.

    After a fault that ended its context (an illegal access, an assert) it does not: no OOM, however full the GPU is.
    """
    try:
        return list(torch.cuda.mem_get_info(device)) if device is not None and device.type == "cuda" else None
    except Exception:  # the error to report is another
        return None


def describe_oom(error: BaseException, device: torch.device | None) -> dict[str, Any]:
    """Describe the error that ended a script's process; `device` is the one it trained on, if it came so far."""
    kind, full = type(error), oom_columns(error)
    said = {"type": f"{kind.__module__}.{kind.__qualname__}", "message": str(error), "card_memory": card_memory(device)}
    return said | ({"columns": full, "phase": phase(error)} if full else {})


def phase(error: BaseException) -> str:
    """Return the phase of a step that an error was raised in, by the functions in its traceback, outermost first.

    A pass that checkpointing repeats in the backward phase belongs to backward. The meter knows no better, because it
    watches backward passes only in the probe step, and memory runs out in the first. A custom step's own work
    after them is called forward.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name in ("backward", "_engine_run_backward"):
            return "backward"
        if _AFTER_BACKWARD.search(f"{code.co_filename}:{code.co_name}"):
            return "optimizer"
    return "forward"


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    number, unit = filter(None, found.groups()) if found else (None, "")
    return None if number is None else round(float(number) * _UNITS[unit])
