"""Profile a measured trial's step: the time of kernels on the GPU, next to that of the host that launches them.

    python benchmarks/profiled_steps.py OUT.json ROWS.jsonl TRIAL_ID [TRIAL_ID ...]

For each trial of a journal (of the plain loop, on one GPU) we time bare steps without a profiler, then three steps
under torch.profiler. The GPU's busy time is the union of its kernels' and copies' times. We write that time, the number
of launches, and the longest kinds of kernel. A step that is much longer than the busy time waits for the host. The
profiler makes the host slower; times on the GPU come from its own clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vramsweep.harness.spec import trial as trials  # noqa: E402
from vramsweep.runners.model import build  # noqa: E402

WARMUP, TIMED, PROFILED = 5, 10, 3


def main() -> None:
    """Profile each trial and write OUT.json; record a failure there, and go on with the next trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("trials", nargs="+", metavar="TRIAL_ID")
    arguments = parser.parse_args()
    rows = {row["trial_id"]: row for row in map(json.loads, arguments.rows.read_text().splitlines())}
    found: dict[str, Any] = {}
    for name in arguments.trials:
        try:
            found[name] = profiled(trials.Trial.model_validate(rows[name]["trial"]))
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        torch.cuda.empty_cache()
    print(json.dumps({name: {k: v for k, v in one.items() if k != "kernels"} for name, one in found.items()}))


def profiled(trial: trials.Trial) -> dict[str, Any]:
    """Return the seconds of a step with and without the profiler, and what the GPU did in it."""
    device = torch.device("cuda", 0)
    step = stepper(trial, device)
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(TIMED):
        began = time.perf_counter()
        step()
        issued = time.perf_counter() - began
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began, issued))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        began = time.perf_counter()
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - began) / PROFILED
    events = [e for e in recorded.events() or [] if e.device_type == DeviceType.CUDA]
    spans = [(e.time_range.start, e.time_range.end) for e in events]
    kinds: Counter[str] = Counter()
    for event in events:
        kinds[event.name[:100]] += event.time_range.end - event.time_range.start
    return {
        "step_s": statistics.median(one[0] for one in times),
        "issued_s": statistics.median(one[1] for one in times),  # until the host had launched everything
        "profiled_step_s": wall,
        "card_busy_s": busy(spans) / 1e6 / PROFILED,
        "launches": len(events) / PROFILED,
        "kernels": {name: us / 1e6 / PROFILED for name, us in kinds.most_common(12)},
    }


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the spans, in their unit."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def stepper(trial: trials.Trial, device: torch.device) -> Callable[[], None]:
    """Build the trial's model; return a function that runs one step of the plain loop, without instruments."""
    build.prepare(trial)
    net = build.model(trial, device)
    optimizer = build.optimizer(trial, net.parameters(), device)
    data = build.data(trial)
    batch = {key: value.to(device) for key, value in data.batch(0, trial.micro_batch).items()}

    def step() -> None:
        with build.autocast(trial, device):
            loss = net(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    main()
