"""The GPU check: everything that only a real card can prove, in one command and under nine minutes.

    python benchmarks/gpu_check.py OUT [--device cuda] [--seconds 520]

Writes at most eight files into OUT, to be kept under results/reference/<gpu>/: `summary.json` (verdicts and figures),
`rows.jsonl` (every row of every part), `recordings.zip` (one recorded step for each allocator setting), `tests.txt`
and `log.txt`. A part that fails or finds no time is said so in the summary and does not stop the others. With
--device cpu the same parts run on the tiny model as far as they go, which is how the kit itself is tested.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import journal, machine  # noqa: E402
from harness.allocator.replay import what_if  # noqa: E402
from harness.row import Row  # noqa: E402

KIB = 1024
# A user's public measurement of GPT-2 with the Trainer's defaults, length 512, fp32, torch 2.9.1, transformers 4.57.3.
PUBLIC_GPT2 = {"peak_allocated_bytes": round(8_450_177.5 * KIB), "peak_reserved_bytes": 9_154_560 * KIB}


@dataclass
class Check:
    """What the parts share: where things go, the device and its models, the deadline, and the rows so far."""

    out: Path
    scratch: Path
    device: str
    deadline: float
    rows: list[Row] = field(default_factory=list)

    @property
    def real(self) -> bool:
        """Whether this is the card itself and not the rehearsal on a CPU."""
        return self.device == "cuda"

    def sweep(self, name: str, *overrides: str) -> list[Row]:
        """Run one sweep and return its terminal rows; ends it when the time is up and keeps what there is."""
        words = ["-m", f"device={self.device}", f"name={name}", f"results={self.scratch}", "report=false", *overrides]
        with (self.out / "log.txt").open("a") as log:
            log.write(f"\n== {name}: {' '.join(overrides)}\n")
            log.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", "harness", "sweep", *words], cwd=ROOT, stdout=log, stderr=log
            )
            try:
                process.wait(max(1.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(30)
                log.write("ended: no time left\n")
        rows = list(journal.terminal(journal.read(self.scratch / name)[0]).values())
        self.rows += rows
        return rows


def tests(check: Check) -> dict[str, Any]:
    """The tests marked `gpu`."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=max(1.0, check.deadline - time.monotonic()),
    )
    (check.out / "tests.txt").write_text(done.stdout + done.stderr)
    return {"exit_status": done.returncode, "last_line": (done.stdout.strip().splitlines() or [""])[-1]}


def isolation(check: Check) -> dict[str, Any]:
    """Cold against warm: memory to the byte, speed within the spread, overhead of each."""
    shape = ["model=qwen0.5b", "seq_len=512"] if check.real else ["model=tiny", "seq_len=64", "protocol=brief"]
    rows = {
        kind: check.sweep(f"isolation-{kind}", *shape, f"isolation={kind}", "repeats=3") for kind in ("cold", "warm")
    }
    cold, warm = ([r for r in rows[kind] if r["outcome"] == "ok"] for kind in ("cold", "warm"))
    names = ["peak_allocated_bytes"] + (["peak_active_bytes", "peak_reserved_bytes"] if check.real else [])
    speed = {kind: [r["tokens_per_s"] for r in found] for kind, found in (("cold", cold), ("warm", warm))}
    return {
        "equal_memory": {n: len({r[n] for r in cold + warm}) == 1 for n in names},
        "tokens_per_s": speed,
        "speed_ratio_warm_cold": statistics.median(speed["warm"]) / statistics.median(speed["cold"]),
        "overhead_s": {
            kind: statistics.median(r["overhead_s"] for r in f) for kind, f in (("cold", cold), ("warm", warm))
        },
    }


def allocators(check: Check) -> dict[str, Any]:
    """The quick sweep over lengths, batches, precisions and every allocator setting."""
    if check.real:
        grid = ["model=qwen0.5b", "seq_len=256,512,1024,2048", "micro_batch=1,4", "precision=bf16,fp32"]
        grid += ["allocator=default,expandable,max_split_128,gc,roundup,cuda_malloc_async"]
    else:
        grid = ["model=tiny", "seq_len=32,64", "precision=bf16,fp32", "protocol=brief"]
    rows = check.sweep("allocators", *grid)
    fast = [r for r in rows if r["mfu"] is not None]
    best = max(fast, key=lambda r: r["mfu"], default=None)
    return {
        "outcomes": outcomes(rows),
        "highest_mfu": best
        and {k: best[k] for k in ("mfu", "hfu", "seq_len", "micro_batch", "precision", "allocator")},
    }


def gpt2_trainer(check: Check) -> dict[str, Any]:
    """GPT-2 at the Trainer's defaults beside the public measurement."""
    shape = ["model=gpt2", "seq_len=512"] if check.real else ["model=tiny", "seq_len=64", "protocol=brief"]
    rows = check.sweep("gpt2-trainer", *shape, "runner=trainer", "precision=fp32")
    row = rows[0]
    found = {name: row[name] for name in PUBLIC_GPT2}
    differs = {n: row[n] / PUBLIC_GPT2[n] - 1 for n in PUBLIC_GPT2 if row[n] is not None} if check.real else None
    return {"outcomes": outcomes(rows), "measured": found, "public": PUBLIC_GPT2, "relative_difference": differs}


def zero3(check: Check) -> dict[str, Any]:
    """Qwen1.5-0.5B, ZeRO-3, fp16, with and without expandable segments: the shape of the public curve."""
    if check.real:
        grid = ["model=qwen0.5b", "seq_len=64,256,512,768,896,960,1024,1280,1536,1792,1920,2048"]
        grid += ["precision=fp16", "allocator=default,expandable"]
    else:
        grid = ["model=tiny", "seq_len=32,64", "precision=bf16", "protocol=brief"]
    rows = check.sweep("zero3", *grid, "runner=deepspeed", "runner.zero_stage=3")
    curve = {
        name: sorted(
            (r["seq_len"], r["peak_allocated_bytes"], r["peak_reserved_bytes"])
            for r in rows
            if r["allocator"] == name and r["outcome"] == "ok"
        )
        for name in {r["allocator"] for r in rows}
    }
    return {"outcomes": outcomes(rows), "curve": curve}


def recordings(check: Check) -> dict[str, Any]:
    """One recorded step under each setting: is its replay exact? A tight limit forces the retries."""
    if not check.real:
        return {"skipped": "recordings need CUDA"}
    shape = ["model=gpt2", "seq_len=256", "micro_batch=4", "precision=bf16", "record=true", "protocol=brief"]
    plain = check.sweep("recorded-default", *shape)
    total, peak = plain[0]["device_total_bytes"], plain[0]["peak_reserved_bytes"]
    settings = {
        "default": "",
        "expandable": "expandable_segments:True",
        "max_split": "max_split_size_mb:20",
        "roundup": "roundup_power2_divisions:8",
        "gc": f"garbage_collection_threshold:0.6,per_process_memory_fraction:{1.2 * peak / total:.6f}",
        "retry": f"per_process_memory_fraction:{0.97 * peak / total:.6f}",
    }
    found: dict[str, Any] = {}
    with zipfile.ZipFile(check.out / "recordings.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, conf in settings.items():
            chosen = ["allocator=custom", f"allocator.conf='{conf}'"] if conf else []
            rows = plain if not conf else check.sweep(f"recorded-{name}", *shape, *chosen)
            row = rows[0]
            found[name] = {
                "conf": conf,
                "outcome": row["outcome"],
                "reason": row["reason"],
                "retries": row["alloc_retries"],
            }
            if row["recording"] is None:
                continue
            path = check.scratch / f"recorded-{name}" / row["recording"]
            archive.write(path, f"{name}.pickle")
            fraction = float(conf.rpartition("fraction:")[2]) if "fraction" in conf else None
            limit = None if fraction is None else int(fraction * total)
            match = what_if(path, [], recorded_limit=limit).rows[0].match
            found[name] |= {"exact": match and match.exact, "first_difference": match and match.first_difference}
    return found


def instruments(check: Check) -> dict[str, Any]:
    """Our loop against a bare one on the same shapes, in one process."""
    import overhead

    return overhead.instruments(rounds=10, steps=30, device=check.device)


def outcomes(rows: list[Row]) -> dict[str, int]:
    """How many rows of each outcome."""
    return {name: sum(r["outcome"] == name for r in rows) for name in sorted({str(r["outcome"]) for r in rows})}


# The shortest and the most telling first: what finds no time is at the end.
PARTS: tuple[Callable[[Check], dict[str, Any]], ...] = (
    gpt2_trainer, recordings, isolation, instruments, tests, allocators, zero3,
)  # fmt: skip


def main() -> int:
    """Run every part; the exit status is 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=520)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    summary: dict[str, Any] = {
        "device": arguments.device,
        "machine": machine.facts(),
        "gpus": [card.name for card in machine.gpus()],
        "parts": {},
    }
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        check = Check(arguments.out, Path(scratch), arguments.device, began + arguments.seconds)
        for part in PARTS:
            start = time.monotonic()
            if start > check.deadline - 10:
                summary["parts"][part.__name__] = {"skipped": "no time left"}
                continue
            try:
                found = part(check)
            except Exception:  # one part's failure is a finding, and must not cost the others
                found = {"failed": traceback.format_exc().strip().splitlines()[-1]}
                failed = True
            summary["parts"][part.__name__] = found | {"seconds": round(time.monotonic() - start, 1)}
            print(f"{part.__name__}: {json.dumps(summary['parts'][part.__name__])[:300]}", flush=True)
            (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
            (arguments.out / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in check.rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
