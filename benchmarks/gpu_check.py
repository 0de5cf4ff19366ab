"""The GPU check: it proves what only a real GPU can prove, in runs of under nine minutes.

    python benchmarks/gpu_check.py OUT [--device cuda] [--seconds 520] [--only PART,PART]

Writes eight files of at most 16 MiB into OUT, to keep under results/reference/<gpu>/: `summary.json` (verdicts and
figures), `rows.jsonl` (rows of all parts), `residuals.csv` (predicted compared with measured), `recordings.zip` (the
allocator's events under each setting), `report.html` (of the user's sweep), `speeds.json` (of a look at the GPU),
`tests.txt` and `log.txt`. Parts can be split over several runs, each adding to OUT. `predicted` needs no GPU, so
another machine can run it. A part that fails or finds no time is reported in the summary and does not stop the others.
With --device cpu the parts run on the tiny model as far as possible, which tests the check itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

NEEDED = ("torch", "transformers", "hydra", "omegaconf", "pydantic", "pandas", "pyarrow", "psutil", "pynvml")


def missing(names: Iterable[str]) -> list[str]:
    """Return those of the modules that this interpreter does not have."""
    return [name for name in names if importlib.util.find_spec(name) is None]


if __name__ == "__main__" and missing(NEEDED):
    sys.exit(
        f"gpu_check: {sys.executable} lacks {', '.join(missing(NEEDED))}\n"
        "install them with pip (hydra is hydra-core, pynvml is nvidia-ml-py); without a network, bring the wheels along"
    )

from gpu_check_recordings import misses, recordings  # noqa: E402
from gpu_check_sweeps import Check, ended_ok, last_line, outcomes, swept  # noqa: E402

from vramsweep.analysis.compare.residuals import COMPONENTS, not_compared, residuals, sentences  # noqa: E402
from vramsweep.analysis.compare.residuals import summary as per_component  # noqa: E402
from vramsweep.analysis.compare.verdicts import compare  # noqa: E402
from vramsweep.analysis.data.export import write_csv  # noqa: E402
from vramsweep.analysis.data.load import load  # noqa: E402
from vramsweep.harness.files.sweep_folder import own_files  # noqa: E402
from vramsweep.harness.hardware.gpu_lookup import find_gpu  # noqa: E402
from vramsweep.harness.machine import machine  # noqa: E402
from vramsweep.harness.messages.errors import UserError  # noqa: E402
from vramsweep.harness.rows import journal  # noqa: E402
from vramsweep.harness.rows.schema import Row  # noqa: E402

KIB = 1 << 10
MIB = 1 << 20
MOST_FILES, MOST_BYTES = 8, 16 * MIB
# A user published this measurement: GPT-2, the Trainer's defaults, length 512, fp32, torch 2.9.1, transformers 4.57.3.
PUBLIC_GPT2 = {"peak_allocated_bytes": round(8_450_177.5 * KIB), "peak_reserved_bytes": 9_154_560 * KIB}
MOST_PROFILED = 24
DRAWN = 60  # seconds left for the report of the user's sweep after its budget
REHEARSED = "h100-80gb"  # the GPU that a rehearsal without a GPU predicts for
# A prediction does not depend on these overrides of a measured sweep, or refuses them; predictions omit them.
NOT_PREDICTED = ("isolation=", "repeats=", "protocol=", "record=")


def gpt2_trainer(check: Check) -> dict[str, Any]:
    """Measure GPT-2 at the Trainer's defaults, next to the public measurement."""
    shape = ["model=gpt2", "seq_len=512"] if check.real else ["model=tiny", "seq_len=64"]
    if not check.real:
        shape.append("protocol=brief")
    rows = check.sweep("gpt2-trainer", *shape, "runner=trainer", "precision=fp32")
    (row,) = ended_ok(rows)
    found = {name: row[name] for name in PUBLIC_GPT2}
    differs = {n: row[n] / PUBLIC_GPT2[n] - 1 for n in PUBLIC_GPT2 if row[n] is not None} if check.real else None
    return {"outcomes": outcomes(rows), "measured": found, "public": PUBLIC_GPT2, "relative_difference": differs}


def isolation(check: Check) -> dict[str, Any]:
    """Compare cold with warm trials: is memory byte-identical, is speed within the spread, what is the overhead?"""
    shape = ["model=qwen0.5b", "seq_len=512"] if check.real else ["model=tiny", "seq_len=64"]
    kinds = ("cold", "warm")
    rows: dict[str, list[Row]] = {}
    for number in range(3):  # in turns, each first in every other round: drift affects both
        for kind in kinds if number % 2 else reversed(kinds):
            rows[kind] = check.sweep(f"isolation-{kind}", *shape, f"isolation={kind}", f"repeats={number + 1}")
    ok = {kind: ended_ok(rows[kind]) for kind in kinds}
    every = [*ok["cold"], *ok["warm"]]
    # on a CPU reserved memory is the process's resident set, which includes the fork server's imports
    names = [c for c in COMPONENTS if every[0][c] is not None and (check.real or "allocated" in c)]
    sides = [load(check.scratch / f"isolation-{kind}") for kind in kinds]
    try:
        speed = compare(sides[0], sides[1], kinds).speed
        verdict = f"{speed.verdict}: {speed.reason}"
    except UserError as error:
        verdict = f"not compared: {error}"
    return {
        "memory_equal_to_the_byte": {n: len({r[n] for r in every}) == 1 for n in names},
        "tokens_per_s": {kind: [r["tokens_per_s"] for r in found] for kind, found in ok.items()},
        "fastest_step_s": {kind: min(min(r["step_times_s"]) for r in found) for kind, found in ok.items()},
        "speed_of_warm": verdict,
        "overhead_s": {kind: statistics.median(r["overhead_s"] for r in found) for kind, found in ok.items()},
    }


def instruments(check: Check) -> dict[str, Any]:
    """Compare our loop with a bare one on the same shapes. It runs in its own process because later sweeps would count
    this one, once it has touched the GPU, as a foreign user of it. Raises RuntimeError if it fails."""
    if missing(["pytest"]):
        return {"skipped": "pytest is not installed here, but the tiny model is part of the tests"}
    code = "import json, sys; sys.path.insert(0, 'benchmarks'); import overhead; "
    code += f"print(json.dumps(overhead.instruments(rounds=10, steps=30, device={check.device!r})))"
    done = check.python(["-c", code])
    if done.returncode:
        raise RuntimeError(last_line(done.stderr))
    found: dict[str, Any] = json.loads(last_line(done.stdout))
    return found


def zero3(check: Check) -> dict[str, Any]:
    """Measure Qwen1.5-0.5B, ZeRO-3, fp16, with and without expandable segments, as in the public curve."""
    if missing(["deepspeed"]):
        return {"skipped": "deepspeed is not installed here"}
    if check.real:
        grid = ["model=qwen0.5b", "seq_len=64,512,960,1024,1536,2048"]
        grid += ["precision=fp16", "allocator=default,expandable"]
    else:
        grid = ["model=tiny", "seq_len=32,64", "precision=bf16", "protocol=brief"]
    rows = check.sweep("zero3", *grid, "runner=deepspeed", "sharding=zero3")
    curve = {
        name: sorted(
            (r["seq_len"], r["peak_allocated_bytes"], r["peak_reserved_bytes"])
            for r in rows
            if r["allocator"] == name and r["outcome"] == "ok"
        )
        for name in {r["allocator"] for r in rows}
    }
    return {"outcomes": outcomes(rows), "curve": curve}


def tests(check: Check) -> dict[str, Any]:
    """Run the end-to-end tests marked `gpu`. `pytest -m gpu` also runs those of single techniques, minutes each."""
    if missing(["pytest", "pytest_timeout"]):
        return {"skipped": "pytest or pytest-timeout is not installed here"}
    words = ["-m", "pytest", "-m", "gpu", "-vv", "-rfEs", "-p", "no:cacheprovider", "tests/test_gpu.py"]
    path, status = check.out / "tests.txt", None
    with path.open("w") as stream:  # written as they run, so that a timeout leaves the output
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=stream, stderr=stream)
        try:
            status = process.wait(check.left())
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    text = path.read_text(errors="replace")[-MIB:]
    path.write_text(text.replace(sys.executable, "python").replace(f"{ROOT}", "."))  # no paths of this machine
    return {"exit_status": status, "cut_short": status is None, "last_line": last_line(text)}


def profiles(check: Check) -> dict[str, Any]:
    """Profile steps of the plain loop's measured trials: is the time spent on the GPU or on the host before it?"""
    plain = {"runner": "torch", "sharding": "none", "outcome": "ok", "device": check.device, "grad_accum": 1}
    rows = [r for r in check.rows if all(r[k] == v for k, v in plain.items()) and r["allocator"] == "default"]
    names = list(dict.fromkeys(r["trial_id"] for r in rows if r["sweep"].startswith("factors")))[:MOST_PROFILED]
    if not names:
        return {"skipped": "no trial of the part factors is measured yet"}
    path, kept = check.scratch / "profiles.json", check.scratch / "profiled.jsonl"
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = str(ROOT / "benchmarks" / "profiled_steps.py")
    limit = ["--device", check.device, "--seconds", f"{check.left() - 10:.0f}"]  # it ends by itself, with its processes
    done = check.python([script, str(path), str(kept), *names, *limit])
    if not path.exists():
        raise RuntimeError(last_line(done.stderr))
    found: dict[str, Any] = json.loads(path.read_text())
    if any(one.get("failed") == "no time left" for one in found.values()):
        check.cut_short.add("profiles")
    return found


def allocators(check: Check) -> dict[str, Any]:
    """Measure the allocator settings that the user's sweep does not have, each twice."""
    grid = ["model=tiny", "seq_len=32,64", "precision=bf16", "protocol=brief"]
    if check.real:
        grid = ["model=qwen0.5b", "repeats=2", "seq_len=512,2048", "micro_batch=4", "allocator=default,gc,roundup"]
    return {"outcomes": outcomes(check.sweep("allocators", *grid))}


def factors(check: Check) -> dict[str, Any]:
    """Measure the preset `factors`: everything that decides memory, each at least twice."""
    return preset(check, "factors", "checkpointing=none,full")


def techniques(check: Check) -> dict[str, Any]:
    """Measure the preset `techniques`: every other technique that one GPU can run."""
    return preset(check, "techniques", "optimizer=sgd,adafactor")


def models(check: Check) -> dict[str, Any]:
    """Measure the preset `models`: one model of each architecture that a GPU of 80 GB can train somehow."""
    return preset(check, "models", "precision=bf16,bf16_pure")


def speeds(check: Check) -> dict[str, Any]:
    """Look at the GPU (speed_readings.py); keep the file of its speeds, and return it without its readings."""
    out = check.out / "speeds.json"
    out.unlink(missing_ok=True)
    done = check.python(["benchmarks/speed_readings.py", str(out), "--device", check.device])
    if not out.exists():
        raise RuntimeError(last_line(done.stderr))
    found = {name: one for name, one in json.loads(out.read_text()).items() if name != "readings"}
    return found | ({"ended": f"status {done.returncode}: {last_line(done.stderr)}"} if done.returncode else {})


def preset(check: Check, name: str, rehearsed: str) -> dict[str, Any]:
    """Measure a preset; return outcomes and reasons of failures. Without a GPU, use the tiny model and `rehearsed`."""
    rows = check.sweep(name, *([f"sweep={name}"] if check.real else ["model=tiny", "seq_len=32", rehearsed]))
    failed = [f"{r['trial_id']}: {r['reason']}"[:300] for r in rows if r["outcome"] not in ("ok", "oom")]
    return {"outcomes": outcomes(rows), "not_measured": failed}


def sweep(check: Check) -> dict[str, Any]:
    """Run `make sweep MODEL=qwen0.5b` as a user types it, in the time left; keep its report, return the highest MFU."""
    model, name = ("qwen0.5b" if check.real else "tiny"), "make-sweep"
    where = ["name=" + name, f"results={check.scratch}", f"budget={max(30, int(check.left()) - DRAWN)}s"]
    device = "auto" if check.real else "cpu"
    preset = "auto" if check.real else "none"
    check.seed(name)
    folder, log = check.scratch / name, check.scratch / f"{name}.log"
    words = ["make", "sweep", f"MODEL={model}", f"DEVICE={device}", f"SWEEP={preset}", f"PYTHON={sys.executable}"]
    with log.open("a") as stream:
        status = check.run([*words, "VENV=", f"ARGS={' '.join(where)}"], stream)
    rows = swept(folder)
    if not rows:
        raise RuntimeError(f"make sweep wrote no row: {last_line(log.read_text())}")
    check.keep(rows)
    asked = (f"model={model}", "sweep=cuda") if check.real else (f"model={model}",)
    if asked not in check.asked:
        check.asked.append(asked)
    plan = own_files(folder) / journal.PLAN
    if status and not plan.exists():
        raise RuntimeError(f"make sweep did not start: {last_line(log.read_text())}")
    if len(rows) < len(json.loads(plan.read_text())["trials"]):  # the budget was too short
        check.cut_short.add(name)
    if (report := folder / "report.html").exists():
        (check.out / report.name).write_bytes(report.read_bytes())
    best = max((r for r in rows if r["mfu"] is not None), key=lambda r: r["mfu"], default=None)
    return {
        "exit_status": status,
        "outcomes": outcomes(rows),
        "highest_mfu": best
        and {k: best[k] for k in ("mfu", "hfu", "seq_len", "micro_batch", "precision", "allocator")},
    }


def predicted(check: Check) -> dict[str, Any]:
    """Predict, on the simulated device, every trial that the other parts measured; return the prediction errors."""
    name = next((r["gpu_name"] for r in check.rows if r["gpu_name"] is not None), None)
    card = find_gpu(name) if name else None
    if check.real and card is None:
        return {"skipped": f"{name or 'the GPU'} is not in `vramsweep gpus`, so vramsweep cannot predict for it"}
    gpu = card.name if card else REHEARSED
    grids = list(dict.fromkeys(part for asked in check.asked for part in by_length(asked)))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tracing is Python, and several run at once

    def predict(number: int) -> list[Row]:
        return check.run_sweep(f"predicted-{number}", "device=simulated", f"device.gpu={gpu}", *grids[number])

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        rows = [row for found in pool.map(predict, range(len(grids))) for row in found]
    measured = [r for r in check.rows if r["device"] != "simulated"]
    check.keep(rows)
    return {"gpu": gpu, "outcomes": outcomes(rows), **compared(measured, rows, check.out / "residuals.csv")}


def by_length(overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of a measured sweep as those of its predictions, one set a length, run in parallel."""
    kept = [word for word in overrides if not word.startswith(NOT_PREDICTED)]
    lengths = next((word for word in kept if word.startswith("seq_len=")), "").removeprefix("seq_len=").split(",")
    if lengths == [""]:  # a preset names the lengths
        return [tuple(kept)]
    rest = [word for word in kept if not word.startswith("seq_len=")]
    return [(f"seq_len={length}", *rest) for length in lengths]


def compared(measured: list[Row], predicted: list[Row], path: Path) -> dict[str, Any]:
    """Write the predictions' residuals to `path`; return them by component, in words, and rows without one and why."""
    if not any(row["device"] == "cuda" for row in measured):
        return {"not_compared": ["needs cuda rows"]}
    with tempfile.TemporaryDirectory() as scratch:
        both = Path(scratch) / journal.NAME
        both.write_text("".join(json.dumps(row) + "\n" for row in (*measured, *predicted)))
        table = load(both)
    found = residuals(table)
    write_csv(found, path)
    return {
        "configurations": int(found["configuration"].nunique()),
        "components": per_component(found).to_dict("records"),
        "words": sentences(found),
        "not_compared": not_compared(table),
    }


def bounded(out: Path) -> dict[str, Any]:
    """Leave out recordings, the largest first, until the folder is within its limits; return sizes and omissions."""
    archive = out / "recordings.zip"
    left_out: list[str] = []
    while archive.exists() and sum(path.stat().st_size for path in out.iterdir()) > MOST_BYTES:
        with zipfile.ZipFile(archive) as stream:
            kept = sorted(stream.infolist(), key=lambda entry: entry.compress_size)
            if not kept:
                break
            left_out.append(kept.pop().filename)
            contents = {entry.filename: stream.read(entry) for entry in kept}
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as stream:
            for name, content in contents.items():
                stream.writestr(name, content)
    sizes = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    within = len(sizes) <= MOST_FILES and sum(sizes.values()) <= MOST_BYTES
    return {"bytes": sizes, "within_limits": within, "recordings_left_out": left_out}


# Parts run in this order, each with the seconds it may take. The comments give the seconds expected on an H100 with 16
# cores, reckoned from 4 s to start a process that imports everything and 3 to 4 s a trial.
PARTS: tuple[tuple[Callable[[Check], dict[str, Any]], float], ...] = (
    (gpt2_trainer, 60),  # 12: a fork server and a trial
    (recordings, 90),  # 30: ten processes at 6 s, four at a time
    (factors, 200),  # 180: 32 trials from fork servers, eight cold ones
    (tests, 110),  # 80: seven processes to start, eight trials
    (isolation, 140),  # 120: three cold trials at 20 s, three fork servers at 15 s, three warm trials
    (sweep, 200),  # as many of 112 trials as there is time for, the coarse grid first
    (zero3, 110),  # 70: two fork servers, 12 trials
    (allocators, 75),  # 60: three fork servers, 12 trials
    (instruments, 40),  # 15
    (techniques, 360),  # 80 trials
    (models, 180),  # 18 trials
    (speeds, 130),  # 100 to measure, and a start
    (misses, 90),  # 30: processes that record, four at a time
    (profiles, 300),  # 250: a process for each trial, because a profiler slows down what follows it
    (predicted, 90),  # 60: nothing on the GPU, half as many at once as there are cores
)
APART = (techniques, models, speeds)  # each in its own run (--only), because it takes too much of the time
RESERVED = 60  # seconds that the parts before `predicted` leave it, if it is chosen


def main() -> int:
    """Run the chosen parts; return 1 if one of them failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--only", help="parts, joined by commas; OUT may contain other parts: " + ", ".join(NAMES))
    arguments = parser.parse_args()
    apart = {part.__name__ for part in APART}
    names = arguments.only.split(",") if arguments.only else [name for name in NAMES if name not in apart]
    arguments.out = arguments.out.resolve()  # absolute, because sweeps run in the repository's folder
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"there is no part {unknown[0]}; allowed: {', '.join(NAMES)}")
    if arguments.device == "cuda" and names != [predicted.__name__] and not machine.gpus():
        sys.exit("gpu_check: NVML finds no GPU here; --device cpu rehearses the check without one")
    arguments.out.mkdir(parents=True, exist_ok=True)
    before = read_summary(arguments.out)
    unfinished = {"skipped", "failed", "cut_short"}  # another run does or continues these
    did = {name for name, part in before.get("parts", {}).items() if not part.keys() & unfinished}
    did -= {predicted.__name__}  # always made anew, because it is the present code's
    work = arguments.out.with_name(f"{arguments.out.name}.work")  # exists if an earlier run was killed
    if work.exists() and not arguments.only:
        names = [name for name in names if name not in did]
    done = sorted(did & set(names))
    if done or (any(arguments.out.iterdir()) and not (work.exists() or (before and arguments.only))):
        what = f"has {', '.join(done)} already" if done else "is not empty"
        sys.exit(f"gpu_check: {arguments.out} {what}; name a new folder, so that earlier results are not mixed in")
    ends = time.monotonic() + arguments.seconds
    here = {
        "machine": machine.machine_facts()
        | {"deepspeed_version": machine.version("deepspeed"), "cores": os.cpu_count()},
        "gpus": [
            {"name": card.name, "driver": card.driver, "memory_bytes": card.memory_total} for card in machine.gpus()
        ],
    }
    summary: dict[str, Any] = before or {"device": arguments.device, **here, "asked": [], "parts": {}}
    elsewhere = {} if summary["machine"] == here["machine"] else here
    failed = False
    with kept_till_done(work) as scratch:
        check = Check(arguments.out, scratch, arguments.device, ends)
        check.asked = [tuple(one) for one in summary.setdefault("asked", [])]
        if (log := arguments.out / "log.txt").exists():
            check.log = log.read_text()
        if (rows := arguments.out / "rows.jsonl").exists():
            check.rows = [json.loads(line) for line in rows.read_text().splitlines()]
        check.take_up()
        for part, most in PARTS:
            if part.__name__ not in names:
                continue
            start = time.monotonic()
            reserved = RESERVED if part is not predicted and predicted.__name__ in names else 0
            check.deadline = min(start + most if len(names) > 1 else ends, ends - reserved)
            if part is predicted:
                check.deadline = ends
            if start > check.deadline - 10:
                found: dict[str, Any] = {"skipped": "no time left"}
            else:
                check.cut_short.clear()
                try:
                    found = part(check)
                    if check.cut_short:
                        found["cut_short"] = True
                except Exception:  # a part's failure is a finding, and must not stop the others
                    found = {"failed": traceback.format_exc().strip().splitlines()[-1]}
                    failed = True
            summary["parts"][part.__name__] = found | elsewhere | {"seconds": round(time.monotonic() - start, 1)}
            summary["asked"] = check.asked
            print(f"{part.__name__}: {json.dumps(summary['parts'][part.__name__])[:600]}", flush=True)
            (arguments.out / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in check.rows))
            check.finish_log()
            write_summary(arguments.out, summary)
    return int(failed)


@contextlib.contextmanager
def kept_till_done(folder: Path) -> Iterator[Path]:
    """Make a folder and remove it once all is done. If this run is killed, the folder stays, and the next run takes up
    the rows in it."""
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    shutil.rmtree(folder)


NAMES = tuple(part.__name__ for part, _ in PARTS)


def read_summary(out: Path) -> dict[str, Any]:
    """Return the content of an earlier run's summary.json, {} without one."""
    path = out / "summary.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write_summary(out: Path, summary: dict[str, Any]) -> None:
    """Write summary.json after each part, so that a check that is cut short leaves what it has."""
    summary["files"] = bounded(out)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
