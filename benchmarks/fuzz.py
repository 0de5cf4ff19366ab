"""Fuzz the readers of outside data, guided by coverage: no input may break a reader's promise.

    pip install atheris
    python benchmarks/fuzz.py --inputs 1000000 [--only recording] [--seed 1]

Prints a table: target, inputs, seconds, crashes (places that raised an undocumented exception), the slowest input and
the process's peak memory. The exit status is 1 if a target crashed or ended early. Each target runs in its own process.
Its fuzzer (atheris: libFuzzer) starts from small valid inputs: the last events of the shipped recording, because whole
ones are too long to mutate by the million. The slowest input is by wall time, which a busy machine lengthens.

tests/secure/ tests whole verbs, and files that only libraries read.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_seeds as seeds

LONGEST = 4096  # bytes of an input
HANGS = 20  # seconds after which libFuzzer ends the process
MEMORY = 4096  # MiB above which libFuzzer ends it


@dataclass(frozen=True)
class Target:
    """A target. `modules` are watched for coverage. `made` returns the function under test, which raises only
    documented exceptions. `seeds` returns the first inputs."""

    modules: tuple[str, ...]
    made: Callable[[], Callable[[bytes], None]]
    seeds: Callable[[], Iterable[bytes]]


def recording() -> Callable[[bytes], None]:
    """Return a reader of a file's bytes: it gives a recording or raises UserError."""
    from vramsweep.harness.allocator import recording, safe_unpickle
    from vramsweep.harness.messages.errors import UserError

    def one(data: bytes) -> None:
        try:
            recording.check(safe_unpickle.loads(data, "fuzzed"), "fuzzed")
        except UserError as error:
            short(error)

    return one


def replayed() -> Callable[[bytes], None]:
    """Return a test that changes values of a valid recording by the bytes and replays it; UserError is allowed."""
    from vramsweep.harness.allocator import recording, replay
    from vramsweep.harness.allocator.config import parse
    from vramsweep.harness.allocator.initial_state import undo
    from vramsweep.harness.messages.errors import UserError

    valid = [pickle.dumps(one) for one in seeds.recordings()]
    other = parse("expandable_segments:True")

    def one(data: bytes) -> None:
        try:
            known = recording.check(seeds.changed(valid, data), "fuzzed")
            start = undo(known)
            replay.replay_as_recorded(known, start)
            replay.replay_under(known, start, other, 1 << 26)
        except UserError as error:
            short(error)

    return one


def allocator() -> Callable[[bytes], None]:
    """Return a test of a text: AllocatorConfigError, or settings that parse again from their canonical text."""
    from vramsweep.harness.allocator.config import AllocatorConfigError, parse

    def one(data: bytes) -> None:
        try:
            found = parse(data.decode("utf-8", "replace"))
        except AllocatorConfigError as error:
            short(error)
        else:
            assert parse(found.render()) == found

    return one


def journal() -> Callable[[bytes], None]:
    """Return a reader of a journal's line: it gives a row or None."""
    from vramsweep.harness.rows import journal, migrations

    def one(data: bytes) -> None:
        row = journal.parsed(data)
        assert row is None or isinstance(row["trial_id"], str)
        journal.finished([] if row is None else [row], {"0": (None,)})
        if row is not None and isinstance(row.get("trial"), dict):
            # given its trial's id, because no mutation finds it
            migrations.upgrade_row(row | {"schema_version": 1, "trial_id": migrations.first_id(row["trial"])})

    return one


def formula() -> Callable[[bytes], None]:
    """Return a test of a text: ValueError, or a formula, which at a point gives an integer or raises ValueError."""
    from vramsweep.runners.trace import symbolic_trace

    point = symbolic_trace.Point(1 << 24, 1 << 24, 3)

    def one(data: bytes) -> None:
        try:
            symbolic_trace.compiled.__wrapped__(data.decode("utf-8", "replace"))(point)
        except ValueError as error:
            short(error)
        finally:
            symbolic_trace.function.cache_clear()

    return one


ALLOCATOR = "vramsweep.harness.allocator."
TARGETS = {
    "recording": Target(
        (ALLOCATOR + "safe_unpickle", ALLOCATOR + "recording", ALLOCATOR + "config"), recording, seeds.pickles
    ),
    "replayed": Target(
        tuple(ALLOCATOR + name for name in ("recording", "initial_state", "replay", "verify_replay", "simulator")),
        replayed,
        seeds.changes,
    ),
    "allocator": Target((ALLOCATOR + "config",), allocator, seeds.settings),
    "journal": Target(("vramsweep.harness.rows.journal", "vramsweep.harness.rows.migrations"), journal, seeds.lines),
    "formula": Target(("vramsweep.runners.trace.symbolic_trace",), formula, seeds.formulas),
}


def short(error: Exception) -> None:
    """Check that a message has under 1,000 characters in two lines at most."""
    said = str(error)
    assert len(said) < 1000, f"a message of {len(said)} characters"
    assert said.count("\n") <= 1, "a message of many lines"


def fuzz(name: str, inputs: int, seed: int, out: Path) -> None:
    """Fuzz one target in this process, which the fuzzer ends; write the findings to the file `out`."""
    atheris: Any = importlib.import_module("atheris")
    target = TARGETS[name]
    importlib.import_module("vramsweep.harness.messages.errors")
    with atheris.instrument_imports(include=list(target.modules)):
        for module in target.modules:
            importlib.import_module(module)
    one = target.made()
    crashes: Counter[str] = Counter()
    examples: dict[str, str] = {}
    state: dict[str, Any] = {"inputs": 0, "slowest_s": 0.0, "slowest": "", "before_mib": peak_mib()}
    began = time.perf_counter()

    def counted(data: bytes) -> None:
        start = time.perf_counter()
        try:
            one(data)
        except Exception as error:
            where = place(error)
            crashes[where] += 1
            examples.setdefault(where, repr(data[:300]))
        took = time.perf_counter() - start
        state["inputs"] += 1
        if took > state["slowest_s"]:
            state["slowest_s"], state["slowest"] = took, repr(data[:300])
        if state["inputs"] % 5000 == 0 or state["inputs"] >= inputs:  # the fuzzer exits without telling Python
            told = state | {"seconds": time.perf_counter() - began, "peak_mib": peak_mib()}
            out.write_text(json.dumps(told | {"crashes": crashes, "examples": examples}))

    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        for number, content in enumerate(target.seeds()):
            (Path(folder) / str(number)).write_bytes(content)
        limits = [f"-max_len={LONGEST}", f"-timeout={HANGS}", f"-rss_limit_mb={MEMORY}", "-len_control=0"]
        atheris.Setup(["fuzz", folder, f"-runs={inputs}", f"-seed={seed}", "-verbosity=0", *limits], counted)
        atheris.Fuzz()


def place(error: BaseException) -> str:
    """Return the type of an error and the file and line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}"


def peak_mib() -> float:
    """Return the largest resident set of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def told(name: str, inputs: int, seed: int) -> dict[str, Any]:
    """Fuzz one target in its own process; return its findings, with `ended` "" or the end of its stderr."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = ["--child", str(out), "--only", name, "--inputs", str(inputs), "--seed", str(seed)]
        done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=False)
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"inputs": 0}
        return found | {"ended": "" if done.returncode == 0 else done.stderr[-2000:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="number of inputs for each target")
    parser.add_argument("--only", choices=TARGETS, action="append", help="a target; may be repeated (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    random.seed(asked.seed)
    if importlib.util.find_spec("atheris") is None:  # type: ignore[attr-defined]
        print("benchmarks/fuzz.py needs atheris; run pip install atheris", file=sys.stderr)
        return 2
    if asked.child is not None:
        fuzz(asked.only[0], asked.inputs, asked.seed, asked.child)
    print("| target | inputs | seconds | crashes | slowest input, s | peak memory, MiB (before the first input) |")
    print("|---|---|---|---|---|---|", flush=True)
    whole = True
    for name in asked.only or TARGETS:
        found = told(name, asked.inputs, asked.seed)
        crashes = found.get("crashes", {})
        whole = whole and not crashes and not found["ended"] and found["inputs"] >= asked.inputs
        if found["inputs"]:
            print(
                f"| {name} | {found['inputs']:,} | {found['seconds']:.0f} | {len(crashes)} | "
                f"{found['slowest_s']:.3f} | {found['peak_mib']:.0f} ({found['before_mib']:.0f}) |",
                flush=True,
            )
        for where, count in crashes.items():
            print(f"{name}: {where}, {count:,} times, such as {found['examples'][where]}", file=sys.stderr)
        if found["ended"]:
            print(f"{name}: ended early, {found['ended']}", file=sys.stderr)
        elif found["slowest_s"] > 1:
            print(f"{name}: slowest {found['slowest']}", file=sys.stderr)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
