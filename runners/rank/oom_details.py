"""Details in torch's out-of-memory error of a measured run: the request, what was held, and the phase it came from.

Predicted runs do not need this module, because their replay knows all of it (predicted_row.py).
"""

import traceback
from typing import Any

import torch

from vramsweep.harness.allocator.oom_message import find_phase, read_message


def oom_columns(error: BaseException) -> dict[str, Any]:
    """Return the row's columns, in bytes, as far as the error tells; {} for an error of another kind."""
    if not isinstance(error, torch.OutOfMemoryError):
        return {}
    sizes = read_message(str(error))
    return {f"oom_{name}_bytes": sizes.get(name) for name in ("request", "allocated", "reserved")}


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

    The meter knows no better, because it watches backward passes only in the probe step, and memory runs out in the
    first.
    """
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return find_phase(f"{code.co_filename}:{code.co_name}" for code in codes)
