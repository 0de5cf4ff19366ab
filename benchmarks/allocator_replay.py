"""Speed and memory of the allocator simulation, printed as one JSON object.

    python benchmarks/allocator_replay.py --events 10000000 --recordings DIR

Events are counted as PyTorch records them: an allocation is one, a free is two (requested, completed). The synthetic
stream is made while the simulation consumes it. The time of making it is measured alone and subtracted. Each
measurement runs in its own process, because peak memory is that of a process.
"""

import argparse
import json
import multiprocessing
import platform
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vramsweep.harness.allocator import recording
from vramsweep.harness.allocator.config import MIB, parse
from vramsweep.harness.allocator.initial_state import undo
from vramsweep.harness.allocator.replay import Timeline, replay_as_recorded, replay_under
from vramsweep.harness.allocator.simulator import Simulator

SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:8")
Step = tuple[int, int, int]  # kind (0 allocate, 1 request free, 2 complete free), handle, size


def synthetic(events: int, seed: int = 0) -> Iterator[Step]:
    """Yield steps like training's: up to 2,000 live blocks of 40 sizes from 512 B to 64 MiB, freed in random order."""
    rng = random.Random(seed)
    sizes = [int(2 ** rng.uniform(9, 26)) for _ in range(40)]
    live: list[int] = []
    handle = made = 0
    while made < events:
        if len(live) > 2000 or (live and rng.random() < 0.5):
            index = rng.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            freed = live.pop()
            yield 1, freed, 0
            yield 2, freed, 0
            made += 2
        else:
            handle += 1
            live.append(handle)
            yield 0, handle, sizes[rng.randrange(40)]
            made += 1


def measure_synthetic(settings: str, events: int) -> dict[str, Any]:
    began = time.perf_counter()
    for _ in synthetic(events):
        pass
    making = time.perf_counter() - began
    simulator = Simulator(parse(settings))
    timeline = Timeline(simulator, None)
    malloc, request, complete = simulator.malloc, simulator.free_requested, simulator.free_completed
    began = time.perf_counter()
    for stretch in timeline.stretches(synthetic(events), events):
        for kind, handle, size in stretch:
            if kind == 0:
                malloc(handle, size)
            elif kind == 1:
                request(handle)
            else:
                complete(handle)
    seconds = time.perf_counter() - began - making
    return _result(settings, timeline.events, seconds) | {"peak_reserved_mib": simulator.peak_reserved // MIB}


def measure_recording(path: Path, settings: str | None) -> dict[str, Any]:
    """Time the replay of a recording, the fastest of three. `settings` None: as recorded, with its comparison."""
    loaded = recording.load(path)
    start = undo(loaded)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        if settings is None:
            replay_as_recorded(loaded, start)
        else:
            replay_under(loaded, start, parse(settings), None)
        seconds.append(time.perf_counter() - began)
    shown = "as recorded, compared" if settings is None else settings
    return {"recording": path.name} | _result(shown, len(loaded.events), min(seconds))


def _result(settings: str, events: int, seconds: float) -> dict[str, Any]:
    return {
        "settings": settings,
        "events": events,
        "seconds": round(seconds, 3),
        "events_per_second": round(events / seconds),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def machine() -> dict[str, Any]:
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "logical_cpus": multiprocessing.cpu_count(),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000, help="length of the synthetic stream")
    parser.add_argument("--recordings", type=Path, help="a folder of recordings to replay as well")
    parser.add_argument("--settings", action="append", help="settings for the synthetic stream (default: four)")
    args = parser.parse_args(argv)
    jobs: list[tuple[Any, tuple[Any, ...]]] = []
    for settings in args.settings or SETTINGS:
        jobs.append((measure_synthetic, (settings, args.events)))
    for path in sorted(args.recordings.iterdir()) if args.recordings else []:
        jobs += [(measure_recording, (path, settings)) for settings in (None, "", "expandable_segments:True")]
    context = multiprocessing.get_context("spawn")
    results = []
    for function, arguments in jobs:
        with context.Pool(1) as pool:
            results.append({"kind": function.__name__.removeprefix("measure_")} | pool.apply(function, arguments))
    print(json.dumps({"machine": machine(), "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
