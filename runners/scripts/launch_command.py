"""runner=script: a user's own command, run as it is, in place of one of our training loops.

The worker starts the command as a child process with hook/sitecustomize.py on its PYTHONPATH, and waits. It makes one
row of the processes' reports (observer.py), or exit_diagnosis.py finds why there is none. The command may be anything
that trains with torch: a script, torchrun, accelerate launch, a shell script. It is ended once the steps are measured.
"""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import psutil

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
LOOK_S = 0.1  # seconds between checks whether the steps are measured
GRACE_S = 3.0  # seconds that a command's remaining processes have to end of themselves


def run(trial: Trial, folder: Path) -> Columns:
    """Run the trial's command and return the row's columns.

    Raises InvalidTrial if it cannot be measured as it is. If it fails, raises ScriptError or the script's own error;
    after the measured steps, result_file.EndedEarly. A signal that ends the command ends this process too.
    """
    output = (folder / command_template.OUTPUT).resolve()  # a script may change its working directory, as Hydra's do
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
        row["notes"] = [*(row["notes"] or ()), f"{more} more processes trained; this row describes the first training"]
    row |= {"environment": worker_environment.recorded_variables(os.environ), "device_baseline_bytes": baseline}
    if code == 0 and all(one["complete"] for one in trained):
        return row
    result_file.values(folder, row, complete=False)
    problem = next((one["problem"] for one in trained if one["problem"]), None)
    how = "ended" if code == 0 else exit_diagnosis.describe_end(code, folder)
    if code == 0 and problem:
        how = f"could not be watched any further: {problem}"
    left = "" if all(one["complete"] for one in trained) else "the step that counts FLOPs is missing, because "
    raise result_file.EndedEarly(f"{left}after the measured steps the script {how}")


def _observer_request(trial: Trial) -> dict[str, Any]:
    """Return the request to the observer."""
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
    """Wait for the command, or end it once nothing more can be measured. Return its exit status; 0 if all was measured
    or it was ended here.

    Later parts, an evaluation or an upload, would take this training for a whole one. A whole `job` runs to its end,
    unless it cannot be watched any further.
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
    """Return the process ids of a training all of whose ranks have measured all they will; none before. Otherwise
    return those of training processes that will never measure, because the observer broke in them."""
    trained = [] if job else _trained(seen)
    if trained and all(one["complete"] or one["problem"] for one in trained):
        return {one["pid"] for one in trained}
    broken = (one for one in seen if one["problem"] and "columns" not in one and not one["ended"])
    return {one["pid"] for one in broken if exit_diagnosis.worked(one)}


def _end(process: subprocess.Popen[bytes], over: Collection[int]) -> None:
    """End the command from its own process downwards, so that it starts nothing more.

    Processes in `over` are killed at once, because they would only save what nobody needs. Others get SIGTERM first.
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
        known = psutil.process_iter(["status"])  # a zombie may wait for ever for the process that adopted it
        left = [*{one for one in known if one.info["status"] != psutil.STATUS_ZOMBIE}.intersection(left)]
        time.sleep(0.02)
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def environment(folder: Path) -> dict[str, str]:
    """Return the command's environment variables: ours, and those that the hook needs."""
    path = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    lent = {str(Path(str(psutil.__file__)).resolve().parents[1])}
    if machine.pynvml is not None:  # else the command's GPU memory is measured without NVML
        lent.add(str(Path(str(machine.pynvml.__file__)).resolve().parent))
    return {
        "HYDRA_FULL_ERROR": "1",  # else Hydra prints a script's exception, and ends as if there was none
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        hook.ATTEMPT: str(folder.resolve()),
        hook.PACKAGE: str(Path(str(version.__file__)).resolve().parent),
        hook.LENT: os.pathsep.join(sorted(lent)),
    }


def _used(trial: Trial) -> int | None:
    """Return the largest memory in use on the trial's GPUs by NVML, before the command uses them; bytes, or None."""
    if trial.device.name != "cuda":
        return None
    seen = (card.memory_used for card in machine.visible_gpus(os.environ)[: trial.world_size])
    return max((used for used in seen if used is not None), default=None)


def _read(folder: Path) -> list[Seen]:
    """Return the reports of the command's processes, in the order of their last writing."""
    every = [json.loads(path.read_text()) for path in folder.glob(SEEN.format("*"))]
    return sorted(every, key=lambda one: float(one["at"]))


def _trained(seen: Sequence[Seen]) -> list[Seen]:
    """Return the reports of the measured training's processes, by rank; empty while some rank has not measured.

    A command may train more than once (a search over settings); the row is of the first measured training.
    """
    done = [one for one in seen if "columns" in one]
    if not done:
        return []
    size = done[0]["world_size"]
    ranks = {one["rank"]: one for one in reversed(done) if one["world_size"] == size}  # the first of each rank counts
    return [ranks[rank] for rank in sorted(ranks)] if len(ranks) == size else []
