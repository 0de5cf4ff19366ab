"""From evidence to outcome: pure functions, no processes, no clock, no files.

The parent gathers what it saw of an attempt into `Evidence`; `classify` names the outcome, and `OUTCOMES` says for each
whether it answers the trial's question and when the trial is tried again.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Any, Literal

from vramsweep.harness.row import Outcome


@dataclass(frozen=True)
class Kind:
    """What an outcome means for its trial.

    `answer`: the trial's question is answered; else it is shown as failed. `now`: another attempt follows at once, as
    it may well end differently. `later`: whether a later run of the sweep tries again: never, asked (with
    retry_failed=true), or always, since it said nothing about the trial.
    """

    outcome: Outcome
    answer: bool
    now: bool
    later: Literal["never", "asked", "always"]
    meaning: str


# fmt: off
OUTCOMES = (
    Kind(Outcome.OK, True, False, "never", "measured, or predicted"),
    Kind(Outcome.OOM, True, False, "never", "the GPU's memory is too small"),
    Kind(Outcome.HOST_OOM, True, False, "never", "the host's memory is too small; simulated: a node's, as given"),
    Kind(Outcome.INVALID, True, False, "never", "cannot run; the reason says why and what would"),
    Kind(Outcome.TIMEOUT, False, False, "asked", "no result within the deadline"),
    Kind(Outcome.CRASH, False, True, "asked", "the worker raised (not tried at once again), was killed, did not start"),
    Kind(Outcome.CUDA_ERROR, False, True, "asked", "the driver or a CUDA library failed"),
    Kind(Outcome.BAD_RESULT, False, True, "asked", "the worker ended well but left no result that can be used"),
    Kind(Outcome.CONTENDED, False, True, "always", "other processes use the device"),
    Kind(Outcome.ENVIRONMENT, False, True, "always", "the machine is not fit for the trial now (no CUDA device, ...)"),
)
# fmt: on
_KINDS: dict[str, Kind] = {kind.outcome: kind for kind in OUTCOMES}


def _kind(outcome: str) -> Kind:
    """What an outcome means; one that only a later version knows is a failure that may be asked for again."""
    return _KINDS.get(outcome, Kind(Outcome.CRASH, False, False, "asked", "not known to this version"))


def is_answer(outcome: str) -> bool:
    """Whether a row with this outcome answers its trial's question."""
    return _kind(outcome).answer


def is_verdict(outcome: str) -> bool:
    """Whether it says something about the trial, be it that it fails; a fault of the machine does not."""
    return _kind(outcome).later != "always"


def runs_again(outcome: str, asked: bool) -> bool:
    """Whether a later run of the sweep tries the trial again; `asked`: with retry_failed=true."""
    later = _kind(outcome).later
    return later == "always" or (asked and later == "asked")


REASON_LENGTH = 400  # characters of a line that becomes a row's reason


@dataclass(frozen=True)
class Evidence:
    """What the parent saw of one attempt.

    `exit_code` is negative for the signal that ended the worker and None if it is not known (its template died);
    `result` is the worker's result file, `result_error` why that could not be read; `host_oom_kills` counts what the
    kernel's out-of-memory killer did on the host meanwhile; `foreign` lists other processes on the device beforehand;
    `start_error` is why no worker could be started; `last_words` the last line that it wrote to stderr; `rank` is the
    rank whose end the exit code tells of, if it did not say why: what another says then is only that it was missed.
    """

    exit_code: int | None = None
    expired: bool = False
    result: dict[str, Any] | None = None
    result_error: str | None = None
    deadline_s: float | None = None
    host_oom_kills: int = 0
    foreign: tuple[int, ...] = ()
    start_error: str | None = None
    last_words: str | None = None
    rank: int | None = None


# PyTorch's own, the runtime's, the driver API's (expandable segments), cuBLAS's, cuDNN's, and NCCL's (names the call)
_OOM = re.compile(
    r"CUDA out of memory|CUDA (driver )?error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|"
    r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|(NCCL|ncclUnhandledCudaError)[\s\S]*out of memory|"
    r"Cuda failure( 2)? '?out of memory"
)
_HOST_OOM = re.compile(r"DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|std::bad_alloc")
# The driver, the card or the node is not there or not whole: it says nothing about the trial.
_ENVIRONMENT = re.compile(
    r"No CUDA GPUs are available|Found no NVIDIA driver|NVIDIA driver on your system is too old|cudaGetDeviceCount|"
    r"CUDA unknown error|no CUDA-capable device|system not yet initialized|driver version is insufficient|"
    r"ECC error|(GPU|device) is lost|fallen off the bus|CUDA (driver )?error: initialization error|"
    r"CUDA driver initialization failed|invalid device ordinal",
    re.IGNORECASE,
)
_HINTS = {Outcome.TIMEOUT: "; raise timeout_s if that is too short"}
_BUSY = re.compile(r"CUDA-capable device(s|\(s\)) (is\/)?are busy|device is in use")
_CUDA = re.compile(r"CUDA error|CUDA driver error|CUBLAS_STATUS|CUDNN_STATUS|NCCL|AcceleratorError|device-side assert")


def same_way(a: tuple[str, str | None], b: tuple[str, str | None]) -> bool:
    """Whether two outcomes with their reasons are the same failure, whatever numbers the reasons hold."""

    def shape(outcome: str, reason: str | None) -> tuple[str, str]:
        return outcome, re.sub(r"0x[0-9a-f]+|\d+", "N", reason or "")

    return shape(*a) == shape(*b)


def classify(evidence: Evidence) -> tuple[Outcome, str | None]:
    """The outcome and, unless it is ok, the reason in one line."""
    if evidence.foreign:
        pids = ", ".join(map(str, evidence.foreign))
        return Outcome.CONTENDED, f"other processes use the device (pid {pids})"
    if evidence.start_error:
        return Outcome.CRASH, evidence.start_error
    error = (evidence.result or {}).get("error")
    if error is not None and evidence.rank is None:
        kind, reason = _from_error(error["type"], error["message"])
        rank = error.get("rank")
        return kind, reason if rank is None or kind is Outcome.INVALID else f"rank {rank}: {reason}"
    if published(evidence):
        return Outcome.OK, None
    ended = _ended(evidence)
    if ended is not None:
        return ended[0], f"{ended[1]}{_HINTS.get(ended[0], '')}"
    if evidence.result is None:
        return Outcome.BAD_RESULT, evidence.result_error or "exit status 0 without a result"
    return Outcome.OK, None


def of_the_machine(text: str) -> bool:
    """Whether an error with which CUDA does not even start says that the machine is not fit, rather than the trial."""
    return any(pattern.search(text) for pattern in (_ENVIRONMENT, _BUSY, _OOM))


def published(evidence: Evidence) -> bool:
    """Whether the worker had measured and said so; what became of it afterwards changes nothing in that."""
    return "values" in (evidence.result or {}) and "complete" in (evidence.result or {})


def remark(evidence: Evidence) -> str | None:
    """What a reader of a published result should know of how its worker ended; None where it ended well."""
    ended = _ended(evidence) if published(evidence) else None
    return None if ended is None else f"ended after the measured steps: {ended[1]}"


def _ended(evidence: Evidence) -> tuple[Outcome, str] | None:
    """How a worker ended that did not end well."""
    if evidence.expired:
        return Outcome.TIMEOUT, f"no end within {evidence.deadline_s:g} s"
    who = "" if evidence.rank is None else f"rank {evidence.rank} "
    if evidence.exit_code == -signal.SIGKILL and evidence.host_oom_kills > 0:
        return Outcome.HOST_OOM, f"{who}killed by the kernel for want of host memory"
    if evidence.exit_code is None:
        return Outcome.CRASH, "the template process died, and the worker with it"
    if evidence.exit_code == 0 and evidence.rank is None:
        return None
    how = f"{who and f'{who}ended with '}exit status {evidence.exit_code}"
    if evidence.exit_code < 0:
        how = f"{who}killed by {signal.Signals(-evidence.exit_code).name}"
    if evidence.last_words and evidence.exit_code != -signal.SIGKILL:  # which nobody announces
        whose = "its last words" if evidence.rank is None else "the last words of all ranks"
        how = f"{how}; {whose}: {evidence.last_words}"
    return Outcome.CRASH, how


def _from_error(kind: str, message: str) -> tuple[Outcome, str]:
    lines = message.strip().splitlines()
    lines = [line[:REASON_LENGTH] for line in lines[:1]]
    reason = f"{kind}: {lines[0]}" if lines and not kind.startswith("vramsweep.") else lines[0] if lines else kind
    text = f"{kind}: {message}"
    if kind.endswith("EnvironmentFault"):
        return Outcome.ENVIRONMENT, lines[0] if lines else kind
    if kind.endswith("InvalidTrial"):
        return Outcome.INVALID, lines[0] if lines else kind
    if kind.endswith("HostOutOfMemoryError"):  # of a simulated node
        return Outcome.HOST_OOM, reason
    if kind.endswith("OutOfMemoryError") or _OOM.search(text):
        return Outcome.OOM, reason
    if kind.endswith(".MemoryError") or _HOST_OOM.search(text):
        return Outcome.HOST_OOM, reason
    if _ENVIRONMENT.search(text):
        return Outcome.ENVIRONMENT, reason
    if _BUSY.search(text):
        return Outcome.CONTENDED, reason
    if _CUDA.search(text):
        return Outcome.CUDA_ERROR, reason
    return Outcome.CRASH, reason


def transient(outcome: Outcome, evidence: Evidence) -> bool:
    """Whether another attempt at once could end differently; a Python exception would only be raised again."""
    if outcome is Outcome.CRASH and (evidence.result or {}).get("error") is not None:
        return False
    return _KINDS[outcome].now


def markdown_table() -> str:
    """The outcomes as a table for the documentation."""
    lines = [
        "**outcomes**",
        "",
        "| outcome | meaning | an answer | tried again at once | on a later run |",
        "|---|---|---|---|---|",
    ]
    later = {"never": "", "asked": "with `retry_failed=true`", "always": "yes"}
    for kind in OUTCOMES:
        cells = ("yes" if kind.answer else "", "yes" if kind.now else "", later[kind.later])
        lines.append(f"| `{kind.outcome}` | {kind.meaning} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
