"""Fit the model of a step's time (harness/hardware/step_time.py) to measured steps, judged on what it did not see.

    python benchmarks/step_times.py [--kernels FOLDER] [--write harness/hardware/step_time.json]

Traces the trials of bound_rows.tsv: measured rows of two GPUs, and whether the GPU or the host bounded each. Each trace
runs in a process of its own, and FOLDER keeps its kernels for the next time. Factors are fitted to rows that the GPU
bounded. The host's seconds a launch are medians of rows that it bounded. Every row is predicted by values fitted
without its model. Published speeds (results/reference/validation/readings.json) are never fitted to.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from vramsweep.harness.files import outputs
from vramsweep.harness.hardware.gpu_lookup import gpu_named
from vramsweep.harness.hardware.roofline import Work, merge_work
from vramsweep.harness.hardware.step_time import Speeds, StepTime, factor_kinds, time_step
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.spec import trial_parser
from vramsweep.runners.predict.predicted_row import host_kind

ROOT = Path(__file__).resolve().parents[1]
ROWS = Path(__file__).with_name("bound_rows.tsv")
# What a factor is without measurements, and how far (as a logarithm) it is expected to be from that.
START = {
    "product half": (1.6, 0.3), "product fp32": (1.6, 0.3), "product tf32": (3.0, 0.5), "product unaligned": (8.0, 0.7),
    "attention forward": (1.4, 0.4), "attention backward": (1.4, 0.4), "stream": (1.3, 0.2),
    "optimizer foreach": (1.25, 0.15), "optimizer fused": (1.25, 0.15), "optimizer 8bit": (8.0, 0.7),
}  # fmt: skip
KERNEL_S = (2.5e-6, 0.5)
HOST_S = {"plain": 28e-6, "checkpointing": 42e-6, "torchao": 62e-6, "sharded": 62e-6}  # without rows
ERROR = 0.05  # of a row that the model describes well
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Timed:
    """A measured step and the kernels of its trace; `weight` makes each model of a GPU count the same."""

    gpu: str
    model: str
    bound_by: str
    tf32: bool
    host: str
    measured_s: float
    kernels: tuple[tuple[Work, int], ...]
    weight: float = 1.0

    @property
    def launches(self) -> int:
        """Return the launches of the step."""
        return sum(work.launches * count for work, count in self.kernels)

    @property
    def kinds(self) -> set[str]:
        """Return the kinds of factors that the step's kernels have."""
        return {name for work, _ in self.kernels for name in factor_kinds(work, self.tf32)}

    def predict(self, speeds: Speeds) -> StepTime:
        """Return the step's time by these speeds."""
        found = time_step(self.kernels, gpu_named(self.gpu), self.tf32, speeds, self.host)
        assert found is not None
        return found


def trace_kernels(row: Row, gpu: str) -> list[tuple[Work, int]]:
    """Trace the trial of a row on this GPU, and return its last step's kernels, each with how often it runs."""
    from vramsweep.runners.predict.make_trace import trace_trial

    device = {**row["trial"]["device"], "name": "simulated", "gpu": gpu}
    trial = trial_parser.parse({**row["trial"], "device": device})
    with tempfile.TemporaryDirectory() as folder:
        trace, _ = trace_trial(trial, trial.device.card, Path(folder))
    return merge_work(trace.kernels)


def read_rows(folder: Path) -> list[Timed]:
    """Return the measured rows, each with the kernels that `folder` has or a trace now finds."""
    named = pd.read_csv(ROWS, sep="\t")
    known: dict[tuple[str, str], Row] = {}
    for gpu in named["gpu"].unique():
        for line in (ROOT / "results/reference" / str(gpu) / "rows.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row["outcome"] == "ok" and row["device"] == "cuda":
                known[str(gpu), row["trial_id"]] = row
    found: list[Timed] = []
    for one in named.itertuples():
        row, file = known[str(one.gpu), str(one.trial_id)], folder / f"{one.gpu}-{one.trial_id}.json"
        if not file.exists():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                traced = pool.apply(trace_kernels, (row, str(one.gpu)))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(traced))
            print(f"traced {len(found) + 1} of {len(named)}: {one.model}", flush=True)
        kernels = tuple((Work(*work), count) for work, count in json.loads(file.read_text()))
        host, step_s = host_kind(trial_parser.parse(row["trial"])), float(str(one.measured_step_s))
        tf32 = row["precision"] == "tf32"
        found.append(Timed(str(one.gpu), str(one.model), str(one.bound_by), tf32, host, step_s, kernels))
    counts = pd.Series([(one.gpu, one.model, one.bound_by) for one in found]).value_counts()
    return [replace(one, weight=float(1 / counts[one.gpu, one.model, one.bound_by])) for one in found]


def fit_speeds(rows: Sequence[Timed], host_of: str | None = None) -> Speeds:
    """Fit speeds to rows (soft L1 of logarithms). `host_of` is the GPU whose machine gives the host's times."""
    names, (start, wide) = [*START], np.array([*START.values(), KERNEL_S]).T
    mine = [one for one in rows if one.bound_by == "gpu"]
    weights = np.sqrt([one.weight for one in mine])

    def off(logs: Array) -> Array:
        speeds = made(np.exp(logs), HOST_S)
        errors = [np.log(one.predict(speeds).gpu_s / one.measured_s) for one in mine]
        return np.concatenate([weights * errors / ERROR, (logs - np.log(start)) / wide])

    def made(values: Array, host: Mapping[str, float]) -> Speeds:
        factors = dict(zip(names, map(float, values[:-1]), strict=True))
        return Speeds("any", "", factors, float(values[-1]), host, {"gpu": 0.0, "host": 0.0})

    fitted = np.exp(least_squares(off, np.log(start), loss="soft_l1").x)
    of_host = [one for one in rows if one.bound_by == "host" and host_of in (None, one.gpu)]
    times = pd.Series([one.measured_s / one.launches for one in of_host], [one.host for one in of_host], float)
    return made(fitted, HOST_S | {str(name): float(one) for name, one in times.groupby(level=0).median().items()})


def predict_left_out(rows: Sequence[Timed], own_host: bool) -> pd.DataFrame:
    """Predict each row by speeds fitted without its model; `own_host`: the host's times are of the row's machine."""
    lines = []
    for model, gpu in sorted({(one.model, one.gpu) for one in rows}):
        speeds = fit_speeds([one for one in rows if one.model != model], gpu if own_host else None)
        for one in rows:
            if (one.model, one.gpu) == (model, gpu):
                found = one.predict(speeds)
                error = found.step_s / one.measured_s - 1
                lines.append({"gpu": gpu, "model": model, "bound_by": one.bound_by, "predicted": found.bound_by,
                              "error": error, "log": -np.log1p(error), "measured_s": one.measured_s,
                              "gpu_s": found.gpu_s, "host_s": found.host_s})  # fmt: skip
    return pd.DataFrame(lines)


def find_spread(errors: pd.DataFrame) -> dict[str, float]:
    """Return half the width of the 95 % interval of log(measured / predicted), by what bounds the prediction."""
    return {str(name): float(mine["log"].abs().quantile(0.95)) for name, mine in errors.groupby("predicted")}


def tabulate(errors: pd.DataFrame) -> pd.DataFrame:
    """Return median, 90th percentile and share within the interval, of all rows and by what bounds them.

    A model's interval is as wide as the errors of the other models are.
    """
    judged = []
    for model, mine in errors.groupby("model"):
        of_gpu, of_host = (np.exp(find_spread(errors[errors["model"].ne(model)])[name]) for name in ("gpu", "host"))
        low = np.maximum(mine["gpu_s"] / of_gpu, mine["host_s"] / of_host)  # as in step_time.time_step
        high = np.maximum(mine["gpu_s"] * of_gpu, mine["host_s"] * of_host)
        judged.append(mine.assign(inside=mine["measured_s"].between(low, high), wide=np.log(high / low) / 2))
    errors = pd.concat(judged)
    lines = []
    for name, mine in [("all", errors), *errors.groupby("bound_by")]:
        size, wide = mine["error"].abs(), mine["wide"]
        covered = mine["inside"].mean()
        lines.append({"rows": f"{name} ({len(mine)})", "median": f"{size.median():.1%}",
                      "90th percentile": f"{size.quantile(0.9):.1%}", "within the interval": f"{covered:.0%}",
                      "median width": f"±{np.expm1(wide).median():.0%}"})  # fmt: skip
    return pd.DataFrame(lines)


def main(arguments: Iterable[str] | None = None) -> int:
    """Print the table of errors, and write the speeds if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=Path, default=ROOT / "out/step_times")
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args(None if arguments is None else list(arguments))
    rows = read_rows(asked.kernels)
    left_out = partial(predict_left_out, rows)
    pooled = left_out(own_host=False)
    print("host's time pooled\n", tabulate(pooled).to_string(index=False))
    print("host's time of the machine\n", tabulate(left_out(own_host=True)).to_string(index=False))
    unseen = [name for name in START if not any(name in one.kinds for one in rows if one.bound_by == "gpu")]
    unseen += sorted(HOST_S.keys() - {one.host for one in rows if one.bound_by == "host"})
    source = f"{len(rows)} measured steps on {len({one.gpu for one in rows})} GPUs"
    source += f"; not measured, but assumed: {', '.join(unseen)}" * bool(unseen)
    speeds = replace(fit_speeds(rows), source=source, spread=find_spread(pooled))
    print(json.dumps(asdict(speeds), indent=1))
    if asked.write is not None:
        outputs.write(asked.write, json.dumps(asdict(speeds), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
