"""Time published runs by the model of today, without predicting their memory again.

    python benchmarks/published_times.py [--kernels FOLDER] [--readings FILE] [--only-traced]

Traces every run of benchmarks/published that has a reading of speed, each in a process of its own, and writes
`calibrated_step_s` with its interval into the readings (validate.py writes the same, in hours). FOLDER keeps the
kernels, so another model of a step's time is judged in seconds. `--only-traced` traces nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import reference_runs
from validation import SPEED, errors, of_speed

from vramsweep.harness.files import outputs
from vramsweep.harness.hardware.gpu_lookup import gpu_named
from vramsweep.harness.hardware.roofline import Work, merge_work
from vramsweep.harness.hardware.step_time import StepTime, pooled, time_step
from vramsweep.harness.spec import trial_parser
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.spec.trial_identity import SIMULATION
from vramsweep.runners.predict.predicted_row import host_kind

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "benchmarks" / "published"
COLUMNS = {"calibrated_step_s": "step_s", "calibrated_step_low_s": "low_s", "calibrated_step_high_s": "high_s"}


def trace_kernels(task: tuple[str, Path]) -> str:
    """Trace a trial, given as JSON, and write its last step's kernels to the file; return what went wrong, or ""."""
    text, file = task
    from vramsweep.runners.predict.make_trace import trace_trial

    trial = trial_parser.parse(json.loads(text))
    try:
        with tempfile.TemporaryDirectory() as folder:
            trace, _ = trace_trial(trial, trial.device.card, Path(folder))
    except Exception as error:  # one run must not end all others
        return f"{file.stem}: {error!r}"
    outputs.write(file, json.dumps(merge_work(trace.kernels)))
    return ""


def planned_trials(readings: Iterable[dict[str, Any]]) -> dict[str, Trial]:
    """Return the trials of these readings, by the id that the readings have, in the order of the files."""
    wanted = {(Path(one["place"]).name, one["run"]): str(one["trial_id"]) for one in readings}
    runs, _ = reference_runs.read(sorted(PUBLISHED.glob("*.yaml")))
    asked, _ = reference_runs.resolve([run for run in runs if (Path(run.place).name, run.name) in wanted], [])
    return {
        wanted[Path(one.run.place).name, one.run.name]: one.item.trial
        for one in asked
        if one.item is not None and one.item.trial is not None
    }


def time_run(trial: Trial, reading: dict[str, Any], file: Path) -> StepTime | None:
    """Return the time of a run's step, by its kernels in the file and the reading's communication."""
    kernels = [(Work(*work), count) for work, count in json.loads(file.read_text())]
    sent = reading["estimated_communication_s"] or 0.0
    return time_step(kernels, gpu_named(reading["gpu"]), trial.precision == "tf32", pooled(), host_kind(trial), sent)


def main(arguments: Iterable[str] | None = None) -> int:
    """Trace what is not traced yet, write the times into the readings, and print their errors by source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=Path, default=ROOT / "out/published_times")
    parser.add_argument("--readings", type=Path, default=ROOT / "results/reference/validation/readings.json")
    parser.add_argument("--only-traced", action="store_true")
    asked = parser.parse_args(None if arguments is None else list(arguments))
    record = json.loads(asked.readings.read_text())
    speeds = [one for one in record["readings"] if one["quantity"] in SPEED and one["predicted"] and one["measured"]]
    trials = planned_trials(speeds)
    asked.kernels.mkdir(parents=True, exist_ok=True)
    files = {name: asked.kernels / f"{name}.json" for name in trials}
    tasks = [(trials[name].model_dump_json(), file) for name, file in files.items() if not file.exists()]
    if tasks and not asked.only_traced:
        with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
            for number, wrong in enumerate(pool.imap_unordered(trace_kernels, tasks), 1):
                print(f"traced {number} of {len(tasks)}: {wrong or 'ok'}", flush=True)
    record["made"]["times_simulation"] = str(SIMULATION)
    for one in speeds:  # those without kernels keep the times that they have
        file = files.get(one["trial_id"])
        if file is not None and file.exists() and (found := time_run(trials[one["trial_id"]], one, file)) is not None:
            one |= {column: getattr(found, name) for column, name in COLUMNS.items()}
    outputs.write(asked.readings, json.dumps(record, indent=1))
    print(of_speed(errors(pd.DataFrame(record["readings"]))).to_string(index=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
