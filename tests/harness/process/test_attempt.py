"""One attempt: templates that misbehave, results and logs that are wrong, its environment, templates used again."""

import errno
import importlib
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from conftest import ROOT, TARGETS, Run, cases, custom, parametrized, refusal, source, tiny, wait_for
from launchers import Still, swept

from vramsweep.harness.machine import machine
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process import attempt, fork_server, orphans, waiting, worker_environment, worker_files
from vramsweep.harness.rows import journal_lock
from vramsweep.harness.rows.outcome import Evidence, HostMemory, classify, is_retryable
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.sweep import plan, resume
from vramsweep.runners.rank import result_file
from vramsweep.runners.worker import serve_forks


class Fakes:
    """Attempts with fake templates; `starts` counts these."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str, bounds: fork_server.Timeouts) -> None:
        monkeypatch.setattr(fork_server, "COMMAND", (sys.executable, str(TARGETS / "fake_template.py"), mode))
        self.folder, self.number = folder, 0
        self.environ = {"STARTS": str(folder / "starts"), "PATH": os.environ["PATH"]}
        self.launcher = attempt.Launcher("warm", folder / "templates", bounds)

    def attempt(self, deadline_s: float = 20, runner: str = "torch", **environ: str) -> attempt.AttemptResult:
        self.number += 1
        place = self.folder / str(self.number)
        return self.launcher.attempt({}, place, self.environ | environ, runner, deadline_s)

    def starts(self) -> int:
        return len((self.folder / "starts").read_text().splitlines())


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Fakes] = []

    def make(mode: str, start_s: float = 20, short_s: float = 0.5) -> Fakes:
        made.append(Fakes(tmp_path, monkeypatch, mode, fork_server.Timeouts(start_s, short_s, short_s)))
        return made[-1]

    yield make
    for one in made:
        one.launcher.__exit__(None, None, None)


@pytest.mark.parametrize(("mode", "outcome", "reason", "starts"), cases("misbehaving_templates"))
def test_a_template_that_misbehaves_costs_one_attempt_at_most(
    fakes: Any, mode: str, outcome: str, reason: str, starts: str
) -> None:
    """None where it does so once the worker has ended, whose result and status are whole."""
    made = fakes(mode, start_s=1 if mode == "stopped_at_start" else 20)
    began = time.monotonic()
    found = [made.attempt().evidence for _ in range(3)]
    assert time.monotonic() - began < 15
    kind, why = classify(found[0])
    assert (kind, reason in (why or "")) == (outcome, True), why
    assert is_retryable(kind, found[0]) is (kind == "crash")
    assert [classify(evidence)[0] for evidence in found[1:]] == ["ok", "ok"]
    assert [evidence.exit_code for evidence in found[1:]] == [0, 0]
    assert made.starts() == int(starts)
    assert not [p for p in psutil.Process().children(recursive=True) if p.pid not in _kept(made)]


def _kept(made: Fakes) -> set[int]:
    return made.launcher._kept | made.launcher.templates.pids()


def test_a_process_that_is_not_the_templates_child_is_left_alone(fakes: Any) -> None:
    made = fakes("pid victim")
    victim = subprocess.Popen(["sleep", "100"], start_new_session=True)
    made.launcher._kept.add(victim.pid)
    try:
        evidence = made.attempt(VICTIM=str(victim.pid)).evidence
        assert classify(evidence)[0] == "crash"
        assert "not its child" in str(evidence.start_error)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


@pytest.mark.slow
def test_a_worker_that_outlives_being_killed_does_not_hold_up_the_trials_after_it(
    fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = fakes("survives")
    survivor = tmp_path / "survivor"
    kill = os.kill

    def spare(pid: int, number: int) -> None:
        if str(pid) != survivor.read_text():
            kill(pid, number)

    with monkeypatch.context() as patch:  # as a process is that waits for a driver
        patch.setattr(orphans, "END_S", 0.1)
        patch.setattr(fork_server.os, "killpg", lambda *_: None)
        patch.setattr(fork_server.signal, "pidfd_send_signal", lambda *_: None)
        patch.setattr(os, "kill", spare)
        first = made.attempt(deadline_s=1.5)
        pid = int(survivor.read_text())
        assert classify(first.evidence)[0] == "timeout"
        assert pid not in made.launcher.own_pids()  # it may well hold memory of the device
        assert str(pid) in capsys.readouterr().err
        began = time.monotonic()
        assert [classify(made.attempt().evidence)[0] for _ in range(3)] == ["ok"] * 3
        assert time.monotonic() - began < 5
    assert made.starts() == 2
    kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


LEAVES = source("worker_that_leaves.txt")
FORKS = source("worker_that_forks.txt")


def test_orphans_are_ended_by_a_few_listings_of_all_processes(tmp_path: Path) -> None:
    """1,000 zombies and 100 daemons. Two that fork for ever, each time in a session of its own, may be too fast."""
    with attempt.Launcher("cold", tmp_path) as launcher:
        for code, most in ((LEAVES, 20), (FORKS, math.inf)):
            environ = os.environ | {orphans.MARK: launcher.run}
            subprocess.run([sys.executable, "-S", "-c", code], start_new_session=True, check=True, env=environ)
            with mock.patch.object(orphans, "list_processes", wraps=orphans.list_processes) as listed:
                launcher._end()
            assert listed.call_count < most
            assert (launcher._stuck and code == FORKS) or not dict(orphans.marked_processes(launcher.run))


def test_what_cannot_be_ended_in_time_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(orphans, "END_S", 0.05)
    none = itertools.count(1 << 23)  # no process has such a number
    for ended in (True, False):
        assert orphans.end_processes(lambda ended=ended: [(next(none), ended)])  # type: ignore[misc] # another one each time
    assert orphans.end_processes(lambda: ((pid, True) for pid in none))  # more than can be listed in time
    monkeypatch.setattr(orphans, "marked_processes", lambda run: [(next(none), False)])
    monkeypatch.setattr(resume, "plans", lambda folder: [{"run": "earlier", "launcher": {}}])
    monkeypatch.setattr(journal_lock, "is_alive", lambda launcher: False)
    resume.end_leftovers(tmp_path, "own")
    said = capsys.readouterr().err
    assert "forking endlessly" in said and "were ended" not in said


def test_a_process_whose_first_thread_has_ended_runs() -> None:
    code = "import ctypes, threading; threading.Thread(target=input).start(); ctypes.CDLL(None).pthread_exit(None)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        wait_for(lambda: "\nState:\tZ" in Path(f"/proc/{process.pid}/status").read_text())
        assert not dict(orphans.list_processes())[process.pid].ended


def test_a_broken_template_is_one_crash_for_each_trial_with_the_end_of_its_own_log(fakes: Any, tmp_path: Path) -> None:
    made = fakes("dies_always")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "torch-1.log").write_text("of an earlier run\n")
    reasons = [made.attempt().evidence.start_error for _ in range(3)]
    said = "no worker could be started: the fork server did not start (exit status 1): ImportError: libcudart.so.12"
    assert reasons == [f"{said}: no such file"] * 3
    assert "earlier" not in (tmp_path / "templates" / "torch-1.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["cold", "warm"])
def test_a_broken_import_is_rows_and_not_the_end_of_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", f"{broken.parent}{os.pathsep}{ROOT}")
    rows = swept(None, tmp_path / "t", custom("good", seed=1), custom("good", seed=2), isolation=isolation)
    assert [row["outcome"] for row in rows] == ["crash", "crash"]
    assert all("libcudart.so.12: cannot open shared object file" in row["reason"] for row in rows)
    assert [row["isolation"] for row in rows] == [isolation] * 2


DRIVER = """
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return CODE; }
"""
IMPORTED = source("imports_of_a_worker.txt")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@parametrized("imports_that_start_cuda")
def test_a_runner_whose_imports_start_cuda_goes_cold(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    code: int,
    reason: str | None,
) -> None:
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    flags = ["-shared", "-fPIC", f"-DCODE={code}", "-Wl,-soname,libcuda.so.1"]  # as the driver names itself
    subprocess.run(["gcc", *flags, str(tmp_path / "driver.c"), "-o", str(library)], check=True)
    (tmp_path / "sitecustomize.py").write_text(IMPORTED.format(path=str(library)))
    (tmp_path / "torch").mkdir()  # without torch a template starts at once, and its workers fail
    (tmp_path / "torch" / "__init__.py").write_text("raise ModuleNotFoundError('no torch')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    rows = swept(None, tmp_path / "t", custom("good", seed=1), custom("good", seed=2))
    said = capfd.readouterr().err.count("starts cold")
    assert all("no torch" in row["reason"] for row in rows)
    assert [row["isolation"] for row in rows] == ["warm" if reason is None else "cold"] * 2
    assert all(row["cold_reason"] is None if reason is None else reason in row["cold_reason"] for row in rows)
    assert said == (reason is not None)


@pytest.mark.slow
def test_imports_that_ask_for_the_compute_capability_do_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes does, and the Trainer imports it where it is installed."""
    cards = [machine.Gpu(i, "NVIDIA H100", f"GPU-{i}", "1", 80 << 30, 0, (), (9, i)) for i in range(2)]
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: cards)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with serve_forks._asked_without_cuda():
        asked = (None, 0, torch.device("cuda", 1), torch.cuda.device(1))  # without a device: the current, the first one
        found = [torch.cuda.get_device_capability(of) for of in asked]
        if catalog.version("bitsandbytes"):
            specs = importlib.import_module("bitsandbytes.cuda_specs")
            assert specs.get_compute_capabilities() == [(9, 0), (9, 1)]
        if catalog.version("torchao"):  # asks by torch.utils._triton.has_triton
            worker = importlib.import_module("torch._dynamo.device_interface").CudaInterface.Worker
            found += [(one.major, one.minor) for one in map(worker.get_device_properties, (None, "cuda:1"))]
    assert found == [(9, 0), (9, 0), (9, 1), (9, 1), (9, 0), (9, 1)][: len(found)] and not torch.cuda.is_initialized()


def test_only_the_runner_that_starts_cuda_goes_cold(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = fakes("unclean")
    assert [made.attempt(runner=name).isolation for name in ("torch", "trainer", "torch")] == ["cold", "warm", "cold"]
    assert made.attempt(runner="trainer").cold_reason is None
    assert made.starts() == 2
    assert capsys.readouterr().err.count("runner=torch starts cold") == 1


def test_our_own_processes_are_never_foreign(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = subprocess.Popen(["sleep", "100"])  # a server that the user has started from here is not ours
    try:
        made = fakes("good")
        made.attempt()
        (template,) = made.launcher.templates.pids()
        pids = (os.getpid(), template, before.pid, 1 << 22)  # the last: of the host, where this is a container
        card = machine.Gpu(0, "NVIDIA H100", "GPU-1", "1", 80 << 30, 1 << 30, pids)
        monkeypatch.setattr(machine, "gpus", lambda: [card])
        taken = made.launcher.occupancy.taken([card], made.launcher.own_pids, lambda _: None)
        assert taken is not None and taken.processes == (before.pid, 1 << 22)
    finally:
        before.kill()
        before.wait()


def test_the_worker_sees_the_allocator_setting_and_only_that_name() -> None:
    base = {"PYTORCH_ALLOC_CONF": "old", "PYTORCH_CUDA_ALLOC_CONF": "older", "HOME": "/h"}
    environ = attempt.attempt_environment("expandable_segments:True", "cuda", base)
    assert environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in environ
    assert attempt.attempt_environment("", "cuda", base, ["GPU-a", "GPU-b"])["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert attempt.attempt_environment("", "cpu", base)["CUDA_VISIBLE_DEVICES"] == ""
    fastest = base | {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}  # an index is to mean the same to CUDA as to NVML
    assert attempt.attempt_environment("", "cuda", fastest, ["GPU-a"])["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in attempt.attempt_environment("", "cuda", base)


def test_steps_of_a_killed_worker_are_read_up_to_the_torn_line(tmp_path: Path) -> None:
    (tmp_path / worker_files.STEPS).write_text('{"event": "load"}\n{"step": 0}\n{"st')
    assert attempt.read_steps(tmp_path) == [{"event": "load"}, {"step": 0}]


def test_what_a_worker_says_that_it_does(tmp_path: Path) -> None:
    assert attempt.read_progress(tmp_path) == {"text": "importing torch"}  # before it says anything
    result_file.progress(tmp_path, "tracing step 1 of 3")
    result_file.progress(tmp_path, "tracing: 1 of 4 done", done=0, total=2)
    place = tmp_path / worker_files.PROGRESS
    place.write_text(place.read_text() + '{"text": 7}\n[]\n{"text": "tracing: 2 o')
    assert attempt.read_progress(tmp_path) == {"text": "tracing: 1 of 4 done", "done": 0, "total": 2}
    place.write_text('{"text": "x", "done": "1", "total": true}\n')
    assert attempt.read_progress(tmp_path) == {"text": "x"}
    result_file.progress(tmp_path / "gone", "x")  # that there is no room for it is nobody's concern


@pytest.mark.parametrize(("text", "said"), cases("results_that_are_none"))
def test_a_result_that_is_none_says_why_and_one_that_fits_no_row_its_column(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / worker_files.RESULT).write_text(text)
    result, problem = attempt.read_result(tmp_path)
    assert result is None
    assert said in str(problem)


def test_a_result_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / worker_files.RESULT).open("wb") as file:
        file.truncate(1 << 40)
    assert "it has 1,099,511,627,776 bytes; at most" in str(attempt.read_result(tmp_path)[1])


def test_a_flood_of_output_is_cut_and_the_row_says_so(
    fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LOG_LIMIT", 400_000)
    monkeypatch.setattr(waiting, "LOG_KEPT", 50_000)
    monkeypatch.setattr(waiting, "LOOK_S", 0.02)
    done = fakes("floods").attempt()
    log = tmp_path / "1" / "stdout.log"
    assert classify(done.evidence)[0] == "ok"
    assert log.stat().st_size < 2_000_000  # of 8 million
    assert b"of this log were dropped]\n" in log.read_bytes()
    assert str(waiting.last_words(log)).startswith("line 399")
    assert "bytes of its logs were dropped" in done.notes[0]


def test_the_last_line_of_a_huge_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert waiting.last_words(log) is None
    log.write_text("one\n\n  two \n \n")
    assert waiting.last_words(log) == "two"
    with log.open("r+b") as file:
        file.truncate(1 << 36)  # sparse: reading it whole would never end
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast " + b"x" * 10_000 + b"\n")
    assert str(waiting.last_words(log)).startswith("last xxx")
    assert len(str(waiting.last_words(log))) == waiting.REASON_LENGTH


@pytest.mark.parametrize("isolation", ["cold", "warm"])
@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM])
def test_a_process_that_the_system_refuses_is_a_crash_and_not_an_unwritable_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str, code: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    rows = swept(None, tmp_path / "t", tiny(seed=1), tiny(seed=2), isolation=isolation)
    assert [row["outcome"] for row in rows] == ["crash", "crash"]
    assert all(os.strerror(code) in row["reason"] for row in rows)


@pytest.mark.parametrize(
    ("code", "said"), [(errno.ENOSPC, "cannot write under"), (errno.EMFILE, "the system refused a resource")]
)
def test_errors_about_writing_are_told_from_others(
    run_sweep: Run, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(machine, "machine_facts", fail)
    assert said in refusal(UserError, run_sweep, tiny())


@parametrized("limits_of_cgroups")
def test_room_for_templates_is_what_the_cgroups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, limits: dict[str, str], room: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1 << 40))
    (tmp_path / "own").write_text("3:memory:/job/step\n2:cpu:/\n0::/\n" if version == 1 else "0::/job/step\n")
    for place, text in limits.items():
        folder = tmp_path / ("memory" if version == 1 else "") / place
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(text)
    assert fork_server.room(tmp_path / "own", tmp_path) == room


@pytest.mark.parametrize(("room", "starts"), [(8, 9 + 3), (9, 9)])  # without room one more for each further length
def test_templates_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, starts: int) -> None:
    forks = {"fork.side_effect": fork_server.ForkServerError("of no matter here"), "ready.return_value": None}
    started = mock.Mock(
        side_effect=lambda runner, environ, log, bounds: mock.Mock(
            lost=None, users=0, pid=os.getpid(), log=log, **forks
        )
    )
    monkeypatch.setattr(fork_server, "ForkServer", started)
    monkeypatch.setattr(fork_server, "room", lambda: room)
    settings = [{"name": f"s{n}", "conf": f"max_split_size_mb:{n + 21}"} for n in range(9)]
    values = [tiny(seq_len=n, allocator=a, device={"name": "cuda"}) for a in settings for n in (32, 64, 96, 128)]
    planned = plan.order_trials(plan.expand_trials(values, 1))
    with attempt.Launcher("warm", tmp_path / "templates") as launcher:
        for number, item in enumerate(planned):
            assert item.trial is not None
            environ = attempt.attempt_environment(item.trial.allocator_variable(), "cuda", {})
            launcher.attempt({}, tmp_path / str(number), environ, "torch", 1)
    assert len(planned) == 36
    assert started.call_count == starts
    lengths = [item.trial.seq_len for item in planned if item.trial]
    assert lengths == [128] * 9 + [32] * 9 + [64] * 9 + [96] * 9  # still coarse to fine


@parametrized("ends_of_asked_workers")
def test_an_answer_that_is_there_counts_however_the_worker_ended(
    ended: dict[str, Any], text: str | None, said: str | None, tmp_path: Path
) -> None:
    starved = HostMemory(*ended["starved"]) if "starved" in ended else None
    evidence = Evidence(**ended | {"starved": starved})

    class Asked(Still):
        def answer(self, spec: Any, folder: Path, environ: Any, look: Any) -> Evidence:
            if text is not None:
                (folder / worker_files.ANSWER).write_text(text)
            return evidence

    request: Any = (Asked(), {}, tmp_path, {}, "", 7.0, "ask less", "it broke: ")
    if said is None:
        assert attempt.ask_attempt(*request) == [{"a": 1}]
    else:
        assert refusal(UserError, attempt.ask_attempt, *request).startswith(said)


FALSIFYING = dict(cases("falsifying_variables"))
OUTER = dict(cases("variables_of_launchers"))
KEPT = {"HOME": "/h", "NCCL_DEBUG": "INFO"}


def test_what_confuses_or_falsifies_is_not_passed_on_and_that_is_said() -> None:
    base = FALSIFYING | OUTER | KEPT
    environ = attempt.attempt_environment("", "cuda", base)
    assert environ.items() >= KEPT.items()
    said = [line.split(" because ")[0].replace(",", " ").split() for line in worker_environment.describe_dropped(base)]
    for name in (*FALSIFYING, *OUTER):
        assert name not in environ and sum(name in names for names in said) == 1, name
    assert worker_environment.describe_dropped(KEPT) == []


@pytest.mark.slow
def test_a_row_records_what_its_worker_had(
    run_sweep: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    own = {"HF_TOKEN": "hf_plantedsecret", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1", "EDITOR": "vi"}
    for name, text in (OUTER | FALSIFYING | own).items():
        monkeypatch.setenv(name, text)
    rows = run_sweep(custom("good"), custom("killed"), isolation="warm")
    assert [row["outcome"] for row in rows] == ["ok", "crash"]
    for row in rows:  # a killed worker tells nothing, so then it is what it was given
        assert row["environment"]["NCCL_DEBUG"] == "WARN"
        assert row["environment"]["OMP_NUM_THREADS"] == "1"
        assert row["environment"]["CUDA_VISIBLE_DEVICES"] == ""
        assert not set(row["environment"]) & {*FALSIFYING, *OUTER, "EDITOR", "HF_TOKEN", "HOME"}
    said = capfd.readouterr().err
    assert said.count("CUDA_LAUNCH_BLOCKING") == 1
