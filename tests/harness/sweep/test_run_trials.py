"""Sweeps with real worker processes, and everything that can happen to them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, SETTINGS, TARGETS, Run, custom, gone, parametrized, refusal, tiny, wait_for
from launchers import OOM, Still, error, swept

from vramsweep.analysis.data.groups import groups
from vramsweep.analysis.data.load import load
from vramsweep.harness.machine import machine
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.journal import Journal
from vramsweep.harness.rows.outcome import Evidence
from vramsweep.harness.rows.schema import SYSTEM, Outcome, complete_row
from vramsweep.harness.sweep import plan, resume, row_builder, run_trials, sweep_status, trial_loop
from vramsweep.harness.sweep.scheduler import Slot


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["cold", "warm"])
def test_each_fault_is_its_outcome_and_the_sweep_goes_on(
    isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(psutil.Process().children(recursive=True))  # other tests' browsers among them
    monkeypatch.setenv("ORPHAN", str(tmp_path / "orphan.pid"))
    names = ["killed", "hangs", "raises", "oom", "exits", "host_oom", "orphan", "forks_for_ever", "good"]
    if isolation == "cold":  # the slow way: what differs from the warm one
        names = ["killed", "hangs", "orphan", "forks_for_ever", "good"]
    values = [custom(name, seed=n) for n, name in enumerate(names)]
    how = {"isolation": isolation, "timeout_s": 24 if isolation == "cold" else 6}
    rows = swept(None, tmp_path / "t", *values, tiny(seq_len=0), **how)
    outcomes = dict(zip(names, [row["outcome"] for row in rows], strict=False))
    expected = {
        "killed": "crash", "hangs": "timeout", "raises": "crash", "oom": "oom", "exits": "bad_result",
        "host_oom": "host_oom", "orphan": "ok", "forks_for_ever": "ok", "good": "ok",
    }  # fmt: skip
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


class Listed(Still):
    """Answers attempts from a list of evidence."""

    def __init__(self, evidence: list[Evidence]) -> None:
        super().__init__()
        self.evidence = list(evidence)

    def answer(self, *_: Any) -> Evidence:
        return self.evidence.pop(0)


def run_fake(folder: Path, evidence: list[Evidence], retries: int, **over: Any) -> tuple[Any, list[float], list[Any]]:
    slept: list[float] = []
    (item,) = plan.order_trials(plan.expand_trials([tiny(**over)], 1))
    chosen = plan.Settings(**(SETTINGS | {"retries": retries, "backoff_s": 5}))
    assert item.trial
    slot = Slot(row_builder.visible_gpus(item.trial), sleep=slept.append)
    launcher: Any = Listed(evidence)
    with Journal(folder) as book:
        for tries in range(retries + 1):
            row = trial_loop.run_trial(item, chosen, folder, book, launcher, tries, tries, slot)
            if row["terminal"]:
                break
    return row, slept, journal.read(folder)[0]


@pytest.mark.slow
def test_retries_have_a_limit_and_back_off(tmp_path: Path) -> None:
    killed = Evidence(exit_code=-9)
    row, slept, rows = run_fake(tmp_path, [killed] * 4, retries=3)
    assert row["outcome"] == "crash"
    assert slept == [5, 10, 20]
    assert [r["terminal"] for r in rows] == [False, False, False, True]


@pytest.mark.parametrize("evidence", [OOM, Evidence(expired=True, deadline_s=1), error("ValueError", "deterministic")])
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


@pytest.fixture
def one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: [H100])
    monkeypatch.setattr(machine, "gpus", lambda: [H100])
    monkeypatch.setattr(machine, "again", lambda cards: cards)


NO_DEVICE = error("x.EnvironmentFault", "no CUDA device")
FINE = Evidence(exit_code=0, result={"values": {"device_baseline_bytes": 9 << 30, "foreign_processes": [12]}})


def test_more_ranks_than_cards_cannot_run_and_run_again_where_there_are_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda: dict[str, Any] = {"device": {"name": "cuda"}, "sharding": "fsdp2"}
    values = [tiny(**cuda, world_size=n) for n in (1, 2)] + [tiny(sharding="fsdp2", world_size=2)]

    def planned(cards: int) -> list[plan.Planned]:
        monkeypatch.setattr(machine, "visible_gpus", lambda environ: [H100] * cards)
        return resume.reject_too_many_ranks(plan.order_trials(plan.expand_trials(values, 1)))

    by_id = {p.trial_id: p for p in planned(1)}
    (refused,) = [p for p in by_id.values() if p.trial is None]
    assert refused.reason and refused.reason.startswith("world_size=2 needs 2 GPUs, but 1 is visible")
    assert refused.resolved["device"]["name"] == "cuda"
    row = complete_row(row_builder.unstarted_row(refused, Outcome.INVALID, refused.reason))
    assert all(p.trial for p in planned(2))
    assert refused.trial_id in {p.trial_id for p in resume.pending_trials(planned(2), {refused.trial_id: row}, False)}
    assert all(p.trial for p in planned(0))  # without any card that is the machine's fault, and the worker says so


@pytest.mark.usefixtures("one_card")
def test_a_row_says_on_which_card_it_ran_out_of_memory_and_what_speaks_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "host_load", lambda: 0.0)
    oom = error("torch.OutOfMemoryError", "CUDA out of memory", device_baseline_bytes=60 << 30)
    row, _, _ = run_fake(tmp_path / "a", [oom], 0, device={"name": "cuda"})
    assert (row["outcome"], row["gpu_name"], row["driver_version"]) == ("oom", H100.name, "580")
    assert row["flags"] == ["high_baseline"]  # a false frontier, perhaps
    row, _, _ = run_fake(tmp_path / "b", [FINE], 0, device={"name": "cuda"})
    assert row["flags"] == ["contended", "high_baseline"]
    assert row["foreign_processes"] == [12]


class Scripted(Still):
    """Stands in for the launcher of a whole sweep; the evidence for each trial's attempts, by its seed."""

    script: dict[int, list[Evidence]]

    def answer(self, spec: Any, folder: Path, *_: Any) -> Evidence:
        folder.mkdir(parents=True)
        left = self.script[spec["trial"]["seed"]]
        return left.pop(0) if len(left) > 1 else left[0]


def scripted(**by_seed: list[Evidence]) -> list[dict[str, Any]]:
    Scripted.script = {int(seed.strip("_")): evidence for seed, evidence in by_seed.items()}
    return [tiny(seed=seed) for seed in Scripted.script]


@pytest.fixture
def run_scripted(tmp_path: Path) -> Run:
    """Runs trials in tmp_path/t with what is in the script."""
    return lambda *values, **settings: swept(Scripted(), tmp_path / "t", *values, **settings)


def test_trials_that_the_machine_stopped_run_once_more_at_the_end_and_again_the_next_time(
    run_scripted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = scripted(_1=[NO_DEVICE, FINE], _2=[FINE], _3=[NO_DEVICE])
    (stopped,) = run_scripted(*values[2:])
    assert (stopped["outcome"], stopped["terminal"]) == ("environment", False)
    rows, _ = journal.read(tmp_path / "t")
    assert [(r["outcome"], r["terminal"]) for r in rows] == [("environment", False)]
    monkeypatch.setitem(Scripted.script, 3, [NO_DEVICE, NO_DEVICE, FINE])
    done = run_scripted(*values)
    assert [row["outcome"] for row in done] == ["ok"] * 3
    assert [row["attempt"] for row in done] == [2, 1, 4]


def test_a_passing_fault_is_retried_and_both_attempts_are_rows(run_scripted: Run, tmp_path: Path) -> None:
    run_scripted(*scripted(_1=[Evidence(exit_code=-9), FINE]), retries=2)
    rows, _ = journal.read(tmp_path / "t")
    assert [(r["outcome"], r["attempt"], r["terminal"]) for r in rows] == [("crash", 1, False), ("ok", 2, True)]


def raised(text: str) -> list[Evidence]:
    return [error("builtins.ValueError", text)]


def test_ten_trials_that_fail_the_same_way_stop_the_sweep(run_scripted: Run, tmp_path: Path) -> None:
    broken = {f"_{n}": raised(f"no space in block {n}") for n in range(1, 15)}
    values = scripted(_0=[FINE], **broken)
    said = r"10 trials in a row .*ValueError: no space in block 10.*with retry_failed=true \(breaker=0"
    with pytest.raises(UserError, match=said):
        run_scripted(*values, breaker=10)
    assert len(journal.read(tmp_path / "t")[0]) == 11
    assert len(run_scripted(*values, breaker=0)) == 15


def test_a_night_whose_longest_trials_all_fail_goes_on_to_the_shorter_ones(run_scripted: Run) -> None:
    scripted(**{f"_{n}": raised("too long") if n < 12 else [FINE] for n in range(24)})
    values = [tiny(seed=seed, seq_len=64 if seed < 12 else 32) for seed in range(24)]
    rows = run_scripted(*values, breaker=10)
    assert [row["outcome"] for row in rows] == ["crash"] * 12 + ["ok"] * 12
    scripted(**{f"_{n}": raised("broken") for n in range(24, 48)})
    values = [tiny(seed=seed, seq_len=64 if seed < 36 else 32) for seed in range(24, 48)]
    assert "13 trials in a row" in refusal(UserError, run_scripted, *values, breaker=10)


@pytest.mark.slow
def test_others_on_the_device_do_not_stop_a_sweep(run_scripted: Run) -> None:
    busy = Evidence(foreign=(4711,))
    values = scripted(**{f"_{n}": [busy] for n in range(1, 13)}, _13=[FINE])
    rows = run_scripted(*values, breaker=10)
    assert [row["outcome"] for row in rows] == ["contended"] * 12 + ["ok"]


def test_a_journal_of_another_card_finishes_nothing_here(
    run_scripted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "machine_facts", lambda: {"cpu_name": "one", "torch_version": "2.13.0"})
    values = scripted(_1=[FINE], _2=[FINE])
    run_scripted(*values)
    monkeypatch.setattr(machine, "machine_facts", lambda: {"cpu_name": "two", "torch_version": "2.13.0"})
    capsys.readouterr()
    run_scripted(*values, any_system=True)
    assert "2 finished before, 0 to do" in capsys.readouterr().out
    assert sweep_status.read_status(tmp_path / "t").done == 2
    run_scripted(*values[:1])
    now = sweep_status.read_status(tmp_path / "t")
    assert (now.done, now.total, now.command_done, now.command_total, now.state) == (2, 2, 1, 1, "finished")
    assert sweep_status.progress(now) == "2/2: 2 ok; the last command: 1/1"
    monkeypatch.setattr(machine, "machine_facts", lambda: {"cpu_name": "three", "torch_version": "2.13.0"})
    planned = plan.order_trials(plan.expand_trials(values, 1))
    resume.write_plan(tmp_path / "t", planned, plan.Settings(**SETTINGS), "a run", set(), [])
    now = sweep_status.read_status(tmp_path / "t")
    assert (now.done, now.state) == (0, "stopped")
    file = tmp_path / "t" / "trials" / journal.NAME
    file.write_bytes(b"".join(file.read_bytes().splitlines(True)[:2]))
    monkeypatch.setattr(machine, "machine_facts", lambda: {"cpu_name": "two", "torch_version": "2.13.0"})
    capsys.readouterr()
    run_scripted(*values)
    said = capsys.readouterr()
    assert "0 finished before, 2 to do" in said.out
    assert "2 trials were measured on another system (one · 2.13.0)" in said.err
    rows, _ = journal.read(tmp_path / "t")
    assert [row["cpu_name"] for row in rows] == ["one", "one", "two", "two"]
    table = load(tmp_path / "t")
    assert len(table.frame) == 4
    assert len(groups(table)) == 2
    assert any("rows of 2 systems, which are never fitted together: one; two" in note for note in table.warnings)
    file.write_text("".join(json.dumps(row | dict.fromkeys(SYSTEM)) + "\n" for row in rows[:2]))
    run_scripted(*values)  # rows of trials that never started are of no system
    assert "another system" not in "".join(capsys.readouterr())


@pytest.mark.slow
def test_a_killed_template_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pidfile = tmp_path / "pid"
    monkeypatch.setenv("PIDFILE", str(pidfile))

    def kill_template() -> None:
        wait_for(lambda: pidfile.exists() and pidfile.read_text() != "")
        between = psutil.Process(int(pidfile.read_text())).ppid()  # which runners/rank/process_end.py tells of
        os.kill(psutil.Process(between).ppid(), signal.SIGKILL)

    killer = threading.Thread(target=kill_template)
    killer.start()
    rows = swept(None, tmp_path / "t", custom("slow_start", seed=1), custom("good", seed=2))
    killer.join()
    assert rows[0]["started_at"] < rows[1]["started_at"]
    assert [(row["outcome"], row["reason"]) for row in rows] == [
        ("crash", "the fork server died, and the worker with it"),
        ("ok", None),
    ]
    wait_for(lambda: gone(int(pidfile.read_text())))


def begun(folder: Path, target: str, *words: str, pids: Path, **how: Any) -> tuple[subprocess.Popen[str], list[str]]:
    """The command line's sweep of a target, once this one has left its process id in a file; and the command."""
    command = [sys.executable, "-m", "vramsweep", "sweep", "-m", "model=tiny", "device=cpu", "runner=custom", "name=t"]
    command += [f"runner.target={TARGETS / 'faults.py'}:{target}", f"results={folder}", *words]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **how)
    wait_for(lambda: pids.exists() and pids.read_text() != "")
    return process, command


@pytest.mark.slow
@pytest.mark.parametrize("also", [False, True], ids=["the launcher", "and its guard"])
def test_what_a_killed_sweep_has_left_is_ended_by_its_guard_or_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, also: bool
) -> None:
    """The trial's own process in a session of its own, whom no signal to a parent reaches."""
    pids = tmp_path / "pids"
    monkeypatch.setenv("ORPHAN", str(pids))
    parent, command = begun(tmp_path, "orphan_and_hangs", "report=false", "retries=0", "timeout_s=3", pids=pids)
    orphan = int(pids.read_text())
    assert sweep_status.read_status(tmp_path / "t").state == "running"
    (guard,) = (p for p in psutil.Process(parent.pid).children() if "process.orphans" in " ".join(p.cmdline()))
    if also:
        guard.kill()
    parent.kill()
    parent.communicate()
    assert sweep_status.read_status(tmp_path / "t").state == "stopped"
    assert journal.read(tmp_path / "t") == ([], 0)
    if also:
        assert not gone(orphan)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert f"left orphan processes, which were ended: {orphan}" in done.stderr
    wait_for(lambda: gone(orphan) and gone(guard.pid))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_ctrl_c_once_finishes_the_running_trial_and_reports_twice_or_sigterm_stops_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, times: int
) -> None:
    pidfile, go_on = tmp_path / "pid", tmp_path / "go on"
    monkeypatch.setenv("PIDFILE", str(pidfile))
    monkeypatch.setenv("GO_ON", str(go_on))
    # a session of its own, all of which a terminal's Ctrl-C reaches
    parent, _ = begun(
        tmp_path, "waits", "seq_len=8,16,24", "protocol=quick", "repeats=1", pids=pidfile, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    os.killpg(parent.pid, number) if number == signal.SIGINT else parent.send_signal(number)
    time.sleep(0.5)
    finished = number == signal.SIGINT and times == 1
    if finished:
        go_on.touch()
    elif times == 2:
        os.killpg(parent.pid, number)
    _, err = parent.communicate(timeout=120)
    assert parent.returncode == 130
    assert "run the same command again to resume" in err and "Traceback" not in err
    rows, unreadable = journal.read(tmp_path / "t")
    assert ([row["outcome"] for row in rows], unreadable) == (["ok"] * finished, 0)
    assert (tmp_path / "t" / "report.html").exists() == finished
    wait_for(lambda: gone(int(pidfile.read_text())))


def test_a_report_of_the_same_rows_is_not_drawn_again(
    run_scripted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds if only its path is printed; `vramsweep report` and a sweep draw it."""
    run_scripted(*scripted(_1=[FINE]))
    drawn: list[Any] = []
    monkeypatch.setattr(
        run_trials.subprocess, "run", lambda *asked, **_: drawn.append(asked) or subprocess.CompletedProcess(asked, 7)
    )
    (page := tmp_path / "t" / "report.html").touch()
    (table := tmp_path / "t" / "rows.csv").touch()
    os.utime(page, (time.time() + 60, time.time() + 60))
    assert run_trials.report(tmp_path / "t", brief=True) == 0 and not drawn
    assert f"report    {page} (kept, because no row has changed" in capsys.readouterr().out
    table.unlink()
    assert run_trials.report(tmp_path / "t", brief=True) == 7 and len(drawn) == 1
    table.touch()
    assert run_trials.report(tmp_path / "t") == 7 and len(drawn) == 2
    os.utime(page, (0, 0))
    assert run_trials.report(tmp_path / "t", brief=True) == 7 and len(drawn) == 3


def test_status_of_a_finished_sweep(run_sweep: Run, tmp_path: Path) -> None:
    run_sweep(tiny(seq_len=0), tiny(micro_batch=0))
    found = sweep_status.read_status(tmp_path / "t")
    assert (found.state, found.done, found.total, found.invalid) == ("finished", 2, 2, 2)
    with (tmp_path / "t" / "trials" / journal.NAME).open("a") as file:
        file.write('{"torn')
    assert sweep_status.read_status(tmp_path / "t").unreadable == 1
    assert json.loads((tmp_path / "t" / "trials" / journal.PLAN).read_text())["trials"]


def test_status_of_a_sweep_that_the_machine_stopped(run_scripted: Run, tmp_path: Path) -> None:
    run_scripted(*scripted(_1=[NO_DEVICE], _2=[FINE]))
    found = sweep_status.read_status(tmp_path / "t")
    assert (found.state, found.done, found.total, found.ok, found.failed, found.stopped) == ("stopped", 1, 2, 1, 0, 1)


def test_status_of_a_sweep_of_version_1() -> None:
    found = sweep_status.read_status(ROOT / "results" / "reference" / "gpt2-cpu")
    assert (found.done, found.ok) == (12, 12)


@pytest.mark.usefixtures("one_card")
def test_what_the_worker_does_not_know_the_parent_may(tmp_path: Path) -> None:
    """Else a card that tells its name to one of them only would be another system, and every run start anew."""
    told = Evidence(exit_code=0, result={"values": {"gpu_name": None, "torch_version": None}})
    row, _, _ = run_fake(tmp_path, [told], 0, device={"name": "cuda"})
    assert row["gpu_name"] == H100.name
    assert row["torch_version"] == machine.machine_facts()["torch_version"]


@pytest.mark.usefixtures("one_card")
@parametrized("foreign_processes_found")
def test_whom_nobody_looked_for_is_not_known(
    tmp_path: Path, values: Any, exit_code: int, found: list[int] | None
) -> None:
    told = Evidence(exit_code=exit_code, result=None if values is None else {"values": values})
    row, _, _ = run_fake(tmp_path, [told], 0, device={"name": "cuda"})
    assert row["foreign_processes"] == found


def test_a_hang_after_the_measured_steps_is_no_overhead(tmp_path: Path) -> None:
    told = {"values": {"steps_s": 0.25}, "complete": False}
    row, _, _ = run_fake(tmp_path / "a", [Evidence(expired=True, deadline_s=3600, result=told)], 0)
    assert (row["outcome"], row["overhead_s"]) == ("ok", None)
    assert row["notes"] == ["ended after the measured steps: not finished within 3600 s"]
    row, _, _ = run_fake(tmp_path / "b", [Evidence(exit_code=0, result=told | {"complete": True})], 0)
    assert row["overhead_s"] == 0.75


def test_what_was_measured_with_more_cards_stays_measured_with_fewer(
    run_scripted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(_1=[FINE])
    values = tiny(seed=1, device={"name": "cuda"}, sharding="fsdp2", world_size=2)
    monkeypatch.setattr(machine, "again", lambda cards: cards)
    for cards in (2, 1):
        monkeypatch.setattr(machine, "visible_gpus", lambda environ, cards=cards: [H100] * cards)
        (row,) = run_scripted(values)
        assert row["outcome"] == "ok"
    assert len(journal.read(tmp_path / "t")[0]) == 1
