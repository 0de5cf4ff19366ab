"""The GPU check's own logic, without a card: what it predicts, compares, records and keeps."""

import copy
import json
import sys
import time
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import card_page_speed
import gpu_check
import gpu_check_recordings
import pandas as pd
import profiled_steps
import pytest
import recorded_steps
import torch
from conftest import Run, refusal, tiny

from vramsweep.analysis.compare.residuals import COMPONENTS
from vramsweep.harness.rows.schema import Row, complete_row

CONF = "expandable_segments:True"


def check(tmp_path: Path, device: str = "cuda") -> gpu_check.Check:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    out.mkdir()
    scratch.mkdir()
    return gpu_check.Check(out, scratch, device, float("inf"))


def as_measured(row: Row, **over: Any) -> Row:
    """The row that a card would have given for the same trial, had it measured what was predicted."""
    trial = row["trial"] | {"device": {"name": "cuda"}}
    return row | {"device": "cuda", "simulated_gpu": None, "trial": trial, "trial_id": "m" + row["trial_id"],
                  "gpu_name": "NVIDIA H100 80GB HBM3", "memory_source": "cuda_allocator"} | over  # fmt: skip


@pytest.mark.slow
def test_fabricated_cuda_rows_are_compared_with_the_predictions_of_their_trials(run_sweep: Run, tmp_path: Path) -> None:
    simulated = {"device": {"name": "simulated", "gpu": "h100-80gb"}}
    refused = tiny(**simulated, allocator={"name": "throwing", "conf": "throw_on_cudamalloc_oom:True"})
    rows = run_sweep(
        tiny(**simulated), tiny(**simulated, allocator={"name": "expandable", "conf": CONF}), refused, isolation="warm"
    )
    assert [row["outcome"] for row in rows] == ["ok", "ok", "invalid"]
    plain, other, not_predicted = rows
    measured = [
        as_measured(plain, peak_reserved_bytes=round(plain["peak_reserved_bytes"] / 1.25)),
        as_measured(other, outcome="oom", peak_reserved_bytes=None, gpu_name=None),
        as_measured(not_predicted, outcome="ok", allocator_conf="throw_on_cudamalloc_oom:True"),
    ]
    path = tmp_path / "residuals.csv"
    found = gpu_check.compared(measured, rows, path)
    assert found["configurations"] == 2
    by_name = {line["component"]: line for line in found["components"]}
    assert by_name["peak_reserved_bytes"]["worst"] == pytest.approx(0.25, abs=1e-3)
    assert by_name["peak_allocated_bytes"]["worst_bytes"] == 0
    assert len(pd.read_csv(path)) == len(COMPONENTS) + 1
    assert any("Predicted to fit, but ran out of memory: 1 configuration" in text for text in found["words"])
    assert any(text.startswith("1 not predicted: allocator throwing") for text in found["not_compared"])
    assert json.dumps(found, allow_nan=False)


def test_predictions_are_of_what_was_measured_one_sweep_a_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, own = [], check(tmp_path)
    of_a_cpu = complete_row({"trial_id": "a", "device": "cpu", "outcome": "ok", "terminal": True})
    assert gpu_check.compared([of_a_cpu], [], tmp_path / "none.csv") == {"not_compared": ["needs cuda rows"]}
    assert not (tmp_path / "none.csv").exists()
    own.rows = [complete_row({"trial_id": "a", "device": "cuda", "outcome": "ok", "gpu_name": "NVIDIA H200"})]
    own.asked = [
        ("model=tiny", "seq_len=64", "isolation=cold", "repeats=3"),
        ("model=tiny", "seq_len=64", "isolation=warm", "repeats=3"),
        ("model=tiny", "seq_len=32,64", "allocator=default,expandable", "protocol=brief"),
    ]
    monkeypatch.setattr(gpu_check.Check, "run_sweep", lambda self, name, *words: ran.append((name, words)) or [])
    monkeypatch.setattr(gpu_check, "compared", lambda measured, predicted, path: {"configurations": 0})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert gpu_check.predicted(own)["gpu"] == "h200-141gb"
    assert sorted(words for _, words in ran) == [
        ("device=simulated", "device.gpu=h200-141gb", "seq_len=32", "model=tiny", "allocator=default,expandable"),
        ("device=simulated", "device.gpu=h200-141gb", "seq_len=64", "model=tiny"),
        ("device=simulated", "device.gpu=h200-141gb", "seq_len=64", "model=tiny", "allocator=default,expandable"),
    ]
    assert len({name for name, _ in ran}) == 3
    own.rows[0]["gpu_name"] = "NVIDIA Imaginary 9000"
    assert "NVIDIA Imaginary 9000 is not in `vramsweep gpus`" in gpu_check.predicted(own)["skipped"]


@pytest.mark.parametrize(
    ("retries_at", "fails_below", "kept"), [(0.97, 0.9, 0.97), (0.9, 0.96, 0.97), (1.0, 1.0, None)]
)
def test_the_largest_limit_that_makes_the_allocator_retry_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retries_at: float, fails_below: float, kept: float | None
) -> None:
    peak = 1_000_000

    def recorded(own: gpu_check.Check, name: str, conf: str, limit: int | None, *more: str) -> dict[str, Any]:
        (own.scratch / f"{name}.pickle").write_text(name)
        share = 2.0 if limit is None else limit / peak
        return {"limit_bytes": limit, "peak_reserved_bytes": peak, "out_of_memory": share < fails_below,
                "retries": int(share <= retries_at)}  # fmt: skip

    monkeypatch.setattr(gpu_check_recordings, "recorded", recorded)
    own = check(tmp_path)
    found = gpu_check_recordings.recordings(own)
    assert found["out_of_memory"]["out_of_memory"]
    assert (found["retry"]["limit_bytes"] if "retry" in found else None) == (kept and round(kept * peak))
    with zipfile.ZipFile(own.out / "recordings.zip") as archive:
        assert set(archive.namelist()) == {f"{name}.pickle" for name in found}


def test_recordings_are_left_out_until_the_folder_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "MOST_BYTES", 2500)
    (tmp_path / "rows.jsonl").write_bytes(bytes(1800))
    random = Random(0)  # bytes that do not compress
    with zipfile.ZipFile(tmp_path / "recordings.zip", "w") as archive:
        for name, size in (("small", 300), ("large", 5000), ("middle", 400)):
            archive.writestr(name, random.randbytes(size))
    found = gpu_check.bounded(tmp_path)
    assert found["recordings_left_out"] == ["large", "middle"]
    assert found["within_limits"]
    with zipfile.ZipFile(tmp_path / "recordings.zip") as archive:
        assert len(archive.read("small")) == 300
    (tmp_path / "rows.jsonl").write_bytes(bytes(3000))
    assert not gpu_check.bounded(tmp_path)["within_limits"]


def test_a_run_is_recorded_under_the_limit_that_the_allocator_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def train(*_: Any) -> None:
        calls.append("train")
        raise torch.OutOfMemoryError("CUDA out of memory")

    card = types.SimpleNamespace(total_memory=85_899_345_920 - 7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", calls.append)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {
        "num_alloc_retries": 1, "allocated_bytes.all.peak": 2, "reserved_bytes.all.peak": 3})  # fmt: skip
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: calls.append("record"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    monkeypatch.setattr(recorded_steps, "train", train)
    monkeypatch.setattr(sys, "argv", ["recorded_steps.py", str(tmp_path / "r.pickle"), "--limit", "3000000001"])
    recorded_steps.main()
    said = json.loads(capsys.readouterr().out)
    fraction = calls[0]
    assert said["limit_bytes"] == int(fraction * card.total_memory)
    assert abs(said["limit_bytes"] - 3_000_000_001) <= 1
    assert said["out_of_memory"] and said["retries"] == 1
    assert calls[1:] == ["record", "train", str(tmp_path / "r.pickle")]


def test_what_is_recorded_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = {**recorded_steps.TRIAL, "model": tiny()["model"], "device": {"name": "cpu"}, "seq_len": 32}
    nets: list[torch.nn.Module] = []
    make = recorded_steps.build.model

    def model(*given: Any) -> torch.nn.Module:
        nets.append(make(*given))
        nets.append(copy.deepcopy(nets[0]))
        return nets[0]

    monkeypatch.setattr(recorded_steps.build, "model", model)
    recorded_steps.train(recorded_steps.trial_parser.parse(trial), torch.device("cpu"))
    trained, before = (list(net.parameters()) for net in nets)
    assert all(not torch.equal(one, other) for one, other in zip(trained, before, strict=True))


def test_a_profile_counts_work_and_no_annotation_and_is_refused_without_its_kernels() -> None:
    spans = [
        ("user_annotation", "Optimizer.step#AdamW.step", 0, 90), ("gpu_user_annotation", "Optimizer.step", 0, 500),
        ("cuda_runtime", "cudaLaunchKernel", 1, 1), ("cuda_driver", "cuLaunchKernelEx", 3, 1), ("cpu_op", "mm", 0, 4),
        ("cuda_runtime", "cudaMemcpyAsync", 5, 1), ("kernel", "gemm", 10, 20), ("kernel", "add", 25, 15),
        ("gpu_memcpy", "HtoD", 100, 5), ("gpu_memset", "Set", 110, 1), ("cuda_runtime", "cudaGraphLaunch", 7, 1),
    ]  # fmt: skip
    step = [
        {"ph": "M", "name": "process_name"},
        *(dict(zip(("cat", "name", "ts", "dur"), s, strict=True)) for s in spans),
    ]
    found, counts = (
        profiled_steps.summarize_events(step[:-1], 1),
        {"kernels": 2, "copies": 1, "fills": 1, "launches": 2},
    )
    assert found.pop("longest_s") == pytest.approx({"gemm": 20e-6, "add": 15e-6, "HtoD": 5e-6, "Set": 1e-6})
    assert found == counts | {"gpu_busy_s": pytest.approx(36e-6)}
    refused = profiled_steps.summarize_events(step, 1)
    assert refused.pop("refused").startswith("2 kernels of 3 launches") and refused == counts | {"launches": 3}


@pytest.mark.slow
def test_profiles_of_a_cpu_say_what_they_do_not_show(tmp_path: Path) -> None:
    """One process a profile; a trial that fails does not stop the others."""
    own = check(tmp_path, "cpu")
    given = {"runner": "torch", "sharding": "none", "allocator": "default", "grad_accum": 1, "sweep": "factors"}
    given |= {"outcome": "ok", "device": "cpu"}
    own.rows = [given | {"trial_id": "bad", "trial": {}}, given | {"trial_id": "good", "trial": tiny()}]
    own.deadline = time.monotonic() + 300
    found = gpu_check.profiles(own)
    assert found["bad"]["failed"] and not own.cut_short and found["good"].pop("step_s") > 0
    assert found["good"].keys() == {"issued_s", "profiled_step_s", "refused"}


def test_a_page_takes_busy_shares_against_the_rows_steps_and_leaves_out_lost_kernels() -> None:
    new, old = {"copies": 1, "fills": 0, "gpu_busy_s": 0.018}, {"card_busy_s": 0.018, "launches": 101}
    kinds = {"Optimizer.step#AdamW.step": 0.006, "multi_tensor_apply_kernel<...>": 0.004, "gemm": 0.01}
    profiles = {"a": new | {"kernels": 99}, "b": old | {"kernels": kinds}, "c": new | {"kernels": 98},
                "d": {"refused": "2 kernels of 3 launches"}, "e": {"failed": "no time left"}}  # fmt: skip
    measured = {trial: (trial, {"step_times_s": [0.5, 0.02, 0.01]}) for trial in profiles}
    lines = card_page_speed.profile_lines(profiles, measured, {t: {"estimated_launches": 100} for t in "abc"})
    assert lines[4:6] == ["| a | 20.0 | 18.0 | 90 % | 100 |", "| b | 20.0 | 16.0 to 18.0 | 80 to 90 % | 100 |"]
    assert lines[-1].endswith(": c (99 of 100), d (2 kernels of 3 launches).")


def test_modules_that_are_missing_are_named() -> None:
    assert gpu_check.missing(["json", "no_such_module_here"]) == ["no_such_module_here"]


def measured(folder: Path, sweep: str, *seeds: int, device: str = "cpu") -> None:
    """A sweep's folder as a worker leaves it: a terminal row for each seed."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        complete_row({"trial_id": f"{sweep}{n}", "sweep": sweep, "device": device, "outcome": "ok", "terminal": True})
        for n in seeds
    ]
    (folder / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def go(
    monkeypatch: pytest.MonkeyPatch, out: Path, part: Callable[[gpu_check.Check], dict[str, Any]], *words: str
) -> int:
    """The check's exit status where this is its only part."""
    monkeypatch.setattr(gpu_check, "PARTS", ((part, 60.0),))
    monkeypatch.setattr(gpu_check, "NAMES", (part.__name__,))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", str(out), "--device", "cpu", *words])
    return gpu_check.main()


def test_what_a_killed_go_had_measured_is_taken_up_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def killed(own: gpu_check.Check) -> dict[str, Any]:
        measured(own.scratch / "long", "long", 1, 2)
        measured(own.scratch / "predicted-0", "predicted-0", 1, device="simulated")
        (own.scratch / "long.log").write_text(f"rows in {own.scratch}/long\n")
        (own.out / "tests.txt").write_text("as far as they ran")
        raise KeyboardInterrupt

    def goes_on(own: gpu_check.Check) -> dict[str, Any]:
        assert (own.scratch / "long" / "journal.jsonl").exists()
        assert not (own.scratch / "predicted-0").exists()  # of earlier code, maybe
        measured(own.scratch / "long", "long", 1, 2, 3)
        own.keep(gpu_check.swept(own.scratch / "long"))
        return {"outcomes": gpu_check.outcomes(own.rows)}

    with pytest.raises(KeyboardInterrupt):
        go(monkeypatch, out, killed)
    assert (tmp_path / "out.work" / "long" / "journal.jsonl").exists() and not (out / "rows.jsonl").exists()
    assert go(monkeypatch, out, goes_on) == 0
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert [row["trial_id"] for row in rows] == ["long1", "long2", "long3"]
    assert not (tmp_path / "out.work").exists()
    assert (out / "log.txt").read_text() == "rows in long\n"
    assert "has goes_on already" in refusal(SystemExit, go, monkeypatch, out, goes_on, "--only", "goes_on")


def test_a_sweep_that_the_time_did_not_last_for_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds its rows in its folder; its part may be asked for again until all of it is there."""
    out, seen = tmp_path / "out", []

    def part(own: gpu_check.Check) -> dict[str, Any]:
        own.seed("half")
        folder = own.scratch / "half"
        seen.append(len(gpu_check.swept(folder)))
        measured(folder, "half", *range(seen[-1] + 1))
        own.keep(gpu_check.swept(folder))
        if len(seen) < 3:
            own.cut_short.add("half")
        return {}

    for count in (1, 2, 3):
        assert go(monkeypatch, out, part, "--only", "part") == 0
        assert json.loads((out / "summary.json").read_text())["parts"]["part"].get("cut_short", False) == (count < 3)
    assert seen == [0, 1, 2]
    assert "has part already" in refusal(SystemExit, go, monkeypatch, out, part, "--only", "part")


def test_a_command_that_outlasts_its_time_is_ended(tmp_path: Path) -> None:
    own = check(tmp_path)
    with (tmp_path / "said").open("w") as stream:
        assert own.run([sys.executable, "-c", "raise SystemExit(3)"], stream) == 3
        own.deadline = 0.0
        assert own.run([sys.executable, "-c", "import time; time.sleep(600)"], stream) is None
