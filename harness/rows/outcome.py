"""Outcomes of attempts, decided from evidence by pure functions: no processes, no clock, no files.

The parent gathers what it saw of an attempt into `Evidence`, and `classify` names the outcome. `OUTCOMES` says for each
whether it answers the trial's question and when the trial is tried again. `SYMPTOMS` is the table of faults by how
error texts spell them: CUDA's runtime and driver (cudaGetErrorString, cuGetErrorName), status codes of its libraries,
torch, NCCL, triton and bitsandbytes.
"""

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.units import format_gib
from vramsweep.harness.rows.schema import Outcome


@dataclass(frozen=True)
class OutcomeInfo:
    """The meaning of an outcome for its trial.

    `answer`: the trial's question is answered; else it is shown as failed. `now`: another attempt follows at once,
    because it may well end differently. `later`: when a later sweep run tries again: never, asked (with
    retry_failed=true), unasked (without skip_dominated=true), or always, if it says nothing about the trial.
    """

    outcome: Outcome
    answer: bool
    now: bool
    later: Literal["never", "asked", "unasked", "always"]
    meaning: str


def _read(line: str) -> OutcomeInfo:
    """Return the outcome in a line of outcomes.tsv."""
    outcome, answer, now, later, meaning = line.split("\t")
    return OutcomeInfo(Outcome(outcome), answer == "yes", now == "yes", later, meaning)  # type: ignore[arg-type]


OUTCOMES = tuple(map(_read, Path(__file__).with_name("outcomes.tsv").read_text("utf-8").splitlines()[1:]))
_MISSING = re.compile(r"No module named '([\w.]+)'")
_KINDS: dict[str, OutcomeInfo] = {kind.outcome: kind for kind in OUTCOMES}


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


def _kind(outcome: str) -> OutcomeInfo:
    """Return an outcome's meaning; one of a later version is a failure that retry_failed=true tries again."""
    return _KINDS.get(outcome, OutcomeInfo(Outcome.CRASH, False, False, "asked", "not known to this version"))


def is_answer(outcome: str) -> bool:
    """Return whether a row with this outcome answers its trial's question."""
    return _kind(outcome).answer


def is_verdict(outcome: str) -> bool:
    """Return whether it says something about the trial, even that it fails; a fault of the machine does not."""
    return _kind(outcome).later != "always"


def runs_again(outcome: str, asked: bool) -> bool:
    """Return whether a later run of the sweep tries the trial again; `asked`: with retry_failed=true.

    A skipped trial is checked again; it may still be dominated.
    """
    later = _kind(outcome).later
    return later in ("always", "unasked") or (asked and later == "asked")


REASON_LENGTH = 400  # characters of a line that becomes a row's reason
GIB = 1 << 30
NOT_WRITTEN = 74  # EX_IOERR of sysexits.h: the exit status of a worker that could not write its result


@dataclass(frozen=True)
class HostMemory:
    """Host memory in bytes when almost none was left: held by the attempt, in use, in total, and in use before the
    attempt."""

    held: int
    used: int
    total: int
    before: int


@dataclass(frozen=True)
class Evidence:
    """The evidence of one attempt, as the parent saw it.

    `exit_code` is negative for the signal that ended the worker, and None if not known because its fork server died.
    `result` is the worker's result file, `result_error` why it could not be read. `host_oom_kills` counts kills by the
    kernel's out-of-memory killer on the host meanwhile. `foreign` lists other processes on the device beforehand.
    `held` says who holds memory there that the trial before has not given back. `start_error` is why no worker could be
    started. `last_words` is what it wrote to stderr last (error_text). `rank` is the rank whose end the exit
    code describes, if it did not say why. Then other ranks' errors only say that it was missed. `starved` is given
    if we ended it because the host had no memory left.
    """

    exit_code: int | None = None
    expired: bool = False
    result: dict[str, Any] | None = None
    result_error: str | None = None
    deadline_s: float | None = None
    host_oom_kills: int = 0
    foreign: tuple[int, ...] = ()
    held: str | None = None
    start_error: str | None = None
    last_words: str | None = None
    rank: int | None = None
    starved: HostMemory | None = None


_HINTS = {Outcome.TIMEOUT: "; raise timeout_s if that is too short"}


def is_same_failure(a: tuple[str, str | None], b: tuple[str, str | None]) -> bool:
    """Return whether two outcomes with their reasons are the same failure, whatever numbers the reasons hold."""

    def shape(outcome: str, reason: str | None) -> tuple[str, str]:
        return outcome, re.sub(r"0x[0-9a-f]+|\d+", "N", reason or "")

    return shape(*a) == shape(*b)


def classify(evidence: Evidence) -> tuple[Outcome, str | None]:
    """Return the outcome and, unless it is ok, the reason in one line."""
    if evidence.foreign:
        pids = ", ".join(map(str, evidence.foreign))
        return Outcome.CONTENDED, f"other processes use the GPU (pid {pids})"
    if evidence.held:
        return Outcome.CONTENDED, evidence.held
    if evidence.start_error:
        return Outcome.CRASH, evidence.start_error
    error = (evidence.result or {}).get("error")
    if error is not None and evidence.rank is None:
        kind, reason = _from_error(error, evidence.host_oom_kills)
        rank = error.get("rank")
        return kind, reason if rank is None or kind is Outcome.INVALID else f"rank {rank}: {reason}"
    if has_published_result(evidence):
        return Outcome.OK, None
    if (ended := _ended(evidence)) is not None:
        return ended[0], f"{ended[1]}{_HINTS.get(ended[0], '')}"
    if evidence.result is None:
        return Outcome.BAD_RESULT, evidence.result_error or "exit status 0 without a result"
    return Outcome.OK, None


def is_machine_fault(text: str) -> bool:
    """Return whether an error with which CUDA does not even start says that the machine, not the trial, is unfit."""
    found = find_fault(text)
    return found is not None and found.outcome in (Outcome.ENVIRONMENT, Outcome.CONTENDED, Outcome.OOM)


def has_published_result(evidence: Evidence) -> bool:
    """Return whether the worker had published what it measured; how it ended afterwards does not change that."""
    return "values" in (evidence.result or {}) and "complete" in (evidence.result or {})


def describe_end(evidence: Evidence) -> str | None:
    """Describe how the worker of a published result ended, for readers of that result; return None if it ended well."""
    ended = _ended(evidence) if has_published_result(evidence) else None
    return None if ended is None else f"ended after the measured steps: {ended[1]}"


def _ended(evidence: Evidence) -> tuple[Outcome, str] | None:
    """Return outcome and reason of a worker that did not end well; None if it ended well."""
    if evidence.starved is not None:
        return _starved(evidence.starved)
    if evidence.expired:
        return Outcome.TIMEOUT, f"not finished within {evidence.deadline_s:g} s"
    who = "" if evidence.rank is None else f"rank {evidence.rank} "
    if evidence.exit_code == -signal.SIGKILL and evidence.host_oom_kills > 0:
        return Outcome.HOST_OOM, f"{who}killed by the kernel because host memory ran out"
    if evidence.exit_code is None:
        return Outcome.CRASH, "the fork server died, and the worker with it"
    if evidence.exit_code == 0 and evidence.rank is None:
        return None
    how = f"{who and f'{who}ended with '}exit status {evidence.exit_code}"
    if evidence.exit_code < 0:
        how = f"{who}killed by {signal.Signals(-evidence.exit_code).name}"
    kind = Outcome.CRASH
    if evidence.exit_code == NOT_WRITTEN:
        kind, how = Outcome.ENVIRONMENT, f"{who}could not write its result ({how})"
    if evidence.last_words and evidence.exit_code != -signal.SIGKILL:  # which leaves no last words
        whose = "its last words" if evidence.rank is None else "the last words of all ranks"
        how = f"{how}; {whose}: {evidence.last_words}"
        found = find_fault(evidence.last_words) if evidence.exit_code in (-signal.SIGABRT, 1) else None
        kind = found.outcome if found else kind  # SIGABRT is C++'s std::terminate; C libraries call exit(1)
    return kind, how


OWN_SHARE = 0.9  # of what was taken since it began; the rest is the harness's, the kernel's or short-lived


def _starved(seen: HostMemory) -> tuple[Outcome, str]:
    """Judge an attempt ended for lack of host memory: host_oom if it took it on a free host, else environment."""
    held, used, total, before = (format_gib(size) for size in (seen.held, seen.used, seen.total, seen.before))
    if seen.held >= OWN_SHARE * (seen.used - seen.before) and 2 * seen.before <= seen.total:
        why = f"it used {held} of the host's {total} GiB and almost none was left ({before} in use before)"
        return Outcome.HOST_OOM, f"ended because {why}"
    why = f"{used} of {total} GiB in use, {held} by the trial; before it, {before}"
    return Outcome.ENVIRONMENT, f"other programs use the host's memory: {why}"


# Starting a library takes less: cuDNN's kernels 150 to 500 MB (pytorch#81620), a context 768 MiB (gpu_lookup.py).
FULL_BYTES, FULL_SHARE = GIB, 0.05  # a nearly full GPU has less free; the share is for a small GPU or a slice


def _said_full(memory: object) -> str | None:
    """Say that a GPU was nearly full, by its [free, total] bytes at an error; None if it was not, or not known."""
    match memory:
        case [int(free), int(total)] if free < min(FULL_BYTES, FULL_SHARE * total):
            return f"only {format_gib(free)} of the GPU's {format_gib(total)} GiB were free"
    return None


def _from_error(error: Mapping[str, Any], host_oom_kills: int) -> tuple[Outcome, str]:
    kind, message = error["type"], error["message"]
    said = "".join(message.strip().splitlines()[:1])
    if len(said) > REASON_LENGTH:  # cut between two words, if it has any
        said = f"{said[: REASON_LENGTH - 2].rpartition(' ')[0] or said[: REASON_LENGTH - 2]} …"
    reason = f"{kind}: {said}" if said and not kind.startswith("vramsweep.") else said or kind
    if kind.endswith("EnvironmentFault"):
        return Outcome.ENVIRONMENT, said or kind
    if kind.endswith("InvalidTrial"):
        return Outcome.INVALID, said or kind
    missing = _MISSING.match(message) if kind.endswith("ModuleNotFoundError") else None
    if missing and suggestions.find_extra(missing[1]):
        return Outcome.ENVIRONMENT, suggestions.missing_package(missing[1])
    if kind.endswith(("HostOutOfMemoryError", ".MemoryError")):  # a simulated node's, or Python's
        return Outcome.HOST_OOM, reason
    if kind.endswith("OutOfMemoryError"):
        return Outcome.OOM, reason
    if host_oom_kills and "is killed by signal: Killed" in message:  # torch's text about a data loader's worker
        return Outcome.HOST_OOM, f"{reason}, by the kernel because host memory ran out"
    full = _said_full(error.get("card_memory"))
    found = find_fault(f"{kind}: {message}", full is not None)
    if found and found.when_full:
        reason = f"{reason}; {full}"
    return (found.outcome, reason) if found else (Outcome.CRASH, ", at ".join([reason, *error.get("at", ())]))


def is_retryable(outcome: Outcome, evidence: Evidence) -> bool:
    """Return whether another attempt at once could end differently; a Python exception would only be raised again."""
    error = (evidence.result or {}).get("error")
    if error is not None and (outcome is Outcome.CRASH or error["type"].endswith("ModuleNotFoundError")):
        return False
    return _KINDS[outcome].now


def markdown_table() -> str:
    """Return the outcomes as a table for the documentation."""
    lines = ["**outcomes**", ""]
    lines += [
        "| outcome | meaning | is an answer | retried at once | run again by a later sweep |",
        "|---|---|---|---|---|",
    ]
    later = {"never": "", "asked": "with `retry_failed=true`", "unasked": "unless `skip_dominated=true` skips it again"}
    later |= {"always": "yes"}
    for kind in OUTCOMES:
        cells = ("yes" if kind.answer else "", "yes" if kind.now else "", later[kind.later])
        lines.append(f"| `{kind.outcome}` | {kind.meaning} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def find_fault(text: str, full: bool = False) -> ErrorPattern | None:
    """Return the fault that a text reports; None if it reports none in the table. `full`: the GPU was nearly full."""
    return next((one for one, pattern in _PATTERNS if (full or not one.when_full) and pattern.search(text)), None)


def error_text(lines: list[str]) -> str | None:
    """Return the line that says why a process ended; the last that it wrote if none does, None without lines.

    If C++ announced the end, the reason stands there, above its stack. Else it is among the last `NEAR` lines: the
    process recovered from errors further up.
    """
    ended = next((at for at in reversed(range(len(lines))) if _ENDED.search(lines[at])), None)
    why = lines[-NEAR:][::-1] if ended is None else lines[ended:]
    return next((line for line in why if find_fault(line) is not None), lines[-1] if lines else None)
