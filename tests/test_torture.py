"""Most faults of the torture once (benchmarks/faults.py has all), and a night with everything that can happen."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from conftest import ROOT, TARGETS, source, wait_for
from torture.arena import Arena
from torture.faults import FAULTS, Fault, Missing

from vramsweep.harness.rows import journal


@pytest.mark.slow
@pytest.mark.deterministic
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.short], ids=lambda fault: fault.name)
def test_no_row_is_lost_or_doubled_nobody_is_left_and_the_sweep_goes_on(fault: Fault, tmp_path: Path) -> None:
    try:
        count = fault.inject(Arena(tmp_path, Random(20261124)), fault.short)
    except Missing as why:
        pytest.skip(str(why))
    assert count.well and count.injected, (count, *count.said)


LENGTHS = range(8, 2049, 8)
NIGHT = source("night_of_trials.txt").format(template=str(TARGETS / "oracle_template.py"), lengths=LENGTHS)


def night(folder: Path, *words: str, disturbed: bool = False) -> subprocess.Popen[bytes]:
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "DISTURBED": "1" if disturbed else ""}
    return subprocess.Popen([sys.executable, "-c", NIGHT, str(folder), *words], env=environ, stdout=subprocess.DEVNULL)


def rows(folder: Path) -> list[journal.Row]:
    return journal.read(folder)[0] if journal.files(folder)[0].exists() else []


@pytest.mark.slow
@pytest.mark.deterministic
def test_a_disturbed_night_with_eight_slots_ends_as_a_quiet_one(tmp_path: Path) -> None:
    assert night(tmp_path / "quiet").wait(300) == 0
    disturbed = tmp_path / "disturbed"
    first = night(disturbed, disturbed=True)
    wait_for(lambda: len(rows(disturbed)) > len(LENGTHS) // 3)
    first.kill()
    assert first.wait() == -9
    before = len(rows(disturbed))
    assert before < len(LENGTHS)
    assert night(disturbed, disturbed=True).wait(300) == 1  # what hung has failed
    assert night(disturbed, "again", disturbed=True).wait(300) == 0
    found = rows(disturbed)
    kinds = Counter(row["outcome"] for row in found)
    assert kinds["crash"] >= 2 and kinds["timeout"] >= 1, kinds
    ok = Counter(row["trial_id"] for row in found if row["outcome"] == "ok")
    assert set(ok.values()) == {1} and len(ok) == len(LENGTHS)  # none lost, none run twice
    same = ("trial_id", "seq_len", "outcome", "peak_allocated_bytes", "terminal", "trial", "loss_last", "allocator")
    ends = [
        sorted(tuple(str(row.get(name)) for name in same) for row in journal.terminal(of).values())
        for of in (rows(tmp_path / "quiet"), found)
    ]
    assert ends[0] == ends[1]
