"""Time first answers: refusals in multiples of `--help`, other answers in multiples of one import.

    python benchmarks/first_answers.py [--repeats 3] [--only refusals|answers|phases] [--model llama3-8b]

The import is that of torch and the model's class, in a fresh process of the same run. Every command runs in a fresh
process: from nothing (empty cache and results folder), then again, and once more in another results folder, where only
the user's cache helps. The first is also given in CPU seconds of all its processes, for a machine that has other work.
Wall seconds are meaningful on two quiet cores. Each time is the minimum of the repeats. Goals are of wall time, for
refusals of CPU time. `phases` prints the CPU seconds of each phase of one explanation.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Spent(NamedTuple):
    """CPU and wall seconds."""

    cpu: float
    wall: float


ROOT = Path(__file__).resolve().parents[1]
MODULE = (sys.executable, "-m", "vramsweep")
REFUSED = (
    "explain nothing", "timeline nothing", "check nothing", "report foo.json", "report nothing", "fit nothing.csv",
    "prdict", "predict seqlenn=5", "predict model=gpt3 seq_len=512", "predict model=gpt2 precision=bfloat17",
    "plan -m model=gpt2 seq_len=128, 256", "sweep model=gpt2 dry_run=true",
)  # fmt: skip
GOAL_REFUSED, GOAL_AGAIN = 3.0, "2 s"
ANSWERS = (
    ("explain model=gpt2", 1.8),
    ("explain model={model} adapter=lora", 3.0),
    ("predict model={model} sharding=fsdp2 world_size=8 seq_len=4096 report=false", 3.5),
    ("predict --largest seq_len model={model} adapter=lora seq_len=1..8192", 8.0),
    ("advise model={model} adapter=lora seq_len=4096 --most 0", 10.0),
)
PHASES = (
    ("interpreter and command line", "import vramsweep.__main__"),
    ("imports to compose settings", "from vramsweep.harness.config import compose"),
    ("one trial composed", "trial = compose.resolve(['device=simulated', 'model=gpt2'], 'explain').trials[0].trial"),
    ("imports to read and replay a trace", "from vramsweep.runners.worker import query_server"),
    ("imports to trace", "from vramsweep.runners.worker import worker; worker.preload('simulated')"),
    ("one trace", "from vramsweep.runners.predict import trace_cache; from pathlib import Path; import tempfile; "
     "place = Path(tempfile.mkdtemp()); "
     "trace, _ = trace_cache.load_or_trace(trial, trial.device.card, place, place / 'traces')"),
    ("the cached trace", "trace_cache.load_trace(trial, trial.device.card, place / 'traces')"),
    ("its explanation", "query_server.QUESTIONS['explanation'](trace, trial)"),
)  # fmt: skip


def spend(words: Iterable[str], cwd: Path, statuses: tuple[int, ...] = (0,), **variables: str) -> Spent:
    """Run a process; return its seconds and those of all that it waited for. Raises SystemExit if it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environ = os.environ | {"PYTHONPATH": str(ROOT), "HYDRA_FULL_ERROR": "0"} | variables
    done = subprocess.run([*words], cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in statuses:
        raise SystemExit(f"{' '.join(words)}: status {done.returncode}\n{done.stderr}")
    return Spent(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.monotonic() - began)


def least(repeats: int, once: Callable[[], Spent]) -> Spent:
    """Return the least seconds of `repeats` tries."""
    return lowest([once() for _ in range(repeats)])


def lowest(tries: Sequence[Spent]) -> Spent:
    """Return the least CPU seconds and the least wall seconds of some tries."""
    return Spent(*map(min, zip(*tries, strict=True)))


def show_refusals(repeats: int, folder: Path) -> None:
    """Print CPU seconds of refusals in multiples of `--help`."""
    (folder / "foo.json").write_text("{}")
    unit = least(repeats + 2, lambda: spend([*MODULE, "--help"], folder))
    print(f"\n| refused | x `--help` ({unit.cpu:.2f} s of CPU) | goal |\n|---|--:|--:|")
    for text in REFUSED:
        spent = least(repeats, lambda text=text: spend([*MODULE, *text.split()], folder, (2,)))  # type: ignore[misc]
        print(f"| `{text}` | {spent.cpu / unit.cpu:.1f} | {GOAL_REFUSED:g} |", flush=True)


def show_answers(repeats: int, folder: Path, model: str) -> None:
    """Print seconds of answers, from nothing and repeated. The unit is an import, timed next to each question because
    the machine's speed varies."""
    code = "import torch; from transformers import LlamaForCausalLM"
    heads = "import, s | x import: wall | CPU | goal | again, s | goal | elsewhere, s"
    print(f"\n| command, without a cache | {heads} |\n|---|--:|--:|--:|--:|--:|--:|--:|")
    for text, goal in ANSWERS:
        words = [*MODULE, *text.format(model=model).split()]
        tries: dict[str, list[Spent]] = {name: [] for name in ("first", "again", "elsewhere")}
        imports = []
        for _ in range(repeats):
            imports.append(spend([sys.executable, "-c", code], folder))
            with tempfile.TemporaryDirectory() as place:
                for name, spent in tries.items():
                    own = Path(place) / ("there" if name == "elsewhere" else "here")
                    own.mkdir(exist_ok=True)
                    spent.append(spend(words, own, (0, 1), VRAMSWEEP_CACHE=str(Path(place) / "cache")))
        asked = f"`{text.format(model=model)}`"
        unit, first, again, elsewhere = map(lowest, (imports, *tries.values()))
        of = f"{unit.wall:.1f} | {first.wall / unit.wall:.1f} | {first.cpu / unit.cpu:.1f} | {goal:g}"
        print(f"| {asked} | {of} | {again.wall:.1f} | {GOAL_AGAIN} | {elsewhere.wall:.1f} |", flush=True)


def show_phases(folder: Path) -> None:
    """Print the CPU seconds of each phase of one explanation, all in one process."""
    code = "import time\nat = time.process_time()\n"
    for name, step in PHASES:
        code += f"{step}\nnow = time.process_time(); print(f'| {name} | {{now - at:.2f}} |', flush=True); at = now\n"
    print("\n| phase of `explain model=gpt2` | CPU s |\n|---|--:|", flush=True)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "VRAMSWEEP_CACHE": ""}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environ, stderr=subprocess.DEVNULL, check=True)


def main() -> None:
    """Measure and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("refusals", "answers", "phases"))
    parser.add_argument("--model", default="llama3-8b")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if options.only in (None, "phases"):
            show_phases(folder)
        if options.only in (None, "refusals"):
            show_refusals(options.repeats, folder)
        if options.only in (None, "answers"):
            show_answers(options.repeats, folder, options.model)


if __name__ == "__main__":
    main()
