"""One attempt's worker, from spec to result: the same code whether it was started cold or forked warm.

Read `spec.json`, run the trial (or predict the many that it names: many.py), write `result.json` (result.py). With
several ranks the worker forks them, each its own process, and waits; rank 0 writes the result. Nothing is imported
here that a template must not have touched.
"""

from __future__ import annotations

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
from vramsweep.runners import agent, result

PR_SET_PDEATHSIG = 1


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


def leave(status: int) -> NoReturn:
    """End without interpreter teardown, where DeepSpeed and NCCL now and then abort after the work is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main(folder: Path, parent: int) -> int:
    """Run the attempt in `folder`; returns the exit status."""
    die_with(parent)
    spec = json.loads((folder / SPEC).read_text())
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


def _ranks(trial: trials.Trial, folder: Path) -> int:
    """Run every rank; one that ends without saying why is named in the records, where the parent looks for it."""
    ended = agent.ranks(trial.world_size, lambda rank: _rank(trial, folder))
    if ended.rank is not None and ended.code not in result.TOLD:
        with (folder / STEPS).open("a") as records:
            records.write(json.dumps({"event": ENDED, "rank": ended.rank}) + "\n")
    if ended.code < 0:  # report the rank's signal as our own
        own_end = -ended.code
        signal.signal(own_end, signal.SIG_DFL) if own_end not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), own_end)
    return ended.code


def _rank(trial: trials.Trial, folder: Path) -> int:
    """Run one rank. A failure becomes an error in the result, for the parent to classify; after the measured steps it
    becomes a note."""
    try:
        values = _values(trial, folder)
    except result.EndedEarly as end:
        traceback.print_exc()
        result.note(folder, str(end))
        return result.ENDED_EARLY
    except BaseException as error:  # a target may call sys.exit(text), or raise what is no Exception
        traceback.print_exc()
        answer = told(error)
        if trial.world_size > 1 and "RANK" in os.environ:
            answer["error"]["rank"] = os.environ["RANK"]
        result.error(folder, answer)
        return result.FAILED
    if values is not None:
        result.values(folder, values, complete=True)
    return 0


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
    return {"error": {"type": f"{kind.__module__}.{kind.__qualname__}", "message": str(error)}} | values


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), int(sys.argv[2])))
