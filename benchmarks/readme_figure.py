"""Draw the README's picture: memory by component over length, the GPU's limit, and points measured on an H100.

    python benchmarks/readme_figure.py [--work build/readme] [--out docs/images/memory.png]

Bars are predicted here (Qwen1.5-0.5B, bf16, batch 4). Points are rows of results/reference/h100-80gb with the same
settings. It takes two minutes on two cores and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from vramsweep.analysis.data.load import load
from vramsweep.analysis.figures.drawing import write_one
from vramsweep.analysis.report.content import collect

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "results" / "reference" / "h100-80gb" / "rows.jsonl"
SAME = {"model": "qwen0.5b", "precision": "bf16", "micro_batch": 4, "allocator": "default", "device": "cuda"}
SWEEPS = ("make-sweep", "allocators")
LENGTHS = "128,512,1024,2048,3072,4096,5120,6144"


def main() -> int:
    """Predict, add the measured rows, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "readme")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "memory.png")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    words = ["model=qwen0.5b", "precision=bf16", "micro_batch=4", f"seq_len={LENGTHS}", "gpu=h100-80gb", "name=readme"]
    command = [sys.executable, "-m", "vramsweep", "sweep", *words, "report=false"]
    subprocess.run(command, cwd=arguments.work, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=True)
    predicted = (arguments.work / "results" / "readme" / "trials" / "journal.jsonl").read_text().splitlines()
    rows = (json.loads(line) for line in MEASURED.read_text().splitlines())
    same = [row for row in rows if row["sweep"] in SWEEPS and all(row.get(k) == v for k, v in SAME.items())]
    together = arguments.work / "rows.jsonl"
    together.write_text("\n".join([*predicted, *map(json.dumps, same)]) + "\n")
    figures = {one.name: one for one in collect(load(together)).figures}
    write_one(figures["composition_predicted"], arguments.out)
    print(f"{arguments.out}: {len(predicted)} predicted and {len(same)} measured rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
