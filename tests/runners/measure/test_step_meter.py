"""The instruments, in this process: counters, FLOPs, boundaries."""

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TARGETS, parametrized, refusal, source, tiny
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import flop_registry

from vramsweep.harness.spec import trial as trials
from vramsweep.runners.loops import custom, hf_trainer, torch_loop
from vramsweep.runners.measure import dispatch_modes, model_description, rank_instruments, step_meter
from vramsweep.runners.measure.counters import CudaMemory, Process, backward_boundaries, foreign, scaler_skips
from vramsweep.runners.measure.dispatch_modes import FlopCount, LiveBytes
from vramsweep.runners.measure.rank_instruments import Gauges
from vramsweep.runners.measure.steady_memory import reached_plateau, step_growth
from vramsweep.runners.measure.step_meter import Meter, meter_spec
from vramsweep.runners.rank.aggregate_ranks import over_ranks

CPU = torch.device("cpu")


def test_a_rank_that_comes_late_to_the_measured_steps_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_instruments, "MEETING_S", 0.1)
    found = []
    for others in (0, 1):
        torch.distributed.init_process_group("fake", rank=0, world_size=2, store=torch.distributed.HashStore())
        torch.distributed.distributed_c10d._get_default_store().add(rank_instruments.MET, others)
        found.append(rank_instruments.meet_ranks())
        torch.distributed.destroy_process_group()
    assert found == [["the ranks did not begin the measured steps together, because one was over 0.1 s late"], []]


def test_live_bytes_counts_each_storage_once_and_frees_it() -> None:
    held, lazy = torch.zeros(1000), torch.nn.LazyLinear(4)  # whose weight has no storage yet
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
    assert held.numel() == 1000 and torch.nn.parameter.is_lazy(lazy.weight)


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


@parametrized("step_growth")
def test_growth(held: list[int | None], expected: int | None) -> None:
    assert step_growth(held) == expected


@parametrized("plateaus")
def test_plateau(reserved: list[int | None], expected: bool | None) -> None:
    assert reached_plateau(reserved) is expected


def test_the_driver_s_allocator_fills_three_counters_and_the_rest_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("allocated", "active", "requested", "reserved", "inactive_split")
    stats: dict[str, Any] = {f"{n}_bytes": {"all": {"peak": 7, "current": 3}} for n in names}
    stats |= {"num_alloc_retries": 0, "num_ooms": 0}
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    memory = CudaMemory(torch.device("cuda", 0))
    assert memory.take() == {"allocated": 7, "active": 7, "requested": None, "reserved": 7, "inactive_split": None}
    assert memory.summary() == {"reserved_unallocated_bytes": 0, "alloc_retries": None, "alloc_ooms": None}
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    memory = CudaMemory(torch.device("cuda", 0))
    assert memory.take()["requested"] == 7
    assert memory.summary()["alloc_retries"] == 0


def metered(folder: Path, *publish: Any, **over: Any) -> tuple[trials.Trial, Meter]:
    """The tiny trial, and the meter of its rank."""
    trial = trials.Trial.model_validate(tiny(**over))
    return trial, Meter(meter_spec(trial), folder, Gauges(CPU), 0, *publish)


def drive(folder: Path, describe: Callable[[], dict[str, Any]] = dict, **over: Any) -> dict[str, Any]:
    trial, meter = metered(folder, **over)
    weight = torch.ones(1 << 18, requires_grad=True)
    meter.built(describe)
    for _ in range(trial.steps()):
        meter.step_begin()
        for _ in range(trial.grad_accum):
            loss = (weight * weight).sum()
            loss.backward()
        weight.grad = None
        meter.step_end(loss)
    return meter.columns()


@pytest.mark.parametrize(
    ("leaving", "growth"), [([0, 1, 2, 3, 4, 5], 64 << 20), ([], 0), ([1], 0)], ids=["leaks", "plain", "once"]
)
def test_what_every_step_leaves_on_a_cpu_is_counted(tmp_path: Path, leaving: list[int], growth: int) -> None:
    trial, meter = metered(tmp_path, protocol={"name": "brief", "warmup_steps": 1, "measured_steps": 3})
    weight, kept, last = torch.ones(1 << 18, requires_grad=True), [], None
    meter.built(dict)
    for index in range(trial.steps()):
        meter.step_begin()
        (weight * weight).sum().backward()
        last, weight.grad = weight.grad, None  # until the next step
        kept += [torch.ones(1 << 24)] * (index in leaving)  # so large that malloc has to ask the kernel for it
        meter.step_end()
    assert meter.columns()["step_growth_bytes"] == growth and meter.columns()["full_after_steps"] is None
    assert last is not None


def test_parameters_count_that_had_no_gradient_after_any_step() -> None:
    experts, count = torch.nn.ModuleList(torch.nn.Linear(3, 2) for _ in range(3)), model_description.without_gradient
    with register_optimizer_step_post_hook(model_description.look_at_gradients):
        assert count([experts]) is None  # nothing has stepped
        adam = torch.optim.Adam(experts.parameters())
        for number, left in ((1, 2 * (3 * 2 + 2)), (2, 3 * 2 + 2), (1, 3 * 2 + 2)):
            experts[number](torch.ones(3)).sum().backward()
            adam.step()
            adam.zero_grad()
            assert count([experts]) == left
        first = torch.optim.LBFGS(experts[0].parameters(), max_iter=1)
        first.step(lambda: ((loss := experts[0](torch.ones(3)).sum()).backward(), loss)[1])  # in the step itself
        assert count([experts]) == 0
        copies = torch.optim.SGD([p.detach().clone().requires_grad_() for p in experts.parameters()])
        copies.step()
        del adam, first
        assert count([experts]) is None


@pytest.mark.slow
def test_phases_of_a_step_with_accumulation(tmp_path: Path) -> None:
    one, four = (drive(tmp_path, grad_accum=n) for n in (1, 4))
    mib = 1 << 20
    loss = 4  # bytes: in the forward phase the loss is alive beside the weight and its square
    assert one["forward_peak_allocated_bytes"] == one["optimizer_peak_allocated_bytes"] + loss
    # while it accumulates, the gradient of the micro-step before is alive in the forward phase
    assert four["forward_peak_allocated_bytes"] - one["forward_peak_allocated_bytes"] == mib
    assert four["backward_peak_allocated_bytes"] - one["backward_peak_allocated_bytes"] == mib
    assert one["peak_allocated_bytes"] == one["backward_peak_allocated_bytes"]


def of(function: str, folder: Path, **over: Any) -> dict[str, Any]:
    """A row of one of the targets in tests/targets/backward.py."""
    trial, meter = metered(folder, runner=target(function), **over)
    custom.run(trial, CPU, meter, folder)
    return meter.columns()


def target(function: str) -> dict[str, str]:
    return {"name": "custom", "target": f"{TARGETS / 'backward.py'}:{function}"}


TOKENS = 2 * 32  # what the tiny trial counts a step
FORWARD = 2 * 8 * (16 * 32 + 32 * 4)  # that MLP's two products
BACKWARD = 2 * 8 * (16 * 32 + 2 * 32 * 4)  # two of the last one; nobody wants the inputs' gradient


@pytest.mark.parametrize("function", ["backward", "by_grad"])
def test_flops_and_phases_do_not_depend_on_who_starts_the_backward_pass(tmp_path: Path, function: str) -> None:
    row = of(function, tmp_path)
    assert row["model_flops_per_token"] == 3 * FORWARD / TOKENS
    assert row["hardware_flops_per_token"] == (FORWARD + BACKWARD) / TOKENS
    assert row["notes"] is None
    known = [row[f"{phase}_peak_allocated_bytes"] for phase in ("forward", "backward", "optimizer")]
    assert None not in known
    assert max(known) == row["peak_allocated_bytes"]


def test_gradients_by_hand_leave_model_flops_and_phases_unknown(tmp_path: Path) -> None:
    row = of("by_hand", tmp_path)
    assert row["model_flops_per_token"] is None
    assert row["hardware_flops_per_token"] == (FORWARD + BACKWARD) / TOKENS
    assert {
        row[f"{p}_peak_{c}_bytes"] for p in ("forward", "backward", "optimizer") for c in ("allocated", "reserved")
    } == {None}
    assert row["peak_allocated_bytes"] is not None
    assert len(row["notes"]) == 2 and all("no backward pass" in note for note in row["notes"])


def test_an_operator_without_a_formula_leaves_flops_unknown_and_is_named(tmp_path: Path) -> None:
    row = of("by_operator", tmp_path)
    assert row["model_flops_per_token"] is row["hardware_flops_per_token"] is None
    (note,) = row["notes"]
    assert "vramsweep_tests::twice_product" in note and "register_flop_formula" in note


def test_a_formula_that_the_user_registers_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, step, batches = custom.load(f"{TARGETS / 'backward.py'}:by_operator")(None)
    packet = torch.ops.vramsweep_tests.twice_product
    monkeypatch.setitem(flop_registry, packet, lambda a, b, *_, **__: 2 * a.shape[0] * a.shape[1] * b.shape[1])
    with FlopCount() as count:
        step(batches(0))
    assert (count.total, count.uncounted) == (3 * FORWARD, set())  # its formula makes the inputs' gradient, too


def test_the_host_waits_for_values_and_blocking_copies_of_a_gpu_that_has_work() -> None:
    ops = torch.ops.aten
    with FakeTensorMode(shape_env=ShapeEnv()), FlopCount() as count:
        x, host = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
        for waits in (0, 1):  # there is nothing to wait for before the first product
            x.sum().item()
            assert count.waits == waits
            x @ x
        mask, places = x > 0, torch.zeros(2, dtype=torch.int64, device="cuda")
        host.sum().item()
    assert count.waits == 1
    for op, args, more, waits in (
        (ops.copy_.default, (x, host), {}, True), (ops.copy_.default, (x, host, True), {}, False),
        (ops.copy_.default, (host, x), {}, True), (ops.copy_.default, (host, host), {}, False),
        (ops._to_copy.default, (x, host), {"non_blocking": True}, False), (ops._to_copy.default, (x, x), {}, False),
        (ops.index.Tensor, (x, [None, mask]), {}, True), (ops.index.Tensor, (x, [None, places]), {}, False),
        (ops.nonzero.default, (x,), {}, True), (ops.nonzero.default, (host,), {}, False),
    ):  # fmt: skip
        assert dispatch_modes._waits(op, args, more, None) is waits


def test_products_of_the_optimizer_are_hardware_flops_only(tmp_path: Path) -> None:
    row = of("multiplying_update", tmp_path)
    update = 2 * 2 * (16 * 32 * 32 + 32 * 4 * 4)
    assert row["model_flops_per_token"] == 3 * FORWARD / TOKENS
    assert row["hardware_flops_per_token"] == (FORWARD + BACKWARD + update) / TOKENS
    row = of("operator_in_the_update", tmp_path)
    assert row["model_flops_per_token"] == 3 * FORWARD / TOKENS
    assert row["hardware_flops_per_token"] is None
    assert row["notes"][0].startswith("hardware FLOPs are unknown, because there is no formula for vramsweep_tests::")


@pytest.mark.parametrize("attention", ["flash_attention_2", "kernels-community/flash-attn3"])
def test_flash_attention_s_own_kernels_leave_flops_unknown(tmp_path: Path, attention: str) -> None:
    row = drive(tmp_path, describe=lambda: {"attention_effective": attention})
    assert row["model_flops_per_token"] is row["hardware_flops_per_token"] is None
    assert attention in row["notes"][0]
    assert row["issue_fraction"] is row["bound_by"] is None  # no GPU
    assert row["host_steal_fraction"] is None or 0 <= row["host_steal_fraction"] <= 1


def test_flops_of_products_also_of_those_that_torch_s_registry_lacks() -> None:
    matrix, vector, stack = torch.randn(6, 5), torch.randn(5), torch.randn(3, 6, 5)
    linear = torch.nn.Linear(32, 16)
    cases = [
        (lambda: matrix @ vector, 2 * 6 * 5),
        (lambda: vector @ vector, 2 * 5),
        (lambda: torch.addmv(torch.randn(6), matrix, vector), 2 * 6 * 5),
        (lambda: torch.randn(6, 7).addmm_(matrix, torch.randn(5, 7)), 2 * 6 * 5 * 7),
        (lambda: torch.addbmm(torch.randn(6, 7), stack, torch.randn(3, 5, 7)), 2 * 3 * 6 * 5 * 7),
        (lambda: linear(torch.randn(8, 32, requires_grad=True)).sum().backward(), 3 * 2 * 8 * 32 * 16),
    ]
    for compute, expected in cases:
        with FlopCount() as count:
            compute()
        assert (count.total, count.uncounted) == (expected, set())


def test_flops_of_a_mixture_of_experts_grouped_product() -> None:
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    tokens = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    experts = torch.randn(4, 16, 24, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([8, 8, 24, 32], dtype=torch.int32)
    with FlopCount() as count:
        out = torch.nn.functional.grouped_mm(tokens, experts, offs=ends)
        assert count.total == 2 * 32 * 16 * 24  # each token goes through one expert
        out.square().sum().backward()
    assert (count.total, count.uncounted) == (3 * 2 * 32 * 16 * 24, set())


def test_a_product_for_which_nobody_has_a_formula_is_named() -> None:
    layer = torch.nn.LSTM(4, 4)
    with FlopCount() as count:
        layer(torch.randn(2, 1, 4))
    assert count.uncounted or count.total >= 2 * 2 * 8 * 16  # of a CPU with a fused kernel, or step by step


def test_the_plan_has_as_many_steps_as_the_trial() -> None:
    for over in ({}, {"record": True}, {"protocol": {"name": "x", "warmup_steps": 3, "measured_steps": 5}}):
        trial, meter = metered(Path("/tmp"), **over)
        assert len(meter.plan) == trial.steps()


def test_the_result_is_published_when_the_last_measured_step_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[dict[str, Any]] = []
    trial, meter = metered(tmp_path, lambda own: published.append(own) or over_ranks([own]), runner=target("backward"))
    begin = meter.step_begin

    def watched() -> None:
        assert bool(published) == (meter.index >= trial.steps() - 1)
        begin()

    monkeypatch.setattr(meter, "step_begin", watched)
    custom.run(trial, CPU, meter, tmp_path)
    assert len(published) == 1
    assert published[0]["optimizer_effective"] == "SGD" and published[0]["measured_steps"] == 2
    complete = {k: v for k, v in meter.columns().items() if k in published[0] and k not in ("steps_s", "notes")}
    assert complete == {k: v for k, v in published[0].items() if k in complete}


def test_training_that_ends_too_soon_says_so(tmp_path: Path) -> None:
    _, meter = metered(tmp_path)
    meter.built(dict)
    meter.step_begin()
    meter.step_end()
    assert "after 1 of 5 steps" in refusal(RuntimeError, meter.columns)


@parametrized("foreign_processes")
def test_foreign_processes(before: Any, after: Any, own: set[int], expected: list[int] | None) -> None:
    assert foreign(before, after, own) == expected


@pytest.mark.slow
def test_ours_are_the_session_and_its_children() -> None:
    """Asked in a session of its own, as a worker is: what started it is then foreign wherever the tests run."""
    asked = source("processes_of_a_session.txt")
    told = subprocess.run([sys.executable, "-c", asked], start_new_session=True, capture_output=True, text=True)
    assert told.stdout.startswith("True"), told


@pytest.mark.slow
@pytest.mark.parametrize("start", [2.0**14, 2.0**26, 2.0**60])
def test_updates_that_the_scaler_skips_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: float
) -> None:
    """Only measured steps count; the steps that the optimizer really made are the reference."""
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=start))
    trial, meter = metered(tmp_path, precision="fp16", protocol={"warmup_steps": 2, "measured_steps": 12})
    updated: set[int] = set()
    hook = register_optimizer_step_post_hook(lambda *_: updated.add(meter.index))
    try:
        torch_loop.run(trial, CPU, meter, tmp_path)
    finally:
        hook.remove()
    skipped = set(range(3, 15)) - updated
    assert meter.columns()["skipped_steps"] == len(skipped)
    if start == 2.0**26:
        assert 0 < len(skipped) < 12
    else:
        assert len(skipped) == (0 if start == 2.0**14 else 12)


@pytest.mark.slow
def test_the_trainer_s_scaler_is_asked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class WithScaler(hf_trainer._Trainer):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)  # Accelerate leaves fp16 off on a CPU; the scaled loss overflows 11 times
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.9)
            self.accelerator.native_amp, self.accelerator.scaler = True, scaler

    monkeypatch.setattr(hf_trainer, "_Trainer", WithScaler)
    trial, meter = metered(tmp_path, runner={"name": "trainer"})
    hf_trainer.run(trial, CPU, meter, tmp_path)
    assert meter.columns()["skipped_steps"] == 2


def test_a_scale_that_may_have_grown_does_not_tell_how_often_it_shrank() -> None:
    scaler = torch.amp.GradScaler("cpu", growth_interval=10)
    assert scaler_skips(scaler, 9)() == 0
    assert scaler_skips(scaler, 10)() is None
    assert scaler_skips(torch.amp.GradScaler("cpu", enabled=False), 10)() == 0
    assert scaler_skips(torch.amp.GradScaler("cpu", init_scale=float("inf")), 9)() is None


@pytest.mark.slow
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
    assert step_meter._finite(torch.tensor(float("nan"))) is None
    assert step_meter._finite(torch.tensor(2.5)) == 2.5
    assert step_meter._finite(None) is None


def test_the_resident_peak_is_the_kernels_whenever_it_is_asked() -> None:
    process = Process(begun=True)
    for size in (1, 64 << 20, 1, 192 << 20, 1):
        block = b"1" * size  # touched, so resident
        found = process.resident_peak()
        known = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None and known is not None
        assert 0 <= int(known[1]) * 1024 - found < 1 << 20  # pages of this very test
        del block


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_products_with_a_dtype_for_their_output_are_counted(name: str) -> None:
    """`addmm.dtype`, which only a card has: Liger's fused loss adds up its gradients with it. 2 m n k, by shapes."""
    left, right = torch.empty(4, 8, device="meta"), torch.empty(8, 16, device="meta")
    if name.endswith("bmm"):
        left, right = left.expand(3, 4, 8), right.expand(3, 8, 16)
    bias = [torch.empty(16, device="meta")] * name.startswith(("add", "badd"))
    formula = dispatch_modes.FORMULAS[getattr(torch.ops.aten, name)]
    flops = 2 * 4 * 8 * 16 * (3 if name.endswith("bmm") else 1)
    assert formula(*bias, left, right, torch.float32, out_val=None) == flops
    assert formula(*bias, left, right, out_val=None) == flops
