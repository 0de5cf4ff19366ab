"""Profile a measured trial's step: the time of kernels on the GPU, next to that of the host that launches them.

    python benchmarks/profiled_steps.py OUT.json ROWS.jsonl TRIAL_ID [TRIAL_ID ...] [--device cpu] [--seconds 300]

For each trial of a journal (of the plain loop, on one GPU), a process of its own times bare steps without a profiler,
then runs three steps under torch.profiler. A process needs to be fresh, because a profiler that has run once slows down
later steps. The GPU's busy time is the union of its kernels', copies' and fills' times. A step that is much longer than
the busy time waits for the host. The profiler makes the host slower; times on the GPU come from its own clock.

With --device cpu this is a rehearsal for rows of the tiny model: it shows that profiles are made, and nothing about a
GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vramsweep.harness.spec import trial as trials  # noqa: E402
from vramsweep.runners.model import build  # noqa: E402

WARMUP, TIMED, PROFILED = 5, 10, 3
# Categories of a Chrome trace, as torch names them: https://github.com/pytorch/kineto, ActivityType.cpp.
ON_GPU = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "fills"}
CALLS = ("cuda_runtime", "cuda_driver")
LAUNCH = re.compile(r"cudaLaunch(Cooperative)?Kernel|cuLaunch(Cooperative)?Kernel|cudaGraphLaunch|cuGraphLaunch")
NO_GPU = "no event of a GPU: this profile shows neither its busy time nor its kernels"


def main() -> None:
    """Profile each trial in a process of its own and write OUT.json; record a failure there and continue."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("trials", nargs="+", metavar="TRIAL_ID")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=3600, help="when they are over, the other trials are left out")
    parser.add_argument("--here", action="store_true", help="profile the one trial in this process")
    arguments = parser.parse_args()
    if arguments.here:
        rows = {row["trial_id"]: row for row in map(json.loads, arguments.rows.read_text().splitlines())}
        trial = trials.Trial.model_validate(rows[arguments.trials[0]]["trial"])
        arguments.out.write_text(json.dumps(profiled(trial, torch.device(arguments.device))))
        return
    ends, found = time.monotonic() + arguments.seconds, {}
    for name in arguments.trials:
        found[name] = profiled_apart(arguments.rows, name, arguments.device, ends - time.monotonic())
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: {k: v for k, v in one.items() if k != "longest_s"} for name, one in found.items()}))


def profiled_apart(rows: Path, name: str, device: str, seconds: float) -> dict[str, Any]:
    """Return the profile of one trial, made in a process of its own; {"failed": reason} if it fails in the time."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "profile.json"
        words = [sys.executable, __file__, str(out), str(rows), name, "--device", device, "--here"]
        try:
            if seconds <= 0:
                raise subprocess.TimeoutExpired(words, seconds)
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"failed": "no time left"}
        if done.returncode:
            return {"failed": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def profiled(trial: trials.Trial, device: torch.device) -> dict[str, Any]:
    """Return the seconds of a step with and without the profiler, and what the GPU did in it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    step = stepper(trial, device)
    for _ in range(WARMUP):
        step()
    wait()
    times = []
    for _ in range(TIMED):
        began = time.perf_counter()
        step()
        issued = time.perf_counter() - began
        wait()
        times.append((time.perf_counter() - began, issued))
    with profile(activities=activities) as recorded:
        began = time.perf_counter()
        for _ in range(PROFILED):
            step()
        wait()
        wall = (time.perf_counter() - began) / PROFILED
    with tempfile.TemporaryDirectory() as scratch:
        recorded.export_chrome_trace(str(path := Path(scratch) / "trace.json"))
        events = json.loads(path.read_text())["traceEvents"]
    return {
        "step_s": statistics.median(one[0] for one in times),
        "issued_s": statistics.median(one[1] for one in times),  # until the host had launched everything
        "profiled_step_s": wall,
        **summarize_events(events, PROFILED),
    }


def summarize_events(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Sum up the events of a Chrome trace of `steps` steps, times in microseconds, by step.

    Returns `gpu_busy_s`, `kernels`, `copies`, `fills`, `launches` (the host's calls that launch kernels or graphs) and
    `longest_s`, the seconds of the twelve longest kinds of kernel. Annotations are not work and are left out, although
    torch shows them on the GPU's timeline too. The profile is `refused`, with the counts, if it has fewer kernels than
    launches, because then the profiler has lost kernels; it is refused too without any event of a GPU.
    """
    spans: list[tuple[float, float]] = []
    counts, kinds = Counter(dict.fromkeys([*ON_GPU.values(), "launches"], 0)), Counter[str]()
    for event in events:
        category = event.get("cat")
        if category in CALLS and LAUNCH.match(event["name"]):
            counts["launches"] += 1
        if category in ON_GPU:
            counts[ON_GPU[category]] += 1
            kinds[event["name"][:100]] += event["dur"]
            spans.append((event["ts"], event["ts"] + event["dur"]))
    if not spans and not counts["launches"]:
        return {"refused": NO_GPU}
    found = {name: count / steps for name, count in counts.items()}
    if counts["kernels"] < counts["launches"]:
        text = f"{counts['kernels']:,} kernels of {counts['launches']:,} launches: the profiler lost the others"
        return found | {"refused": text}
    longest = {name: us / 1e6 / steps for name, us in kinds.most_common(12)}
    return found | {"gpu_busy_s": busy(spans) / 1e6 / steps, "longest_s": longest}


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
