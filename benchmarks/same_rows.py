"""Keep the rows and tables of one version of the code in a folder, and print the differences of two such folders.

    python benchmarks/same_rows.py write --code BEFORE evidence/before
    python benchmarks/same_rows.py write --code AFTER --before evidence/before evidence/after
    python benchmarks/same_rows.py compare evidence/before evidence/after

`compare` ends with status 1 if anything differs that LEFT_OUT does not name. Use one interpreter for both sides,
because rows record versions of packages. The script uses only the command line (`PYTHON -m vramsweep`, with the
checkout CODE first on PYTHONPATH), so one version of it checks two of the code. Its inputs are in same_rows_inputs/.

A folder of evidence holds results/, tables/ and the rows that the journal had at the kill. results/ has 337 predicted
trials, 47 trials on the CPU, and 12 of a sweep whose launcher was killed and which was resumed. tables/ has the output
of the verbs in tables.txt, and rows of old journals as CSV. With --before the script also resumes that folder's sweeps,
which must add no row. It skips steps whose output exists, so the same command resumes an interrupted one. It takes
about 20 minutes on two cores.

Rows cannot show the following, but tests do:

    # a wheel in a fresh environment; the check on a GPU from a copy that is not installed
    .venv/bin/python -m pytest tests/test_install.py
    # a real Slurm of one node, where slurmctld is installed; shards without a cluster
    .venv/bin/python -m pytest tests/slurm tests/harness/sweep/test_shards.py
    # ranks, workers and launchers killed at random
    .venv/bin/python -m pytest tests/test_torture.py -k night
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
INPUTS = Path(__file__).with_name("same_rows_inputs")
OLD = {
    **{path.stem: path for path in sorted((ROOT / "tests" / "data" / "journals").glob("*.jsonl"))},
    "gpt2-cpu": ROOT / "results" / "reference" / "gpt2-cpu" / "journal.jsonl",
    "h100": ROOT / "results" / "reference" / "h100-80gb" / "rows.jsonl",
}
RECORDING = ROOT / "tests" / "data" / "snapshots" / "silmont2000__b61be4_mem_snapshot.pickle"
TABLES = {
    name: shlex.split(words)
    for line in (INPUTS / "tables.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for name, words in [line.split(maxsplit=1)]
}
SWEEPS = ("killed", "measured", "predicted")
KILLED_AT = 3  # rows
WAIT_S = 600


class LeftOut(NamedTuple):
    """A difference between two runs of the same code; it is not compared."""

    where: str  # rows: columns of every row; measured: of rows with device=cpu; flags: of these; texts: expressions
    what: str
    why: str


# Found by comparing two runs of the same code: only what differed is here, with similar things and git_commit.
LEFT_OUT = (
    LeftOut("rows", "git_commit", "the code that is compared"),
    LeftOut("rows", "started_at", "a date"),
    LeftOut("rows", "duration_s overhead_s", "times of attempts"),
    LeftOut("rows", "host_load", "load by other programs"),
    LeftOut("rows", "checksum", "checksum of the line, with values that are left out here"),
    LeftOut("measured", "elapsed_s step_times_s warmup_step_times_s step_median_s step_iqr_s", "times of steps"),
    LeftOut("measured", "tokens_per_s samples_per_s", "speeds"),
    LeftOut(
        "measured",
        "load_peak_reserved_bytes forward_peak_reserved_bytes backward_peak_reserved_bytes peak_reserved_bytes "
        "optimizer_peak_reserved_bytes step_peak_reserved_bytes rank_peak_reserved_bytes rss_baseline_bytes "
        "host_resident_peak_bytes host_processes_bytes host_load_peak_bytes host_peak_bytes plateau worst_rank",
        "resident sets (reserved on a CPU), which vary by pages; plateau and worst_rank depend on them",
    ),
    LeftOut("flags", "busy_host wide_spread not_settled odd_end clock_anomaly", "flags about times and load"),
    LeftOut("flags", "not_plateaued", "a flag about the resident set"),
    LeftOut("texts", r"(?m)^(\[\d+(/\d+)?\] |tracing ).*\n", "progress lines, whose order and number vary"),
    LeftOut("texts", r'"expected_s": [\d.]+|rough, at [\d.]+ TFLOP/s', "expected times, which depend on the machine"),
)


class Code:
    """The command line of one checkout, run in a folder of evidence."""

    def __init__(self, checkout: Path, python: Path, folder: Path) -> None:
        if not (checkout / "vramsweep").is_dir():
            raise SystemExit(f"{checkout} is not a checkout of vramsweep")
        self.folder = folder
        self.command = [str(python), "-m", "vramsweep"]
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # `python` of the inputs' commands
        more = {"PYTHONPATH": str(checkout), "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "NO_COLOR": "1"}
        self.environment = os.environ | more

    def run(self, *words: str) -> str:
        """Run a verb to its end; return the command, its output on both streams and its status."""
        done = subprocess.run(
            [*self.command, *words], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        return f"$ vramsweep {' '.join(words)}\n{done.stdout}--- stderr\n{done.stderr}--- status {done.returncode}\n"

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a verb in a session of its own; it prints to a file."""
        with (self.folder / "started.log").open("ab") as log:
            return subprocess.Popen(
                [*self.command, *words], cwd=self.folder, env=self.environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip


def sweep_words(preset: str, folder: str | None = None) -> list[str]:
    """Return the command of the sweep of one of the inputs' presets, in results/ under its own name or `folder`."""
    return ["sweep", "--config-dir", ".", f"sweep={preset}", f"name={folder or preset}", "report=false"]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of a sweep's journals; skip empty lines and lines that a killed launcher did not finish."""
    rows = []
    for path in sorted([*folder.glob("journal*.jsonl"), *folder.glob("trials/journal*.jsonl")]):  # first: of older code
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def kill_and_note(code: Code) -> None:
    """Start the sweep `killed`, kill its launcher once it has some rows, and keep those rows."""
    folder = code.folder / "results" / "killed"
    launcher = code.start(*sweep_words("killed"))
    limit = time.monotonic() + WAIT_S
    while len(read_rows(folder)) < KILLED_AT:
        if launcher.poll() is not None or time.monotonic() > limit:
            raise SystemExit(f"the sweep to be killed has too few rows: see {code.folder / 'started.log'}")
        time.sleep(0.05)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    (code.folder / "rows_at_the_kill.json").write_text(json.dumps(read_rows(folder)))


def write(code: Code, before: Path | None) -> None:
    """Write a folder of evidence: sweeps, the kill, and tables; keep what exists."""
    folder = code.folder
    for name in ("old", "tables", "sweep"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shutil.copytree(INPUTS, folder, dirs_exist_ok=True)
    shutil.copyfile(RECORDING, folder / "recording.pickle")
    for name, path in OLD.items():
        shutil.copyfile(path, folder / "old" / f"{name}.jsonl")
    if not (folder / "rows_at_the_kill.json").exists():
        shutil.rmtree(folder / "results" / "killed", ignore_errors=True)
        kill_and_note(code)
    steps = {f"sweep-{name}": sweep_words(name) for name in SWEEPS} | TABLES
    if before is not None:
        for name in SWEEPS:
            target = folder / "results" / f"resumed-{name}"
            if not target.exists():
                shutil.copytree(before / "results" / name, target)
            steps[target.name] = sweep_words(name, target.name)
    for name, words in steps.items():
        out = folder / "tables" / f"{name}.txt"
        if not out.exists():
            began = time.monotonic()
            text = code.run(*words)
            out.write_text(text)
            print(f"{name}: {time.monotonic() - began:.0f} s, {text.rstrip().rpartition('--- ')[2]}", flush=True)


def compared_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns and flags of a row in which two runs of the same code agree."""
    measured = row["device"] != "simulated"
    wheres = {"rows", "measured"} if measured else {"rows"}
    columns = {name for entry in LEFT_OUT if entry.where in wheres for name in entry.what.split()}
    compared = {name: without_what_varies(value) for name, value in row.items() if name not in columns}
    if measured and row["flags"] is not None:
        left_out = {flag for entry in LEFT_OUT if entry.where == "flags" for flag in entry.what.split()}
        compared["flags"] = [flag for flag in row["flags"] if flag not in left_out]
    return compared


def without_what_varies(value: Any) -> Any:
    """Remove what varies between runs of the same code from a text, or from all texts of a value."""
    if isinstance(value, dict):
        return {key: without_what_varies(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_what_varies(item) for item in value]
    if isinstance(value, str):
        for left_out in LEFT_OUT:
            if left_out.where == "texts":
                value = re.sub(left_out.what, "", value)
    return value


def rows_by_attempt(folder: Path) -> dict[str, dict[str, Any]]:
    """Read a sweep's rows by trial and attempt; a repeated row gets a key of its own."""
    rows: dict[str, dict[str, Any]] = {}
    for row in read_rows(folder):
        key = f"{row['trial_id']} attempt {row['attempt']}"
        while key in rows:
            key += " again"
        rows[key] = row
    return rows


def differing_rows(one: Path, other: Path) -> Iterator[str]:
    """Describe each row that only one sweep has, and each column in which two rows differ."""
    ours, theirs = rows_by_attempt(one), rows_by_attempt(other)
    for key in sorted(ours.keys() | theirs.keys()):
        if key not in ours or key not in theirs:
            yield f"{one.name}: {key}: only in {'the first' if key in ours else 'the second'}"
            continue
        row, twin = compared_columns(ours[key]), compared_columns(theirs[key])
        for column in sorted(row.keys() | twin.keys()):
            value, other_value = (found.get(column, "no such column") for found in (row, twin))
            if value != other_value:
                name = f"{one.name}: {key} ({row['model']}, {row['runner']}): {column}"
                yield f"{name}: {value!r} | {other_value!r}"


def differing_texts(one: Path, other: Path) -> Iterator[str]:
    """Describe each table that only one folder has, and the lines in which two tables differ."""
    for name in sorted({path.name for folder in (one, other) for path in folder.iterdir()}):
        if name.startswith(("sweep-", "resumed-")):
            continue  # their order is that in which trials ended; their rows are compared
        if not (one / name).exists() or not (other / name).exists():
            yield f"{name}: only in {'the first' if (one / name).exists() else 'the second'}"
            continue
        text, twin = (without_what_varies((folder / name).read_text()).splitlines() for folder in (one, other))
        for line in difflib.unified_diff(text, twin, lineterm="", n=0):
            if not line.startswith(("---", "+++", "@@")):
                yield f"{name}: {line}"


def lost_rows(folder: Path) -> Iterator[str]:
    """Describe each row from before the kill that is lost or changed, and each trial that has two terminal rows."""
    rows = read_rows(folder / "results" / "killed")
    for row in json.loads((folder / "rows_at_the_kill.json").read_text()):
        if row not in rows:
            yield f"{folder}: killed: {row['trial_id']}: its row from before the kill is missing or changed"
    ended = [row["trial_id"] for row in rows if row["terminal"]]
    yield from (f"{folder}: killed: {trial}: two terminal rows" for trial in set(ended) if ended.count(trial) > 1)


def trials_run_again(folder: Path, before: Path) -> Iterator[str]:
    """Describe each sweep of the folder `before` to which resuming added rows."""
    for name in SWEEPS:
        resumed = folder / "results" / f"resumed-{name}"
        if resumed.exists() and read_rows(resumed) != read_rows(before / "results" / name):
            yield f"{resumed.name}: resuming a finished sweep ran trials again"


def compare(one: Path, other: Path) -> int:
    """Print every difference of two folders of evidence; return their number."""
    found = [*lost_rows(one), *lost_rows(other), *trials_run_again(other, one)]
    for name in SWEEPS:
        found += differing_rows(one / "results" / name, other / "results" / name)
    found += differing_texts(one / "tables", other / "tables")
    for line in found:
        print(line if len(line) < 400 else f"{line[:400]}…")
    rows = {name: len(rows_by_attempt(one / "results" / name)) for name in SWEEPS}
    print(f"{len(found)} differences; rows compared: {rows}; tables: {len(TABLES)}")
    return len(found)


def main() -> int:
    """Read the command line and run the verb; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    writer = verbs.add_parser("write", help="write a folder of evidence")
    writer.add_argument("folder", type=Path)
    writer.add_argument("--code", type=Path, required=True, help="checkout that makes the rows")
    writer.add_argument("--python", type=Path, default=Path(sys.executable), help="the interpreter; default: this one")
    writer.add_argument("--before", type=Path, help="earlier evidence, whose sweeps this code resumes")
    comparer = verbs.add_parser("compare", help="print the differences of two folders; status 1 if there are any")
    comparer.add_argument("one", type=Path)
    comparer.add_argument("other", type=Path)
    asked = parser.parse_args()
    if asked.verb == "compare":
        return min(1, compare(asked.one, asked.other))
    asked.folder.mkdir(parents=True, exist_ok=True)
    write(Code(asked.code.resolve(), asked.python.absolute(), asked.folder.resolve()), asked.before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
