"""runner=script: a command of the user's own, as it is, in place of a training loop of ours.

The worker starts it as a process below itself, with hook/sitecustomize.py on its PYTHONPATH, waits, and makes one row
of what the processes have left (observer.py). The command may be anything that comes to train with torch: a script,
torchrun, accelerate launch, a shell script. Once the steps are measured, all of it is ended. Not covered: why there is
nothing to make a row of (exit_diagnosis.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import psutil
import pynvml

from vramsweep import version
from vramsweep.harness.machine import machine
from vramsweep.harness.process import worker_environment
from vramsweep.harness.spec import command_template
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.harness.spec.trial_parser import require_unchanged_files
from vramsweep.runners.rank import result_file
from vramsweep.runners.rank.aggregate_ranks import Columns
from vramsweep.runners.scripts import exit_diagnosis
from vramsweep.runners.scripts import observed_row as of_processes
from vramsweep.runners.scripts.hook import sitecustomize as hook
from vramsweep.runners.scripts.observation_files import SEEN, WATCH
from vramsweep.runners.scripts.observed_row import Seen

HOOK = Path(__file__).parent / "hook"
LOOK_S = 0.1  # how often it is looked whether the steps are measured
GRACE_S = 3.0  # that what is left of a command has to end by itself


def run(trial: Trial, folder: Path) -> Columns:
    """Run the trial's command and return the row's columns.

    Raises InvalidTrial where it cannot be measured as it is, ScriptError or what the script itself raised where it
    failed, result_file.EndedEarly where that was after the measured steps. A signal that ends it ends this process too.
    """
    output = (folder / command_template.OUTPUT).resolve()  # a script may go elsewhere, as Hydra's do
    output.mkdir()
    require_unchanged_files(trial)
    (folder / WATCH).write_text(json.dumps(_observer_request(trial)))
    baseline = _used(trial)
    words = command_template.command_words(trial, str(output))
    try:
        process = subprocess.Popen(words, env=environment(folder), stdin=subprocess.DEVNULL)
    except OSError as error:
        raise InvalidTrial(f"{words[0]} cannot be started: {error.strerror}") from None
    code = _ended(process, folder, trial.protocol.job) if trial.runner.stop else process.wait()
    seen = _read(folder)
    trained = _trained(seen)
    if not trained:
        exit_diagnosis.explain(exit_diagnosis.End(trial, folder, words, process.pid, code, seen))
    row = of_processes.columns(trial, trained, command_template.placeholder_names(str(trial.runner.command)))
    more = sum("columns" in one for one in seen) - len(trained)
    if more > 0:
        row["notes"] = [*(row["notes"] or ()), f"{more} more processes trained; this row is of the first training"]
    row |= {"environment": worker_environment.recorded_variables(os.environ), "device_baseline_bytes": baseline}
    if code == 0 and all(one["complete"] for one in trained):
        return row
    result_file.values(folder, row, complete=False)
    problem = next((one["problem"] for one in trained if one["problem"]), None)
    how = "ended before it" if code == 0 else exit_diagnosis.describe_end(code, folder)
    if code == 0 and problem:
        how = f"could not be watched any further: {problem}"
    left = "" if all(one["complete"] for one in trained) else "the step that counts FLOPs is missing: "
    raise result_file.EndedEarly(f"{left}after the measured steps the script {how}")


def _observer_request(trial: Trial) -> dict[str, Any]:
    """What the observer is asked to do."""
    unseen = command_template.unseen_settings(trial)
    return {
        "warmup_steps": trial.protocol.warmup_steps,
        "measured_steps": None if trial.protocol.job else trial.protocol.measured_steps,
        "record": trial.record,
        "stop": trial.runner.stop and not trial.protocol.job,
        "job": trial.protocol.job,
        "precision": None if "precision" in unseen else trial.precision,
        "worker": os.getpid(),
        "variables": {name: os.environ.get(name) for name in worker_environment.ALLOCATOR},
    }


def _ended(process: subprocess.Popen[bytes], folder: Path, job: bool) -> int:
    """Wait until the command has ended, and end it once there is nothing more to see of it; the exit status, then 0.

    What comes after the training, an evaluation or an upload, would take this one for a whole one. A whole `job` goes
    to its end, unless it cannot be watched any further.
    """
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(LOOK_S)
            trained = [] if job else _trained(_read(folder))
            return 0 if trained and all(one["complete"] for one in trained) else code
        if over := _finished_processes(_read(folder), job):
            _end(process, over)
            return 0


def _finished_processes(seen: Sequence[Seen], job: bool) -> set[int]:
    """The processes of a training whose every rank has all its steps, or those of them that it will have; none before.
    Also those that train and will never have any, as the observer broke in them."""
    trained = [] if job else _trained(seen)
    if trained and all(one["complete"] or one["problem"] for one in trained):
        return {one["pid"] for one in trained}
    broken = (one for one in seen if one["problem"] and "columns" not in one and not one["ended"])
    return {one["pid"] for one in broken if exit_diagnosis.worked(one)}


def _end(process: subprocess.Popen[bytes], over: Collection[int]) -> None:
    """End the command from its own process downwards, which so starts nothing more.

    Those that are measured, or cannot be, would only save what nobody needs; the others are asked first.
    """
    left: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        left = [top, *top.children(recursive=True)]
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill() if one.pid in over else one.terminate()
    until = time.monotonic() + GRACE_S
    while left and time.monotonic() < until:
        process.poll()
        left = [one for one in left if _alive(one)]
        time.sleep(0.02)
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _alive(one: psutil.Process) -> bool:
    """A zombie waits for whoever adopted it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(one.is_running() and one.status() != psutil.STATUS_ZOMBIE)
    return False


def environment(folder: Path) -> dict[str, str]:
    """The command's: ours, and what lets the hook find its way."""
    path = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    lent = {str(Path(str(pynvml.__file__)).resolve().parent), str(Path(str(psutil.__file__)).resolve().parents[1])}
    return {
        "HYDRA_FULL_ERROR": "1",  # else it prints a script's exception, and ends it as if there was none
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        hook.ATTEMPT: str(folder.resolve()),
        hook.PACKAGE: str(Path(str(version.__file__)).resolve().parent),
        hook.LENT: os.pathsep.join(sorted(lent)),
    }


def _used(trial: Trial) -> int | None:
    """The most that NVML sees in use on any of the trial's cards, before the command touches them."""
    if trial.device.name != "cuda":
        return None
    seen = (card.memory_used for card in machine.visible_gpus(os.environ)[: trial.world_size])
    return max((used for used in seen if used is not None), default=None)


def _read(folder: Path) -> list[Seen]:
    """What the command's processes have left, in the order in which they ended."""
    every = [json.loads(path.read_text()) for path in folder.glob(SEEN.format("*"))]
    return sorted(every, key=lambda one: float(one["at"]))


def _trained(seen: Sequence[Seen]) -> list[Seen]:
    """The processes of the training that was measured, by rank; none where one of its ranks has not come so far.

    A command may train more than once (a search over settings): the first training that was measured is the row's.
    """
    done = [one for one in seen if "columns" in one]
    if not done:
        return []
    size = done[0]["world_size"]
    ranks = {one["rank"]: one for one in reversed(done) if one["world_size"] == size}  # the first of each rank counts
    return [ranks[rank] for rank in sorted(ranks)] if len(ranks) == size else []
