"""Measure how long it takes to end orphans: zombies that wait for us, and daemons in sessions of their own.

    python benchmarks/reaping.py [--json FILE]

One run makes each case anew: a process starts children and ends, so that we adopt them; then most of them end. The
time consists of listing all processes of the machine; `listings` counts how often that was done.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from vramsweep.harness.process import orphans  # noqa: E402
from vramsweep.harness.process.attempt import Launcher  # noqa: E402

CASES = ((100, 0), (200, 0), (400, 0), (1000, 100))  # zombies, daemons
LEAVE = """
import os, sys, time
zombies, daemons = map(int, sys.argv[1:])
for number in range(zombies + daemons):
    if os.fork() == 0:
        if number >= zombies:
            os.setsid()
            time.sleep(600)
        os._exit(0)
os._exit(0)
"""


def measure(zombies: int, daemons: int) -> dict[str, float]:
    """Return the seconds and listings that ending so many takes. Raises SystemExit if one is still there."""
    with tempfile.TemporaryDirectory() as logs, Launcher("cold", Path(logs)) as launcher:
        command = [sys.executable, "-S", "-c", LEAVE, str(zombies), str(daemons)]
        subprocess.run(command, start_new_session=True, check=True)
        with mock.patch.object(orphans, "list_processes", wraps=orphans.list_processes) as listed:
            began = time.perf_counter()
            launcher._end()
            spent = time.perf_counter() - began
        if left := set(dict(launcher._leftovers())) | launcher._stuck:
            raise SystemExit(f"not ended: {left}")
    return {"zombies": zombies, "daemons": daemons, "seconds": spent, "listings": listed.call_count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    arguments = parser.parse_args()
    found = [measure(*case) for case in CASES]
    print("| zombies | daemons | s | listings of all processes |\n|---|---|---|---|")
    for one in found:
        print(f"| {one['zombies']} | {one['daemons']} | {one['seconds']:.2f} | {one['listings']} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
