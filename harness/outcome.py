"""From evidence to outcome: pure functions, no processes, no clock, no files.

The parent gathers what it saw of an attempt into `Evidence`; `classify` names the outcome and `transient` says
whether another attempt could end differently.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Any

from vramsweep.harness.row import Outcome


@dataclass(frozen=True)
class Evidence:
    """What the parent saw of one attempt.

    `exit_code` is negative for the signal that ended the worker and None if it is not known (its template died);
    `result` is the worker's result file, `result_error` why that could not be read; `host_oom_kills` counts what the
    kernel's out-of-memory killer did on the host meanwhile; `foreign` lists other processes on the device beforehand;
    `start_error` is why no worker could be started.
    """

    exit_code: int | None = None
    expired: bool = False
    result: dict[str, Any] | None = None
    result_error: str | None = None
    deadline_s: float | None = None
    host_oom_kills: int = 0
    foreign: tuple[int, ...] = ()
    start_error: str | None = None


_OOM = re.compile(r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED")
_HOST_OOM = re.compile(r"DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|std::bad_alloc")
_BUSY = re.compile(r"CUDA-capable device(s|\(s\)) (is\/)?are busy|device is in use")
_CUDA = re.compile(r"CUDA error|CUDA driver error|CUBLAS_STATUS|CUDNN_STATUS|NCCL|AcceleratorError|device-side assert")


def classify(evidence: Evidence) -> tuple[Outcome, str | None]:
    """The outcome and, unless it is ok, the reason in one line."""
    if evidence.foreign:
        pids = ", ".join(map(str, evidence.foreign))
        return Outcome.CONTENDED, f"other processes use the device (pid {pids})"
    if evidence.start_error:
        return Outcome.CRASH, evidence.start_error
    error = (evidence.result or {}).get("error")
    if error is not None:
        return _from_error(error["type"], error["message"])
    if evidence.expired:
        return Outcome.TIMEOUT, f"no result within {evidence.deadline_s:g} s; raise timeout_s if that is too short"
    if evidence.exit_code == -signal.SIGKILL and evidence.host_oom_kills > 0:
        return Outcome.HOST_OOM, "killed by the kernel for want of host memory"
    if evidence.exit_code is None:
        return Outcome.CRASH, "the template process died, and the worker with it"
    if evidence.exit_code < 0:
        return Outcome.CRASH, f"killed by {signal.Signals(-evidence.exit_code).name}"
    if evidence.exit_code > 0:
        return Outcome.CRASH, f"exit status {evidence.exit_code} without a result"
    if evidence.result is None:
        return Outcome.BAD_RESULT, evidence.result_error or "exit status 0 without a result"
    return Outcome.OK, None


def _from_error(kind: str, message: str) -> tuple[Outcome, str]:
    lines = message.strip().splitlines()
    reason = f"{kind}: {lines[0]}" if lines else kind
    text = f"{kind}: {message}"
    if kind.endswith("InvalidTrial"):
        return Outcome.INVALID, lines[0] if lines else kind
    if kind.endswith("OutOfMemoryError") or _OOM.search(text):
        return Outcome.OOM, reason
    if kind.endswith(".MemoryError") or _HOST_OOM.search(text):
        return Outcome.HOST_OOM, reason
    if _BUSY.search(text):
        return Outcome.CONTENDED, reason
    if _CUDA.search(text):
        return Outcome.CUDA_ERROR, reason
    return Outcome.CRASH, reason


def transient(outcome: Outcome, evidence: Evidence) -> bool:
    """Whether another attempt could end differently.

    A Python exception would only be raised again, and a deadline that ran out would only run out again; a worker that
    was killed, a CUDA error, a busy device or a missing result may well be a passing fault.
    """
    if outcome is Outcome.CRASH:
        return (evidence.result or {}).get("error") is None
    return outcome in (Outcome.CUDA_ERROR, Outcome.CONTENDED, Outcome.BAD_RESULT)
