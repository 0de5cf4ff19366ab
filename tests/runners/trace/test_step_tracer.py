"""Tracing: every byte has a category, and CUDA's kernels are the ones that run."""

import gc
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, source, tiny
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from traces import A100, SIMULATED, small, trace_trial, traced_once

from vramsweep.harness.allocator.config import parse
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.spec import trial_parser
from vramsweep.runners.loops import torch_loop
from vramsweep.runners.predict import make_trace, trace_cache
from vramsweep.runners.predict.replay_trace import replay
from vramsweep.runners.trace import cuda_emulation
from vramsweep.runners.trace.step_tracer import Tracer
from vramsweep.runners.trace.trace_data import CATEGORIES, cublas_workspace, on

pytestmark = pytest.mark.deterministic


def test_the_stream_is_consistent() -> None:
    trace = traced_once()
    there: set[int] = set()
    for event in trace.events:
        if event > 0:
            assert event not in there
            there.add(event)
        else:
            there.remove(-event)
    assert [(m.step, m.phase) for m in trace.marks[:4]] == [
        (None, "load"), (0, "forward"), (0, "backward"), (0, "optimizer"),
    ]  # fmt: skip
    assert len(trace.marks) == 10
    assert set(trace.categories) <= set(CATEGORIES)


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:128"])
def test_the_breakdown_sums_to_the_peak(conf: str) -> None:
    trace = traced_once()
    predicted = replay(trace, parse(conf), None)
    assert sum(predicted.breakdown.values()) == predicted.peak["allocated"]
    assert predicted.peak["requested"] <= predicted.peak["allocated"] <= predicted.peak["reserved"]
    assert predicted.refused is None
    short = replay(trace, parse(conf), predicted.peak["reserved"] - (1 << 20))
    assert short.refused is not None
    assert sum(short.refused.parts.values()) == short.refused.allocated + short.refused.request
    assert trace.sizes[short.refused.storage] == short.refused.request > 0


def test_every_accumulated_pass_has_its_phases() -> None:
    accumulated = traced_once(grad_accum=2)
    assert Counter(m.phase for m in accumulated.marks) == {"load": 1, "forward": 6, "backward": 6, "optimizer": 3}


def test_workspaces() -> None:
    assert cublas_workspace((9, 0)) == 33_554_432
    assert cublas_workspace((8, 9)) == 8_519_680


class Operators(TorchDispatchMode):
    """Names of the operators that reach the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def ran(capability: tuple[int, int], work: Callable[[], Any]) -> tuple[list[str], Any]:
    operators = Operators()
    with cuda_emulation.behave(capability), FakeTensorMode(), operators:
        result = work()
    return operators.names, result


@pytest.mark.parametrize(
    ("capability", "dtype", "masked", "kernel"),
    [
        ((8, 0), torch.bfloat16, False, "_scaled_dot_product_flash_attention"),
        ((8, 0), torch.bfloat16, True, "_scaled_dot_product_efficient_attention"),
        ((8, 0), torch.float32, False, "_scaled_dot_product_efficient_attention"),
        ((7, 5), torch.float16, False, "_scaled_dot_product_efficient_attention"),
        ((7, 5), torch.bfloat16, False, "bmm"),
    ],
)
def test_attention_is_the_card_s(capability: tuple[int, int], dtype: torch.dtype, masked: bool, kernel: str) -> None:
    def work() -> torch.Tensor:
        q, k, v = (torch.empty(2, 4, 24, 64, dtype=dtype, requires_grad=True) for _ in range(3))
        mask = torch.ones(24, 24, dtype=torch.bool) if masked else None
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked)
        out.sum().backward()
        assert q.grad is not None
        return out

    names, out = ran(capability, work)
    assert kernel in names
    assert out.shape == (2, 4, 24, 64)


def test_autocast_is_cuda_s() -> None:
    def work() -> tuple[torch.dtype, ...]:
        weight, x = torch.empty(8, 8, requires_grad=True), torch.empty(4, 8)
        with torch.autocast("cuda", torch.bfloat16):
            y = F.linear(x, weight)
            again = x @ weight
            normed = F.layer_norm(y, (8,))
            return y.dtype, again.dtype, normed.dtype, y.softmax(-1).dtype, y.sum().dtype, (y + x).dtype

    names, dtypes = ran((8, 0), work)
    assert dtypes == (torch.bfloat16, torch.bfloat16, *[torch.float32] * 4)
    assert (
        names.count("_to_copy") == 5
    )  # the weight once, x twice, y for the norm and for softmax; sum casts as it goes


def test_the_policy_names_only_operators_that_cuda_casts() -> None:
    known = cuda_emulation._registered("AutocastCUDA")
    assert (cuda_emulation.LOWER | cuda_emulation.PROMOTE | cuda_emulation.FP32_OUTPUT) - known <= {
        "linalg_vecdot",
        "prod.dim_int",
    }


def test_dropout_keeps_a_byte_mask_and_optimizers_run_foreach() -> None:
    def work() -> None:
        x = torch.nn.Parameter(torch.empty(16))
        F.dropout(x, 0.1).sum().backward()
        torch.nn.utils.clip_grad_norm_([x], 1.0)
        torch.optim.AdamW([x]).step()

    operators = Operators()
    with cuda_emulation.behave((8, 0)), Tracer((8, 0)).record(), operators:
        work()
    assert "native_dropout" in operators.names
    assert any(name.startswith("_foreach_norm") for name in operators.names)
    assert any(name.startswith("_foreach_addcdiv") for name in operators.names)


@pytest.mark.slow
def test_a_cold_worker_s_model_finds_cuda_s_ways_too() -> None:
    """transformers' mask module is first imported by the model, inside: it would test positions and build a mask."""
    code = (
        "import sys; from vramsweep.runners.trace import cuda_emulation\n"
        "assert 'transformers.masking_utils' not in sys.modules\n"
        "with cuda_emulation.behave((8, 0)):\n"
        "    from transformers.masking_utils import find_packed_sequence_indices as find\n"
        "    assert find(None) is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_behaviour_ends_with_its_context() -> None:
    before = torch.cuda.synchronize, torch.clear_autocast_cache, torch.amp.autocast_mode.autocast.__init__
    with cuda_emulation.behave((8, 0)):
        assert torch.cuda.synchronize is not before[0]
    assert before == (torch.cuda.synchronize, torch.clear_autocast_cache, torch.amp.autocast_mode.autocast.__init__)
    operators = Operators()
    with operators:
        F.dropout(torch.ones(4, requires_grad=True), 0.5)
    assert "native_dropout" not in operators.names


@pytest.mark.slow
@pytest.mark.parametrize("over", [{}, {"precision": "fp32", "attention": "eager"}, {"optimizer": "adafactor"}], ids=str)
def test_cards_of_one_generation_have_one_trace(tmp_path: Path, over: dict[str, Any]) -> None:
    """Only the cuBLAS workspace of compute capability 9.0 is another; before 8.0 other kernels attend, and in
    halves on 9.x and 10.x too."""
    chosen = trial_parser.parse(tiny(device=SIMULATED, **over))
    cards = ["a100-80gb", "rtx3090-24gb", "l40s-48gb", "rtx5090-32gb", "h100-80gb"]
    traces = [make_trace.trace_trial(chosen, gpu_lookup.gpu_named(card), tmp_path, torch_loop)[0] for card in cards]
    *alike, hopper = traces
    assert all(one == alike[0] for one in alike)
    changed = {c for c, a, b in zip(hopper.categories, alike[0].sizes, hopper.sizes, strict=True) if a != b}
    assert changed == {"workspaces"} and hopper.events == alike[0].events
    assert on(alike[0], (9, 0)) == hopper and on(hopper, (12, 0)) == alike[0]


@pytest.mark.slow
def test_a_kept_trace_has_the_workspaces_of_the_card_that_reads_it(tmp_path: Path) -> None:
    """And its file is the same, whichever card was first."""
    files = set()
    for first, second in (("a100-80gb", "h100-80gb"), ("h100-80gb", "a100-80gb")):
        traces = tmp_path / first
        for name in (first, second):
            card = gpu_lookup.gpu_named(name)
            chosen = trial_parser.parse(tiny(device={"name": "simulated", "gpu": name}))
            kept, _ = trace_cache.load_or_trace(chosen, card, tmp_path, traces)
            assert kept == make_trace.trace_trial(chosen, card, tmp_path, torch_loop)[0]
        files |= {(path.name, path.read_bytes()) for path in traces.iterdir()}
    assert len(files) == 1


@pytest.mark.slow
def test_the_collector_runs_at_the_end_of_a_phase_whatever_else_the_process_does(tmp_path: Path) -> None:
    chosen = trial_parser.parse(tiny(device=SIMULATED))
    first, _ = make_trace.trace_trial(chosen, A100, tmp_path, torch_loop)
    before = gc.get_threshold()
    gc.set_threshold(3)
    try:
        second, _ = make_trace.trace_trial(chosen, A100, tmp_path, torch_loop)
    finally:
        gc.set_threshold(*before)
    assert first == second and gc.isenabled()


FRESH = source("trace_in_a_fresh_process.txt")


FSDP2 = {"sharding": "fsdp2", "world_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize("over", [{"optimizer": "adafactor"}, {"adapter": "lora"}, FSDP2], ids=str)
def test_what_a_process_imports_is_not_in_its_first_trace(tmp_path: Path, over: dict[str, Any]) -> None:
    """bitsandbytes, which transformers' optimizers import, keeps two tables of 64 bytes."""
    values = tiny(device=SIMULATED, **over)
    command = [sys.executable, "-c", FRESH, json.dumps(values), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stdout + done.stderr


def added_in_place(held: bool, place: Callable[[torch.Tensor], int]) -> bool:
    """Whether autograd adds the gradients of two users of a tensor into the first's; `held`: somebody keeps them."""
    kept: list[torch.Tensor] = []
    made, got = [], []

    class Branch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            out = grads[0].clone()
            made.append(place(out))
            kept.extend([out] * held)
            return out

    shared = torch.ones(64, requires_grad=True) * 1
    shared.register_hook(lambda grad: got.append(place(grad)))
    (Branch.apply(shared) * 1 + Branch.apply(shared) * 1).sum().backward()  # type: ignore[no-untyped-call]
    return got[0] in made


@pytest.mark.parametrize("held", [False, True])
def test_gradients_are_added_in_place_where_autograd_does_so(held: bool) -> None:
    real = added_in_place(held, lambda tensor: tensor.data_ptr())  # to look at a real storage is to hold it
    with Tracer((9, 0)).record():
        traced = added_in_place(held, lambda tensor: tensor.untyped_storage()._cdata)
    assert traced == real == (not held)


def test_the_device_that_is_answered_at_once_is_torch_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracer's shortcut, beside what the operator itself says."""
    answered, real = list[tuple[torch.device, torch.device]](), Tracer.__torch_dispatch__

    def dispatch(self: Tracer, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = real(self, func, types, args, kwargs)
        if func is torch.ops.prim.device.default:
            answered.append((out, func(*args)))
        return out

    monkeypatch.setattr(Tracer, "__torch_dispatch__", dispatch)
    trace_trial(small(), tmp_path)
    assert len(answered) > 1_000
    assert all(at_once == own for at_once, own in answered)
