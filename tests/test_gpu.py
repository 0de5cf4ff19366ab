"""Tests that need a CUDA device. Skipped, with the reason, elsewhere."""

from pathlib import Path
from typing import Any

import pytest
from conftest import SETTINGS as HOW
from conftest import Run, tiny

from vramsweep.harness.allocator.replay import what_if
from vramsweep.harness.machine import machine
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.sweep import plan, run_trials

pytestmark = pytest.mark.gpu

CUDA = {"device": {"name": "cuda"}, "seq_len": 256, "micro_batch": 8}
RECORDED = {
    "default": "", "expandable": "expandable_segments:True", "max_split": "max_split_size_mb:128",
    "roundup": "roundup_power2_divisions:8",
}  # fmt: skip


def cuda(conf: str = "", **over: Any) -> dict[str, Any]:
    return tiny(**(CUDA | {"allocator": {"name": conf or "default", "conf": conf}} | over))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Row]]:
    """One warm sweep with all that the tests look at, as starting templates is what takes the time; rows by name."""
    if not machine.gpus():
        pytest.skip("needs an NVIDIA card, and this machine has none")
    trials = {name: cuda(conf, record=True) for name, conf in RECORDED.items()} | {
        "bf16": cuda(precision="bf16"),
        "driver": cuda("backend:cudaMallocAsync"),
        "too large": cuda(seq_len=4096, micro_batch=2_000, attention="eager"),
    }
    folder = tmp_path_factory.mktemp("gpu") / "t"
    expanded = plan.expand_trials(trials.values(), 1)
    rows, _ = run_trials.run(
        plan.order_trials(expanded), plan.Settings(**(HOW | {"isolation": "warm", "retries": 1})), folder
    )
    return folder, {name: rows[one[0].trial_id] for name, one in zip(trials, expanded, strict=True)}


def test_cold_and_warm_agree_to_the_byte(run_sweep: Run, tmp_path: Path) -> None:
    memory = []
    for isolation in ("cold", "warm"):
        (row,) = run_sweep(cuda(), isolation=isolation)
        assert row["outcome"] == "ok", row["reason"]
        memory.append({k: v for k, v in row.items() if k.startswith(("peak_", "load_", "forward_", "backward_"))})
        (tmp_path / "t" / "trials" / "journal.jsonl").unlink()
    assert memory[0] == memory[1]


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_settings_take_effect_and_a_recorded_step_replays_exactly(
    swept: tuple[Path, dict[str, Row]], name: str
) -> None:
    folder, rows = swept
    assert rows[name]["outcome"] == "ok", rows[name]["reason"]
    assert rows[name]["allocator_conf_effective"] == rows[name]["allocator_conf"] == RECORDED[name]
    match = what_if(folder / rows[name]["recording"], []).rows[0].match
    assert match is not None
    assert match.exact, match.first_difference


def test_a_row_of_a_gpu(swept: tuple[Path, dict[str, Row]]) -> None:
    row = swept[1]["bf16"]
    assert row["outcome"] == "ok", row["reason"]
    assert row["memory_source"] == "cuda_allocator"
    assert row["peak_requested_bytes"] <= row["peak_allocated_bytes"] <= row["peak_active_bytes"]
    assert (
        row["peak_active_bytes"] <= row["peak_reserved_bytes"] < row["device_used_bytes"] <= row["device_total_bytes"]
    )
    assert len(row["step_peak_reserved_bytes"]) == row["measured_steps"]
    assert row["gpu_name"]
    assert row["gpu_uuid"].startswith("GPU-")
    assert row["alloc_ooms"] == 0


def test_the_driver_s_allocator_leaves_what_it_does_not_count_unknown(swept: tuple[Path, dict[str, Row]]) -> None:
    row = swept[1]["driver"]
    assert row["outcome"] == "ok", row["reason"]
    assert row["allocator_conf_effective"] == "backend:cudaMallocAsync"
    assert row["peak_reserved_bytes"] >= row["peak_allocated_bytes"] > 0
    assert row["peak_requested_bytes"] is None
    assert row["alloc_retries"] is None


def test_out_of_memory_is_a_result(swept: tuple[Path, dict[str, Row]]) -> None:
    row = swept[1]["too large"]
    assert row["outcome"] == "oom", row["reason"]
    assert row["attempt"] == 1
    assert row["peak_allocated_bytes"] is None
