"""Reading rows needs no POSIX: the verbs that do it, as on Windows, as far as Linux can play it (targets/elsewhere.py).

Not covered: what only a real Windows or macOS shows, such as its paths, its libraries, its browser.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TARGETS

ROWS = ROOT / "results" / "reference" / "gpt2-cpu"
VERBS = (
    "fit rows --metric peak_allocated_bytes", "report rows --images none", "compare rows rows",
    "export rows out.csv", "export rows out.parquet", "paper rows", "check rows", "status rows", "columns", "gpus",
    "techniques", "report rows --images none",
)  # fmt: skip


@pytest.mark.slow
def test_verbs_run_elsewhere_and_a_report_is_written_over(here: Path) -> None:
    shutil.copytree(ROWS, here / "rows")
    environ = os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "warn_default_encoding", str(TARGETS / "elsewhere.py"), *VERBS]
    done = subprocess.run(command, env=environ, capture_output=True, check=False)
    said = done.stderr.decode("cp1252")
    assert done.returncode == 0 and "Traceback" not in said, said
    assert "–" in (here / "rows" / "report.html").read_text(encoding="utf-8")
