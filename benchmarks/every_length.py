"""Predict every length from few traces: seconds, and a comparison with direct traces, column by column.

    python benchmarks/every_length.py [--only NAME ...] [--lengths N] [--points N] [--largest]

For each configuration `vramsweep predict` predicts every length up to --lengths (2,048; GPT-2 has 1,024 positions)
under two allocator settings, from an empty folder. Then --points of the trials, chosen at random with a fixed seed, are
predicted again, each by its own `vramsweep sweep` from its own trace. Columns must be equal, except times, the trace's
basis and how the trial ran (`APART`). --largest instead finds the maximum sequence length on 10 GPUs under three
settings, and checks up to 20 trials at these lengths and one token above. Prints a line of JSON a configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vramsweep.harness.machine.machine import version  # noqa: E402
from vramsweep.harness.rows.journal import read, terminal  # noqa: E402
from vramsweep.harness.rows.schema import Row  # noqa: E402

CARDS = (
    "rtx4080-16gb", "rtx3090-24gb", "rtx4090-24gb", "rtx5090-32gb", "a100-40gb", "a40-48gb", "l40s-48gb", "a100-80gb",
    "h100-80gb", "h200-141gb",
)  # fmt: skip
SETTINGS = ("default", "expandable", "max_split_128")
DECODER = ROOT / "benchmarks" / "published" / "targets" / "cs336.py"
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "zero3": ("model=qwen0.5b", "runner=deepspeed", "sharding=zero3", "precision=fp16"),
    "torch": ("model=qwen0.5b", "runner=torch"),
    "torch8": ("model=qwen0.5b", "runner=torch", "micro_batch=8"),
    "eager": ("model=qwen0.5b", "runner=torch", "attention=eager"),
    "trainer": ("model=qwen0.5b", "runner=trainer"),
    "fsdp2": ("model=qwen0.5b", "runner=torch", "sharding=fsdp2", "world_size=8"),
    "gpt2": ("model=gpt2", "runner=torch", "precision=fp32"),
    "llama3-8b": ("model=llama3-8b", "runner=torch", "sharding=fsdp2", "world_size=8"),
    "custom": ("runner=custom", f"runner.target={DECODER}:build", "+runner.options.rotary=own"),
}
APART = {
    "attempt", "duration_s", "exit_code", "git_commit", "host_load", "isolation", "overhead_s", "started_at", "sweep",
    "trace_basis", "finished_at",
}  # fmt: skip


def rows(folder: Path) -> dict[str, Row]:
    """Return the terminal rows of a results folder, by trial id."""
    return terminal(read(folder)[0])


def vramsweep(*words: str) -> str:
    """Run a verb and return its standard output."""
    command = [sys.executable, "-m", "vramsweep", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout


def different(one: Row, other: Row) -> list[str]:
    """Return the names of columns that differ, without those of `APART`."""
    return sorted(name for name in one.keys() | other.keys() if name not in APART and one.get(name) != other.get(name))


def directly(words: tuple[str, ...], trials: list[dict[str, Any]], results: Path) -> dict[str, Row]:
    """Predict each trial by its own sweep; return the rows by trial id."""

    def one(numbered: tuple[int, dict[str, Any]]) -> dict[str, Row]:
        number, trial = numbered
        own = [f"{axis}={trial[axis]}" for axis in ("seq_len", "micro_batch")]
        card, setting = f"device.gpu={trial['device']['gpu']}", f"allocator={trial['allocator']['name']}"
        where = [f"results={results}", f"name={number}", "report=false", "device=simulated"]
        vramsweep("sweep", *words, *own, card, setting, *where)
        return rows(results / str(number))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {name: row for found in pool.map(one, enumerate(trials)) for name, row in found.items()}


def measured(name: str, lengths: int, points: int) -> dict[str, Any]:
    """Predict all lengths of a configuration; return the seconds and the trials that differ from direct traces."""
    words = CONFIGURATIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        vramsweep(
            "predict", *words, f"seq_len=1..{lengths}", "allocator=default,expandable", "device.gpu=a100-80gb",
            f"results={folder}", "name=curve", "report=false",
        )  # fmt: skip
        seconds = time.monotonic() - began
        curve = rows(Path(folder) / "curve")
        traces = len(list((Path(folder) / "curve" / "trials" / "traces").iterdir()))
        chosen = random.Random(name).sample(sorted(curve), min(points, len(curve)))
        own = directly(words, [curve[one]["trial"] for one in chosen], Path(folder) / "own")
        wrong = {one: different(curve[one], own[one]) if one in own else ["no row"] for one in chosen}
    bases: dict[str, int] = {}
    for row in curve.values():
        bases[row["trace_basis"]] = bases.get(row["trace_basis"], 0) + 1
    return {
        "configuration": name, "rows": len(curve), "seconds": round(seconds, 1), "direct_traces": traces,
        "trace_basis": bases, "outcomes": sorted({row["outcome"] for row in curve.values()}), "compared": len(chosen),
        "different": {one: columns for one, columns in wrong.items() if columns},
    }  # fmt: skip


def label(trial: dict[str, Any]) -> tuple[str, ...]:
    """Return length, GPU and allocator setting, which tell the trials of a survey apart."""
    return str(trial["seq_len"]), trial["device"]["gpu"], trial["allocator"]["name"]


def largest(name: str, lengths: int) -> dict[str, Any]:
    """Find the maximum length for all GPUs and settings; return the seconds and the trials that disagree."""
    words = CONFIGURATIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        told = vramsweep(
            "predict", "--largest", "seq_len", "--json", *words, f"seq_len=1..{lengths}",
            f"device.gpu={','.join(CARDS)}", f"allocator={','.join(SETTINGS)}", f"results={folder}", "name=edges",
        )  # fmt: skip
        seconds = time.monotonic() - began
        edges = json.loads(told)
        asked: list[tuple[dict[str, Any], bool]] = []
        for edge in edges:
            for at, fits in ((edge["largest"], True), ((edge["largest"] or 0) + 1, False), (edge["all_up_to"], True)):
                if at is not None and 1 <= at <= lengths:
                    asked.append((edge["trial"] | {"seq_len": at}, fits))
        asked = random.Random(name).sample(asked, min(len(asked), 20))
        own = directly(words, [trial for trial, _ in asked], Path(folder) / "own").values()
        said = {label(row["trial"]): row["outcome"] == "ok" for row in own}
        wrong = [label(trial) for trial, fits in asked if said.get(label(trial)) is not fits]
    looked = max(edge["looked_at"] for edge in edges)
    named = [(f"{e['trial']['device']['gpu']} {e['trial']['allocator']['name']}", e) for e in edges]
    return {
        "configuration": name, "largest_seconds": round(seconds, 1), "edges": len(edges), "looked_at": looked,
        "of": lengths, "compared": len(asked), "different": wrong,
        "found": {label: (edge["all_up_to"], edge["largest"]) for label, edge in named},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--lengths", type=int, default=2048)
    parser.add_argument("--points", type=int, default=30)
    parser.add_argument("--largest", action="store_true")
    chosen = parser.parse_args()
    packages = {package: version(package) for package in ("torch", "transformers", "deepspeed")}
    print(json.dumps({"machine": platform.machine(), "python": platform.python_version()} | packages), flush=True)
    for name in chosen.only:
        lengths = min(chosen.lengths, 1024) if name == "gpt2" else chosen.lengths
        print(
            json.dumps(largest(name, lengths) if chosen.largest else measured(name, lengths, chosen.points)), flush=True
        )


if __name__ == "__main__":
    main()
