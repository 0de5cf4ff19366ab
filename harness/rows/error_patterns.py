"""Table of faults by how error texts spell them, and the search for them. Pure.

The texts come from CUDA's runtime and driver (cudaGetErrorString, cuGetErrorName) and from its libraries' status codes.
Others come from torch, NCCL, triton and bitsandbytes.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from vramsweep.harness.rows.schema import Outcome


@dataclass(frozen=True)
class ErrorPattern:
    """A fault, the outcome of an attempt that shows it, and its spelling: a regular expression, matched in any case."""

    fault: str
    outcome: Outcome
    spelling: str
    when_full: bool = False  # counts only if the GPU is known to have been nearly full; else it is another fault's


# The first match decides, because a collective out of memory also says NCCL, and a lost GPU also says CUDA error.
# Data loaders' workers leave their batches in /dev/shm. After an OOM, torch asks NVML who holds the memory.
_WORDS = json.loads(Path(__file__).with_name("error_patterns.json").read_text("utf-8"))
SYMPTOMS = tuple(
    ErrorPattern(one["fault"], Outcome(one["outcome"]), "|".join(one["spellings"]), one.get("when_full", False))
    for one in _WORDS
)
_ENDED = re.compile(r"terminate called|^\s*what\(\): ")  # libstdc++ announces the end with these
NEAR = 3  # last lines to search, because streams and threads still write after a Python error
_PATTERNS = tuple((symptom, re.compile(symptom.spelling, re.IGNORECASE)) for symptom in SYMPTOMS)


def find(text: str, full: bool = False) -> ErrorPattern | None:
    """Return the fault that a text reports; None if it reports none in the table. `full`: the GPU was nearly full."""
    return next((one for one, pattern in _PATTERNS if (full or not one.when_full) and pattern.search(text)), None)


def error_text(lines: list[str]) -> str | None:
    """Return the line that says why a process ended; the last that it wrote if none does, None without lines.

    If C++ announced the end, the reason stands there, above its stack. Else it is among the last `NEAR` lines: the
    process recovered from errors further up.
    """
    ended = next((at for at in reversed(range(len(lines))) if _ENDED.search(lines[at])), None)
    why = lines[-NEAR:][::-1] if ended is None else lines[ended:]
    return next((line for line in why if find(line) is not None), lines[-1] if lines else None)
