"""Many predictions in one attempt, as its worker makes them: processes, deadlines, families."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import ROOT, TARGETS, parametrized, source, tiny
from traces import A100, SIMULATED, trace_tiny

from vramsweep.harness.process import attempt
from vramsweep.harness.process.worker_files import PREDICTIONS, PROGRESS, TRACES
from vramsweep.harness.spec import trial, trial_parser
from vramsweep.runners.predict import trace_cache
from vramsweep.runners.rank import result_file
from vramsweep.runners.symbolic import trace_family, trace_workers
from vramsweep.runners.trace import step_tracer
from vramsweep.runners.worker import batch_server, worker


def parsed(**over: Any) -> trial.Trial:
    return trial_parser.parse(tiny(device=SIMULATED, **over))


@parametrized("trial_families")
def test_a_family_is_what_length_and_batch_leave_of_a_trace_s_key(over: dict[str, Any], same_family: bool) -> None:
    one, other = parsed(), parsed(**over)
    assert (trace_cache.family_key(one, A100) == trace_cache.family_key(other, A100)) is same_family
    points = trace_family.point(one) != trace_family.point(other)
    assert (trace_cache.trace_key(one, A100) == trace_cache.trace_key(other, A100)) is (same_family and not points)


@pytest.mark.slow
def test_jobs_run_so_many_at_a_time_and_late_and_dying_ones_do_not_stop_the_others(tmp_path: Path) -> None:
    def leaves(name: str, seconds: float = 0.0) -> Callable[[], None]:
        def job() -> None:
            began = time.monotonic()
            time.sleep(seconds)
            (tmp_path / name).write_text(json.dumps([began, time.monotonic()]))

        return job

    def dies() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def raises() -> None:
        raise SystemExit("not today")

    jobs: list[trace_workers.Job] = [
        (leaves("late", 60), 0.5),
        (dies, 60),
        (raises, 60),
        *((leaves(f"good{n}", 0.2), 60) for n in range(4)),
    ]
    began = time.monotonic()
    assert sorted(trace_workers.forked(jobs, 2)) == list(range(7))
    assert time.monotonic() - began < 30
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"good{n}" for n in range(4)]
    spans = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    most = max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)
    assert most <= 2


@pytest.mark.slow
def test_no_process_at_all_is_an_error_and_one_too_few_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, refusals = os.fork, [True, False, True, False]

    def refusing() -> int:
        if refusals and refusals.pop():
            raise BlockingIOError("Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", refusing)
    assert list(trace_workers.forked([(lambda: time.sleep(0.2), 60.0)] * 2, 2)) == [0, 1]
    refusals[:] = [True]
    with pytest.raises(BlockingIOError):
        list(trace_workers.forked([(lambda: None, 60.0)], 2))


def test_at_once_leaves_each_process_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    for free, processes in ((5 << 30, 5), (1 << 20, 1)):
        room = trace_workers.host_memory.Room(8 << 30, free)
        monkeypatch.setattr(trace_workers.host_memory, "memory_room", lambda room=room: room)
        assert trace_workers.at_once() == processes


def answers(folder: Path) -> dict[str, dict[str, Any]]:
    lines = [line for path in folder.glob(PREDICTIONS) for line in path.read_text().splitlines()]
    found = {answer["trial_id"]: answer for answer in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def run(folder: Path, *values: dict[str, Any], timeout_s: float = 120) -> dict[str, dict[str, Any]]:
    """Answers by the trials' numbers, of the worker in a process of its own."""
    folder.mkdir(parents=True)
    trials = [
        {"trial_id": str(n), "trial": trial_parser.parse(v).model_dump(mode="json")} for n, v in enumerate(values)
    ]
    (folder / "spec.json").write_text(json.dumps({"trials": trials, "timeout_s": timeout_s}))
    own = os.getpid()
    list(trace_workers.forked([(lambda: worker.main(folder, own), 300.0)], 1))
    return answers(folder)


OPENMP = source("threads_before_a_fork.txt")


def test_what_forks_to_trace_has_one_thread(tmp_path: Path) -> None:
    """OpenMP's threads are not there after a fork."""

    def job() -> None:
        torch.set_num_threads(2)
        trace_workers.import_makers(parsed())
        (tmp_path / "threads").write_text(str(torch.get_num_threads()))

    list(trace_workers.forked([(job, 60.0)], 1))
    assert (tmp_path / "threads").read_text() == "1"


@pytest.mark.slow
def test_traces_do_not_wait_for_threads_that_are_not_there_after_a_fork(tmp_path: Path) -> None:
    here = Path(__file__).parent
    words = [sys.executable, "-c", OPENMP, str(here), str(ROOT / "tests"), str(here.parent), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, timeout=170)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr


@pytest.mark.slow
def test_a_trace_that_crashes_or_hangs_leaves_only_its_own_trials_unanswered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(name: str, **over: Any) -> dict[str, Any]:
        runner = {"name": "custom", "target": f"{TARGETS / 'simulated_faults.py'}:{name}"}
        return tiny(device=SIMULATED, runner=runner, **over)

    folder = tmp_path / "t" / "trials" / "attempts" / "shared" / "1"
    killed = [fault("killed_at_48", seq_len=length) for length in (32, 48)]
    expandable = {"name": "expandable", "conf": "expandable_segments:True"}
    fine = [fault("fine"), fault("fine", allocator=expandable)]
    found = run(folder, *killed, fault("hangs"), fault("asks_for_a_value"), *fine, timeout_s=10)
    assert sorted(found) == ["0", "3", "4", "5"]
    assert found["3"]["result"]["error"]["type"] == "vramsweep.harness.spec.trial.InvalidTrial"
    assert ".item()" in found["3"]["result"]["error"]["message"]
    for number in "045":
        assert found[number]["result"]["values"]["peak_allocated_bytes"] > 0
        assert found[number]["result"]["values"]["trace_basis"] == "traced"
        assert found[number]["duration_s"] > 0
    assert len(list((tmp_path / "t" / "trials" / "traces").glob("*.json"))) == 2  # 32, and one for both allocators
    told = [json.loads(line) for line in (folder / PROGRESS).read_text().splitlines()]
    assert told[-1] == {"text": "predicting", "done": 4, "total": 4}  # families, of which three have one length
    assert [one["done"] for one in told if one["text"] == "predicting"] == [3, 4]


@pytest.mark.slow
def test_a_trace_says_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as every hundred operators, from a process that was forked for it too."""
    monkeypatch.setattr(step_tracer, "SOME", 100)
    trace_workers._make_folder(tmp_path / "forked")
    trace_tiny(tmp_path / "forked", protocol={"measured_steps": 1})
    told = [json.loads(line)["text"] for line in (tmp_path / TRACES).read_text().splitlines()]
    steps = parsed(protocol={"measured_steps": 1}).steps()
    first = [text for text in told if ":" not in text]
    assert first == ["building tiny", *(f"tracing step {n} of {steps}" for n in range(1, steps + 1))]
    counts = [int(text.rpartition(": ")[2].split()[0]) for text in told if text.startswith(f"{first[-1]}: ")]
    assert len(counts) > 2 and {later - one for one, later in pairwise(counts)} == {100} and counts[0] <= 100
    result_file.progress(tmp_path, "tracing: 0 of 1 done", done=0, total=1)
    assert attempt.read_progress(tmp_path)["text"] == f"tracing: 0 of 1 done; {first[-1]}: {counts[-1]} operators"
    result_file.progress(tmp_path, "predicting")
    assert attempt.read_progress(tmp_path) == {"text": "predicting"}


def test_no_prediction_is_an_answer_only_where_lengths_vary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is only one length, the trial's own attempt tells more."""
    refuse = mock.Mock(side_effect=trial.InvalidTrial("not this one"))
    monkeypatch.setattr(batch_server, "curve", mock.Mock(**{"return_value.at.return_value": (None, {})}))
    monkeypatch.setattr(batch_server.predicted_row, "predict", refuse)
    for name, stand_in in {"family": mock.Mock(), "refused": lambda *_: None, "predict": refuse}.items():
        monkeypatch.setattr(batch_server.varying_lengths, name, stand_in)
    tracer = mock.Mock(refused=lambda _: None)
    for at, (name, data) in enumerate({"one": "synthetic", "many": "lengths:lognormal(9,1)"}.items()):
        family = {name: parsed(data=data)}
        batch_server._load_and_answer(family, tracer, tmp_path, at, 60)
    (found,) = answers(tmp_path).items()
    assert found[0] == "many" and found[1]["result"]["error"]["message"] == "not this one"


IMPORTED = source("imports_before_a_fork.txt")


@pytest.mark.slow
@pytest.mark.parametrize(("runner", "threads"), [("torch", 1), ("custom", 1), ("script", 0)])
def test_a_fork_server_imports_no_more_than_its_trials_need(runner: str, threads: int) -> None:
    """Threads of its own change in which order it and its workers end, and what a fork finds.

    transformers' models bring one; what predicts runs of varying lengths would bring more, and pandas.
    """
    command = [sys.executable, "-c", IMPORTED, runner]
    environ = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environ)
    started, pandas = done.stdout.splitlines()[-1].split()
    assert int(started) <= threads and pandas == "False"
