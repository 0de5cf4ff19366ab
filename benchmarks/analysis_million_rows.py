"""Load, group, fit and draw a million generated rows. Prints JSON: seconds, memory, versions.

    python benchmarks/analysis_million_rows.py [--rows 1000000] [--folder DIR]

The rows have every column of the registry, as the harness writes them. Generating them is not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def generate(path: Path, rows: int) -> None:
    """Write rows of 2 precisions x 6 allocators x 4 batches, 2,048 lengths, and as many repeats as `rows` needs."""
    from vramsweep.harness.rows.schema import complete_row

    random = np.random.default_rng(0)
    settings = [(p, a, b) for p in ("bf16", "fp32") for a in range(6) for b in (1, 2, 4, 8)]
    note = "generated, not a measurement"
    filled = complete_row({"sweep": "generated", "terminal": True, "outcome": "ok", "notes": [note]})
    axes = ("trial_id", "seq_len", "micro_batch", "precision", "allocator")
    template = json.dumps({**filled, **dict.fromkeys(axes, "@")})
    for name in ("repeat", "peak_allocated_bytes", "peak_reserved_bytes", "step_median_s", "tokens_per_s"):
        template = template.replace(f'"{name}": null', f'"{name}": @')
    fixed = {"model": "made-up", "runner": "torch", "device": "cuda", "memory_source": "cuda_allocator"}
    for name, value in fixed.items():
        template = template.replace(f'"{name}": null', f'"{name}": "{value}"')
    template = template.replace('"step_times_s": null', '"step_times_s": [0.1, 0.1, 0.1, 0.1, 0.1]')
    order = [key for key in filled if f'"{key}": "@"' in template or f'"{key}": @' in template]
    pieces = template.replace('"@"', "@").split("@")
    noise = np.exp(random.normal(0, 0.01, rows))
    with path.open("w", encoding="utf-8") as stream:
        for i in range(rows):
            precision, allocator, batch = settings[i % len(settings)]
            length = 1 + (i // len(settings)) % 2048
            peak = int(max(4e9, 3e9 + batch * length * 1.5e6 * (1 if precision == "bf16" else 2)))
            step = (0.02 + batch * length * 2e-6) * noise[i]
            values = {
                "trial_id": f'"{i:08x}"', "seq_len": length, "micro_batch": batch, "precision": f'"{precision}"',
                "allocator": f'"allocator {allocator}"', "repeat": i // len(settings) // 2048,
                "peak_allocated_bytes": peak,
                "peak_reserved_bytes": int(peak * (1.02 + 0.02 * allocator)), "step_median_s": step,
                "tokens_per_s": batch * length / step,
            }  # fmt: skip
            stream.write(pieces[0] + "".join(f"{values[k]}{p}" for k, p in zip(order, pieces[1:], strict=True)) + "\n")


def measure(path: Path) -> dict[str, float]:
    """Return sizes, seconds of each part and peak memory of an analysis in this process."""
    from vramsweep.analysis.data.groups import groups
    from vramsweep.analysis.data.load import load
    from vramsweep.analysis.report.content import collect

    begin, cpu = time.perf_counter(), time.process_time()
    table = load(path)
    loaded = time.perf_counter()
    content = collect(table)  # groups, fits and draws
    fitted = time.perf_counter()
    pages = sum(len(figure.plot.to_html(include_plotlyjs=False, full_html=False)) for figure in content.figures)
    drawn = time.perf_counter()
    return {
        "rows": len(table.frame),
        "groups": len(groups(table)),
        "fits": len(content.fits),
        "figures": len(content.figures),
        "figure_bytes": pages,
        "load_s": round(loaded - begin, 2),
        "group_fit_draw_s": round(fitted - loaded, 2),
        "serialise_s": round(drawn - fitted, 2),
        "total_s": round(drawn - begin, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="folder of the generated journal (default: a temporary one)")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"generated-{arguments.rows}.jsonl"
        if not path.exists():
            generate(path, arguments.rows)
        # a fresh process, because this one's peak memory includes generating the rows
        command = [sys.executable, __file__, "--measure", str(path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        result = json.loads(done.stdout)
        result["journal_mib"] = round(path.stat().st_size / 2**20)
    names = ("numpy", "pandas", "pyarrow", "scipy", "plotly")
    result |= {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    result |= {name: version(name) for name in names}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
