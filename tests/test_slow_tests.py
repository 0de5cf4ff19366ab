"""Slow tests that have not begun within SLOW_TESTS_MINUTES are skipped with that reason; the others run."""

from __future__ import annotations

import os
import subprocess
import sys

from conftest import ROOT, SLOW_WITHIN


def test_slow_tests_that_come_too_late_are_named_and_the_others_run() -> None:
    """Of a file with one of either kind."""
    environ = {**os.environ, SLOW_WITHIN: "0"}
    environ.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-r", "s", "tests/harness/test_variables.py"]
    said = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True).stdout
    assert f"{SLOW_WITHIN}=0 are over: not begun: tests/harness/test_variables.py::test_" in said
    assert "passed" in said and "failed" not in said
