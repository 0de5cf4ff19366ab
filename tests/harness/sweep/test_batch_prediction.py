"""Sweeps whose predictions are made together, and everything that can happen to them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, TARGETS, Run, gone, source, tiny, wait_for
from launchers import Still, swept

from vramsweep.harness.rows import journal
from vramsweep.harness.rows.outcome import Evidence
from vramsweep.harness.rows.schema import COLUMNS, Row
from vramsweep.harness.sweep import batch_prediction, plan, sweep_status

# How the rows of predictions that were made together may differ from those of attempts of their own.
DIFFERENT = {"started_at", "duration_s", "host_load", "isolation", "exit_code"}
EXPANDABLE = {"name": "expandable", "conf": "expandable_segments:True"}


def simulated(gpu: str = "a100-80gb", node_memory_gib: float | None = None, **over: Any) -> dict[str, Any]:
    device: dict[str, Any] = {"name": "simulated", "gpu": gpu}
    return tiny(device=device | ({"node_memory_gib": node_memory_gib} if node_memory_gib else {}), **over)


def target(name: str, **over: Any) -> dict[str, Any]:
    return simulated(runner={"name": "custom", "target": f"{TARGETS / 'simulated_faults.py'}:{name}"}, **over)


def same_but_for_times(together: list[Row], alone: list[Row]) -> None:
    assert len(together) == len(alone)
    for one, other in zip(together, alone, strict=True):
        assert one["outcome"] == other["outcome"]
        for column in COLUMNS:
            if column.name not in DIFFERENT:
                assert one[column.name] == other[column.name], column.name
        if one["attempt"]:
            assert (one["isolation"], one["exit_code"]) == ("shared", None)
            assert other["isolation"] == "warm" and other["exit_code"] is not None
            assert one["duration_s"] is None if one["outcome"] == "invalid" else one["duration_s"] > 0


def both(run_sweep: Run, tmp_path: Path, *values: dict[str, Any]) -> list[Row]:
    """The rows of these trials, predicted together; they are as those of attempts of their own."""
    together = run_sweep(*values, isolation="warm")
    traces = {path.name: path.read_bytes() for path in (tmp_path / "t" / "trials" / "traces").iterdir()}
    (tmp_path / "t").rename(tmp_path / "together")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_prediction, "batches", lambda todo: {})
        same_but_for_times(together, run_sweep(*values, isolation="warm"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "t" / "trials" / "traces").iterdir()} == traces
    return together


@pytest.mark.slow
def test_rows_are_those_of_attempts_of_their_own(run_sweep: Run, tmp_path: Path) -> None:
    without_effect = {"name": "gc", "conf": "garbage_collection_threshold:0.8"}
    rows = both(
        run_sweep, tmp_path, simulated(seq_len=8), simulated(allocator=EXPANDABLE), simulated(),
        simulated(allocator=without_effect), simulated(seq_len=4096, micro_batch=512, gpu="t4-16gb"),
        simulated(node_memory_gib=0.1), simulated(seq_len=4097), simulated(precision="bf16", seq_len=64),
        target("asks_for_a_value"), target("fine"),
    )  # fmt: skip
    outcomes = [row["outcome"] for row in rows]
    assert outcomes == ["ok"] * 4 + ["oom", "host_oom", "invalid", "ok", "invalid", "ok"]
    assert [row["trace_basis"] for row in rows] == ["traced"] * 6 + [None, "traced", None, "traced"]
    assert rows[4]["phase"] == "step 0, forward"
    assert rows[8]["phase"] == "start"
    assert len(list((tmp_path / "t" / "trials" / "traces").iterdir())) == 5  # 8, 32, 4096 x 512, bf16, the target's
    attempts = tmp_path / "together" / "trials" / "attempts"
    assert sorted(path.name for path in attempts.iterdir()) == ["shared"]
    assert sorted(path.name for path in (attempts / "shared").iterdir()) == ["1", "2"]  # torch and custom


@pytest.mark.slow
def test_rows_of_several_ranks_are_those_of_attempts_of_their_own(run_sweep: Run, tmp_path: Path) -> None:
    over = {"runner": {"name": "deepspeed"}, "sharding": "zero3", "world_size": 8, "precision": "fp16"}
    trials = [*(simulated(seq_len=n, **over) for n in (16, 64)), simulated(**over, gpu="h200-141gb")]
    rows = both(run_sweep, tmp_path, *trials)
    assert [row["outcome"] for row in rows] == ["ok"] * 3


@pytest.mark.slow
def test_one_trial_is_an_attempt_of_its_own_and_says_that_it_was_traced(run_sweep: Run, tmp_path: Path) -> None:
    (row,) = run_sweep(simulated(), isolation="warm")
    assert (row["isolation"], row["exit_code"], row["trace_basis"]) == ("warm", 0, "traced")
    assert (tmp_path / "t" / "trials" / "attempts" / row["trial_id"] / "1" / "result.json").is_file()


@pytest.mark.slow
def test_what_a_crash_leaves_unanswered_is_run_alone_and_has_its_evidence(
    run_sweep: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = (32, 48, 64)
    rows = run_sweep(*(target("killed_at_48", seq_len=n) for n in lengths), isolation="warm")
    assert [row["outcome"] for row in rows] == ["ok", "crash", "ok"]
    assert [row["isolation"] for row in rows] == ["shared", "warm", "shared"]
    assert (rows[1]["exit_code"], rows[1]["attempt"]) == (-signal.SIGKILL, 1)
    assert "1 of 3 predictions need an attempt of their own" in capsys.readouterr().err
    before = (tmp_path / "t" / "trials" / journal.NAME).read_bytes()
    run_sweep(*(target("killed_at_48", seq_len=n) for n in lengths), isolation="warm")
    assert (tmp_path / "t" / "trials" / journal.NAME).read_bytes() == before


def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[subprocess.Popen[bytes], int]:
    """A sweep of two families, the second of which waits; the sweep, and its worker's process id."""
    pidfile = tmp_path / "pid"
    monkeypatch.setenv("PIDFILE", str(pidfile))
    lengths = (("fine", 64), ("fine", 8), ("waits_once", 48), ("waits_once", 40))
    values = json.dumps([target(name, seq_len=n) for name, n in lengths])
    words = [sys.executable, "-c", source("sweep_of_two_families.txt"), values, str(tmp_path / "t")]
    parent = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"})
    for ready in (lambda: pidfile.exists() and pidfile.read_text(), lambda: len(journal.read(tmp_path / "t")[0]) == 2):
        wait_for(lambda ready=ready: ready() or parent.poll() is not None)  # type: ignore[misc]
        assert parent.poll() is None
    return parent, int(pidfile.read_text())


def found(tmp_path: Path) -> list[tuple[int, str, str, int]]:
    rows, unreadable = journal.read(tmp_path / "t")
    assert unreadable == 0
    return [(row["seq_len"], row["outcome"], row["isolation"], row["attempt"]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_sweep_leaves_no_process_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_sweep: Run, number: signal.Signals
) -> None:
    parent, _ = started(tmp_path, monkeypatch)
    family = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
    assert len(family) >= 3  # template, worker, the process that traces
    parent.send_signal(number)
    assert parent.wait(60) == (-number if number == signal.SIGKILL else 130)
    wait_for(lambda: all(map(gone, family)))
    before = (tmp_path / "t" / "trials" / journal.NAME).read_bytes()
    assert [length for length, *_ in found(tmp_path)] == [64, 8]
    assert sweep_status.read_status(tmp_path / "t").state == "stopped"
    names = {64: "fine", 8: "fine", 48: "waits_once", 40: "waits_once"}
    rows = run_sweep(*(target(name, seq_len=n) for n, name in names.items()), isolation="warm")
    assert [row["isolation"] for row in rows] == ["shared"] * 4
    assert (tmp_path / "t" / "trials" / journal.NAME).read_bytes().startswith(before)
    assert len(found(tmp_path)) == 4


class Lying(Still):
    """Its worker leaves these lines; an attempt of a trial's own ends well."""

    lines: bytes = b""

    def answer(self, spec: Any, folder: Path, environ: Any, look: Any) -> Evidence:
        if "trials" in spec:
            folder.mkdir(parents=True)
            (folder / "predictions-0.jsonl").write_bytes(self.lines)
            look()
        return Evidence(exit_code=0, result={"values": {"loss_last": 1.0}})


def test_only_whole_lines_that_are_answers_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [simulated(seq_len=n) for n in range(1, 9)]
    ids = [one[0].trial_id for one in plan.expand_trials(values, 1)]
    crash = {"error": {"type": "ValueError", "message": "no"}}

    def line(trial_id: Any, result: Any) -> str:
        return json.dumps({"trial_id": trial_id, "result": result, "duration_s": 0.5}) + "\n"

    def good(trial_id: str, loss: Any = 2.0) -> str:
        return line(trial_id, {"values": {"loss_last": loss}, "complete": True})

    lines = [
        good(ids[0]),
        good(ids[0], 3.0),  # a second answer
        good("nobody"),
        good(ids[1], float("nan")),
        good(ids[2], "text"),
        line(ids[3], crash),
        line(ids[4], 5),
        line([ids[5]], crash) + "nonsense\n[]\n" + "[" * 100_000 + "\n",
        good(ids[5]).replace("0.5", "NaN"),
        good(ids[7]).replace("0.5", '0.5, "record": [1]'),
        good(ids[6]).rstrip("\n"),  # torn
    ]
    monkeypatch.setattr(Lying, "lines", "".join(lines).encode())
    rows = swept(Lying(), tmp_path / "t", *values)
    assert [row["isolation"] for row in rows] == ["shared"] + ["warm"] * 7
    assert [row["loss_last"] for row in rows] == [2.0] + [1.0] * 7
    assert len(journal.read(tmp_path / "t")[0]) == 8


def test_a_bunch_of_rows_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), fsync(descriptor))[1])
    with journal.Journal(tmp_path) as book:
        synced.clear()
        book.extend([{"trial_id": str(n), "outcome": "ok"} for n in range(100)])
        assert len(synced) == 1
        book.extend([])
        assert len(synced) == 1
    assert len(journal.read(tmp_path)[0]) == 100


def test_only_simulated_trials_that_share_a_template_are_predicted_together() -> None:
    values = [simulated(seq_len=n) for n in (1, 2)] + [tiny(), target("fine"), simulated(seq_len=0)]
    todo = plan.order_trials(plan.expand_trials(values, 1))
    found = batch_prediction.batches(todo)
    assert {name: len(items) for name, items in found.items()} == {"torch": 2}
