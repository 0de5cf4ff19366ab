"""What only a CUDA device can show. Skipped, with the reason, elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Run, tiny

from harness.allocator.replay import what_if

pytestmark = pytest.mark.gpu

CUDA = {"device": {"name": "cuda"}, "seq_len": 256, "micro_batch": 8}
SETTINGS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "max_split": "max_split_size_mb:128",
    "roundup": "roundup_power2_divisions:8",
}


def cuda(conf: str = "", **over: Any) -> dict[str, Any]:
    return tiny(**(CUDA | {"allocator": {"name": conf or "default", "conf": conf}} | over))


def test_cold_and_warm_agree_to_the_byte(run_sweep: Run, tmp_path: Path) -> None:
    memory = []
    for isolation in ("cold", "warm"):
        (row,) = run_sweep(cuda(), isolation=isolation)
        assert row["outcome"] == "ok", row["reason"]
        memory.append({k: v for k, v in row.items() if k.startswith(("peak_", "load_", "forward_", "backward_"))})
        (tmp_path / "t" / "journal.jsonl").unlink()
    assert memory[0] == memory[1]


def test_settings_take_effect_and_are_read_back(run_sweep: Run) -> None:
    rows = run_sweep(*(cuda(conf) for conf in SETTINGS.values()), isolation="warm")
    assert [row["outcome"] for row in rows] == ["ok"] * len(SETTINGS), [row["reason"] for row in rows]
    assert [row["allocator_conf_effective"] for row in rows] == [row["allocator_conf"] for row in rows]


def test_a_row_of_a_gpu(run_sweep: Run) -> None:
    (row,) = run_sweep(cuda(precision="bf16"), isolation="warm")
    assert row["memory_source"] == "cuda_allocator"
    assert row["peak_requested_bytes"] <= row["peak_allocated_bytes"] <= row["peak_active_bytes"]
    assert (
        row["peak_active_bytes"] <= row["peak_reserved_bytes"] < row["device_used_bytes"] <= row["device_total_bytes"]
    )
    assert len(row["step_peak_reserved_bytes"]) == row["measured_steps"]
    assert row["gpu_name"]
    assert row["gpu_uuid"].startswith("GPU-")
    assert row["alloc_ooms"] == 0


def test_the_driver_s_allocator_leaves_what_it_does_not_count_unknown(run_sweep: Run) -> None:
    (row,) = run_sweep(cuda("backend:cudaMallocAsync"), isolation="warm")
    assert row["outcome"] == "ok", row["reason"]
    assert row["allocator_conf_effective"] == "backend:cudaMallocAsync"
    assert row["peak_reserved_bytes"] >= row["peak_allocated_bytes"] > 0
    assert row["peak_requested_bytes"] is None
    assert row["alloc_retries"] is None


def test_out_of_memory_is_a_result(run_sweep: Run) -> None:
    (row,) = run_sweep(cuda(seq_len=4096, micro_batch=60_000, attention="eager"), isolation="warm", retries=2)
    assert row["outcome"] == "oom"
    assert row["attempt"] == 1
    assert row["peak_allocated_bytes"] is None


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_recorded_step_replays_exactly(run_sweep: Run, tmp_path: Path, name: str) -> None:
    (row,) = run_sweep(cuda(SETTINGS[name], record=True), isolation="warm")
    assert row["outcome"] == "ok", row["reason"]
    match = what_if(tmp_path / "t" / row["recording"], []).rows[0].match
    assert match is not None
    assert match.exact, match.first_difference
