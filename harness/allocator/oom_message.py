"""Message of torch's out-of-memory error: its sizes, and the phase of the step that raised it.

Forms from torch 1.1 to 2.13: c10/cuda/CUDACachingAllocator.cpp and CUDAMallocAsyncAllocator.cpp. A watched script's
process imports this after the error, so it imports nothing large.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

# Sizes of format_size: two decimals. CUDAMallocAsyncAllocator.cpp's message names no cache, because that is the
# driver's. "cached" (torch 1.1 to 1.3) is what is not allocated of it.
_S = r"([\d.]+) (bytes|KiB|MiB|GiB)"
PATTERNS = json.loads(Path(__file__).with_name("oom_patterns.json").read_text("utf-8"))
SIZES: dict[str, str] = {name: pattern.replace("SIZE", _S) for name, pattern in PATTERNS["sizes"].items()}
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_OTHERS = re.compile(rf"Process (\d+) has {_S} memory in use")
_UNLIMITED = 1 << 50  # bytes: a limit that is none
# Functions, by file, that run after the last backward pass: predictions count them all as the optimizer's. Every step
# of a torch.optim.Optimizer passes through torch/optim/optimizer.py, whoever wrote it.
AFTER_BACKWARD = re.compile(f"({'|'.join(PATTERNS['after_backward'])})$")


def read_message(text: str) -> dict[str, int]:
    """Return the sizes in a message of torch's allocators, in bytes, by the names of `SIZES`, and those that follow.

    `outside` is what of the GPU is neither free nor this process's (torch's own, if the message does not tell the
    process's); it is below 0 if the driver lends host memory.
    """
    text = " ".join(text.split())
    found = {name: hit for name, pattern in SIZES.items() if (hit := re.search(pattern, text, re.IGNORECASE))}
    sizes = {name: _bytes(*filter(None, hit.groups())) for name, hit in found.items()}
    sizes = {name: size for name, size in sizes.items() if size < _UNLIMITED}
    if {"allocated", "unused"} <= sizes.keys():
        sizes["reserved"] = sizes["allocated"] + sizes["unused"]
    elif {"allocated", "reserved"} <= sizes.keys():
        sizes["unused"] = max(sizes["reserved"] - sizes["allocated"], 0)
    own = sizes.get("process", sizes.get("reserved"))
    if own is not None and {"total", "free"} <= sizes.keys():
        sizes["outside"] = sizes["total"] - sizes["free"] - own
    return sizes


def read_others(text: str) -> dict[str, int]:
    """Return the bytes that the message says of other processes, by process id."""
    return {process: _bytes(number, unit) for process, number, unit in _OTHERS.findall(" ".join(text.split()))}


def find_phase(frames: Iterable[str]) -> str:
    """Return the phase of a step by the stack of an error, "file:function" of each frame, the outermost first.

    A pass that checkpointing repeats in the backward phase belongs to backward. A custom step's own work after the
    passes is called forward.
    """
    for frame in frames:
        if frame.rpartition(":")[2] in ("backward", "_engine_run_backward"):
            return "backward"
        if AFTER_BACKWARD.search(frame):
            return "optimizer"
    return "forward"


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit.lower()])
