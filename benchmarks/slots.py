"""Measure how much faster eight slots are than one, and how much CPU time the launcher needs for each trial.

    python benchmarks/slots.py [--slots 8] [--trials 48] [--seconds 2]

Trials that sleep stand for training on GPUs: they do not wait for the machine's CPUs, so the remaining time is the cost
of the harness. One fork server serves all slots. It is started before the clock.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = str(ROOT)

from conftest import SETTINGS, tiny  # noqa: E402

from vramsweep.harness.process.attempt import Launcher  # noqa: E402
from vramsweep.harness.sweep import plan, run_trials  # noqa: E402

TARGET = """
import time, torch
def sleeps(trial):
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    def step(batch):
        time.sleep({seconds} / 5)  # with the probe and the step that counts FLOPs
        loss = net(batch).square().mean()
        loss.backward()
        return loss
    return net, optimizer, step, lambda index: torch.ones(4, 8)
"""


def run(folder: Path, trials: int, slots: int, seconds: float, launcher: Launcher) -> tuple[float, float]:
    """Return trials per second, and the launcher's CPU seconds per trial."""
    target = folder / "target.py"
    target.write_text(TARGET.format(seconds=seconds))
    runner = {"name": "custom", "target": f"{target}:sleeps"}
    values: list[dict[str, Any]] = [tiny(runner=runner, seed=n) for n in range(trials)]
    settings = plan.Settings(**(SETTINGS | {"isolation": "warm", "slots": slots}))
    planned = plan.order_trials(plan.expand_trials(values, 1))
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    rows, status = run_trials.run(planned, settings, folder / f"slots-{slots}", launcher=launcher)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    if status:
        raise SystemExit(f"a trial failed: {next(row['reason'] for row in rows.values() if row['reason'])}")
    cpu = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return trials / wall, cpu / trials


def main() -> None:
    """Print the rates, their ratio, and CPU per trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=2.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, Launcher("warm", Path(scratch) / "templates") as launcher:
        folder = Path(scratch)
        run(folder, 1, 2, 0.0, launcher)
        one, cpu_one = run(folder, max(3, asked.trials // asked.slots), 1, asked.seconds, launcher)
        many, cpu_many = run(folder, asked.trials, asked.slots, asked.seconds, launcher)
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    print(f"one slot: {one:.3f} trials/s; {asked.slots} slots: {many:.3f} trials/s, {many / one:.2f} times as many")
    print(f"launcher's CPU per trial: {1000 * cpu_one:.1f} ms, {1000 * cpu_many:.1f} ms with {asked.slots} slots")


if __name__ == "__main__":
    main()
