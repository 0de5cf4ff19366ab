"""Predict Qwen1.5-0.5B under ZeRO-3 at every length from 1 to 2,048, and draw it over what was published.

    python benchmarks/published_sweep.py [--data FILE] [--figure OUT.png] [--results FOLDER]

Published: github gpjt/fine-tune-2024-04, results-without-env-var.csv: peak active and reserved MiB of a 24 GB GPU, by
the Trainer with DeepSpeed 0.14.2, transformers 4.40.0, torch 2.2.2, fp16, FusedAdam, one sample, text padded to the
length, no allocator setting. Predicted by one command: `vramsweep predict` with WORDS, which name these versions.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import plotly.graph_objects as go

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vramsweep.analysis.figures.drawing import Picture, draw_one  # noqa: E402
from vramsweep.harness.rows.journal import read, terminal  # noqa: E402
from vramsweep.harness.rows.schema import Row  # noqa: E402

MIB = 1 << 20
DATA = ROOT.parent / "shared" / "data" / "qwen15-0.5b-zero3" / "without-expandable-segments.csv"
WORDS = (
    "model=qwen0.5b", "runner=trainer", "sharding=zero3", "precision=fp16", "zero_init=false", "padding=0.5",
    "optimizer=deepspeed_fused_adam", "use_cache=on", "+versions.deepspeed=0.14.2", "+versions.transformers=4.40.0",
    "device.gpu=rtx3090-24gb", "seq_len=1..2048", "micro_batch=1", "report=false",
)  # fmt: skip
LINES = {
    "active": ("peak_active_bytes", None, "#0072b2"),
    "reserved": ("peak_reserved_bytes", "peak_reserved_most_bytes", "#d55e00"),
}


def published(path: Path) -> dict[int, tuple[int, int]]:
    """Read active and reserved MiB by length; if a length occurs twice, the last line counts."""
    found = {}
    for line in path.read_text().splitlines():
        length, active, reserved, *_ = (cell.strip() for cell in line.split(","))
        found[int(length)] = int(active), int(reserved)
    return found


def predicted(results: Path) -> dict[int, Row]:
    """Return the rows by length; predict those that `results` does not have yet."""
    command = [sys.executable, "-m", "vramsweep", "predict", *WORDS, f"results={results}", "name=published"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
    return {row["seq_len"]: row for row in terminal(read(results / "published")[0]).values()}


def table(rows: dict[int, Row], truth: dict[int, tuple[int, int]]) -> list[str]:
    """Return the prediction errors by range of length, as lines of a table."""
    lines = ["| lengths | counter | median error | worst | | |", "|---|---|---|---|---|---|"]
    for low, high in ((2, 511), (512, 1023), (1024, 1535), (1536, 2048)):
        at = [n for n in truth if low <= n <= high and n in rows and rows[n]["outcome"] == "ok"]
        if not at:
            lines.append(f"| {low} to {high} | no row is ok | | | | |")
            continue
        for index, (name, (column, most, _)) in enumerate(LINES.items()):
            errors = [rows[n][column] / MIB / truth[n][index] - 1 for n in at]
            worst = max(errors, key=abs)
            upper = [rows[n][most] / MIB / truth[n][index] - 1 for n in at] if most else []
            more = f"upper bound: {statistics.median(upper):+.2%} | {max(upper, key=abs):+.2%}" if upper else " | "
            lines.append(f"| {low} to {high} | {name} | {statistics.median(errors):+.2%} | {worst:+.2%} | {more} |")
    return lines


def draw(rows: dict[int, Row], truth: dict[int, tuple[int, int]], out: Path) -> None:
    """Draw published points under predicted lines."""
    figure = go.Figure()
    order = sorted(rows)
    for index, (name, (column, most, colour)) in enumerate(LINES.items()):
        x = sorted(truth)
        figure.add_scatter(
            x=x, y=[truth[n][index] / 1024 for n in x], mode="markers", name=f"{name}, published",
            marker={"size": 4, "color": colour, "opacity": 0.35},
        )  # fmt: skip
        for label, one, dash in ((f"{name}, predicted", column, "solid"), (f"{name}, upper bound", most, "dot")):
            if one is not None:
                figure.add_scatter(
                    x=order, y=[rows[n][one] / MIB / 1024 if rows[n][one] else math.nan for n in order], name=label,
                    mode="lines", line={"color": "black", "width": 1.2, "dash": dash},
                )  # fmt: skip
    figure.update_layout(
        template="plotly_white", xaxis_title="sequence length (tokens)", yaxis_title="GiB", width=900, height=560,
        title="Qwen1.5-0.5B, ZeRO-3, fp16: every length, published and predicted",
        legend={"orientation": "h", "y": -0.18}, yaxis_rangemode="tozero", margin={"t": 50, "r": 20, "l": 60},
    )  # fmt: skip
    draw_one(Picture(figure, out, scale=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--figure", type=Path, help="file of the figure")
    parser.add_argument("--results", type=Path, help="folder of the rows: read if it has them, else written")
    chosen = parser.parse_args()
    if not chosen.data.is_file():
        parser.exit(1, f"there is no file {chosen.data}; give the published file with --data\n")
    truth = published(chosen.data)
    with tempfile.TemporaryDirectory() as folder:
        rows = predicted(chosen.results or Path(folder))
    print("\n".join(table(rows, truth)))
    if chosen.figure is not None:
        draw(rows, truth, chosen.figure)


if __name__ == "__main__":
    main()
