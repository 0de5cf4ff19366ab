"""The instruments, in this process: counters, FLOPs, boundaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny

from vramsweep.harness import trial as trials
from vramsweep.runners import measure
from vramsweep.runners.dispatch import FlopCount, LiveBytes
from vramsweep.runners.instruments import CudaMemory, backward_boundaries
from vramsweep.runners.measure import Meter, plateau


def test_live_bytes_counts_each_storage_once_and_frees_it() -> None:
    held = torch.zeros(1000)
    with LiveBytes() as live:
        start = live.live
        assert start >= 4000
        a = torch.zeros(1 << 20, dtype=torch.uint8)
        view = a[: 1 << 19]
        assert live.live - start == 1 << 20
        b = a + 1
        assert live.live - start == 2 << 20
        del a
        assert live.live - start == 2 << 20  # the view keeps it
        del view, b
        assert live.live == start
        assert live.take() - start == 2 << 20
        assert live.take() == start
    assert held.numel() == 1000


def test_live_bytes_sees_gradients_that_only_the_parameter_holds() -> None:
    weight = torch.ones(1 << 16, requires_grad=True)
    weight.square().sum().backward()
    with LiveBytes() as live:
        before = live.live
        weight.grad = None
        assert before - live.live == 4 << 16


@pytest.mark.parametrize("fused", [True, False])
def test_flops_of_attention_do_not_depend_on_its_kernel(fused: bool) -> None:
    q, k, v = (torch.randn(2, 3, 64, 16, requires_grad=True) for _ in range(3))
    backend = torch.nn.attention.SDPBackend.FLASH_ATTENTION if fused else torch.nn.attention.SDPBackend.MATH
    with torch.nn.attention.sdpa_kernel(backend), FlopCount() as count:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        forward = count.total
        out.sum().backward()
    assert forward == 2 * 2 * (2 * 3 * 64 * 64 * 16)
    recomputed = forward // 2 if fused else 0  # the fused backward computes the scores again
    assert count.total - forward == 2 * forward + recomputed


def test_flops_of_attention_count_every_head_of_the_query_also_where_they_share_keys() -> None:
    totals = []
    for heads in (1, 4):
        q = torch.randn(2, 4, 64, 16, requires_grad=True)
        k, v = (torch.randn(2, heads, 64, 16, requires_grad=True) for _ in range(2))
        with FlopCount() as count:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward()
        totals.append(count.total)
    assert totals[0] == totals[1]


def test_flops_of_a_linear_layer() -> None:
    net = torch.nn.Linear(32, 16)
    with FlopCount() as count:
        net(torch.randn(8, 32, requires_grad=True)).sum().backward()
    assert count.total == 3 * 2 * 8 * 32 * 16


def test_boundaries_ignore_the_backward_within_a_backward() -> None:
    seen: list[str] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        return x.square()

    x = torch.ones(4, requires_grad=True)
    original = torch.autograd.backward
    with backward_boundaries(lambda: seen.append("in"), lambda: seen.append("out")):
        for _ in range(2):
            torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True).sum().backward()
    assert seen == ["in", "out", "in", "out"]
    assert torch.autograd.backward is original


@pytest.mark.parametrize(
    ("reserved", "expected"),
    [([5, 5, 5, 5], True), ([5, 6, 6, 6], True), ([5, 5, 5, 6], False), ([5], None), ([], None), ([5, None], None)],
)
def test_plateau(reserved: list[int | None], expected: bool | None) -> None:
    assert plateau(reserved) is expected


def test_the_driver_s_allocator_fills_three_counters_and_the_rest_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("allocated", "active", "requested", "reserved", "inactive_split")
    stats: dict[str, Any] = {f"{n}_bytes": {"all": {"peak": 7, "current": 3}} for n in names}
    stats |= {"num_alloc_retries": 0, "num_ooms": 0}
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    memory = CudaMemory()
    assert memory.take() == {"allocated": 7, "active": 7, "requested": None, "reserved": 7, "inactive_split": None}
    assert memory.summary() == {"reserved_unallocated_bytes": 0, "alloc_retries": None, "alloc_ooms": None}
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    memory = CudaMemory()
    assert memory.take()["requested"] == 7
    assert memory.summary()["alloc_retries"] == 0


def drive(folder: Path, **over: Any) -> dict[str, Any]:
    trial = trials.Trial.model_validate(tiny(**over))
    meter = Meter(trial, folder, torch.device("cpu"), 0)
    weight = torch.ones(1 << 18, requires_grad=True)
    meter.built(dict)
    for _ in range(trial.steps()):
        meter.step_begin()
        for _ in range(trial.grad_accum):
            loss = (weight * weight).sum()
            loss.backward()
        weight.grad = None
        meter.step_end(loss)
    return meter.columns()


def test_phases_of_a_step_with_accumulation(tmp_path: Path) -> None:
    one, four = (drive(tmp_path, grad_accum=n) for n in (1, 4))
    mib = 1 << 20
    loss = 4  # bytes: in the forward phase the loss is alive beside the weight and its square
    assert one["forward_peak_allocated_bytes"] == one["optimizer_peak_allocated_bytes"] + loss
    # while it accumulates, the gradient of the micro-step before is alive in the forward phase
    assert four["forward_peak_allocated_bytes"] - one["forward_peak_allocated_bytes"] == mib
    assert four["backward_peak_allocated_bytes"] - one["backward_peak_allocated_bytes"] == mib
    assert one["peak_allocated_bytes"] == one["backward_peak_allocated_bytes"]


def test_a_recorded_step_comes_last_and_is_dumped_before_the_history_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **kw: calls.append(kw.get("enabled", "on")))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    plain = drive(tmp_path)
    assert calls == []
    recorded = drive(tmp_path, record=True)
    assert calls == ["on", str(tmp_path / "recording.pickle"), None]
    assert recorded["measured_steps"] == plain["measured_steps"]
    assert recorded["peak_allocated_bytes"] == plain["peak_allocated_bytes"]


def test_a_loss_that_is_no_number_is_unknown() -> None:
    assert measure._finite(torch.tensor(float("nan"))) is None
    assert measure._finite(torch.tensor(2.5)) == 2.5
    assert measure._finite(None) is None
