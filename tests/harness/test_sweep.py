"""Sweeps with real worker processes, and everything that can happen to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, SETTINGS, TARGETS, Run, custom, gone, tiny, wait_for

from vramsweep.analysis.data.groups import groups
from vramsweep.analysis.data.load import load
from vramsweep.harness import account, attempt, journal, machine, plan, status, sweep
from vramsweep.harness.errors import UserError
from vramsweep.harness.journal import Journal
from vramsweep.harness.occupancy import Occupancy
from vramsweep.harness.outcome import Evidence
from vramsweep.harness.pool import Slot
from vramsweep.harness.row import complete


@pytest.mark.parametrize("isolation", [pytest.param("cold", marks=pytest.mark.slow), "warm"])
def test_each_fault_is_its_outcome_and_the_sweep_goes_on(
    run_sweep: Run, isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(psutil.Process().children(recursive=True))  # other tests' browsers among them
    monkeypatch.setenv("ORPHAN", str(tmp_path / "orphan.pid"))
    names = ["killed", "hangs", "raises", "oom", "exits", "host_oom", "orphan", "forks_for_ever", "good"]
    if isolation == "cold":  # the slow way: what differs from the warm one
        names = ["killed", "hangs", "orphan", "forks_for_ever", "good"]
    values = [custom(name, seed=n) for n, name in enumerate(names)]
    rows = run_sweep(*values, tiny(seq_len=0), isolation=isolation, timeout_s=24 if isolation == "cold" else 6)
    outcomes = dict(zip(names, [row["outcome"] for row in rows], strict=False))
    expected = {
        "killed": "crash",
        "hangs": "timeout",
        "raises": "crash",
        "oom": "oom",
        "exits": "bad_result",
        "host_oom": "host_oom",
        "orphan": "ok",
        "forks_for_ever": "ok",
        "good": "ok",
    }
    assert outcomes == {name: expected[name] for name in names}
    assert rows[-1]["outcome"] == "invalid"
    assert rows[-1]["attempt"] == 0
    by_name = dict(zip(names, rows, strict=False))
    assert by_name["killed"]["exit_code"] == -signal.SIGKILL
    assert by_name["killed"]["phase"] == "step 1"  # the steps before were on disk
    assert by_name["killed"]["peak_allocated_bytes"] is None
    assert by_name["good"]["phase"] is None
    assert gone(int((tmp_path / "orphan.pid").read_text()))
    assert not (set(psutil.Process().children(recursive=True)) - before)


@pytest.mark.slow
def test_finished_trials_are_skipped_and_changed_ones_run(run_sweep: Run, tmp_path: Path) -> None:
    one, two = custom("good", seed=1), custom("good", seed=2)
    first = run_sweep(one, isolation="warm")
    before = (tmp_path / "t" / journal.NAME).read_bytes()
    again = run_sweep(one, two, isolation="warm")
    assert again[0]["started_at"] == first[0]["started_at"]
    after = (tmp_path / "t" / journal.NAME).read_bytes()
    assert after.startswith(before)
    assert len(list(filter(None, after.splitlines()))) == 2
    run_sweep(one, two, isolation="warm")
    assert (tmp_path / "t" / journal.NAME).read_bytes() == after


@pytest.mark.slow
def test_a_passing_fault_is_retried_and_both_attempts_are_rows(
    run_sweep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    (row,) = run_sweep(custom("killed_once"), isolation="warm", retries=2)
    assert (row["outcome"], row["attempt"], row["terminal"]) == ("ok", 2, True)
    rows, _ = journal.read(tmp_path / "t")
    assert [(r["outcome"], r["attempt"], r["terminal"]) for r in rows] == [("crash", 1, False), ("ok", 2, True)]


class FakeLauncher:
    """Answers attempts from a list of evidence, without a process."""

    isolation = "warm"
    occupancy = Occupancy()

    def __init__(self, *evidence: Evidence) -> None:
        self.evidence = list(evidence)

    def attempt(
        self, spec: Any, folder: Path, environ: Any, runner: str, deadline_s: float, look: Any
    ) -> attempt.Attempted:
        return attempt.Attempted(self.evidence.pop(0), 1.0, "warm")

    def own_pids(self) -> set[int]:
        return {os.getpid()}


def run_fake(folder: Path, evidence: list[Evidence], retries: int, **over: Any) -> tuple[Any, list[float], list[Any]]:
    slept: list[float] = []
    (item,) = plan.order(plan.expand([tiny(**over)], 1))
    chosen = plan.Settings(**(SETTINGS | {"retries": retries, "backoff_s": 5}))
    assert item.trial
    slot = Slot(account.cards(item.trial), sleep=slept.append)
    launcher: Any = FakeLauncher(*evidence)
    with Journal(folder) as book:
        for tries in range(retries + 1):
            row = sweep.run_trial(item, chosen, folder, book, launcher, slot, tries, tries)
            if row["terminal"]:
                break
    return row, slept, journal.read(folder)[0]


def test_retries_have_a_limit_and_back_off(tmp_path: Path) -> None:
    killed = Evidence(exit_code=-9)
    row, slept, rows = run_fake(tmp_path, [killed] * 4, retries=3)
    assert row["outcome"] == "crash"
    assert slept == [5, 10, 20]
    assert [r["terminal"] for r in rows] == [False, False, False, True]


@pytest.mark.parametrize(
    "evidence",
    [
        Evidence(exit_code=1, result={"error": {"type": "torch.OutOfMemoryError", "message": "CUDA out of memory"}}),
        Evidence(expired=True, deadline_s=1),
        Evidence(exit_code=1, result={"error": {"type": "ValueError", "message": "deterministic"}}),
    ],
)
def test_what_would_only_happen_again_is_not_retried(tmp_path: Path, evidence: Evidence) -> None:
    row, slept, rows = run_fake(tmp_path, [evidence], retries=3)
    assert row["terminal"]
    assert slept == []
    assert len(rows) == 1


def test_a_busy_gpu_is_contended_and_no_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = machine.Gpu(0, "NVIDIA H100", "GPU-1", "1", 80 << 30, 9 << 30, (4711, os.getpid()))
    monkeypatch.setattr(machine, "gpus", lambda: [card])
    row, slept, _ = run_fake(tmp_path, [], retries=1, device={"name": "cuda"})
    assert row["outcome"] == "contended"
    assert row["terminal"] is False  # a fault of the machine is no verdict
    assert row["foreign_processes"] == [4711]
    looks = [0.2, 0.5, 1.0]  # the worker before may take a moment to leave the device
    assert slept == [*looks, 5, *looks]


H100 = machine.Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-1", "580", 80 << 30, 0, ())
NO_DEVICE = Evidence(exit_code=1, result={"error": {"type": "x.EnvironmentFault", "message": "no CUDA device"}})
FINE = Evidence(exit_code=0, result={"values": {"device_baseline_bytes": 9 << 30, "foreign_processes": [12]}})


def test_more_ranks_than_cards_cannot_run_and_run_again_where_there_are_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda: dict[str, Any] = {"device": {"name": "cuda"}, "sharding": "fsdp2"}
    values = [tiny(**cuda, world_size=n) for n in (1, 2)] + [tiny(sharding="fsdp2", world_size=2)]

    def planned(cards: int) -> list[plan.Planned]:
        monkeypatch.setattr(machine, "visible_gpus", lambda environ: [H100] * cards)
        return sweep.placed(plan.order(plan.expand(values, 1)))

    by_id = {p.trial_id: p for p in planned(1)}
    (refused,) = [p for p in by_id.values() if p.trial is None]
    assert refused.reason and refused.reason.startswith("world_size=2 needs 2 GPUs and 1 is visible")
    assert refused.resolved["device"]["name"] == "cuda"
    row = complete(plan.invalid(refused))
    assert all(p.trial for p in planned(2))
    assert refused.trial_id in {p.trial_id for p in plan.pending(planned(2), {refused.trial_id: row}, False)}
    assert all(p.trial for p in planned(0))  # without any card that is the machine's fault, and the worker says so


def test_a_row_says_on_which_card_it_ran_out_of_memory_and_what_speaks_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: [H100])
    monkeypatch.setattr(machine, "gpus", lambda: [H100])
    monkeypatch.setattr(machine, "host_load", lambda: 0.0)
    error = {"type": "torch.OutOfMemoryError", "message": "CUDA out of memory"}
    oom = Evidence(exit_code=1, result={"error": error, "values": {"device_baseline_bytes": 60 << 30}})
    row, _, _ = run_fake(tmp_path / "a", [oom], 0, device={"name": "cuda"})
    assert (row["outcome"], row["gpu_name"], row["driver_version"]) == ("oom", H100.name, "580")
    assert row["flags"] == ["high_baseline"]  # a false frontier, perhaps
    row, _, _ = run_fake(tmp_path / "b", [FINE], 0, device={"name": "cuda"})
    assert row["flags"] == ["contended", "high_baseline"]
    assert row["foreign_processes"] == [12]


class Scripted(attempt.Launcher):
    """Stands in for the launcher of a whole sweep; the evidence for each trial's attempts, by its seed."""

    script: dict[int, list[Evidence]]
    run = "scripted"
    occupancy = Occupancy()
    threads = ThreadPoolExecutor()

    def __init__(self, isolation: str, log: Path) -> None:
        self.isolation = isolation
        self.started: list[int] = []

    def __exit__(self, *error: Any) -> None:
        pass

    def own_pids(self) -> set[int]:
        return set()

    def attempt(
        self, spec: Any, folder: Path, environ: Any, runner: str, deadline_s: float, look: Any
    ) -> attempt.Attempted:
        folder.mkdir(parents=True)
        left = self.script[spec["trial"]["seed"]]
        return attempt.Attempted(left.pop(0) if len(left) > 1 else left[0], 1.0, "warm")


def scripted(monkeypatch: pytest.MonkeyPatch, **by_seed: list[Evidence]) -> list[dict[str, Any]]:
    Scripted.script = {int(seed.strip("_")): evidence for seed, evidence in by_seed.items()}
    monkeypatch.setattr(sweep, "Launcher", Scripted)
    return [tiny(seed=seed) for seed in Scripted.script]


def test_trials_that_the_machine_stopped_run_once_more_at_the_end_and_again_the_next_time(
    run_sweep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = scripted(monkeypatch, _1=[NO_DEVICE, FINE], _2=[FINE], _3=[NO_DEVICE])
    (stopped,) = run_sweep(*values[2:], isolation="warm")
    assert (stopped["outcome"], stopped["terminal"]) == ("environment", False)
    rows, _ = journal.read(tmp_path / "t")
    assert [(r["outcome"], r["terminal"]) for r in rows] == [("environment", False)]
    monkeypatch.setitem(Scripted.script, 3, [NO_DEVICE, NO_DEVICE, FINE])
    done = run_sweep(*values, isolation="warm")
    assert [row["outcome"] for row in done] == ["ok"] * 3
    assert [row["attempt"] for row in done] == [2, 1, 4]


def raised(text: str) -> list[Evidence]:
    return [Evidence(exit_code=1, result={"error": {"type": "builtins.ValueError", "message": text}})]


def test_ten_trials_that_fail_the_same_way_stop_the_sweep(
    run_sweep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {f"_{n}": raised(f"no space in block {n}") for n in range(1, 15)}
    values = scripted(monkeypatch, _0=[FINE], **broken)
    said = r"10 trials in a row .*ValueError: no space in block 10.*with retry_failed=true \(breaker=0"
    with pytest.raises(UserError, match=said):
        run_sweep(*values, isolation="warm", breaker=10)
    assert len(journal.read(tmp_path / "t")[0]) == 11
    assert len(run_sweep(*values, isolation="warm", breaker=0)) == 15


def test_a_night_whose_longest_trials_all_fail_goes_on_to_the_shorter_ones(
    run_sweep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(
        monkeypatch, **{f"_{n}": raised("too long") for n in range(12)}, **{f"_{n}": [FINE] for n in range(12, 24)}
    )
    values = [tiny(seed=seed, seq_len=64 if seed < 12 else 32) for seed in range(24)]
    rows = run_sweep(*values, isolation="warm", breaker=10)
    assert [row["outcome"] for row in rows] == ["crash"] * 12 + ["ok"] * 12
    scripted(monkeypatch, **{f"_{n}": raised("broken") for n in range(24, 48)})
    values = [tiny(seed=seed, seq_len=64 if seed < 36 else 32) for seed in range(24, 48)]
    with pytest.raises(UserError, match="13 trials in a row"):
        run_sweep(*values, isolation="warm", breaker=10)


@pytest.mark.slow
def test_others_on_the_device_do_not_stop_a_sweep(run_sweep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Evidence(foreign=(4711,))
    values = scripted(monkeypatch, **{f"_{n}": [busy] for n in range(1, 13)}, _13=[FINE])
    rows = run_sweep(*values, isolation="warm", breaker=10)
    assert [row["outcome"] for row in rows] == ["contended"] * 12 + ["ok"]


def test_a_journal_of_another_card_finishes_nothing_here(
    run_sweep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "facts", lambda: {"cpu_name": "one", "torch_version": "2.13.0"})
    values = scripted(monkeypatch, _1=[FINE], _2=[FINE])
    run_sweep(*values, isolation="warm")
    monkeypatch.setattr(machine, "facts", lambda: {"cpu_name": "two", "torch_version": "2.13.0"})
    capsys.readouterr()
    run_sweep(*values, isolation="warm", any_system=True)
    assert "2 finished before, 0 to do" in capsys.readouterr().out
    assert status.read(tmp_path / "t").done == 2
    run_sweep(*values[:1], isolation="warm")
    now = status.read(tmp_path / "t")
    assert (now.done, now.total, now.command_done, now.command_total, now.state) == (2, 2, 1, 1, "finished")
    assert status.progress(now) == "2/2: 2 ok; the last command: 1/1"
    monkeypatch.setattr(machine, "facts", lambda: {"cpu_name": "three", "torch_version": "2.13.0"})
    sweep._write_plan(tmp_path / "t", plan.order(plan.expand(values, 1)), plan.Settings(**SETTINGS), "a run", set())
    assert (status.read(tmp_path / "t").done, status.read(tmp_path / "t").state) == (0, "stopped")
    (tmp_path / "t" / journal.NAME).write_bytes(
        b"".join((tmp_path / "t" / journal.NAME).read_bytes().splitlines(True)[:2])
    )
    monkeypatch.setattr(machine, "facts", lambda: {"cpu_name": "two", "torch_version": "2.13.0"})
    capsys.readouterr()
    run_sweep(*values, isolation="warm")
    said = capsys.readouterr()
    assert "0 finished before, 2 to do" in said.out
    assert "2 trials were measured on another system (one · 2.13.0)" in said.err
    rows, _ = journal.read(tmp_path / "t")
    assert [row["cpu_name"] for row in rows] == ["one", "one", "two", "two"]
    table = load(tmp_path / "t")
    assert len(table.frame) == 4
    assert len(groups(table)) == 2
    assert any("rows of 2 systems, never fitted together: one; two" in note for note in table.warnings)


@pytest.mark.slow
def test_a_killed_template_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pidfile = tmp_path / "pid"
    monkeypatch.setenv("PIDFILE", str(pidfile))
    command = [
        sys.executable,
        "-c",
        "import sys; from conftest import *; from harness import plan, sweep; from pathlib import Path\n"
        "s = plan.Settings(**(SETTINGS | {'isolation': 'warm', 'retries': 0}))\n"
        "items = plan.order(plan.expand([custom('slow_start', seed=1), custom('good', seed=2)], 1))\n"
        "items.sort(key=lambda p: p.trial.seed)\n"
        f"sweep.run(items, s, Path({str(tmp_path / 't')!r}))",
    ]
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    parent = subprocess.Popen(command, env=environ)
    wait_for(lambda: pidfile.exists() and pidfile.read_text() != "")
    worker = int(pidfile.read_text())
    template = psutil.Process(psutil.Process(worker).ppid()).ppid()  # between them is what runners/init.py says
    assert template != parent.pid
    os.kill(template, signal.SIGKILL)
    assert parent.wait(60) == 0
    wait_for(lambda: gone(worker))
    rows, _ = journal.read(tmp_path / "t")
    assert [(r["outcome"], r["reason"]) for r in rows] == [
        ("crash", "the template process died, and the worker with it"),
        ("ok", None),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("isolation", [pytest.param("cold", marks=pytest.mark.slow), "warm"])
def test_a_killed_parent_leaves_no_orphan_and_no_torn_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    pidfile = tmp_path / "pid"
    monkeypatch.setenv("PIDFILE", str(pidfile))
    target = f"{TARGETS / 'faults.py'}:slow_start"
    command = [sys.executable, "-m", "harness", "sweep", "model=tiny", "device=cpu", "runner=custom", "name=t"]
    command += [f"runner.target={target}", f"results={tmp_path}", f"isolation={isolation}", "report=false"]
    parent = subprocess.Popen(command, cwd=ROOT)
    wait_for(lambda: pidfile.exists() and pidfile.read_text() != "")
    family = [p.pid for p in psutil.Process(parent.pid).children(recursive=True)]
    assert int(pidfile.read_text()) in family
    assert status.read(tmp_path / "t").state == "running"
    parent.kill()
    parent.wait()
    wait_for(lambda: all(gone(pid) for pid in family))
    assert status.read(tmp_path / "t").state == "stopped"
    assert journal.read(tmp_path / "t") == ([], 0)


@pytest.mark.slow
@pytest.mark.parametrize("also", [False, True], ids=["the launcher", "and its guard"])
def test_what_a_killed_sweep_has_left_is_ended_by_its_guard_or_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, also: bool
) -> None:
    """The trial's own process in a session of its own, whom no signal to a parent reaches."""
    pids = tmp_path / "pids"
    monkeypatch.setenv("ORPHAN", str(pids))
    target = f"{TARGETS / 'faults.py'}:orphan_and_hangs"
    command = [sys.executable, "-m", "harness", "sweep", "model=tiny", "device=cpu", "runner=custom", "name=t"]
    command += [f"runner.target={target}", f"results={tmp_path}", "report=false", "retries=0", "timeout_s=3"]
    parent = subprocess.Popen(command, cwd=ROOT)
    wait_for(lambda: pids.exists() and pids.read_text() != "")
    orphan = int(pids.read_text())
    guards = [p for p in psutil.Process(parent.pid).children() if any("leftovers" in word for word in p.cmdline())]
    assert len(guards) == 1
    if also:
        guards[0].kill()
    parent.kill()
    parent.wait()
    if also:
        assert not gone(orphan)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert f"had left processes behind, which were ended: {orphan}" in done.stderr
    wait_for(lambda: gone(orphan))
    wait_for(lambda: gone(guards[0].pid))


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_once_finishes_the_running_trial_and_reports_twice_stops_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    pidfile, go_on = tmp_path / "pid", tmp_path / "go on"
    monkeypatch.setenv("PIDFILE", str(pidfile))
    monkeypatch.setenv("GO_ON", str(go_on))
    target = f"{TARGETS / 'faults.py'}:waits"
    command = [sys.executable, "-m", "harness", "sweep", "-m", "model=tiny", "device=cpu", "runner=custom", "name=t"]
    command += [f"runner.target={target}", f"results={tmp_path}", "seq_len=8,16,24", "protocol=quick", "repeats=1"]
    # a session of its own, all of which a terminal's Ctrl-C reaches
    parent = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    wait_for(lambda: pidfile.exists() and pidfile.read_text() != "")
    os.killpg(parent.pid, signal.SIGINT)
    time.sleep(0.5)
    if times == 1:
        go_on.touch()
    else:
        os.killpg(parent.pid, signal.SIGINT)
    _, err = parent.communicate(timeout=120)
    assert parent.returncode == 130
    assert "the same command goes on from here" in err and "Traceback" not in err
    rows, unreadable = journal.read(tmp_path / "t")
    assert ([row["outcome"] for row in rows], unreadable) == (["ok"] * (times == 1), 0)
    assert (tmp_path / "t" / "report.html").exists() == (times == 1)
    wait_for(lambda: gone(int(pidfile.read_text())))


@pytest.mark.slow
def test_an_interrupted_sweep_ends_its_worker_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pidfile = tmp_path / "pid"
    monkeypatch.setenv("PIDFILE", str(pidfile))
    target = f"{TARGETS / 'faults.py'}:slow_start"
    command = [sys.executable, "-m", "harness", "sweep", "model=tiny", "device=cpu", "runner=custom", "name=t"]
    command += [f"runner.target={target}", f"results={tmp_path}", "report=false", "isolation=cold"]
    parent = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: pidfile.exists() and pidfile.read_text() != "")
    parent.send_signal(signal.SIGTERM)
    _, err = parent.communicate(timeout=60)
    assert parent.returncode == 130
    assert "the same command goes on from here" in err
    assert "Traceback" not in err
    wait_for(lambda: gone(int(pidfile.read_text())))


def test_status_of_a_finished_sweep(run_sweep: Run, tmp_path: Path) -> None:
    run_sweep(tiny(seq_len=0), tiny(micro_batch=0))
    found = status.read(tmp_path / "t")
    assert (found.state, found.done, found.total, found.invalid) == ("finished", 2, 2, 2)
    with (tmp_path / "t" / journal.NAME).open("a") as file:
        file.write('{"torn')
    assert status.read(tmp_path / "t").unreadable == 1
    assert json.loads((tmp_path / "t" / journal.PLAN).read_text())["trials"]


def test_status_of_a_sweep_that_the_machine_stopped(
    run_sweep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_sweep(*scripted(monkeypatch, _1=[NO_DEVICE], _2=[FINE]), isolation="warm")
    found = status.read(tmp_path / "t")
    assert (found.state, found.done, found.total, found.ok, found.failed, found.stopped) == ("stopped", 1, 2, 1, 0, 1)


def test_status_of_a_sweep_of_version_1() -> None:
    found = status.read(ROOT / "results" / "reference" / "gpt2-cpu")
    assert (found.done, found.ok) == (12, 12)


def test_what_the_worker_does_not_know_the_parent_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a card that tells its name to one of them only would be another system, and every run start anew."""
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: [H100])
    monkeypatch.setattr(machine, "again", lambda cards: cards)
    told = Evidence(exit_code=0, result={"values": {"gpu_name": None, "torch_version": None}})
    row, _, _ = run_fake(tmp_path, [told], 0, device={"name": "cuda"})
    assert row["gpu_name"] == H100.name
    assert row["torch_version"] == machine.facts()["torch_version"]


@pytest.mark.parametrize(
    ("values", "exit_code", "found"),
    [
        ({"foreign_processes": []}, 0, []),
        ({"foreign_processes": [12]}, 0, [12]),
        ({"foreign_processes": None}, 0, None),  # a container that hides its processes
        (None, -9, None),  # nobody looked again
    ],
)
def test_whom_nobody_looked_for_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: Any, exit_code: int, found: list[int] | None
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: [H100])
    monkeypatch.setattr(machine, "again", lambda cards: cards)
    told = Evidence(exit_code=exit_code, result=None if values is None else {"values": values})
    row, _, _ = run_fake(tmp_path, [told], 0, device={"name": "cuda"})
    assert row["foreign_processes"] == found


def test_a_hang_after_the_measured_steps_is_no_overhead(tmp_path: Path) -> None:
    told = {"values": {"steps_s": 0.25}, "complete": False}
    row, _, _ = run_fake(tmp_path / "a", [Evidence(expired=True, deadline_s=3600, result=told)], 0)
    assert (row["outcome"], row["overhead_s"]) == ("ok", None)
    assert row["notes"] == ["ended after the measured steps: no end within 3600 s"]
    row, _, _ = run_fake(tmp_path / "b", [Evidence(exit_code=0, result=told | {"complete": True})], 0)
    assert row["overhead_s"] == 0.75


def test_what_was_measured_with_more_cards_stays_measured_with_fewer(
    run_sweep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, _1=[FINE])
    values = tiny(seed=1, device={"name": "cuda"}, sharding="fsdp2", world_size=2)
    monkeypatch.setattr(machine, "again", lambda cards: cards)
    for cards in (2, 1):
        monkeypatch.setattr(machine, "visible_gpus", lambda environ, cards=cards: [H100] * cards)
        (row,) = run_sweep(values, isolation="warm")
        assert row["outcome"] == "ok"
    assert len(journal.read(tmp_path / "t")[0]) == 1
