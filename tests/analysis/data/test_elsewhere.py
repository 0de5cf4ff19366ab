"""Reading rows needs no POSIX: the verbs that do it, as on Windows, as far as Linux can play it (targets/elsewhere.py).

Not covered: what only a real Windows or macOS shows, such as its paths, its libraries, its browser.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TARGETS

ROWS = ROOT / "results" / "reference" / "gpt2-cpu"
VERBS = (
    "fit {rows} --metric peak_allocated_bytes", "report {rows} --images none", "compare {rows} {rows}",
    "export {rows} out.csv", "export {rows} out.parquet", "paper {rows}", "check {rows}", "status {rows}", "columns",
    "cards", "techniques",
)  # fmt: skip


def call(line: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    environ = os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "warn_default_encoding", str(TARGETS / "elsewhere.py"), *line.split()]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, check=False)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    shutil.copytree(ROWS, folder)
    return folder


@pytest.mark.parametrize("verb", VERBS[:3])
def test_a_verb_runs_elsewhere(verb: str, rows: Path) -> None:
    done = call(verb.format(rows=rows.name), rows.parent)
    assert done.returncode == 0, done.stderr.decode("cp1252")
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS[3:])
def test_the_other_verbs_too(verb: str, rows: Path) -> None:
    done = call(verb.format(rows=rows.name), rows.parent)
    assert done.returncode in ((0, 1) if verb.startswith("check") else (0,)), done.stderr.decode("cp1252")
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_a_report_is_written_over_elsewhere(rows: Path) -> None:
    for _ in range(2):
        done = call(f"report {rows.name} --images none", rows.parent)
        assert done.returncode == 0, done.stderr.decode("cp1252")
    assert "–" in (rows / "report.html").read_text(encoding="utf-8")
