"""Launchers that start nothing: their answers are said beforehand, by GPU or by the size of the trial. And a sweep with
a launcher that no other test uses."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from conftest import SETTINGS

from vramsweep.harness.machine import machine
from vramsweep.harness.machine.gpu_readiness import Occupancy
from vramsweep.harness.process.attempt import AttemptResult
from vramsweep.harness.rows.outcome import Evidence
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.sweep import plan, run_trials

CARDS = [machine.Gpu(n, "NVIDIA H100", f"GPU-{n}", "1", 80 << 30, 0, (), (9, 0)) for n in range(8)]
FINE = Evidence(exit_code=0, result={"values": {}})


def error(kind: str, message: str, **values: Any) -> Evidence:
    """Return the evidence of a worker that ended with this error and these values."""
    return Evidence(exit_code=1, result={"error": {"type": kind, "message": message}, "values": values})


OOM = error("torch.OutOfMemoryError", "CUDA out of memory")


class Still:
    """A launcher that starts nothing: `answer` says what becomes of an attempt. Made as the real one is, or by hand."""

    run, threads = "a stand-in", ThreadPoolExecutor()

    def __init__(self, isolation: str = "warm", logs: Path | None = None) -> None:
        self.isolation, self.occupancy, self.cold_reasons = isolation, Occupancy(), dict[str, str]()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""

    def own_pids(self) -> set[int]:
        return {os.getpid()}

    def attempt(
        self, spec: Any, folder: Path, environ: Any, runner: str, deadline_s: float, look: Any = None
    ) -> AttemptResult:
        return AttemptResult(self.answer(spec, folder, environ, look), 1.0, "warm")

    def answer(self, spec: Any, folder: Path, environ: Any, look: Any) -> Evidence:
        raise NotImplementedError


class StandIn(Still):
    """Its workers answer by the card that they are on, after a time; both are given by uuid, or faults by seed."""

    def __init__(self, faults: dict[str, Evidence], slow_s: float) -> None:
        super().__init__()
        self.faults, self.slow_s = faults, slow_s

    def answer(self, spec: Any, folder: Path, environ: Any, look: Any) -> Evidence:
        fault = self.faults.get(environ["CUDA_VISIBLE_DEVICES"]) or self.faults.get(spec["trial"]["seed"])
        time.sleep(0 if fault else self.slow_s)
        return fault or FINE


class Fake(Still):
    """A product of length and batch that is larger than `room` is too much for it; it keeps a list."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.tried = room, list[tuple[int, int]]()

    def answer(self, spec: Any, folder: Path, environ: Any, look: Any) -> Evidence:
        point = spec["trial"]["seq_len"], spec["trial"]["micro_batch"]
        self.tried.append(point)
        return OOM if point[0] * point[1] > self.room else FINE


def swept(launcher: Any, folder: Path, *values: dict[str, Any], **settings: Any) -> list[Row]:
    """A sweep with this launcher, or with one of its own where it is None: the terminal rows in the trials' order."""
    chosen = plan.Settings(**(SETTINGS | {"isolation": "warm"} | settings))
    expanded = plan.expand_trials(values, chosen.repeats)
    rows, _ = run_trials.run(plan.order_trials(expanded), chosen, folder, launcher=launcher)
    return [rows[p.trial_id] for trials in expanded for p in trials]
