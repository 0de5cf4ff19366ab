"""Count the points that hydra/sweeper=adaptive needs: its search runs on public sweeps, answered from their files.

    python benchmarks/adaptive.py [--data FOLDER] [--results FOLDER] [--seeds N] [--only NAME ...] [--keep FOLDER]

Source: github gpjt/fine-tune-2024-04, sweeps of Qwen1.5-0.5B (2,048 lengths; batches) on a 24 GB GPU and of Llama 3 8B
(25 lengths; batches; medians over the ranks that reported) on eight A100, under DeepSpeed 0.14.2 ZeRO-3. The files have
peak active (here compared as allocated) and reserved MiB. Nothing is measured: the points that the search requests are
read from the file. A line of the table is a sweep, with `vramsweep predict`'s rows of the same settings or without. It
has the range of measured points over the seeds. Errors over all points, and shares within 1 % (allocated) and 2 %
(reserved), are the worst of the seeds. --keep writes what the search reads of the predicted rows, a CSV a sweep;
tests/data/predicted has "0.5B lengths".
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vramsweep.analysis.model.adaptive import TOLERANCES, Answer, Grid, Search  # noqa: E402
from vramsweep.analysis.model.phases import PHASES  # noqa: E402
from vramsweep.harness.rows.journal import read, terminal  # noqa: E402
from vramsweep.harness.rows.schema import Row  # noqa: E402
from vramsweep.harness.spec.trial_identity import SIMULATION  # noqa: E402

MIB = 1 << 20
DATA = ROOT.parent / "shared" / "data"
SAME = (
    "runner=trainer", "sharding=zero3", "precision=fp16", "zero_init=false", "optimizer=deepspeed_fused_adam",
    "+versions.deepspeed=0.14.2", "+versions.transformers=4.40.0", "report=false",
)  # fmt: skip
QWEN = ("model=qwen0.5b", "device.gpu=rtx3090-24gb")
LLAMA = ("model=llama3-8b", "device.gpu=a100-80gb", "world_size=8")
PLAIN = ("use_cache=on", "padding=0.5")
CHECKPOINTING = ("use_cache=off", "padding=0.5", "checkpointing=full", "checkpointing_reentrant=true")


@dataclass(frozen=True)
class Sweep:
    """A published file along `axis`, the value of the `other` axis, and the overrides that predict it."""

    file: str
    axis: str
    other: int
    words: tuple[str, ...]

    @staticmethod
    def folder(name: str) -> str:
        """Return a sweep's name as the name of a folder."""
        return name.replace(" ", "-").replace(",", "")


SWEEPS = {
    "0.5B lengths": Sweep("qwen15-0.5b-zero3/without-expandable-segments.csv", "seq_len", 1, (*QWEN, *PLAIN)),
    "0.5B batches": Sweep("qwen15-0.5b-zero3/batches.csv", "micro_batch", 2048, (*QWEN, *PLAIN)),
    "0.5B batches, checkpointing": Sweep(
        "qwen15-0.5b-zero3/batches-checkpointing.csv", "micro_batch", 2048, (*QWEN, *CHECKPOINTING)
    ),
    "8B lengths": Sweep("llama3-8b-zero3-8gpu/lengths-zero3.csv", "seq_len", 1, (*LLAMA, *PLAIN)),
    "8B batches": Sweep("llama3-8b-zero3-8gpu/batches-zero3.csv", "micro_batch", 2048, (*LLAMA, *PLAIN)),
    "8B batches, checkpointing": Sweep(
        "llama3-8b-zero3-8gpu/batches-zero3-checkpointing.csv", "micro_batch", 2048, (*LLAMA, *CHECKPOINTING)
    ),
}
READ = (
    "peak_allocated_bytes", "peak_reserved_bytes", "unlimited_peak_reserved_bytes",
    *(f"{phase}_peak_allocated_bytes" for phase in PHASES),
)  # fmt: skip
LIMIT = {"rtx3090-24gb": 23.4 * 1024, "a100-80gb": 78.7 * 1024}  # MiB of an allocator's limit there, to 1 %


def published(path: Path) -> dict[int, tuple[float, float] | None]:
    """Return active and reserved MiB by value of the axis, medians over reporting ranks; None if out of memory."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    full = set()
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if cells[1] == "OOM":
            full.add(int(cells[0]))
            continue
        sizes = [float(cell) for cell in cells[1:-1]]
        found[int(cells[0])] += [(a, r) for a, r in zip(sizes[::2], sizes[1::2], strict=True) if a]
    middle = {
        at: (statistics.median(a for a, _ in each), statistics.median(r for _, r in each)) for at, each in found.items()
    }
    return dict(sorted((middle | dict.fromkeys(full - middle.keys())).items()))


def predicted(name: str, sweep: Sweep, at: list[int], results: Path) -> dict[int, Row]:
    """Return the predicted rows by value of the axis, after predicting those that `results` does not have yet."""
    folder = Sweep.folder(name)
    other = "micro_batch" if sweep.axis == "seq_len" else "seq_len"
    step = f"{at[0]}..{at[-1]}" if at == list(range(at[0], at[-1] + 1)) else ",".join(map(str, at))
    words = (*sweep.words, *SAME, f"{sweep.axis}={step}", f"{other}={sweep.other}")
    command = [sys.executable, "-m", "vramsweep", "predict", *words, f"results={results}", f"name={folder}"]
    subprocess.run(command, check=False, cwd=ROOT, stdout=sys.stderr)  # may fail: a single token has no padding
    return {row[sweep.axis]: row for row in terminal(read(results / folder)[0]).values()}


def keep(path: Path, rows: Mapping[int, Row]) -> None:
    """Write the columns of predicted rows that a search reads, and the version of the simulation that made them."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["at", "simulation", "outcome", *READ])
        writer.writerows([at, SIMULATION, row["outcome"], *(row[name] for name in READ)] for at, row in rows.items())


def kept(path: Path) -> dict[int, Row]:
    """Return the rows that `keep` wrote, by value of the axis."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return {
        int(line["at"]): {"outcome": line["outcome"], "simulation": int(line["simulation"])}
        | {name: int(line[name]) if line[name] else None for name in READ}
        for line in lines
    }


def grid(sweep: Sweep, at: list[int], rows: Mapping[int, Row]) -> Grid:
    """Return the points of a sweep, with their predictions if there are any."""
    x, other = np.array(at, float), np.full(len(at), float(sweep.other))
    length, batch = (x, other) if sweep.axis == "seq_len" else (other, x)
    return Grid.of(length, batch, [rows.get(one) for one in at]) if rows else Grid(length, batch)


def searched(points: Grid, truth: list[tuple[float, float] | None], limit: float, seed: int) -> tuple[Search, float]:
    """Run a search to its end; return it and the seconds of its longest round."""
    search, longest = Search(points, seed=seed), 0.0
    while True:
        began = time.perf_counter()
        asked = search.ask()
        if not asked:
            return search, longest
        answers = {}
        for at in asked:
            sizes = truth[at]
            values = {} if sizes is None else dict(zip(TOLERANCES, (MIB * size for size in sizes), strict=True))
            answers[at] = Answer(sizes is not None, values, MIB * limit)
        search.tell(answers)
        longest = max(longest, time.perf_counter() - began)


def line(name: str, points: Grid, truth: list[tuple[float, float] | None], limit: float, seeds: int) -> str:
    """Return a line of the table, in Markdown."""
    ran = np.array([sizes is not None for sizes in truth])
    runs = [searched(points, truth, limit, seed) for seed in range(seeds)]
    cells = [name, "with" if points.predicted else "without", f"{len(truth):,}"]
    counts = sorted(len(search.answers) for search, _ in runs)
    cells.append(f"{counts[0]} to {counts[-1]}" if counts[0] < counts[-1] else f"{counts[0]}")
    for column, tolerance in TOLERANCES.items():
        known = np.array([MIB * sizes[list(TOLERANCES).index(column)] for sizes in truth if sizes is not None])
        off = [np.abs(search.inferred()[column].value[ran] / known - 1) for search, _ in runs]
        within = min(float(np.mean(one <= tolerance.within)) for one in off)
        cells += [f"{max(np.quantile(one, 0.95) for one in off):.2%}", f"{max(one.max() for one in off):.2%}"]
        cells.append(f"{within:.1%}")
    edges = sum(fits is not None and fits != there for s, _ in runs for fits, there in zip(s.fits(), ran, strict=True))
    cells += [
        f"{sum(s.enough for s, _ in runs)} of {seeds}",
        str(edges),
        f"{max(seconds for _, seconds in runs):.1f} s",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder that contains both sweeps' folders")
    parser.add_argument("--results", type=Path, help="folder of the predicted rows: read if it has them, else written")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="folder to write the predicted columns to that the search reads")
    parser.add_argument("--only", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    chosen = parser.parse_args()
    missing = [
        sweep.file for name, sweep in SWEEPS.items() if name in chosen.only and not (chosen.data / sweep.file).is_file()
    ]
    if missing:
        parser.exit(1, f"there is no file {chosen.data / missing[0]}; give the published folder with --data\n")
    print("| sweep | prediction | points | measured | allocated: 95 % | worst | within 1 % | reserved: 95 % | worst "
          "| within 2 % | reports enough | wrong maxima | longest round |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.only:
            sweep = SWEEPS[name]
            file = published(chosen.data / sweep.file)
            at, truth = list(file), list(file.values())
            card = next(word.partition("=")[2] for word in sweep.words if word.startswith("device.gpu="))
            rows = predicted(name, sweep, at, chosen.results or Path(folder))
            if chosen.keep and rows:
                chosen.keep.mkdir(parents=True, exist_ok=True)
                keep(chosen.keep / f"{sweep.folder(name)}.csv", rows)
            both = [grid(sweep, at, rows), grid(sweep, at, {})]
            for points in both if both[0].predicted else both[1:]:  # a grid ignores fewer than three predictions
                print(line(name, points, truth, LIMIT[card], chosen.seeds), flush=True)


if __name__ == "__main__":
    main()
