"""What an error's text says of an attempt: the one table of faults by their spelling. Pure.

The texts are those of CUDA's runtime and driver (cudaGetErrorString, cuGetErrorName), of its libraries' status codes,
and of what torch, NCCL, triton and bitsandbytes make of them. Not covered: what an outcome means for the trial, and how
a process ends (outcome.py).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from vramsweep.harness.rows.schema import Outcome


@dataclass(frozen=True)
class ErrorPattern:
    """A fault, the outcome of an attempt that shows it, and how it is spelled: a pattern, whatever the case."""

    fault: str
    outcome: Outcome
    spelling: str
    when_full: bool = False  # only where the card is known to have been nearly full; else it is another fault's


# The first that is found decides: a collective that runs out of memory also says NCCL, and a lost GPU CUDA error. Data
# loaders' workers leave their batches in /dev/shm; torch asks NVML who holds the memory once it ran out.
_WORDS = json.loads(Path(__file__).with_name("error_patterns.json").read_text("utf-8"))
SYMPTOMS = tuple(
    ErrorPattern(one["fault"], Outcome(one["outcome"]), "|".join(one["spellings"]), one.get("when_full", False))
    for one in _WORDS
)
_ENDED = re.compile(r"terminate called|^\s*what\(\): ")  # how libstdc++ announces the end
NEAR = 3  # lines from the last: a Python error is followed by what its streams and threads still say
_PATTERNS = tuple((symptom, re.compile(symptom.spelling, re.IGNORECASE)) for symptom in SYMPTOMS)


def find(text: str, full: bool = False) -> ErrorPattern | None:
    """The fault that a text tells of; None where it tells of none that is known. `full`: the card was, nearly."""
    return next((one for one, pattern in _PATTERNS if (full or not one.when_full) and pattern.search(text)), None)


def error_text(lines: list[str]) -> str | None:
    """Of the lines that a process wrote before it ended, the one that says why; None where it wrote none.

    It is among the last, or where C++ says that it ends and why, above its stack. What a line further up tells of was
    got over.
    """
    ended = next((at for at in reversed(range(len(lines))) if _ENDED.search(lines[at])), None)
    why = lines[-NEAR:][::-1] if ended is None else lines[ended:]
    return next((line for line in why if find(line) is not None), lines[-1] if lines else None)
