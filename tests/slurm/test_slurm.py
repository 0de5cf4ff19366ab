"""A sweep in shards on a real Slurm of one node: submitted, told to end, requeued, refused."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import wait_for
from start import cluster, missing

from vramsweep.harness.rows import journal

LENGTHS = (32, 48, 64, 80, 96, 112)
SWEEP = (
    "sweep", "-m", "model=tiny", "device=cpu", "protocol=brief", f"seq_len={','.join(map(str, LENGTHS))}",
    "isolation=cold", "name=night", "cluster=slurm", "shards=2",
)  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def environ() -> Iterator[dict[str, str]]:
    with cluster() as found:
        yield found


def test_shards_that_are_told_to_end_go_on_and_no_row_is_lost_or_doubled(
    environ: dict[str, str], tmp_path: Path
) -> None:
    def said(*command: str) -> str:
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def vramsweep(*words: str) -> str:
        return said(sys.executable, "-m", "vramsweep", *words)

    def rows(writer: str) -> int:
        file = folder / "trials" / f"journal-{writer}.jsonl"
        return len(file.read_bytes().splitlines()) if file.exists() else 0

    def running() -> list[str]:
        return said("squeue", "--noheader", "--array", "--states=RUNNING,COMPLETING", "--format=%i").split()

    def put_back(job: str) -> None:
        """Wait until the job is in the queue again, and have it start now, not when its old credential is void."""
        wait_for(lambda: job not in running(), 10)
        assert job in said("squeue", "--noheader", "--array", "--states=PENDING", "--format=%i").split()
        said("scontrol", "update", f"JobId={job}", "StartTime=now")

    folder = tmp_path / "results" / "night"
    assert "2 of 2 shard(s) submitted" in vramsweep(*SWEEP)
    array = said("squeue", "--noheader", "--format=%F").split()[0]
    wait_for(lambda: rows("1of2") > 0)
    assert "nothing to submit: 2 jobs are in Slurm's queue" in vramsweep(*SWEEP)
    said("scancel", "--signal=TERM", f"{array}_0")  # as at the beginning of a preemption's grace
    put_back(f"{array}_0")
    wait_for(lambda: rows("2of2") > 0)
    said("scontrol", "requeue", f"{array}_1")  # as by a preemption
    put_back(f"{array}_1")
    assert "waiting" in vramsweep("status") or running()
    wait_for(lambda: not said("squeue", "--noheader", "--format=%i"))
    found, unreadable = journal.read(folder)
    assert not unreadable
    assert sorted(row["seq_len"] for row in found if row["terminal"]) == sorted(LENGTHS)
    assert {row["outcome"] for row in found} == {"ok"}
    assert len(found) == len(LENGTHS)
    assert "finished  6/6" in vramsweep("status")
    logs = [file.read_text() for file in (folder / "trials" / "cluster").glob("*_log.*")]
    assert sum(text.count("back in the queue") for text in logs) == 1  # Slurm puts the other back itself
    assert sum("report.html" in text for text in logs) == 1
    assert "nothing to submit: all have rows" in vramsweep(*SWEEP, "shards=5")
    assert "1 of 3 shard(s) submitted" in vramsweep(
        *SWEEP, "shards=3", f"seq_len={','.join(map(str, (*LENGTHS, 128)))}"
    )
    said("scancel", "--user=root")


def test_what_sbatch_refuses_is_one_line(environ: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vramsweep", *SWEEP, "cluster.partition=nosuch"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "sbatch refused: invalid partition specified: nosuch" in done.stderr
    assert not (tmp_path / "results" / "night").exists()
