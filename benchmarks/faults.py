"""Inject every fault that a sweep should survive, many times, and count what was lost.

    python benchmarks/faults.py                       the long form: a table in Markdown on stdout
    python benchmarks/faults.py --only "SIGKILL" --scale 0.1

Rows lost: rows that were in the journal or shown as finished and are gone, trials without an answer at the end, and
answers other than the fault should give. Doubled: trials with two answers. Orphans: processes that outlive their
launcher by half a minute. Resumed: injections after which the same command finished the sweep.

The short form is tests/test_torture.py. Runs on Linux. Faults that need mounts and cgroups run only as root.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from torture.arena import Arena, Count  # noqa: E402
from torture.faults import FAULTS, Missing  # noqa: E402

HEADER = (
    "| fault | injected | rows lost | rows doubled | orphans | resumed | minutes |\n|---|---:|---:|---:|---:|---:|---:|"
)


def main() -> int:
    """Inject the chosen faults and print the table; return 1 if anything was lost, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only faults whose name contains this text")
    parser.add_argument("--skip", help="leave out faults whose name contains this text")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of how often each fault is injected")
    parser.add_argument("--seed", type=int, default=20261124)
    options = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, seed {options.seed}\n\n{HEADER}", flush=True)
    total, well = Count(), True
    for number, fault in enumerate(FAULTS):
        if options.only not in fault.name or (options.skip and options.skip in fault.name):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="torture-") as folder:
            try:
                count = fault.inject(
                    Arena(Path(folder), Random(options.seed + number)), max(1, round(fault.long * options.scale))
                )
            except Missing as why:
                print(f"| {fault.name} | not tried: {why} | | | | | |", flush=True)
                continue
        minutes = (time.monotonic() - began) / 60
        print(_line(fault.name, count, f"{minutes:.1f}"), flush=True)
        for text in count.said:
            print(f"{fault.name}: {text}", file=sys.stderr, flush=True)
        well = well and count.well
        for name in ("injected", "lost", "doubled", "orphans", "resumed"):
            setattr(total, name, getattr(total, name) + getattr(count, name))
    print(_line("**all**", total, ""))
    return 0 if well else 1


def _line(name: str, count: Count, minutes: str) -> str:
    numbers = (count.injected, count.lost, count.doubled, count.orphans, count.resumed)
    return f"| {name} | {' | '.join(f'{number:,}' for number in numbers)} | {minutes} |"


if __name__ == "__main__":
    sys.exit(main())
