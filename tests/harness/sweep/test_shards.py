"""Test a sweep in shards: together they are the whole, each has files of its own, and Slurm gets the right options."""

import json
import os
import signal
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import SETTINGS, cases, custom, parametrized, refusal, source, tiny
from hypothesis import given
from hypothesis import strategies as st
from submitit.core.utils import DelayedSubmission

from vramsweep.harness.config import compose
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process import attempt
from vramsweep.harness.process.attempt import Launcher
from vramsweep.harness.rows import journal, outcome
from vramsweep.harness.rows.journal import Journal
from vramsweep.harness.sweep import batch_prediction, plan, row_builder, run_trials, shards, slurm_jobs, sweep_status
from vramsweep.harness.sweep.plan import Planned
from vramsweep.harness.sweep.progress import Lines
from vramsweep.harness.sweep.session import Session
from vramsweep.harness.sweep.shards import Shard
from vramsweep.harness.verbs import advise, predict, run_words

WORDS = ["-m", "model=tiny", "device=cpu", "seq_len=32,64,96", "cluster=slurm", "shards=2"]


@given(st.permutations(range(30)), st.permutations(range(30)), st.integers(1, 20))
def test_shards_are_the_whole_in_its_order_whatever_that_is_on_each_machine(
    here: list[int], there: list[int], count: int
) -> None:
    orders = [[Planned(str(at), {}, None, None, at) for at in order] for order in (here, there)]
    shares = [plan.take_share(orders[number % 2], Shard(number, count)) for number in range(1, count + 1)]
    assert sorted(int(one.trial_id) for share in shares for one in share) == list(range(30))
    for number, share in enumerate(shares, 1):
        whole = [one.trial_id for one in orders[number % 2]]
        assert [one.trial_id for one in share] == sorted((one.trial_id for one in share), key=whole.index)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_package_that_one_node_lacks_leaves_the_others_trials_where_they_are() -> None:
    values = [tiny(seq_len=n, precision=name) for n in (8, 16, 32, 64) for name in ("fp32", "bf16", "fp16")]
    whole = plan.order_trials(plan.expand_trials(values, 1))
    lacking = [replace(one, trial=None, reason="no bitsandbytes") if one.position % 5 == 0 else one for one in whole]
    other = plan.order_trials([lacking])
    assert [one.trial_id for one in other] != [one.trial_id for one in whole]
    ran = plan.take_share(whole, Shard(1, 2)) + plan.take_share(other, Shard(2, 2))
    assert sorted(one.position for one in ran) == list(range(12))


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/", "/2", "-1/2", "1/2/3", "1/10001", "1.5/2", ""])
def test_a_shard_that_is_none(text: str) -> None:
    assert "allowed is null or N/COUNT" in refusal(UserError, shards.parse, text)


def test_the_only_shard_is_the_whole_sweep() -> None:
    assert shards.parse(None) == shards.parse("1/1") == Shard()
    assert Shard().writer is None
    assert shards.parse("3/16").writer == "3of16"


@pytest.mark.parametrize(("options", "said"), cases("cluster_mistakes"))
def test_what_a_cluster_cannot_be_told(options: str, said: str) -> None:
    assert said in refusal(UserError, shards.slurm, json.loads(options))


def test_shards_need_something_that_starts_them() -> None:
    with pytest.raises(UserError, match=r"shards=4 needs cluster=slurm.*shard=1/4"):
        plan.Settings(**(SETTINGS | {"shards": 4}))
    for value in (0, 1.5, 20_000):
        assert "shards=" in refusal(UserError, plan.Settings, **(SETTINGS | {"shards": value}))


def run(planned: Sequence[plan.Planned], folder: Path, **settings: Any) -> tuple[dict[str, Any], int]:
    return run_trials.run(planned, plan.Settings(**(SETTINGS | settings)), folder)


@pytest.mark.slow
def test_shards_together_equal_the_whole(tmp_path: Path) -> None:
    good = [custom("good", seed=n) for n in range(3)]
    values = [*good, custom("raises"), tiny(seq_len=0), custom("good", seq_len=64)]
    planned = plan.order_trials(plan.expand_trials(values, 1))

    def told(folder: Path) -> list[tuple[Any, ...]]:
        rows = journal.terminal(journal.read(folder)[0]).values()
        return sorted((row["trial_id"], row["outcome"], row["reason"], row["seq_len"], row["attempt"]) for row in rows)

    ran: list[str] = []
    with Launcher("warm", tmp_path / "templates") as launcher:
        run_trials.run(planned, plan.Settings(**SETTINGS), tmp_path / "whole", launcher=launcher)
        for shard in ("3/3", "1/3", "2/3"):
            settings = plan.Settings(**(SETTINGS | {"shard": shard}))
            rows, code = run_trials.run(planned, settings, tmp_path / "parts", launcher=launcher)
            assert code == any(row["outcome"] == "crash" for row in rows.values())
            ran += rows
    assert sorted(ran) == sorted(p.trial_id for p in planned)
    assert told(tmp_path / "parts") == told(tmp_path / "whole")
    names = sorted(file.name for file in (tmp_path / "parts" / "trials").glob("*of3.*"))
    assert names == [f"{kind}-{n}of3.json{end}" for kind, end in (("journal", "l"), ("plan", "")) for n in (1, 2, 3)]
    found = sweep_status.read_status(tmp_path / "parts")
    assert (found.state, found.done, found.total) == ("finished", 6, 6)
    for other in ({"shard": "2/2"}, {"shard": "1/2"}, {}):  # as whoever takes it up divides it otherwise
        assert not {row["attempt"] for row in run(planned, tmp_path / "parts", **other)[0].values()} - {0, 1}
    assert len(journal.read(tmp_path / "parts")[0]) == 6


def test_nothing_is_written_beside_a_sweep_that_is_divided_otherwise(tmp_path: Path) -> None:
    planned = plan.order_trials(plan.expand_trials([tiny(seq_len=0), tiny(seq_len=-1)], 1))
    with Journal(tmp_path, "1of2"):
        for settings in ({"shard": "1/3"}, {"shard": "2/3"}, {}):
            with pytest.raises(UserError, match=r"another sweep is writing .*journal-1of2\.jsonl"):
                run(planned, tmp_path, **settings)
        assert run(planned, tmp_path, shard="2/2")[1] == 0
        with pytest.raises(UserError, match=r"another sweep is writing .*journal-1of2\.jsonl"):
            run(planned, tmp_path, shard="1/2")
    with Journal(tmp_path), pytest.raises(UserError, match=r"another sweep is writing .*journal\.jsonl"):
        run(planned, tmp_path, shard="1/2")
    assert run(planned, tmp_path, shard="1/2")[1] == 0


def test_a_trial_s_system_is_what_the_node_of_its_shard_says(tmp_path: Path) -> None:
    planned = plan.order_trials(plan.expand_trials([tiny(seq_len=n) for n in (8, 16, 32)], 1))
    run([], tmp_path, shard="1/2")
    base = json.loads((tmp_path / "trials" / "plan-1of2.json").read_text()) | {"trials": [p.trial_id for p in planned]}
    for number, card in ((1, "A100"), (2, "H100")):
        own = [0, 2] if number == 1 else [1]
        one = base | {"own": own, "systems": [[card]], "system": [0, 0, 0], "started_at": f"2026-0{number}"}
        (tmp_path / "trials" / f"plan-{number}of2.json").write_text(json.dumps(one))
    wanted, _ = sweep_status._wanted(journal.plans(tmp_path))
    assert wanted is not None
    assert [wanted[p.trial_id] for p in planned] == [("A100",), ("H100",), ("A100",)]
    (tmp_path / "trials" / "plan-1of2.json").write_text("[]")
    assert set((sweep_status._wanted(journal.plans(tmp_path))[0] or {}).values()) == {("H100",)}


def test_shards_predict_in_folders_of_their_own(tmp_path: Path) -> None:
    """Their attempts are of many trials, so numbers would meet in one folder."""
    values = [tiny(seq_len=n, device={"name": "simulated", "gpu": "h100-80gb"}) for n in (32, 64)]
    planned = plan.order_trials(plan.expand_trials(values, 1))
    places: list[Path] = []

    class Recorder(Launcher):
        def attempt(self, spec: Any, folder: Path, *_: Any, **__: Any) -> attempt.AttemptResult:
            places.append(folder.relative_to(tmp_path / "attempts"))
            return attempt.AttemptResult(outcome.Evidence(exit_code=1), 0.0, "warm")

    with Journal(tmp_path) as written, Recorder("warm", tmp_path / "templates") as launcher:
        for shard in (None, "1/2", "2/2"):
            settings = plan.Settings(**(SETTINGS | {"shard": shard}))
            batch_prediction.run(planned, {}, settings, tmp_path, written, launcher, Lines(2))
    assert places == [Path("shared/1"), Path("shared-1of2/1"), Path("shared-2of2/1")]


SBATCH = source("sbatch.txt")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of commands called like Slurm's; what is in its file `queue` is in the queue."""
    place = tmp_path / "bin"
    place.mkdir()
    queue, control = '#!/bin/sh\ncat "$FAKE/queue"\n', '#!/bin/sh\necho "$@" >> "$FAKE/told"\n'
    for name, text in {"sbatch": SBATCH, "srun": "", "squeue": queue, "scontrol": control}.items():
        (place / name).write_text(text)
        (place / name).chmod(stat.S_IRWXU)
    (place / "queue").touch()
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(place))
    monkeypatch.chdir(tmp_path)
    return place


@pytest.mark.slow
def test_a_sweep_is_submitted_once(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "cluster.partition=gpu", "cluster.hours=1.5", "cluster.mem_gib=2", "cluster.extra={qos:night}"]
    assert run_words.main(words) == 0
    folder = Path("results/tiny-torch-cpu")
    assert "2 of 2 shard(s) submitted as 7" in capsys.readouterr().out
    script = (slurm / "script").read_text().splitlines()
    said = {line.removeprefix("#SBATCH --") for line in script if line.startswith("#SBATCH")}
    assert {"array=0-1%2", "partition=gpu", "time=90", "mem=2048M", "qos=night", "requeue", "signal=USR2@90"} <= said
    assert not any(line.startswith("gpus") for line in said)  # device=cpu
    job = DelayedSubmission.load(folder / "trials" / "cluster" / "7_1_submitted.pkl")
    assert job.function.func is slurm_jobs.run_job and job.function.args == (run_words.run_sweep,)
    assert job.args[0] == [*words, "name=tiny-torch-cpu", "shard=2/2"]
    assert job.args[1] == str(folder.absolute() / "trials" / "journal-2of2.jsonl")
    assert not list(folder.glob("journal*"))  # what is written, and the report, are the jobs'
    assert not (folder / "report.html").exists()

    (slurm / "queue").write_text("7_0\n7_1\n99\n")
    assert sweep_status.read_status(folder).state == "waiting"
    assert run_words.main(words) == 0
    assert "nothing to submit: 2 jobs are in Slurm's queue" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"2 jobs are in Slurm's queue for this sweep with shards=2.*scancel 7"):
        run_words.main([*words, "shards=3"])
    (slurm / "queue").write_text("7_1\n")
    assert run_words.main(words) == 0
    assert "1 of 2 shard(s) submitted" in capsys.readouterr().out

    (slurm / "queue").write_text("")
    assert sweep_status.read_status(folder).state == "stopped"
    planned = compose.resolve(WORDS).trials
    with Journal(folder, "1of2") as written:
        made = row_builder.axis_columns(planned[0]) | {"attempt": 1, "terminal": True, "outcome": "ok", "sweep": "t"}
        written.append(made)
        assert "another sweep is writing" in refusal(UserError, run_words.main, [*words, "shards=3"])
    capsys.readouterr()
    assert run_words.main([*words, "shards=3"]) == 0
    assert "3 trials, 2 to do; 2 of 3 shard(s) submitted" in capsys.readouterr().out
    assert run_words.main([*words, "shards=3", "cluster.every=true"]) == 0
    assert "3 of 3 shard(s) submitted" in capsys.readouterr().out


def test_the_device_is_for_the_node_to_decide(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "detect", lambda: "simulated")
    assert run_words.main(["model=tiny", "cluster=slurm", "world_size=2", "sharding=ddp"]) == 0
    assert "1 trial, as composed here; each job chooses its device" in capsys.readouterr().out
    assert "#SBATCH --gpus-per-node=2" in (slurm / "script").read_text()
    job = DelayedSubmission.load(Path("results/tiny-torch-slurm/trials/cluster/7_submitted.pkl"))
    assert job.args[0][-2:] == ["name=tiny-torch-slurm", "shard=1/1"]
    with pytest.raises(UserError, match="has no usable CUDA device, but this job is for GPUs"):
        run_words.main(job.args[0])


@pytest.mark.parametrize(("typed", "said"), cases("submission_mistakes"))
def test_what_is_not_submitted_leaves_no_folder(slurm: Path, typed: str, said: str) -> None:
    words = typed.split()
    given = [word for word in WORDS if word.partition("=")[0] not in {one.partition("=")[0] for one in words}]
    assert said in refusal(UserError, run_words.main, [*given, *words])
    assert not Path("results/tiny-torch-cpu").exists()


def test_a_cluster_is_for_what_is_swept(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="divide only the trials of sweep and run"):
        run_words.sweep_words(WORDS, "predict", "predicted")
    for verb, words in ((advise, []), (predict, ["--largest", "seq_len"])):
        for part in ("shard=2/2", "cluster=slurm"):
            with pytest.raises(UserError, match="divide only the trials of sweep and run"):
                verb.main([*words, "model=tiny", "seq_len=32", "device.gpu=l4-24gb", part])
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no sbatch here" in refusal(UserError, run_words.main, WORDS)


@pytest.fixture
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@parametrized("signals_to_jobs")
@pytest.mark.usefixtures("signals")
def test_a_job_that_is_told_to_end_puts_itself_back(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, name: str, state: str, wrote: bool, requeued: bool
) -> None:
    def swept(words: Sequence[str]) -> int:
        assert words == ["shard=1/2"]
        if wrote:
            (slurm / "journal").write_text("{}\n")
        os.kill(os.getpid(), signal.Signals[name])
        signal.pause()
        raise AssertionError

    monkeypatch.setenv("SLURM_JOB_ID", "8")  # another task's too, in an array
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    (slurm / "queue").write_text(f"{state}\n")
    with pytest.raises(SystemExit) as end:
        slurm_jobs.run_job(swept, ["shard=1/2"], str(slurm / "journal"))
    assert end.value.code == 130
    assert (slurm / "told").exists() == requeued
    if requeued:
        assert (slurm / "told").read_text() == "requeue 7_1\n"


@pytest.mark.usefixtures("signals")
def test_a_job_ends_as_its_sweep_did(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as end:
        slurm_jobs.run_job(lambda words: 1, [], str(slurm / "journal"))
    assert end.value.code == 1
    slurm_jobs.run_job(lambda words: 0, [], str(slurm / "journal"))
    assert not (slurm / "told").exists()


def test_the_report_comes_with_the_last_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan.order_trials(plan.expand_trials([tiny(seq_len=0), tiny(seq_len=-1)], 1))
    reported: list[Path] = []
    monkeypatch.setattr(run_trials, "report", reported.append)
    run(planned, tmp_path, shard="1/2")
    run_words._report_once(tmp_path)
    assert not reported
    run(planned, tmp_path, shard="2/2")
    run_words._report_once(tmp_path)
    assert reported == [tmp_path]
    monkeypatch.setattr(run_trials, "report", lambda folder: 3)
    assert run_words._report_once(tmp_path) == 3


@pytest.mark.parametrize(("status", "failed", "ends"), [(0, 0, 0), (0, -9, 1), (1, 0, 1), (130, 0, 130), (130, 1, 130)])
def test_a_report_is_written_however_the_sweep_ended_and_one_that_failed_is_said(
    status: int, failed: int, ends: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Path] = []
    monkeypatch.setattr(run_trials, "report", lambda folder, brief: reported.append(folder) or failed)
    asked = Session(settings=plan.Settings(**SETTINGS | {"report": True}), folder=tmp_path, status=status)
    run_words.write_report(asked)
    assert reported == [tmp_path] and asked.status == ends
