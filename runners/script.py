"""runner=script: a command of the user's own, as it is, in place of a training loop of ours.

The worker starts it as a process below itself, with hook/sitecustomize.py on its PYTHONPATH, waits, and makes one row
of what the processes have left (observer.py). The command may be anything that comes to train with torch: a script,
torchrun, accelerate launch, a shell script. How it ended is classified like a worker of ours: an exception by its type
and text, a signal by its name, anything else by its exit status and last words.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pynvml

import vramsweep
from vramsweep.harness import attempt, machine, script, variables
from vramsweep.harness.attempt import ENDED, LOGS, STEPS
from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.harness.waiting import LOG_KEPT, tail
from vramsweep.runners import result
from vramsweep.runners import seen as of_processes
from vramsweep.runners.over_ranks import Columns
from vramsweep.runners.seen import Seen

HOOK = Path(__file__).parent / "hook"
OUTPUT = "output"  # {output_dir}: what the script writes, in the attempt's folder
WATCH, SEEN = "watch.json", "seen-*.json"  # observer.py's
# What argparse, click, fire and Hydra say of an option that they do not know.
_REFUSED = re.compile(
    r"error: (unrecognized arguments|argument |the following arguments|ambiguous option|invalid )|No such option|"
    r"(Error: )?(Missing|Invalid value|Got unexpected)|Could not consume arg|Could not override"
)
# How torchrun tells of a rank that a signal ended: torch/distributed/elastic/multiprocessing/errors.
_KILLED = re.compile(r"rank +: (\d+) \(local_rank.*\n +exitcode +: -(\d+)")
# What ranks say that share a card, or look for one that is not there.
_FEW_CARDS = re.compile(r"invalid device ordinal|Duplicate GPU detected")
# What a rank says because another has gone, of gloo and NCCL.
_MISSED = re.compile(r"[Cc]onnection (closed|reset) by peer|Broken pipe|remote process exited|Timed out waiting")


class ScriptError(RuntimeError):
    """The command failed by itself; the text says how."""


def run(trial: Trial, folder: Path) -> Columns:
    """Run the trial's command and return the row's columns.

    Raises InvalidTrial where it cannot be measured as it is, ScriptError or what the script itself raised where it
    failed, result.EndedEarly where that was after the measured steps. A signal that ends it ends this process too.
    """
    output = folder / OUTPUT
    output.mkdir()
    (folder / WATCH).write_text(json.dumps(_asked(trial)))
    baseline = _used(trial)
    words = script.words(trial, str(output))
    try:
        process = subprocess.Popen(words, env=environment(folder), stdin=subprocess.DEVNULL)
    except OSError as error:
        raise InvalidTrial(f"{words[0]} cannot be started: {error.strerror}") from None
    code = process.wait()
    seen = _read(folder)
    trained = _trained(seen)
    if not trained:
        _failed(trial, folder, code, seen, words)
    row = of_processes.columns(trial, trained, script.names(str(trial.runner.command)))
    more = sum("columns" in one for one in seen) - len(trained)
    if more > 0:
        row["notes"] = [*(row["notes"] or ()), f"{more} more processes trained; this row is of the first training"]
    row |= {
        "environment": variables.recorded(os.environ),
        "device_baseline_bytes": baseline,
    }
    if code == 0 and all(one["complete"] for one in trained):
        return row
    result.values(folder, row, complete=False)
    how = "ended before it" if code == 0 else _how(code, folder)
    left = "" if all(one["complete"] for one in trained) else "the step that counts FLOPs is missing: "
    raise result.EndedEarly(f"{left}after the measured steps the script {how}")


def _asked(trial: Trial) -> dict[str, Any]:
    """What the observer is asked to do."""
    unseen = script.unseen(trial)
    return {
        "warmup_steps": trial.protocol.warmup_steps,
        "measured_steps": None if trial.protocol.job else trial.protocol.measured_steps,
        "record": trial.record,
        "stop": trial.runner.stop and not trial.protocol.job,
        "job": trial.protocol.job,
        "precision": None if "precision" in unseen else trial.precision,
        "worker": os.getpid(),
    }


def environment(folder: Path) -> dict[str, str]:
    """The command's: ours, and what lets the hook find its way."""
    path = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    lent = {str(Path(str(module.__file__)).resolve().parent) for module in (pynvml,)}
    lent.add(str(Path(str(psutil.__file__)).resolve().parent.parent))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "VRAMSWEEP_ATTEMPT": str(folder.resolve()),
        "VRAMSWEEP_PACKAGE": str(Path(str(vramsweep.__file__)).resolve().parent),
        "VRAMSWEEP_LENT": os.pathsep.join(sorted(lent)),
    }


def _used(trial: Trial) -> int | None:
    """The most that NVML sees in use on any of the trial's cards, before the command touches them."""
    if trial.device.name != "cuda":
        return None
    found = []
    for card in machine.visible_gpus(os.environ)[: trial.world_size]:
        if card.uuid is not None:
            machine.ask("nvmlInit")
            handle, _ = machine.ask("nvmlDeviceGetHandleByUUID", card.uuid)
            info = None if handle is None else machine.ask("nvmlDeviceGetMemoryInfo", handle)[0]
            found += [] if info is None else [int(info.used)]
    return max(found, default=None)


def _read(folder: Path) -> list[Seen]:
    """What the command's processes have left, in the order in which they ended."""
    every = [json.loads(path.read_text()) for path in folder.glob(SEEN)]
    return sorted(every, key=lambda one: float(one["at"]))


def _trained(seen: Sequence[Seen]) -> list[Seen]:
    """The processes of the training that was measured, by rank; none where one of its ranks has not come so far.

    A command may train more than once (a search over settings): the first training that was measured is the row's.
    """
    done = [one for one in seen if "columns" in one]
    if not done:
        return []
    size = done[0]["world_size"]
    ranks: dict[int, Seen] = {}
    for one in done:
        if one["world_size"] == size:
            ranks.setdefault(one["rank"], one)
    return [ranks[rank] for rank in sorted(ranks)] if len(ranks) == size else []


def _failed(trial: Trial, folder: Path, code: int, seen: Sequence[Seen], words: Sequence[str]) -> None:
    """Raise what tells why there is nothing to make a row of. Ends this process where a signal ended the command."""
    recorded = sum("step" in record for record in attempt.steps(folder))
    steps = max((max(one["steps"], recorded) for one in seen), default=0)
    asked = trial.protocol.warmup_steps + 1 + trial.protocol.measured_steps + 1  # the next one's begin ends the last
    if trial.protocol.job:
        asked = trial.protocol.warmup_steps + 4  # one whose FLOPs are counted, the probe, one measured, the last
    own_words = of_processes.changed(trial, seen)
    if own_words:
        raise InvalidTrial(own_words)
    for one in seen:
        if one["problem"]:
            raise ScriptError(f"the script could not be watched any further: {one['problem']}")
    for path in folder.glob("problem-*.txt"):
        raise InvalidTrial(f"the script cannot be watched: {path.read_text()}")
    killed = [(int(rank), int(number)) for rank, number in _KILLED.findall(_end(folder))]
    killed = [one for one in killed if one[1] != signal.SIGTERM]  # with which torchrun ends the others
    if code > 0 and killed:
        with (folder / STEPS).open("a") as file:
            file.write(json.dumps({"event": ENDED, "rank": killed[0][0]}) + "\n")
        code = -killed[0][1]
    elif first := next((one for one in seen if "error" in one), None):
        if first["world_size"] > trial.world_size and _FEW_CARDS.search(first["error"]["message"]):
            raise InvalidTrial(
                f"the training has {first['world_size']} ranks, and world_size={trial.world_size} is how many cards it "
                f"is given: give world_size={first['world_size']}"
            )
        raise _gone(first, seen) or _as_raised(first, folder)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        sys.stdout.flush()
        os.kill(os.getpid(), -code)
    if code > 0:
        said = _words(folder)
        if said and _REFUSED.search(said):
            raise InvalidTrial(f"{_name(words)} does not take these options: {said}")
        raise ScriptError(_how(code, folder))
    if not seen:
        raise InvalidTrial(
            f"{_name(words)} ended well, but no Python process of it imported torch where it could be watched "
            "(python -I and -E leave PYTHONPATH out)"
        )
    if steps == 0:
        calls, passes = (max(one[name] for one in seen) for name in ("forwards", "backwards"))
        raise InvalidTrial(
            f"{_name(words)} ended without an optimizer step ({calls} forward and {passes} backward passes were seen): "
            "it must train with a torch.optim.Optimizer"
        )
    raise InvalidTrial(
        f"{_name(words)} ended after {steps} optimizer steps, and protocol={trial.protocol.name} takes {asked}; let "
        "it run longer, or give protocol.warmup_steps= and protocol.measured_steps="
    )


def _gone(first: Seen, seen: Sequence[Seen]) -> ScriptError | None:
    """What to raise where the first error is that of a rank that misses another, which said nothing."""
    silent = [one["rank"] for one in seen if not one["ended"] and one["world_size"] > 1]
    if not silent or not _MISSED.search(first["error"]["message"]):
        return None
    return ScriptError(
        f"rank {silent[0]} ended in the middle of the training without a word (os._exit?), and rank {first['rank']} "
        "missed it"
    )


def _as_raised(one: Mapping[str, Any], folder: Path) -> BaseException:
    """An exception by the type and text of the one that ended a process, with what the row can say all the same."""
    error = one["error"]
    if error.get("phase"):
        with (folder / STEPS).open("a") as file:
            file.write(json.dumps({"phase": error["phase"], "at_step": one["index"] or 0}) + "\n")
    module, _, name = error["type"].rpartition(".")
    kind = type(name, (RuntimeError,), {"__module__": module, "__qualname__": name})
    raised: BaseException = kind(error["message"])
    raised.columns = error.get("columns") or {}  # type: ignore[attr-defined]
    return raised


def _name(words: Sequence[str]) -> str:
    """What to call the command in a sentence."""
    return next((Path(word).name for word in words if word.endswith(".py")), words[0])


def _how(code: int, folder: Path) -> str:
    """How a command ended that did not end well."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    said = _words(folder)
    return f"ended with {how}" + (f"; its last words: {said}" if said else "")


def _end(folder: Path) -> str:
    try:
        return tail(folder / LOGS[1], LOG_KEPT).decode(errors="replace")
    except OSError:
        return ""


def _words(folder: Path) -> str | None:
    """The last line of stderr that says anything: rulers, such as torchrun's, do not."""
    lines = [line.strip() for line in _end(folder).splitlines()]
    return next((line for line in reversed(lines) if re.search(r"\w", line)), None)
