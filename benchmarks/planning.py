"""Measure how long it takes to plan grids of 10,000 trials, and to find that all of them are finished.

    python benchmarks/planning.py [--lengths 1250]

Each of two grids has a journal with a row for every trial; the functions that write rows make it, and nothing runs.
"lengths" has many lengths, each with eight combinations of plain values and a group. "groups" has about a twelfth of
these lengths, each with a hundred combinations of config groups, which Hydra composes. Prints one JSON object: for each
grid the seconds of each part in this process, and wall and CPU time of a `sweep` process that finds nothing to do.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vramsweep.harness.config import compose
from vramsweep.harness.rows import journal
from vramsweep.harness.sweep import plan, resume, row_builder
from vramsweep.harness.sweep.plan import Planned

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, default=1250, help="number of lengths of the first grid")
    lengths = parser.parse_args().lengths
    grids = {
        "lengths": [f"seq_len=range(1,{lengths + 1})", "micro_batch=1,2,4,8", "precision=fp32,bf16", "model=tiny",
                    "device=cpu"],
        "groups": [f"seq_len=range(1,{lengths * 8 // 100 + 1})", "model=tiny,gpt2,qwen0.5b,phi-2,llama2-7b",
                   "allocator=default,expandable,gc,roundup,max_split_128", "precision=bf16,fp32",
                   "protocol=quick,brief", "device=simulated"],
    }  # fmt: skip
    report: dict[str, Any] = {name: measured(words) for name, words in grids.items()}
    print(json.dumps(report | {"cores": os.cpu_count(), "python": platform.python_version()}, indent=1))


def measured(grid: list[str]) -> dict[str, float]:
    """Return the seconds of each part of a sweep that is already finished, and of the whole as a process."""
    with tempfile.TemporaryDirectory() as results:
        words = ["-m", *grid, f"results={results}", "report=false"]
        seconds: dict[str, float] = {}
        with (
            timed(seconds, plan, "settings"),
            timed(seconds, plan, "expand_trials"),
            timed(seconds, plan, "order_trials"),
        ):
            whole, asked = clocked(lambda: compose.resolve(words))
        composed = whole - seconds.pop("settings") - sum(seconds.values())
        planned, settings, folder = asked.trials, asked.settings, asked.folder
        assert settings is not None
        with journal.Journal(folder) as own:
            own.extend(row(item, folder.name) for item in planned)
        read, (rows, unreadable) = clocked(lambda: journal.read(folder))
        skip, left = clocked(
            lambda: resume.pending_trials(
                planned, resume.rows_for_system(rows, row_builder.systems_here(planned), False)[0], False
            )
        )
        write, _ = clocked(lambda: resume.write_plan(folder, planned, settings, "a run", set(), words))
        assert (len(rows), unreadable, left) == (len(planned), 0, [])
        command = [sys.executable, "-m", "vramsweep", "sweep", *words]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall, done = clocked(lambda: subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert ", 0 to do" in done.stdout, done.stdout
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "trials": len(planned),
        "compose_s": composed,
        "check_and_name_s": seconds["expand_trials"],
        "order_s": seconds["order_trials"],
        "read_journal_s": read,
        "skip_s": skip,
        "write_plan_s": write,
        "process_wall_s": wall,
        "process_cpu_s": cpu,
    }


def row(item: Planned, sweep_name: str) -> dict[str, Any]:
    """Return the row of a trial as if it had been measured."""
    ran = {"sweep": sweep_name, "isolation": "warm", "outcome": "ok", "terminal": True, "duration_s": 2.0}
    return row_builder.initial_columns(item) | row_builder.started_columns(1) | ran


@contextlib.contextmanager
def timed(seconds: dict[str, float], module: Any, name: str) -> Any:
    """Add up, within the block, the seconds that a module's function takes, in `seconds` under its name."""
    own = getattr(module, name)

    def watched(*arguments: Any) -> Any:
        took, answer = clocked(lambda: own(*arguments))
        seconds[name] = seconds.get(name, 0.0) + took
        return answer

    setattr(module, name, watched)
    try:
        yield
    finally:
        setattr(module, name, own)


def clocked(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call takes, and its result; hide what it prints."""
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        answer = call()
    return time.perf_counter() - began, answer


if __name__ == "__main__":
    main()
