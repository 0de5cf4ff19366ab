"""Test which versions of Python, torch and transformers work together: the core tests, in an environment for each.

    python benchmarks/versions.py --torch 2.13.0 --transformers 4.57.6 5.0.0 5.23.0
    python benchmarks/versions.py --python python3.12 --light

Writes the table of tested versions in docs/compatibility.md. Earlier results stay there until their combination is
tested again. `--light` installs no extras and runs the tests that read rows. constraints.txt pins everything except
torch, transformers and what transformers requires itself. It needs the network, and about five minutes for each
combination. GPUs, DeepSpeed, CUDA builds of torch and combinations without a row are not tested.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIGHT = (
    "tests/analysis/data/test_load.py", "tests/analysis/model/test_fit.py",
    "tests/analysis/model/test_memory_frontier.py", "tests/analysis/compare/test_compare.py",
    "tests/analysis/data/test_importers.py", "tests/harness/rows/test_journal.py",
    "tests/harness/rows/test_schema.py", "tests/harness/rows/test_migrations.py",
)  # fmt: skip
CORE = (
    *LIGHT, "tests/test_core.py", "tests/harness/spec/test_trial.py", "tests/runners/model/test_build.py",
    "tests/runners/trace/test_step_tracer.py", "tests/runners/predict/test_predicted_row.py",
    "tests/runners/techniques/test_attention.py",
    "tests/runners/scripts/test_watch.py",
)  # fmt: skip
TOOLS = ("pytest", "pytest-timeout", "hypothesis")
FREE = ("torch", "transformers", "huggingface_hub", "tokenizers")  # transformers requires versions of the last two
BEGIN, END = "<!-- found by benchmarks/versions.py: ", " -->"
PART, END_OF_PART = "<!-- tested versions -->", "<!-- end of tested versions -->"


@dataclass(frozen=True)
class Found:
    """The results of one combination; `torch` and `transformers` are None in a light install, `failed` names tests."""

    python: str
    torch: str | None
    transformers: str | None
    passed: int
    failed: tuple[str, ...]
    skipped: int
    problem: str | None  # why the tests could not be run
    day: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the versions that identify the combination."""
        return self.python, self.torch or "", self.transformers or ""


def main() -> int:
    """Try each combination; return 1 if in any a test failed or the tests could not be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters (default: this one)")
    parser.add_argument("--torch", help="version of torch, as for pip")
    parser.add_argument("--transformers", nargs="+", default=[])
    parser.add_argument("--light", action="store_true", help="install no extras")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "compatibility.md")
    arguments = parser.parse_args()
    if arguments.light == bool(arguments.torch and arguments.transformers):
        parser.error("give --torch and --transformers, or --light")
    known = {one.key: one for one in read(arguments.out)}
    worst = 0
    for python in arguments.python:
        with tempfile.TemporaryDirectory(prefix="vramsweep-versions-") as place:
            own = environment(Path(place) / "env", python, arguments.torch)
            for version in arguments.transformers or [None]:
                began = time.monotonic()
                one = own.tried(version)
                print(json.dumps(asdict(one)), f"{time.monotonic() - began:.0f} s", flush=True)
                known[one.key] = one
                worst |= bool(one.failed or one.problem)
                write(arguments.out, list(known.values()))
    return worst


def environment(folder: Path, python: str, torch: str | None) -> Environment:
    """Make a new environment of that Python, with the project (editable) and what the tests need."""
    found = Environment(folder / "bin" / "python", _version(python), torch)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line.partition("==")[0] not in FREE]
    folder.mkdir()
    (folder / "constraints.txt").write_text("\n".join(pins) + "\n", encoding="utf-8")
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    extras = "[predict,sweep]" if torch else ""
    found.install("-e", f"{ROOT}{extras}", *([f"torch=={torch}"] if torch else []), *TOOLS)
    return found


@dataclass(frozen=True)
class Environment:
    """An interpreter, its version, and the torch that is installed; transformers is replaced for each test."""

    own: Path
    python: str
    torch: str | None

    def install(self, *words: str) -> None:
        """Install packages by pip. Raises RuntimeError with the last line of pip's error."""
        pins = self.own.parents[1] / "constraints.txt"
        line = [str(self.own), "-m", "pip", "install", "--quiet", "-c", str(pins), *words]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["pip gave no reason"])[-1][:300])

    def tried(self, transformers: str | None) -> Found:
        """Run the tests with this version of transformers; return the results."""
        day = f"{datetime.now(UTC):%Y-%m-%d}"
        report = self.own.parents[1] / "report.xml"
        report.unlink(missing_ok=True)
        command = [str(self.own), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["-m", "not slow and not gpu", *(CORE if self.torch else LIGHT)]
        try:
            if transformers:
                self.install(f"transformers=={transformers}", f"torch=={self.torch}")
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if not report.is_file():
                raise RuntimeError((done.stdout.strip().splitlines() or ["pytest gave no reason"])[-1][:300])
        except RuntimeError as error:
            return Found(self.python, self.torch, transformers, 0, (), 0, str(error), day)
        return Found(self.python, self.torch, transformers, *counted(report), None, day)


def counted(report: Path) -> tuple[int, tuple[str, ...], int]:
    """Read pytest's JUnit file; return the number of passed tests, the names of failed ones, and the number skipped."""
    passed, skipped, failed = 0, 0, []
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{str(case.get('classname')).rpartition('.')[2]}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return passed, tuple(failed), skipped


def read(path: Path) -> list[Found]:
    """Read the earlier results from the page; none if it has none."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    start = text.find(BEGIN)
    if start < 0:
        return []
    told = json.loads(text[start + len(BEGIN) : text.index(END, start)])
    return [Found(**{**one, "failed": tuple(one["failed"])}) for one in told]


def write(path: Path, results: list[Found]) -> None:
    """Write the results between their two marks in a page. Raises ValueError for a page without them."""
    before, _, rest = path.read_text(encoding="utf-8").partition(PART)
    _, end, after = rest.partition(END_OF_PART)
    if not end:
        raise ValueError(f"{path} has no {PART} ... {END_OF_PART}")
    path.write_text(f"{before}{PART}\n\n{table(results)}\n\n{end}{after}", encoding="utf-8")


def table(results: list[Found]) -> str:
    """Return the results as a table, the failed tests as a list, and all of it as data in a comment."""
    results = sorted(results, key=lambda one: (one.torch is None, _numbers(one.python), _numbers(one.transformers)))
    lines = [
        "| Python | torch | transformers | passed | failed | skipped | day |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for one in results:
        cells = [one.python, one.torch or "none (light)", one.transformers or "none"]
        counts = ["–", "–", "–"] if one.problem else [str(one.passed), str(len(one.failed)), str(one.skipped)]
        lines.append("| " + " | ".join([*cells, *counts, one.day]) + " |")
    troubles = [
        f"- Python {one.python}, torch {one.torch}, transformers {one.transformers}: "
        + (one.problem or ", ".join(f"`{name}`" for name in one.failed))
        for one in results
        if one.problem or one.failed
    ]
    lines += ["", "Failed tests:", "", *troubles] if troubles else []
    data = json.dumps([asdict(one) for one in results]).replace(">", "\\u003e")
    return "\n".join([*lines, "", BEGIN + data + END])


def _version(python: str) -> str:
    line = [python, "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()


def _numbers(version: str | None) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version or "")]


if __name__ == "__main__":
    sys.exit(main())
