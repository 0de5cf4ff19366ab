"""Predict a few models at lengths divisible by 8 and at others, for `fit_cover.py --grids`.

    python benchmarks/replayed_lengths.py FOLDER

Writes results/reference/replayed_lengths.csv from sweeps in FOLDER. It takes ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

OUT = Path(__file__).parents[1] / "results" / "reference" / "replayed_lengths.csv"
SHORT, LONG = "128..1024:64,140..1020:20,131..1021:10", "128..2048:64,140..2040:40,131..2041:20"
SWEEPS = {
    "gpt2, batch 8": f"model=gpt2 micro_batch=8 seq_len={SHORT}",
    "gpt2, eager, batch 4": f"model=gpt2 micro_batch=4 attention=eager seq_len={SHORT}",
    "qwen0.5b": f"model=qwen0.5b seq_len={LONG}",
    "qwen0.5b, eager": f"model=qwen0.5b attention=eager seq_len={LONG}",
    "qwen0.5b, checkpointing, batch 2": f"model=qwen0.5b checkpointing=full micro_batch=2 seq_len={LONG}",
    "llama3.2-1b, batch 2": f"model=llama3.2-1b micro_batch=2 seq_len={LONG}",
    "phi-1.5, fp16": f"model=phi-1.5 precision=fp16 seq_len={LONG}",
}


def main() -> None:
    """Predict all sweeps and write the CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    found = []
    for i, (name, settings) in enumerate(SWEEPS.items()):
        more = ["allocator=default,expandable", "report=false", f"results={folder}", f"name=lengths{i}"]
        subprocess.run([sys.executable, "-m", "vramsweep", "predict", *settings.split(), *more], check=True)
        for line in (folder / f"lengths{i}" / "trials" / "journal.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row.get("outcome") == "ok":
                peaks = row["peak_allocated_bytes"], row["peak_reserved_bytes"]
                found.append((f"{name}, {row['allocator']}", row["seq_len"], *peaks))
    with OUT.open("w", encoding="utf-8", newline="") as stream:
        write = csv.writer(stream, lineterminator="\n")
        write.writerow(["configuration", "seq_len", "peak_allocated_bytes", "peak_reserved_bytes"])
        write.writerows(sorted(set(found)))


if __name__ == "__main__":
    main()
