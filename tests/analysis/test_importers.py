"""Foreign files, export and trackers."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import synthetic

from vramsweep.analysis import cli
from vramsweep.analysis.data.importers import open_rows
from vramsweep.analysis.data.load import load
from vramsweep.harness.errors import UserError

MIB = 2**20


def test_a_bare_csv_of_four_numbers_is_read_and_what_was_assumed_is_said(tmp_path: Path) -> None:
    file = tmp_path / "bare.csv"
    file.write_text("128, 100, 120, 2.0\n256, 110, 130, 1.0\n256, 110, 130, 1.1\n")
    table, notes = open_rows(file)
    assert "seq_len, peak_active_mib, peak_reserved_mib, iterations_per_s" in notes[0]
    assert table.frame["peak_active_bytes"].tolist() == [100 * MIB, 110 * MIB, 110 * MIB]
    assert table.frame["tokens_per_s"].tolist() == pytest.approx([256.0, 256.0, 281.6])
    assert set(table.frame["foreign"]) == {"bare.csv"}
    assert table.frame["peak_allocated_bytes"].isna().all()


def test_text_where_numbers_should_be_is_said(tmp_path: Path) -> None:
    file = tmp_path / "theirs.csv"
    file.write_text("seq_len,peak_allocated_mib\n128,many\n256,100\n")
    table, notes = open_rows(file)
    assert table.frame["peak_allocated_bytes"].tolist() == [pd.NA, 100 * MIB]
    assert any(note.startswith("peak_allocated_mib: 1 value such as 'many' is not float") for note in notes)


def test_columns_can_be_named(tmp_path: Path) -> None:
    file = tmp_path / "bare.csv"
    file.write_text("128,4,1.5\n256,4,2.5\n")
    table, _ = open_rows(file, ["seq_len", "micro_batch", "peak_allocated_gib"])
    assert table.frame["peak_allocated_bytes"].tolist() == [1536 * MIB, 2560 * MIB]
    assert table.frame["micro_batch"].tolist() == [4, 4]
    with pytest.raises(UserError, match="--columns names 2"):
        open_rows(file, ["seq_len", "micro_batch"])
    with pytest.raises(UserError, match="name its 3 columns"):
        open_rows(file)


def test_a_mapping_file_names_columns_units_and_constants(tmp_path: Path) -> None:
    file, mapping = tmp_path / "theirs.csv", tmp_path / "mapping.json"
    file.write_text("Length,VRAM (GB),it/s\n128,1.5,2\n256,2.5,1\n512,n/a,1\n")
    mapping.write_text(
        json.dumps(
            {
                "seq_len": "Length",
                "peak_allocated_bytes": {"from": "VRAM (GB)", "scale": 1e9},
                "iterations_per_s": {"from": "it/s", "scale": 0.5},
                "micro_batch": {"value": 8},
                "model": {"value": "theirs"},
            }
        )
    )
    table, _ = open_rows(file, mapping=mapping)
    assert table.frame["peak_allocated_bytes"].tolist()[:2] == [1_500_000_000, 2_500_000_000]
    assert pd.isna(table.frame["peak_allocated_bytes"].iloc[2])
    assert table.frame["step_median_s"].tolist() == [1.0, 2.0, 2.0]
    assert table.frame["tokens_per_s"].iloc[0] == 128 * 8
    file.write_text("128,1.5\n256,2.5\n")
    mapping.write_text('{"seq_len": 1, "peak_reserved_bytes": {"from": 2, "scale": 1e9}}')
    table, _ = open_rows(file, mapping=mapping)
    assert table.frame["peak_reserved_bytes"].tolist() == [1_500_000_000, 2_500_000_000]
    mapping.write_text('{"seq_len": 3}')
    with pytest.raises(UserError, match="no column 3; it has 1, 2"):
        open_rows(file, mapping=mapping)
    mapping.write_text('{"sequence": "Length"}')
    with pytest.raises(UserError, match="not known: sequence"):
        open_rows(file, mapping=mapping)


OPTIMUM = {
    "backend": {"model": "gpt2", "device": "cuda", "device_ids": "0", "torch_dtype": "float32", "version": "2.9.0"},
    "scenario": {
        "warmup_steps": 40,
        "dataset_shapes": {"sequence_length": 64},
        "training_arguments": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
    },
    "launcher": {"name": "process"},
    "environment": {"cpu": " AMD EPYC", "python_version": "3.11.7"},
}
MEMORY = {"unit": "MB", "max_ram": 544.0, "max_allocated": 1000.0, "max_reserved": 1200.0, "max_global_vram": 1500.0}


def optimum(folder: Path, config: dict[str, object], times: list[float]) -> tuple[Any, list[str]]:
    """The row of a report laid out as optimum-benchmark writes it, and what was assumed."""
    warmup = {"memory": MEMORY, "latency": {"unit": "s", "values": [9.0]}, "throughput": {"value": 9.0}}
    train = {"memory": MEMORY, "latency": {"unit": "s", "values": times}, "throughput": {"value": 999.0}}
    report = {"overall": warmup, "warmup": warmup, "train": train}
    (folder / "benchmark_report.json").write_text(json.dumps(report))
    (folder / "benchmark_config.json").write_text(json.dumps(config))
    table, notes = open_rows(folder)
    return table.frame.iloc[0], notes


def test_optimum_benchmark_throughput_is_taken_from_the_step_times(tmp_path: Path) -> None:
    row, notes = optimum(tmp_path, OPTIMUM, [0.5, 0.5])
    assert row["tokens_per_s"] == 2 * 3 * 64 / 0.5
    assert (row["peak_allocated_bytes"], row["device_used_bytes"]) == (1_000_000_000, 1_500_000_000)
    assert (row["model"], row["precision"], row["device"]) == ("gpt2", "fp32", "cuda")
    assert (row["warmup_steps"], row["measured_steps"], row["torch_version"]) == (40, 2, "2.9.0")
    assert row["foreign"].endswith("benchmark_report.json") and pd.isna(row["protocol"])
    assert "its own throughput was not used" in notes[0]


def test_optimum_benchmark_over_two_processes_knows_speed_but_no_memory_of_one(tmp_path: Path) -> None:
    row, notes = optimum(tmp_path, OPTIMUM | {"launcher": {"nproc_per_node": 2}}, [0.5, 0.5, 0.5, 0.5])
    assert (row["tokens_per_s"], row["measured_steps"], row["world_size"]) == (2 * 2 * 3 * 64 / 0.5, 2, 2)
    assert pd.isna(row["peak_allocated_bytes"]) and pd.isna(row["device_used_bytes"])
    assert any("summed over 2 devices" in note for note in notes)


def test_optimum_benchmark_on_a_cpu_has_its_resident_set(tmp_path: Path) -> None:
    backend = {"model": "gpt2", "device": "cpu", "device_ids": None, "torch_dtype": None}
    row, _ = optimum(tmp_path, OPTIMUM | {"backend": backend}, [0.5])
    assert (row["peak_reserved_bytes"], row["memory_source"]) == (544_000_000, "cpu_tensors_and_rss")
    assert pd.isna(row["precision"])


SUMMARY = {"step": 6, "train_runtime": 2.0, "train_samples_per_second": 24.0, "train_steps_per_second": 3.0}


def state(folder: Path, *log: dict[str, float]) -> Path:
    """A trainer_state.json with these entries in its log."""
    folder.mkdir(exist_ok=True)
    file = folder / "trainer_state.json"
    file.write_text(json.dumps({"global_step": 6, "train_batch_size": 4, "log_history": list(log)}))
    return file


def test_trainer_state_needs_its_memory_metrics(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="skip_memory_metrics=False"):
        open_rows(state(tmp_path, {"loss": 1.0}, SUMMARY))
    gpu = {"before_init_mem_gpu": 10, "init_mem_gpu_alloc_delta": 20, "train_mem_gpu_alloc_delta": 30}
    row = open_rows(state(tmp_path, {**SUMMARY, **gpu, "train_mem_gpu_peaked_delta": 40}))[0].frame.iloc[0]
    assert (row["peak_allocated_bytes"], row["micro_batch"], row["device"]) == (100, 4, "cuda")
    assert pd.isna(row["seq_len"]) and pd.isna(row["tokens_per_s"])


def test_trainer_state_of_a_cpu_run_with_tokens_counted_and_checkpoints_beside_it(tmp_path: Path) -> None:
    early = {"step": 2, "train_runtime": 0.4, "train_tokens_per_second": 2617.2, "num_input_tokens_seen": 1024}
    cpu = {"before_init_mem_cpu": 400, "init_mem_cpu_alloc_delta": 20, "init_mem_cpu_peaked_delta": 0}
    cpu |= {"train_mem_cpu_alloc_delta": 23, "train_mem_cpu_peaked_delta": 1, "num_input_tokens_seen": 3072}
    state(tmp_path, early, {**SUMMARY, **cpu})
    state(tmp_path / "checkpoint-2", early)
    table, notes = open_rows(tmp_path)
    (row,) = table.frame.to_dict("records")
    assert (row["peak_reserved_bytes"], row["memory_source"]) == (444, "cpu_tensors_and_rss")
    assert pd.isna(row["peak_allocated_bytes"])
    assert (row["seq_len"], row["tokens_per_s"]) == (64, 1536.0)
    assert any(note.startswith("1 of 2 files left out") for note in notes)


def test_a_file_that_is_none_of_these_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UserError, match="neither"):
        open_rows(tmp_path / "x.json")
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="no column seq_len"):
        open_rows(tmp_path / "x.csv")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_export_reads_back_as_the_same_table(tmp_path: Path, suffix: str) -> None:
    folder = synthetic.write(tmp_path / "sweep", synthetic.sweep(lengths=(128, 8192), batches=(1, 4)))
    out = tmp_path / f"table.{suffix}"
    assert cli.main(["export", str(folder), str(out)]) == 0
    pd.testing.assert_frame_equal(load(out).frame, load(folder).frame)


def test_trackers_get_settings_and_results_of_every_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[dict[str, object]] = []

    class Run:
        def __init__(self, **given: object) -> None:
            runs.append(given)

        def log(self, results: dict[str, float]) -> None:
            runs[-1]["results"] = results

        def finish(self) -> None:
            runs[-1]["finished"] = True

    fake = types.ModuleType("wandb")
    fake.init = Run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = synthetic.write(tmp_path, synthetic.sweep(lengths=(128, 8192), batches=(4,), repeats=1))
    assert cli.main(["track", str(folder), "wandb"]) == 0
    assert len(runs) == 4 and all(run["finished"] for run in runs)
    assert runs[0]["config"]["allocator"] == "default"  # type: ignore[index]
    assert runs[0]["config"]["seq_len"] == 128  # type: ignore[index]
    assert runs[0]["results"]["peak_reserved_bytes"] > 2**30  # type: ignore[index]
    assert runs[1]["config"]["outcome"] == "oom" and runs[1]["results"] == {}  # type: ignore[index]


def test_what_a_tracker_objects_to_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(project: str) -> None:
        raise RuntimeError("no such store\nand more")

    fake = types.ModuleType("mlflow")
    fake.set_experiment = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    folder = synthetic.write(tmp_path, synthetic.sweep(lengths=(128,), batches=(1,)))
    assert cli.main(["track", str(folder), "mlflow"]) == 2
    assert capsys.readouterr().err == "vramsweep: mlflow says: no such store\n"


def test_a_tracker_that_is_not_installed_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    folder = synthetic.write(tmp_path, synthetic.sweep(lengths=(128,), batches=(1,)))
    assert cli.main(["track", str(folder), "trackio"]) == 2
