"""Predict the scripts of public reports, and write a table with the reported numbers into docs/accuracy.md.

    python benchmarks/public_reports.py [--only amp_recipe.py simclr.py] [--results FOLDER]

`public_reports/readings.tsv` has a line for each reading. Its counter is a key of COUNTERS: `forward` is the peak
allocated memory of the forward pass, `device` what the driver reports (reserved memory and a default context). A
script's first line is its source. With `--only`, the table is printed and the page stays as it is.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vramsweep.harness.hardware.gpu_lookup import CONTEXT_BYTES

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS, PAGE = Path(__file__).with_suffix(""), ROOT / "docs" / "accuracy.md"
BEGIN, END = "<!-- public reports -->", "<!-- end of public reports -->"
UNITS = {"bytes": 1, "MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
COUNTERS = {  # column of a row, and bytes beside it
    "allocated": ("peak_allocated_bytes", 0),
    "forward": ("forward_peak_allocated_bytes", 0),
    "backward": ("backward_peak_allocated_bytes", 0),
    "reserved": ("peak_reserved_bytes", 0),
    "device": ("peak_reserved_bytes", CONTEXT_BYTES),
}
HEAD = "| script | GPU, torch | counter | published | predicted | error | not covered | why |"


def predict(script: str, arguments: str, gpu: str, results: Path) -> dict[str, Any]:
    """Return the row of one predicted script. Raises FileNotFoundError if it has none; its output is on stderr."""
    name = "-".join([Path(script).stem, *arguments.split(), gpu])
    command = [sys.executable, "-m", "vramsweep", "run", "device=simulated", f"device.gpu={gpu}", f"name={name}"]
    command += [f"results={results}", "report=false", "--", sys.executable, str(SCRIPTS / script), *arguments.split()]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=sys.stderr, check=False)
    row: dict[str, Any] = json.loads((results / name / "trials" / "journal.jsonl").read_text().splitlines()[-1])
    return row


def show(row: dict[str, Any], reading: dict[str, str]) -> tuple[str, float | None]:
    """Return a line of the table, and the error of the prediction: predicted / published - 1, None without a number."""
    column, beside = COUNTERS[reading["counter"]]
    published, predicted, error = float(reading["published"]), None, None
    if row["outcome"] == "ok":
        predicted = (row[column] + beside) / UNITS[reading["unit"]]
        error = predicted / published - 1
    cells = [
        f"[{reading['script']} {reading['arguments']}".strip() + f"]({reading['source']})",
        ", ".join(filter(None, (reading["gpu"], reading["torch"]))),
        reading["counter"],
        f"{show_number(published)} {reading['unit']}",
        row["outcome"] if predicted is None else show_number(predicted),
        "–" if error is None else f"{100 * round(error, 4) or 0:+.2f} %".replace("+0.00", "0"),
        ", ".join(row.get("not_covered") or ()) or "–",
        reading["note"] or "–",
    ]
    return f"| {' | '.join(cells)} |", error


def show_number(value: float) -> str:
    """Return four digits below 100, else a whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


def main() -> None:
    """Predict each script once, print the table, and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="these scripts alone")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "public-reports")
    chosen = parser.parse_args()
    with (SCRIPTS / "readings.tsv").open() as lines:
        every = list(csv.DictReader(lines, delimiter="\t"))
    readings = [reading for reading in every if reading["script"] in (chosen.only or reading["script"])]
    runs = dict.fromkeys((reading["script"], reading["arguments"], reading["gpu"]) for reading in readings)
    rows = {run: predict(*run, chosen.results) for run in runs}
    shown = [show(rows[reading["script"], reading["arguments"], reading["gpu"]], reading) for reading in readings]
    errors = [abs(error) for _, error in shown if error is not None]
    near, nearer = (sum(error <= part for error in errors) for part in (0.05, 0.01))
    scripts = len({reading["script"] for reading in readings})
    text = f"{nearer} of {len(readings)} readings ({scripts} scripts) are within 1 %, {near} within 5 %.\n\n"
    text += "\n".join([HEAD, "|---|---|---|---:|---:|---:|---|---|", *(line for line, _ in shown)])
    print(text)
    if not chosen.only:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
