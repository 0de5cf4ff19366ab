"""One attempt's worker, from spec to result: the same code whether it was started cold or forked warm.

It reads `spec.json`, runs the trial (or answers for the many that it names: batch_server.py, largest_server.py,
query_server.py), and writes `result.json` (result_file.py). With several ranks it forks a process for each and waits;
rank 0 writes the result. It imports nothing that a fork server must not have touched.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, cast

from vramsweep.harness.process.worker_files import ENDED, SPEC, STEPS
from vramsweep.harness.rows.outcome import NOT_WRITTEN
from vramsweep.harness.spec import runner_table
from vramsweep.harness.spec import trial as trials
from vramsweep.runners.rank import process_end, rank_launcher, result_file
from vramsweep.runners.rank.entry_modules import import_entries, import_entry


def preload(runner: str) -> None:
    """Import what the runner will need."""
    import_entries(runner_table.preload(runner))


def needs_imports(folder: Path) -> bool:
    """Return whether the attempt in `folder`, which predicts, has to trace; True if that is unknown."""
    from vramsweep.runners.worker import batch_server

    with contextlib.suppress(Exception):
        return batch_server.lacks_traces(folder, json.loads((folder / SPEC).read_text()))
    return True


def main(folder: Path, parent: int) -> int:
    """Run the attempt in `folder`, in a child process (process_end.py); return the exit status."""
    process_end.die_with_parent(parent)
    return process_end.above(lambda own: process_end.run_and_exit(lambda: _run(folder), own))


def _run(folder: Path) -> int:
    process_end.be_first_oom_victim()
    spec = json.loads((folder / SPEC).read_text())
    _pin_cpus(spec.get("cpus"))
    if "trials" in spec:
        from vramsweep.runners.worker import batch_server, largest_server, query_server

        if "axis" in spec:
            return largest_server.main(folder, spec)
        return query_server.main(folder, spec) if "question" in spec else batch_server.main(folder, spec)
    trial = trials.Trial.model_validate(spec["trial"])
    predicted = trial.device.name == "simulated"  # then one rank stands for all
    alone = predicted or trial.world_size == 1 or runner_table.runner(trial.runner.name).starts
    status = _rank(trial, folder) if alone else _ranks(trial, folder)
    return 0 if status == result_file.ENDED_EARLY else status


def _pin_cpus(cpus: list[int] | None) -> None:
    """Restrict this process to these CPUs, if any are named, because others are for other trials."""
    if cpus:
        os.sched_setaffinity(0, cpus)
        if "torch" in sys.modules and "OMP_NUM_THREADS" not in os.environ:  # else torch counts them when it is loaded
            sys.modules["torch"].set_num_threads(len(cpus))


def _ranks(trial: trials.Trial, folder: Path) -> int:
    """Run every rank; one that ends without reporting why is named in the records, where the parent looks for it."""
    ended = rank_launcher.ranks(trial.world_size, lambda rank: _rank(trial, folder))
    if ended.rank is not None and ended.code not in result_file.TOLD:
        with contextlib.suppress(OSError), (folder / STEPS).open("a") as records:
            records.write(json.dumps({"event": ENDED, "rank": ended.rank}) + "\n")
    if ended.code < 0:  # report the rank's signal as our own
        process_end.end_by(-ended.code)
    return ended.code


def _rank(trial: trials.Trial, folder: Path) -> int:
    """Run one rank; return its exit status, NOT_WRITTEN if its result cannot be written.

    The parent classifies a failure by the error in the result; after the measured steps a failure becomes a note.
    """
    try:
        return _run_and_write(trial, folder)
    except OSError:  # the result cannot be written: the disk is full, the folder is gone
        process_end.print_traceback()
        return NOT_WRITTEN


def _run_and_write(trial: trials.Trial, folder: Path) -> int:
    """Run one rank, write its result, error or note, and return its exit status. Raises OSError if it cannot write."""
    try:
        values = _values(trial, folder)
    except result_file.EndedEarly as end:
        process_end.print_traceback()
        result_file.note(folder, str(end))
        return result_file.ENDED_EARLY
    except BaseException as error:  # a target may call sys.exit(text), or raise any BaseException
        process_end.print_traceback()
        answer = process_end.error_result(error)
        if trial.world_size > 1 and "RANK" in os.environ:
            answer["error"]["rank"] = os.environ["RANK"]
        result_file.error(folder, answer)
        return result_file.FAILED
    if values is not None:
        result_file.values(folder, values, complete=True)
    return 0


def _values(trial: trials.Trial, folder: Path) -> dict[str, Any] | None:
    """Train, start a process that trains, or predict; return the columns on rank 0, None on the others."""
    if trial.device.name == "simulated":
        from vramsweep.runners.worker import batch_server

        return batch_server.predict_trial(trial, folder)
    entry = runner_table.runner(trial.runner.name)
    if entry.starts:
        return cast(dict[str, Any], import_entry(entry.module).run(trial, folder))
    from vramsweep.runners.worker import run_rank

    return run_rank.run(trial, folder)


if __name__ == "__main__":
    process_end.exit_now(main(Path(sys.argv[1]), int(sys.argv[2])))
