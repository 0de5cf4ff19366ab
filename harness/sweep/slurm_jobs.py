"""A sweep as jobs of a Slurm cluster, by submitit: each job runs one shard with our own launcher, on its node.

`submit` is for the node that has sbatch. The command was composed there to find mistakes, and `submit` submits an array
of the shards that have something to do. `run_job` is what a job runs: the same words and its shard=. So the device, and
what counts as finished, are decided where the trials run. A job that must end (preempted, or its time nearly over)
flushes its journal, ends its workers and goes back into the queue.
"""

import contextlib
import functools
import io
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from vramsweep.harness.files.bounded_reads import read_content, replaced
from vramsweep.harness.files.sweep_folder import CLUSTER, JOBS, OWN, own_files
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process.interpreter import build_command
from vramsweep.harness.rows import journal
from vramsweep.harness.sweep import plan, resume, row_builder, shards
from vramsweep.harness.sweep.plan import Planned, Settings
from vramsweep.harness.sweep.shards import Shard, Slurm

WARNING_S = 90  # between SIGUSR2 and the end of a job's time; Slurm may be up to a minute early
RunSweep = Callable[[Sequence[str]], int]  # from words to an exit status; a job imports it by its name
ASKED_S = 20.0  # to wait for an answer of Slurm's own commands


def submit(
    planned: Sequence[Planned], settings: Settings, slurm: Slurm, folder: Path, words: Sequence[str], auto: bool,
    sweep: RunSweep,
) -> None:  # fmt: skip
    """Submit a job for each shard that has a trial to do and no job yet; `words` are the command line's.

    A job calls `sweep` with its words, by the name under which it can be imported. With `auto` the jobs' nodes decide
    the device, so the plan made here does not show what is done: all shards are submitted. Raises UserError: no Slurm
    here, sbatch's refusal, jobs of another number of shards.
    """
    if gone := next((name for name in ("sbatch", "srun", "squeue") if shutil.which(name) is None), None):
        raise UserError(f"cluster=slurm: there is no {gone} here; submit on the login node, which has Slurm's commands")
    resume.refuse_links(folder)
    there = in_queue()
    queued = {name: shard for name, shard in submitted_jobs(folder).items() if name in there}
    if other := [name for name, shard in queued.items() if shard.count != settings.shards]:
        raise UserError(
            f"shards={settings.shards}: {_number(other)} in Slurm's queue for this sweep with shards="
            f"{queued[other[0]].count}; wait, or end them with scancel {' '.join(sorted({_array(n) for n in other}))}"
        )
    rows = journal.read(folder)[0] if any(file.exists() for file in journal.files(folder)) else []
    shards.refuse_other_division(folder, Shard(1, settings.shards))
    finished = journal.terminal(rows)
    outdated = row_builder.find_outdated(planned, finished)
    todo = {p.trial_id for p in resume.pending_trials(planned, finished, settings.retry_failed, outdated)}
    every = auto or slurm.every
    own = (Shard(number, settings.shards) for number in range(1, settings.shards + 1))
    wanted = [shard for shard in own if shard not in queued.values()]
    wanted = [shard for shard in wanted if every or any(p.trial_id in todo for p in plan.take_share(planned, shard))]
    trials = f"{len(planned)} trial{'s' * (len(planned) != 1)}"
    trials += ", as composed here; each job chooses its device" if auto else f", {len(todo)} to do"
    if not wanted:
        why = f"{_number(list(queued))} in Slurm's queue" if queued else "all have rows; cluster.every=true submits all"
        print(f"{trials}; nothing to submit: {why} → {folder}")
        return
    names = _submitted(slurm, wanted, [*words, f"name={folder.name}"], folder, _parameters(planned, slurm, auto), sweep)
    print(
        f"{trials}; {len(wanted)} of {settings.shards} shard(s) submitted as {_array(names[0])} → {folder}\n"
        f"`vramsweep status {folder}` shows their progress, `scancel {_array(names[0])}` ends them; "
        f"logs: {own_files(folder) / CLUSTER}"
    )


def _number(jobs: Sequence[str]) -> str:
    return f"{len(jobs)} jobs are" if len(jobs) != 1 else f"job {jobs[0]} is"


def _array(job: str) -> str:
    return job.partition("_")[0]


def _parameters(planned: Sequence[Planned], slurm: Slurm, auto: bool) -> dict[str, object]:
    """Return submitit's parameters: sbatch's options by submitit's names, None for what is left to the cluster."""
    on_cards = [p.trial.world_size for p in planned if p.trial and (auto or p.trial.device.name == "cuda")]
    gpus = max(on_cards, default=0) if slurm.gpus is None else slurm.gpus
    return {
        "job_name": "vramsweep",
        "partition": slurm.partition,
        "account": slurm.account,
        "time": None if slurm.hours is None else math.ceil(slurm.hours * 60),
        "gpus_per_node": gpus or None,
        "cpus_per_task": slurm.cpus,
        "mem": None if slurm.mem_gib is None else f"{math.ceil(slurm.mem_gib * 1024)}M",
        "signal_delay_s": WARNING_S,
        "setup": list(slurm.setup),
        "additional_parameters": {"requeue": True} | dict(slurm.extra or {}),
    }


def _submitted(
    slurm: Slurm, wanted: Sequence[Shard], words: Sequence[str], folder: Path, parameters: Mapping[str, object],
    sweep: RunSweep,
) -> list[str]:  # fmt: skip
    """Submit the shards as one array and return the names of the jobs. Raises UserError."""
    import submitit  # here, because it takes a second: only who submits waits for it

    place = own_files(folder) / CLUSTER
    if place.is_symlink():
        raise UserError(f"{place} is a link, and sweeps do not write through links; choose another results=DIR")
    python = shlex.join(build_command("submitit")[:-2])  # submitit adds `-u -m submitit.core._submit` for start.py
    executor = submitit.SlurmExecutor(folder=place, python=python)
    executor.update_parameters(**parameters)
    lines = [[*words, f"shard={shard.number}/{shard.count}"] for shard in wanted]
    own = [str((own_files(folder) / journal.name(shard.writer)).absolute()) for shard in wanted]
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit repeats sbatch's errors there
            jobs = executor.map_array(functools.partial(run_job, sweep), lines, own)
    except OSError as error:
        raise UserError(f"cannot write {place}: {error.strerror}; choose a writable folder with results=DIR") from None
    except Exception as error:  # of submitit and subprocess, whose texts have many lines
        _tidy(place)
        raise UserError(f"cluster=slurm: {_refusal(error)}") from None
    record = {name: f"{shard.number}/{shard.count}" for name, shard in submitted_jobs(folder).items()}
    record |= {job.job_id: f"{shard.number}/{shard.count}" for job, shard in zip(jobs, wanted, strict=True)}
    with replaced(place / JOBS) as aside:
        aside.write_text(json.dumps({"submitted_at": row_builder.now(), "jobs": record}, indent=1))
    return [job.job_id for job in jobs]


def _refusal(error: Exception) -> str:
    """Return Slurm's own lines of the error that submitit raises when a command fails."""
    lines = [line.strip() for line in f"{error}\n{error.__cause__}".splitlines()]
    own = [line for line in lines if line.startswith("sbatch: error:")]
    said = "; ".join(line.removeprefix("sbatch: error:").strip() for line in own)
    return f"sbatch refused: {said}" if own else next(filter(None, lines), repr(error))


def _tidy(place: Path) -> None:
    """Remove the files written for jobs that do not exist, and the folder if nothing else is in it."""
    for file in (*place.glob("*.pkl"), *place.glob(".submission_file_*.sh")):
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        for one in (place, place.parent, *([place.parent.parent] if place.parent.name == OWN else [])):
            one.rmdir()


def submitted_jobs(folder: Path) -> dict[str, Shard]:
    """Return the jobs that were ever submitted for the sweep in this folder: the shard of each, by the job's name."""
    found: dict[str, Shard] = {}
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, RecursionError):
        for name, text in json.loads(read_content(own_files(folder) / CLUSTER / JOBS))["jobs"].items():
            with contextlib.suppress(UserError):
                found[name] = shards.parse(text)
    return found


def in_queue() -> set[str]:
    """Return the user's jobs that wait or run, an array's by ARRAY_TASK. Raises UserError if Slurm does not answer."""
    return set(_ask_slurm("squeue", "--me", "--noheader", "--array", "--format=%i").split())


def is_waiting(folder: Path) -> bool:
    """Return whether a job of this sweep waits or runs, as far as can be asked from here."""
    jobs = submitted_jobs(folder)
    with contextlib.suppress(UserError):
        return bool(jobs) and not jobs.keys().isdisjoint(in_queue())
    return False


def _ask_slurm(*command: str) -> str:
    """Return the output of one of Slurm's commands. Raises UserError if there is none."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=ASKED_S).stdout
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip().splitlines()[:1] or [f"exit status {error.returncode}"]
        raise UserError(f"Slurm does not answer: {why[0]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"Slurm does not answer: {error}") from None


def run_job(sweep: RunSweep, words: Sequence[str], own: str) -> None:
    """Run the sweep of one shard, whose journal is `own`, in its job. Ends the process with the sweep's status.

    Slurm signals every process of a job. SIGTERM means preemption, a requeue by hand or scancel. SIGUSR2 comes before
    the end of the job's time. Both end the sweep at once, with every finished row kept.
    """
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGUSR2):  # replaces submitit's handlers, which ignore SIGTERM
        signal.signal(number, hear)
    before = _size(own)
    try:
        status = sweep(words)
    except UserError as error:
        print(f"vramsweep: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    for number in (signal.SIGTERM, signal.SIGUSR2):  # the job is ending: further signals are ignored
        signal.signal(number, signal.SIG_IGN)
    if status == 130:
        if signal.SIGUSR2 in heard and _size(own) == before:
            print("not requeued, because the job is too short for one trial; raise cluster.hours", file=sys.stderr)
        else:
            _requeue()
    if status:
        raise SystemExit(status)


def _size(file: str) -> int:
    with contextlib.suppress(OSError):
        return Path(file).stat().st_size
    return 0


def _requeue() -> None:
    """Put this job back into the queue if Slurm has not. A job that Slurm ends, told by scancel or a requeue, is
    COMPLETING by now. One that was only signalled, as at the beginning of a preemption's grace, is still RUNNING."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    try:
        if "RUNNING" in _ask_slurm("squeue", "--noheader", f"--jobs={job}", "--format=%T").split():
            _ask_slurm("scontrol", "requeue", job)
            print(f"job {job} is back in the queue, and will resume from here", file=sys.stderr)
    except UserError as error:
        print(f"{error}; the job is not requeued; run the same command again to resume", file=sys.stderr)
