"""One attempt's worker, from spec to result: the same code whether it was started cold or forked warm.

Read `spec.json`, run the trial (or predict the many that it names: many.py), write `result.json` (result.py). With
several ranks the worker forks them, each its own process, and waits; rank 0 writes the result. Nothing is imported
here that a template must not have touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from vramsweep.harness import registry
from vramsweep.harness import trial as trials
from vramsweep.harness.attempt import ENDED, SPEC, STEPS
from vramsweep.harness.outcome import NOT_WRITTEN
from vramsweep.runners import agent, init, result

PR_SET_PDEATHSIG = 1
FAILED_TO_START = 1


def preload(runner: str) -> None:
    """Import what the runner will need; a module that this installation lacks is left to the trial to miss."""
    for name in registry.preload(runner):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            print(f"not preloaded: {error}", file=sys.stderr)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; end at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def go_first() -> None:
    """Let the kernel's out-of-memory killer take this process, and what it starts, before all others."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def leave(status: int) -> NoReturn:
    """End without interpreter teardown, where DeepSpeed and NCCL now and then abort after the work is done."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, or a stream that the trial has closed
            stream.flush()
    os._exit(status)


def main(folder: Path, parent: int) -> int:
    """Run the attempt in `folder`, in a process below this one (init.py); returns the exit status."""
    die_with(parent)
    return init.above(lambda own: _end(folder, own))


def _end(folder: Path, parent: int) -> NoReturn:
    status = FAILED_TO_START
    try:
        status = _run(folder, parent)
    except BaseException:
        _print_traceback()
    finally:
        leave(status)


def _run(folder: Path, parent: int) -> int:
    die_with(parent)
    go_first()
    spec = json.loads((folder / SPEC).read_text())
    _keep_to(spec.get("cpus"))
    if "trials" in spec:
        import torch

        from vramsweep.runners import largest, many

        torch.set_num_threads(1)  # OpenMP's are not there in the processes that this one forks, but waited for
        return largest.main(folder, spec) if "axis" in spec else many.main(folder, spec)
    trial = trials.Trial.model_validate(spec["trial"])
    predicted = trial.device.name == "simulated"  # of which one rank stands for the many
    alone = predicted or trial.world_size == 1 or registry.runner(trial.runner.name).starts
    status = _rank(trial, folder) if alone else _ranks(trial, folder)
    return 0 if status == result.ENDED_EARLY else status


def _keep_to(cpus: list[int] | None) -> None:
    """Run on these CPUs alone, where others are for other trials."""
    if cpus:
        os.sched_setaffinity(0, cpus)
        if "torch" in sys.modules and "OMP_NUM_THREADS" not in os.environ:  # else it counts them as it is loaded
            sys.modules["torch"].set_num_threads(len(cpus))


def _ranks(trial: trials.Trial, folder: Path) -> int:
    """Run every rank; one that ends without saying why is named in the records, where the parent looks for it."""
    ended = agent.ranks(trial.world_size, lambda rank: _rank(trial, folder))
    if ended.rank is not None and ended.code not in result.TOLD:
        with contextlib.suppress(OSError), (folder / STEPS).open("a") as records:
            records.write(json.dumps({"event": ENDED, "rank": ended.rank}) + "\n")
    if ended.code < 0:  # report the rank's signal as our own
        init.end_by(-ended.code)
    return ended.code


def _rank(trial: trials.Trial, folder: Path) -> int:
    """Run one rank. A failure becomes an error in the result, for the parent to classify; after the measured steps it
    becomes a note."""
    try:
        return _told(trial, folder)
    except OSError:  # of writing what it has to tell: the disk is full, the folder is gone
        _print_traceback()
        return NOT_WRITTEN


def _told(trial: trials.Trial, folder: Path) -> int:
    """The same. Raises OSError where the result cannot be written."""
    try:
        values = _values(trial, folder)
    except result.EndedEarly as end:
        _print_traceback()
        result.note(folder, str(end))
        return result.ENDED_EARLY
    except BaseException as error:  # a target may call sys.exit(text), or raise what is no Exception
        _print_traceback()
        answer = told(error)
        if trial.world_size > 1 and "RANK" in os.environ:
            answer["error"]["rank"] = os.environ["RANK"]
        result.error(folder, answer)
        return result.FAILED
    if values is not None:
        result.values(folder, values, complete=True)
    return 0


def _print_traceback() -> None:
    """To the log, for whoever wants to know more; the disk may be full, or the trial have closed the stream."""
    with contextlib.suppress(OSError, ValueError):
        traceback.print_exc()


def _values(trial: trials.Trial, folder: Path) -> dict[str, Any] | None:
    """Train, or let train; the columns, on rank 0."""
    entry = registry.runner(trial.runner.name)
    if entry.starts and trial.device.name != "simulated":
        found: dict[str, Any] = importlib.import_module(entry.module).run(trial, folder)
        return found
    from vramsweep.runners import run

    return run.run(trial, folder)


def told(error: BaseException) -> dict[str, Any]:
    """A result that tells of an error, with the columns that the row can say all the same."""
    kind = type(error)
    known = getattr(error, "columns", None)
    values = {"values": known} if isinstance(known, dict) else {}
    pinning = any(frame.name == "pin_memory" for frame in traceback.extract_tb(error.__traceback__))
    said = f"pin_memory: {error}" if pinning else str(error)  # CUDA says the same of the host's memory as of a card's
    memory = {"card_memory": known} if (known := getattr(error, "card_memory", None)) is not None else {}
    return {"error": {"type": f"{kind.__module__}.{kind.__qualname__}", "message": said} | memory} | values


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), int(sys.argv[2])))
