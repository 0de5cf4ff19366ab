"""Diagnosis of a user's command that left nothing to make a row of, from its reports, its log and its exit status.

It raises what the row must report, classified like the end of one of our workers. An exception is reported by type and
text, a signal by name, anything else by exit status and last words.
"""

import json
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from vramsweep.harness.files.bounded_reads import read_tail
from vramsweep.harness.process import attempt
from vramsweep.harness.process.waiting import LOG_KEPT
from vramsweep.harness.process.worker_files import ENDED, LOGS, STEPS
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.rank import process_end
from vramsweep.runners.scripts import observed_row as of_processes
from vramsweep.runners.scripts.hook import sitecustomize as hook
from vramsweep.runners.scripts.observed_row import Seen

# Texts by which argparse, click, typer and fire refuse an option, after a usage line and with exit status 2.
_USAGE = re.compile(r"^usage:", re.MULTILINE | re.IGNORECASE)
_REFUSED = re.compile(
    r"^(?:\S.*: error: .+|(?:Error: |│ )(?:No such|Missing|Invalid|Got unexpected|Option).+|"
    r"ERROR: Could not consume arg.+)",
    re.MULTILINE,
)
# Exceptions by which Hydra and transformers refuse an option.
_UNKNOWN = re.compile(
    r"^(?:hydra\.errors\.\w+: Could not (?:override|append).*|hydra\.errors\.OverrideParseException: .*|"
    r"(?:builtins\.)?ValueError: Some specified arguments are not used by the HfArgumentParser.*)",
    re.MULTILINE,
)
# Launchers of a training's processes, which fail because one of these did, and where their report begins in the log.
_LAUNCHER = re.compile(r"(^|/)(torchrun|accelerate|deepspeed)$|(torch/distributed|accelerate/commands)/\w+\.py$")
_ACCOUNT = re.compile(
    r"^E\d{4} .*torch/distributed/elastic.*failed \(exitcode|"
    r"^Traceback .*\n  File \".*/(?:accelerate|torchrun|deepspeed)\"",
    re.MULTILINE,
)
_STATUS = re.compile(r"exitcode +: (\d+)|non-zero exit status (\d+)|exits with return code = (\d+)")
# torchrun's report of a rank that a signal ended: torch/distributed/elastic/multiprocessing/errors.
_KILLED = re.compile(r"rank +: (\d+) \(local_rank.*\n +exitcode +: -(\d+)")
# Errors of ranks that share a GPU, or look for one that is not there.
_FEW_CARDS = re.compile(r"invalid device ordinal|Duplicate GPU detected")
# Errors of gloo and NCCL in a rank because another rank has gone.
_MISSED = re.compile(r"[Cc]onnection (closed|reset) by peer|Broken pipe|remote process exited|Timed out waiting")


class ScriptError(RuntimeError):
    """The command failed by itself; the text says how."""


@dataclass(frozen=True)
class End:
    """The end of a trial's command. `code` is the exit status of its own process (negative: a signal). `seen` are the
    reports of all its processes that imported torch, in the order of their last writing."""

    trial: Trial
    folder: Path
    words: Sequence[str]
    pid: int
    code: int
    seen: Sequence[Seen]


def explain(end: End) -> NoReturn:
    """Raise the reason why nothing was measured. End this process by the signal that ended the command, if any."""
    name, code = _name(end.words), end.code
    own_words = of_processes.changed(end.trial, end.seen)
    if own_words:
        raise InvalidTrial(own_words)
    for one in end.seen:
        if one["problem"]:
            raise ScriptError(f"the script could not be watched any further: {one['problem']}")
    killed = [(int(rank), int(number)) for rank, number in _KILLED.findall(_log(end.folder))]
    killed = [one for one in killed if one[1] != signal.SIGTERM]  # by which torchrun ends the other ranks
    refused = _refused(end) if code > 0 else None
    if code > 0 and killed:
        _record(end.folder, {"event": ENDED, "rank": killed[0][0]})
        code = -killed[0][1]
    elif first := next(_causes(end), None):
        _raise(first, end)
    elif refused:
        raise InvalidTrial(f"{name} does not take these options: {refused}")
    elif not any(map(worked, end.seen)):
        for path in end.folder.glob(hook.PROBLEM.format("*")):
            raise InvalidTrial(f"the script cannot be watched: {path.read_text().removeprefix('RuntimeError: ')}")
    if code < 0:
        sys.stdout.flush()
        process_end.end_by(-code)
    if code > 0:
        raise ScriptError(describe_end(code, end.folder))
    if (steps := _steps(end)) >= _takes(end) and not all(one["ended"] for one in end.seen if worked(one)):
        raise ScriptError(
            f"{name} ended by os._exit, or by a signal that its parent did not report, after {steps} or more optimizer "
            f"steps, so nothing was measured; let it return, or end by sys.exit{_last_words(end.folder)}"
        )
    raise InvalidTrial(f"{name} ended {_too_early(end)}")


def describe_end(code: int, folder: Path) -> str:
    """Return how a failed command ended, with its last words."""
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return f"ended with {ended}{_last_words(folder)}"


def _causes(end: End) -> Iterator[Seen]:
    """Yield the processes whose error may have ended the command, the first to fail first.

    If another process ended later without an error, it survived the failure, so the failed one was a helper. A failed
    process is no helper if it trained, is one of several ranks, or is the command's own.
    """
    for one in end.seen:
        survived = any(
            other["at"] > one["at"] and other["ended"] and "error" not in other and not _launcher(other)
            for other in end.seen
        )
        own = worked(one) or one["pid"] == end.pid or one["world_size"] > 1
        if "error" in one and not _launcher(one) and (own or not survived):
            yield one


def worked(one: Seen) -> bool:
    """Return whether a process has begun to train."""
    return any(one[name] for name in ("forwards", "backwards", "steps"))


def _launcher(one: Seen) -> bool:
    return not worked(one) and _LAUNCHER.search(one["program"] or "") is not None


def _raise(one: Seen, end: End) -> NoReturn:
    """Raise the error of a process by type and text, with the columns that the row can still have."""
    error = one["error"]
    if one["world_size"] > end.trial.world_size and _FEW_CARDS.search(error["message"]):
        raise InvalidTrial(
            f"the training has {one['world_size']} ranks, but world_size={end.trial.world_size} is the number of its "
            f"GPUs; set world_size={one['world_size']}"
        )
    silent = [other["rank"] for other in end.seen if not other["ended"] and other["world_size"] > 1]
    if silent and _MISSED.search(error["message"]):
        raise ScriptError(
            f"rank {silent[0]} ended during the training without an error message (os._exit?), so rank {one['rank']} "
            "lost the connection to it"
        )
    if unknown := _UNKNOWN.search(f"{error['type']}: {error['message']}"):
        raise InvalidTrial(f"{_name(end.words)} does not take these options: {unknown[0]}")
    if error.get("phase"):
        at = {"phase": "load", "at_step": None} if one["index"] is None else {"at_step": one["index"]}
        _record(end.folder, {"phase": error["phase"]} | at)
    module, _, name = error["type"].rpartition(".")
    kind = type(name, (RuntimeError,), {"__module__": module, "__qualname__": name})
    raised: BaseException = kind(error["message"])
    raised.columns = error.get("columns") or {}  # type: ignore[attr-defined]
    raised.card_memory = error.get("card_memory")  # type: ignore[attr-defined]
    raise raised


def _record(folder: Path, event: dict[str, object]) -> None:
    with (folder / STEPS).open("a") as file:
        file.write(json.dumps(event) + "\n")


def _refused(end: End) -> str | None:
    """Return the script's text about an option that it does not know; None if there is none."""
    log = _log(end.folder)
    if raised := _UNKNOWN.search(log):
        return raised[0]
    statuses = {end.code, *(int("".join(found)) for found in _STATUS.findall(log))}
    found = _REFUSED.findall(log) if 2 in statuses and _USAGE.search(log) else []
    return found[-1].strip("│ ") if found else None


def _too_early(end: End) -> str:
    """Return what a command that ended well lacked."""
    if not end.seen:
        return (
            "without an error, but none of its Python processes imported torch where vramsweep can watch it (python -I "
            "and -E ignore PYTHONPATH)"
        )
    steps = _steps(end)
    if steps == 0:
        calls, passes = (max(one[name] for one in end.seen) for name in ("forwards", "backwards"))
        return (
            f"without an optimizer step ({calls} forward and {passes} backward passes); it must train with a "
            "torch.optim.Optimizer"
        )
    size, ranks = max(one["world_size"] for one in end.seen), {one["rank"] for one in end.seen if worked(one)}
    if steps >= _takes(end) and len(ranks) < size:
        return (
            f"after {steps} optimizer steps on {len(ranks)} of its {size} ranks (WORLD_SIZE), but a row needs all "
            "ranks; start them all in the command, as torchrun --nproc-per-node does"
        )
    name = end.trial.protocol.name
    return (
        f"after {steps} optimizer steps, but protocol={name} needs {_takes(end)}; let it run longer, or set "
        "protocol.warmup_steps= and protocol.measured_steps="
    )


def _steps(end: End) -> int:
    """Return how many optimizer steps there were at least; recorded ones count for a process without a last report."""
    recorded = sum("step" in record for record in attempt.read_steps(end.folder))
    return max((max(one["steps"], recorded) for one in end.seen), default=0)


def _takes(end: End) -> int:
    """Return the number of optimizer steps that a row takes."""
    protocol = end.trial.protocol
    if protocol.job:
        return protocol.warmup_steps + 4  # one whose FLOPs are counted, the probe, one measured, the last
    return protocol.warmup_steps + 1 + protocol.measured_steps + 1  # the last measured step ends when the next begins


def _name(words: Sequence[str]) -> str:
    """Return the command's name for a sentence."""
    return next((Path(word).name for word in words if word.endswith(".py")), words[0])


def _log(folder: Path) -> str:
    try:
        return read_tail(folder / LOGS[1], LOG_KEPT).decode(errors="replace")
    except OSError:
        return ""


def _last_words(folder: Path) -> str:
    """Return the last line of stderr with a word in it, as the end of a sentence. A launcher's report of its processes'
    end is passed over if there is another line."""
    log = _log(folder)
    account = _ACCOUNT.search(log)
    own, all_of_it = log[: account.start() if account else None], log
    lines = [line.strip() for text in (all_of_it, own) for line in text.splitlines()]
    words = next((line for line in reversed(lines) if re.search(r"\w", line)), None)
    return f"; its last words: {words}" if words else ""
