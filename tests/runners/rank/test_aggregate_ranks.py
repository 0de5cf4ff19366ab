"""The row of several ranks, the file that a worker leaves, and imports of libraries that are broken."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vramsweep.harness.process.attempt import read_result
from vramsweep.harness.process.worker_files import RESULT
from vramsweep.harness.rows.schema import COLUMNS
from vramsweep.runners.rank import result_file
from vramsweep.runners.rank.aggregate_ranks import over_ranks
from vramsweep.runners.rank.entry_modules import import_entries, import_entry


def rank(**over: Any) -> dict[str, Any]:
    return {
        "peak_reserved_bytes": 100, "peak_allocated_bytes": 90, "step_peak_reserved_bytes": [100, 100],
        "alloc_retries": 0, "inactive_split_peak_bytes": 5, "device_total_bytes": 1000,
        "forward_peak_reserved_bytes": 70,
        "device_used_bytes": 300, "device_baseline_bytes": 10, "gpu_uuid": "a", "gpu_name": "card",
        "elapsed_s": 2.0, "step_times_s": [1.0, 1.0], "tokens_per_s": 500.0, "loss_last": 3.0,
        "gpu_temperature_c": 50, "gpu_sm_clock_mhz": 1900, "gpu_sm_clock_before_mhz": 1950,
        "gpu_sm_clock_max_mhz": 1980, "throttle_reasons": [], "foreign_processes": None,
        "skipped_steps": 0, "notes": [], "optimizer_effective": "AdamW",
    } | over  # fmt: skip


ROWS = [
    rank(),
    rank(peak_reserved_bytes=120, peak_allocated_bytes=80, step_peak_reserved_bytes=[110, 120], alloc_retries=3,
         inactive_split_peak_bytes=9, forward_peak_reserved_bytes=60, gpu_uuid="b", gpu_temperature_c=70, loss_last=9.0,
         throttle_reasons=["sw_power_cap"], notes=["one"], device_total_bytes=999),
    rank(peak_allocated_bytes=95, peak_active_bytes=97, elapsed_s=4.0,
         step_times_s=[2.0, 2.0], tokens_per_s=250.0, gpu_sm_clock_mhz=1500, gpu_sm_clock_before_mhz=1400,
         device_used_bytes=400, device_baseline_bytes=50, gpu_uuid="c",
         throttle_reasons=["hw_slowdown", "sw_power_cap"], foreign_processes=[7], skipped_steps=1,
         notes=["one", "two"]),
]  # fmt: skip


def test_memory_is_of_one_rank_the_worst() -> None:
    row = over_ranks(ROWS)
    assert row["worst_rank"] == 1
    of_memory = {
        "peak_reserved_bytes": 120, "peak_allocated_bytes": 80, "step_peak_reserved_bytes": [110, 120],
        "alloc_retries": 3, "inactive_split_peak_bytes": 9, "device_total_bytes": 999,
        "forward_peak_reserved_bytes": 60, "gpu_uuid": "b",
    }  # fmt: skip
    assert {name: row[name] for name in of_memory} == of_memory
    assert row["rank_peak_reserved_bytes"] == [100, 120, 100]
    assert row["rank_peak_allocated_bytes"] == [90, 80, 95]
    assert row["rank_peak_active_bytes"] == [None, None, 97]


def test_speed_is_the_slowest_rank_s_and_health_the_worst_of_all() -> None:
    row = over_ranks(ROWS)
    assert (row["elapsed_s"], row["step_times_s"], row["tokens_per_s"]) == (4.0, [2.0, 2.0], 250.0)
    assert (row["gpu_temperature_c"], row["gpu_sm_clock_mhz"], row["device_used_bytes"]) == (70, 1500, 400)
    assert (row["gpu_sm_clock_before_mhz"], row["gpu_sm_clock_max_mhz"]) == (1400, 1980)
    assert row["device_baseline_bytes"] == 50
    assert row["throttle_reasons"] == ["hw_slowdown", "sw_power_cap"]
    assert row["foreign_processes"] == [7]
    assert row["skipped_steps"] == 1
    assert row["notes"] == ["one", "two"]
    assert row["loss_last"] == 3.0 and row["optimizer_effective"] == "AdamW"  # rank 0's
    cases = [(("gpu", "host"), "host"), (("gpu", "gpu"), "gpu"), (("gpu", None), None), ((None, "host"), "host")]
    for by, all_of in cases:
        ranks = [rank(issue_fraction=fraction, bound_by=one) for fraction, one in zip((0.6, 0.95), by, strict=True)]
        assert (over_ranks(ranks)["issue_fraction"], over_ranks(ranks)["bound_by"]) == (0.95, all_of)


def test_energy_is_that_of_all_cards_each_once() -> None:
    ranks = [rank(gpu_energy_j=joules, gpu_uuid=card) for joules, card in ((5.0, "a"), (7.0, "b"), (7.0, "b"))]
    assert over_ranks(ranks)["gpu_energy_j"] == 12.0
    assert over_ranks([*ranks, rank(gpu_energy_j=None, gpu_uuid="c")])["gpu_energy_j"] is None


def test_that_all_is_well_is_said_where_it_is_known_of_all() -> None:
    """One that is not shows, whatever is known of the others."""
    well = {"skipped_steps": 0, "alloc_retries": 0, "throttle_reasons": [], "foreign_processes": [], "plateau": True}
    ill = dict(zip(well, (1, 2, ["sw_power_cap"], [7], False), strict=True))
    unknown = rank(**dict.fromkeys(well))
    for known, expected in ((well, dict.fromkeys(well)), (ill, ill)):
        row = over_ranks([rank(**known), unknown])
        assert {name: row[name] for name in well} == expected
    assert {name: over_ranks([rank(**well)] * 2)[name] for name in well} == well


def test_where_reserved_is_unknown_allocated_tells_the_worst() -> None:
    row = over_ranks([{**columns, "peak_reserved_bytes": None} for columns in ROWS])
    assert row["worst_rank"] == 2 and row["peak_allocated_bytes"] == 95
    blind = over_ranks([rank(peak_reserved_bytes=None, peak_allocated_bytes=None, gpu_temperature_c=None)] * 2)
    assert blind["worst_rank"] is None and blind["gpu_temperature_c"] is None


def test_one_rank_s_row_is_its_own() -> None:
    row = over_ranks([ROWS[1]])
    assert {name: row[name] for name in ROWS[1]} == ROWS[1]
    assert row["worst_rank"] == 0
    assert set(over_ranks(ROWS)) <= {column.name for column in COLUMNS}


def test_one_rank_s_retries_slow_them_all() -> None:
    ranks = [
        {"peak_reserved_bytes": 10, "alloc_retries": 0, "plateau": True},
        {"peak_reserved_bytes": 9, "alloc_retries": 7, "plateau": False},
    ]
    found = over_ranks(ranks)
    assert (found["worst_rank"], found["alloc_retries"], found["plateau"]) == (0, 7, False)


def left(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / RESULT).read_text())
    assert [path.name for path in folder.iterdir()] == [RESULT]  # nothing aside stays
    return found


def test_an_error_does_not_take_a_published_measurement_away(tmp_path: Path) -> None:
    """A rank that fails between rank 0's publication and the end of the barrier."""
    result_file.values(tmp_path, {"peak_allocated_bytes": 7}, complete=False)
    result_file.error(tmp_path, {"error": {"type": "torch.OutOfMemoryError", "message": "CUDA out of memory"}})
    assert left(tmp_path) == {"values": {"peak_allocated_bytes": 7}, "complete": False}


def test_the_first_rank_to_fail_tells_why(tmp_path: Path) -> None:
    cause = {"error": {"type": "torch.OutOfMemoryError", "message": "CUDA out of memory"}}
    result_file.error(tmp_path, cause)
    result_file.error(tmp_path, {"error": {"type": "builtins.RuntimeError", "message": "Connection closed by peer"}})
    assert left(tmp_path) == cause


def test_the_first_last_word_stands(tmp_path: Path) -> None:
    result_file.values(tmp_path, {"peak_allocated_bytes": 7}, complete=False)
    result_file.note(tmp_path, "rank 1: out of memory while FLOPs are counted")
    result_file.note(tmp_path, "rank 0: Connection closed by peer")
    result_file.values(tmp_path, {"peak_allocated_bytes": 8}, complete=False)
    values = left(tmp_path)["values"]
    assert values == {"peak_allocated_bytes": 7, "notes": ["rank 1: out of memory while FLOPs are counted"]}


def test_half_characters_do_not_reach_the_journal(tmp_path: Path) -> None:
    result_file.error(tmp_path, {"error": {"type": "x", "message": "no file \ud800 here"}})
    found, problem = read_result(tmp_path)
    assert problem is None and found is not None
    assert found["error"]["message"] == "no file ? here"


def test_an_error_is_left_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    cause = {"error": {"type": "torch.OutOfMemoryError", "message": "CUDA out of memory"}}
    result_file.error(tmp_path, cause)
    result_file.error(tmp_path, {"error": {"type": "x", "message": "for its sake"}})
    assert left(tmp_path) == cause


BROKEN = {
    "broken_symbol": "raise ImportError('undefined symbol: _ZN3c10')",
    "broken_library": "raise OSError('libcudart.so.12: cannot open shared object file')",
    "broken_setup": "raise RuntimeError('CUDA Setup failed')",
}


def test_a_broken_library_is_left_to_the_trials_that_need_it_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "sound_one.py").write_text("value = 3")
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(3):  # jobs of one process
        import_entries([*BROKEN, "absent_one", "sound_one"])
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "not preloaded: broken_symbol: ImportError: undefined symbol: _ZN3c10"
    assert len(said) == len(BROKEN) + 1
    assert import_entry("sound_one").value == 3
    with pytest.raises(OSError, match="libcudart"):
        import_entry("broken_library")
