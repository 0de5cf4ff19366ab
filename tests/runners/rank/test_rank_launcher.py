"""The ranks of one attempt: told what torchrun tells them, and ended together."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import TARGETS, parametrized, source, tiny

from vramsweep.harness.process import attempt, worker_files
from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.outcome import Evidence
from vramsweep.runners.rank import rank_launcher

pytestmark = pytest.mark.slow

TELL = source("rank_that_tells.txt")
OURS = source("ranks_of_ours.txt").format(tell=TELL)
OWN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID"}  # of each launch
LOGS = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}  # where torchrun's own error handler writes


def test_a_rank_is_told_what_torchrun_tells_it(tmp_path: Path) -> None:
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    told: dict[str, list[dict[str, str]]] = {}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    for name, words in (("torchrun", torchrun), ("ours", ["-c", OURS])):
        folder = tmp_path / name
        folder.mkdir()
        environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        done = subprocess.run([sys.executable, *words, str(folder)], env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = [json.loads((folder / str(rank)).read_text()) for rank in range(2)]
        agents = set(rank_launcher.environment(0, 2, 1, "", None))
        told[name] = [{k: v for k, v in one.items() if os.environ.get(k) != v or k in agents} for one in found]
    for real, ours in zip(told["torchrun"], told["ours"], strict=True):
        assert set(real) - LOGS - {"MASTER_ADDR"} == set(ours) - {"MASTER_ADDR"}
        for name in set(real) - LOGS - OWN - {"MASTER_ADDR"}:
            assert (name, real[name]) == (name, ours[name])


MISSED = source("rank_that_is_killed.txt")


def test_the_rank_that_was_killed_is_to_blame_not_the_one_that_missed_it() -> None:
    done = subprocess.run([sys.executable, "-c", MISSED], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "Ended(rank=1, code=-9)", done.stderr


@parametrized("ends_of_ranks")
def test_a_rank_that_ends_ends_those_who_wait_for_it_and_is_named(tmp_path: Path, how: str, said: str) -> None:
    trial: dict[str, Any] = tiny(sharding="ddp", world_size=2)
    (tmp_path / "spec.json").write_text(json.dumps({"trial": trial}))
    command = [sys.executable, str(TARGETS / "patched_worker.py"), str(tmp_path), how]
    began = time.monotonic()
    done = subprocess.run(
        command, env=attempt.attempt_environment("", "cpu", os.environ), timeout=90, capture_output=True
    )
    assert time.monotonic() - began < 60  # a collective waits for half an hour
    result, _ = attempt.read_result(tmp_path)
    rank = next((one["rank"] for one in attempt.read_steps(tmp_path) if one.get("event") == worker_files.ENDED), None)
    kind, reason = outcome.classify(Evidence(exit_code=done.returncode, result=result, rank=rank))
    assert kind is outcome.Outcome.CRASH
    assert reason is not None and reason.startswith(said)
