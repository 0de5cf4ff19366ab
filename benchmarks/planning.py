"""How long it takes to plan a grid of 4,096 trials: compose, check, compare with the journal.

    python benchmarks/planning.py [--lengths 512]

Prints one JSON object: the wall time of `python -m harness plan` as a process, and the time per trial.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, default=512, help="number of lengths; eight trials for each")
    lengths = parser.parse_args().lengths
    grid = [f"seq_len=range(1,{lengths + 1})", "micro_batch=1,2", "precision=fp32,bf16", "attention=sdpa,eager"]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "harness",
            "plan",
            "-m",
            "model=tiny",
            "device=cpu",
            *grid,
            f"results={folder}",
        ]
        began = time.perf_counter()
        done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=True)
        wall = time.perf_counter() - began
    trials = len(json.loads(done.stdout)["trials"])
    report = {
        "trials": trials,
        "wall_s": wall,
        "ms_per_trial": 1000 * wall / trials,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
