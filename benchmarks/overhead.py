"""Measure the overhead per trial, cold and warm, next to a plain process per length, and the instruments' cost.

    python benchmarks/overhead.py [--trials 6] [--json FILE]

Everything runs on the CPU with the tiny model, in one run on one machine. So ratios are comparable even if absolute
times are not. A trial's overhead is its wall time minus all its training steps. "plain" is the script that people
write: one interpreter for each length, which imports, builds, trains and prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = str(ROOT)

from conftest import custom, tiny  # noqa: E402

from vramsweep.harness.machine import machine  # noqa: E402
from vramsweep.harness.process import attempt  # noqa: E402
from vramsweep.harness.process.attempt import Launcher  # noqa: E402
from vramsweep.harness.spec import runner_table  # noqa: E402
from vramsweep.harness.sweep import plan  # noqa: E402

PLAIN = """
import sys, time, torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model("qwen2", **{config})
model = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
began = time.perf_counter()
for _ in range({steps}):
    ids = torch.randint(512, ({batch}, {length}))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(time.perf_counter() - began)
"""
PROTOCOL = {"name": "brief", "warmup_steps": 1, "measured_steps": 3}


def plain(lengths: list[int]) -> list[float]:
    """Return the overhead of a plain script in seconds, for each length."""
    found = []
    for length in lengths:
        code = PLAIN.format(config=tiny()["model"]["config"], steps=6, batch=2, length=length)
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        found.append(time.perf_counter() - began - float(done.stdout))
    return found


def overhead(runner: dict[str, Any], precision: str, isolation: str, lengths: list[int]) -> dict[str, float]:
    """Return the median overhead of a trial, and the one-time cost of the fork server, in seconds."""
    values = [tiny(seq_len=n, runner=runner, precision=precision, protocol=PROTOCOL) for n in lengths]
    with tempfile.TemporaryDirectory() as scratch, Launcher(isolation, Path(scratch) / "logs") as launcher:
        found, walls = [], []
        for number, item in enumerate(plan.order_trials(plan.expand_trials(values, 1))):
            environ = attempt.attempt_environment("", "cpu", os.environ)
            assert item.trial is not None
            template = runner_table.fork_server_name(item.trial)
            began = time.perf_counter()
            done = launcher.attempt({"trial": item.resolved}, Path(scratch) / str(number), environ, template, 120)
            walls.append(time.perf_counter() - began)
            result = done.evidence.result or {}
            if "values" not in result:
                raise SystemExit(f"a trial failed: {done.evidence}")
            found.append(done.duration_s - result["values"]["steps_s"])
        return {
            "median_s": statistics.median(found),
            "template_s": max(0.0, walls[0] - found[0]) if isolation == "warm" else 0.0,
        }


def instruments(rounds: int, steps: int, device: str = "cpu") -> dict[str, float]:
    """Compare measured steps of our loop with bare steps: the median ratio of the rounds' medians, and its range.

    Measured and bare steps alternate, because the machine's speed drifts within seconds by more than the difference.
    """
    import torch

    from vramsweep.harness.spec import trial_parser
    from vramsweep.runners.measure.counters import Clock
    from vramsweep.runners.measure.rank_instruments import Gauges
    from vramsweep.runners.measure.step_meter import Meter, meter_spec
    from vramsweep.runners.model import build

    protocol = {"name": "x", "warmup_steps": 1, "measured_steps": rounds * steps}
    trial = trial_parser.parse(tiny(seq_len=128, protocol=protocol, device={"name": device}))
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    net = build.model(trial, place)
    optimizer = build.optimizer(trial, net.parameters(), place)
    data = build.data(trial)

    def step(index: int) -> torch.Tensor:
        batch = {k: v.to(place, non_blocking=True) for k, v in data.batch(index, trial.micro_batch).items()}
        loss: torch.Tensor = net(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    clock = Clock(place)
    with tempfile.TemporaryDirectory() as scratch:
        meter = Meter(meter_spec(trial), Path(scratch), Gauges(place), 0)
        meter.built(dict)
        for index in range(trial.steps()):
            timed = meter.step() is meter.measured
            if timed:
                clock.mark()
            meter.step_begin()
            meter.step_end(step(index))
            if timed:
                clock.mark()
                step(index)
                clock.mark()
    times = clock.times()
    ours, bare = times[::3], times[1::3]  # the third interval lies between two pairs
    parts = [slice(at, at + steps) for at in range(0, rounds * steps, steps)]
    ratios = [statistics.median(ours[part]) / statistics.median(bare[part]) for part in parts]
    return {
        "bare_step_ms": 1000 * statistics.median(bare),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def parent_cpu() -> float:
    """Return the parent's CPU time divided by wall time, while a worker measures for about six seconds."""
    with tempfile.TemporaryDirectory() as scratch, Launcher("warm", Path(scratch) / "logs") as launcher:
        os.environ["SLEEPY_LOG"] = str(Path(scratch) / "clock")
        protocol = {"name": "x", "warmup_steps": 1, "measured_steps": 200}
        items = plan.order_trials(plan.expand_trials([custom("good"), custom("sleepy", protocol=protocol)], 1))
        items.sort(key=lambda p: p.trial.steps() if p.trial else 0)
        environ = attempt.attempt_environment("", "cpu", os.environ)
        launcher.attempt({"trial": items[0].resolved}, Path(scratch) / "first", environ, "custom", 120)
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        launcher.attempt({"trial": items[1].resolved}, Path(scratch) / "second", environ, "custom", 120)
        wall = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_SELF)
        return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lengths = [32 * (n + 1) for n in range(arguments.trials)]
    runners: dict[str, tuple[dict[str, Any], str]] = {
        "torch": ({"name": "torch"}, "fp32"),
        "trainer": ({"name": "trainer"}, "fp32"),
        "deepspeed": ({"name": "deepspeed", "zero_stage": 2, "options": SMALL_BUCKETS}, "bf16"),
    }
    report: dict[str, Any] = {
        "machine": {"cpu": machine.cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: machine.version(name) for name in ("torch", "transformers", "deepspeed")},
        "trials": arguments.trials,
        "plain_script_overhead_s": statistics.median(plain(lengths)),
        "overhead": {},
    }
    for name, (runner, precision) in runners.items():
        cold = overhead(runner, precision, "cold", lengths)
        warm = overhead(runner, precision, "warm", lengths)
        report["overhead"][name] = {
            "cold_s": cold["median_s"],
            "warm_s": warm["median_s"],
            "template_once_s": warm["template_s"],
            "warm_over_cold": warm["median_s"] / cold["median_s"],
        }
    report["instruments"] = instruments(rounds=15, steps=40)
    report["parent_cpu_share"] = parent_cpu()
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


SMALL_BUCKETS = {"zero_optimization": {"reduce_bucket_size": 1 << 20, "allgather_bucket_size": 1 << 20}}

if __name__ == "__main__":
    main()
