"""Compare predictions for Llama-3-8B under ZeRO-3 on 8 A100 with what was published: active and reserved memory.

    python benchmarks/published_8b.py [--all] [--data FOLDER] [--only lengths|batches|checkpointing] [--json]

Published: github gpjt/fine-tune-2024-04, per length and batch (length 2,048), with and without checkpointing; DeepSpeed
0.14.2, transformers 4.40.0, torch 2.2.2, fp16, FusedAdam, model made before the training arguments, text padded to the
length, no allocator setting; the Trainer, here runner=deepspeed. Columns in MiB: the peaks of the ranks (median, least
and most), and two predictions. The lower bound is for a GPU that keeps up with the host; its error is from the median.
The upper bound is for a host that runs as far ahead as it may (peak_active_most_bytes). One trace takes about half a
minute; without --all a few points are predicted.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import yaml  # noqa: E402

from vramsweep.harness.allocator import config as allocator_config  # noqa: E402
from vramsweep.harness.hardware import gpu_lookup  # noqa: E402
from vramsweep.harness.spec import (  # noqa: E402
    trial,
    trial_parser,
)
from vramsweep.runners.loops import deepspeed_engine  # noqa: E402
from vramsweep.runners.predict import make_trace, predicted_row  # noqa: E402
from vramsweep.runners.predict.replay_trace import replay  # noqa: E402

MIB = 1 << 20
DATA = ROOT.parent / "shared" / "data" / "llama3-8b-zero3-8gpu"
FORK = multiprocessing.get_context("fork")
# file, setting in its first column, checkpointing, and the points that are predicted without --all
FILES = {
    "lengths": ("lengths-zero3.csv", "seq_len", False, (1, 1041, 2041)),
    "batches": ("batches-zero3.csv", "micro_batch", False, (1, 2, 3)),
    "checkpointing": ("batches-zero3-checkpointing.csv", "micro_batch", True, (1, 4, 12, 13)),
}


@dataclass(frozen=True)
class Reading:
    """Published peaks of every rank, in MiB, at one length or batch; None if the run ran out of memory."""

    value: int
    active: list[int] | None
    reserved: list[int] | None


def readings(path: Path) -> Iterator[Reading]:
    """Yield a reading for each value of the first column. A line has some of the ranks, and zeros for the others."""
    found: dict[int, list[tuple[int, int]]] = {}
    for line in path.read_text().splitlines():
        first, *rest = (cell.strip() for cell in line.split(","))
        ranks = found.setdefault(int(first), [])
        if rest != ["OOM"]:
            sizes = [int(cell) for cell in rest[:16]]
            ranks += [pair for pair in zip(sizes[::2], sizes[1::2], strict=True) if pair[0]]
    for value, pairs in found.items():
        active, reserved = ([pair[i] for pair in pairs] or None for i in (0, 1))
        yield Reading(value, active, reserved)


def trial_of(axis: str, value: int, checkpointing: bool) -> trial.Trial:
    """Return the published run as a trial."""
    values = {
        "model": yaml.safe_load((ROOT / "conf" / "model" / "llama3-8b.yaml").read_text()),
        "seq_len": 2048, "micro_batch": 1, "world_size": 8, "sharding": "zero3", "precision": "fp16",
        "device": {"name": "simulated", "gpu": "a100-80gb"}, "runner": {"name": "deepspeed"}, "zero_init": False,
        "optimizer": "deepspeed_fused_adam", "versions": {"deepspeed": "0.14.2", "transformers": "4.40.0"},
        "allocator": {"name": "default"}, "protocol": {"name": "published", "warmup_steps": 1, "measured_steps": 1},
        "use_cache": "off" if checkpointing else "on",
    }  # fmt: skip
    if checkpointing:
        values |= {"checkpointing": "full", "checkpointing_reentrant": True}
    values |= {axis: value}
    return trial_parser.parse(values | {"padding": 0.5 if values["seq_len"] > 1 else 0.0})


def predicted(axis: str, value: int, checkpointing: bool) -> dict[str, Any]:
    """Predict peaks in MiB; return them, the known differences that were applied, and whether it fits the GPU."""
    chosen, card = trial_of(axis, value, checkpointing), gpu_lookup.gpu_named("a100-80gb")
    with tempfile.TemporaryDirectory() as folder:
        trace, details = make_trace.trace_trial(chosen, card, Path(folder), deepspeed_engine)
    config = allocator_config.parse("")
    limit = gpu_lookup.memory_limit(card)
    found = replay(trace, config, limit)
    most = predicted_row.upper_bounds(trace, config, limit)
    return {
        **{name: found.peak[name] // MIB for name in ("active", "reserved")},
        **{f"{name}_most": most[f"peak_{name}_most_bytes"] // MIB for name in ("active", "reserved")},
        "fits": found.refused is None,
        "differences": details["differences"],
    }


def apart(*arguments: Any) -> dict[str, Any]:
    """Call `predicted` in a new process."""
    here, there = FORK.Pipe(duplex=False)

    def run() -> None:
        there.send(predicted(*arguments))
        os._exit(0)

    process = FORK.Process(target=run)
    process.start()
    there.close()
    answer = dict(here.recv())
    process.join()
    return answer


def line(name: str, reading: Reading, found: dict[str, Any]) -> str:
    """Return a row of the table."""
    cells = [name, str(reading.value)]
    if not found["fits"]:
        published = "OOM" if reading.active is None else f"{statistics.median(reading.active):,.0f}"
        return f"| {' | '.join([*cells, published, 'OOM', '', '', '', ''])} |"
    for counter, values in (("active", reading.active), ("reserved", reading.reserved)):
        least, most = found[counter], found[f"{counter}_most"]
        if values is None:
            cells += ["OOM", f"{least:,}", f"{most:,}"]
            continue
        middle = statistics.median(values)
        cells += [f"{middle:,.0f} ({min(values):,} to {max(values):,})", f"{least:,} ({least / middle - 1:+.1%})"]
        cells.append(f"{most:,}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="all published lengths and batches")
    parser.add_argument("--only", choices=FILES, help="one of the files")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the published files")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each point, not a table")
    chosen = parser.parse_args()
    if not chosen.data.is_dir():
        parser.exit(1, f"there is no folder {chosen.data}; give the published files with --data\n")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if not chosen.json:
        print("| | at | active, published | lower | upper bound | reserved, published | lower | upper bound |")
        print("|---|---|---|---|---|---|---|---|")
    for name, (file, axis, checkpointing, few) in FILES.items():
        for reading in readings(chosen.data / file) if chosen.only in (None, name) else ():
            if chosen.all or reading.value in few:
                found = apart(axis, reading.value, checkpointing)
                print(json.dumps({"file": name, **asdict(reading), "predicted": found}) if chosen.json
                      else line(name, reading, found), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
