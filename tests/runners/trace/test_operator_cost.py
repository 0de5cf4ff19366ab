"""Test the costs of operators against counts made by hand, and whole steps against the formulas of the literature."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import ROOT, tiny
from torch._subclasses.fake_tensor import FakeTensorMode
from traces import A100, SIMULATED, Works, trace_trial

from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.hardware.roofline import ATTENTION, Work, estimate
from vramsweep.harness.spec import trial, trial_parser
from vramsweep.runners.predict import predicted_row
from vramsweep.runners.trace import cuda_emulation, operator_cost
from vramsweep.runners.trace.trace_data import Trace

pytestmark = pytest.mark.deterministic

CAPABILITY = A100.capability


def asked(run: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Any]:
    """Run `run` on tensors of these shapes; return the work of each operator."""
    with cuda_emulation.behave(CAPABILITY), FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
        with Works() as works:
            run(*tensors)
    return works.seen


def test_operators_by_hand() -> None:
    m, k, n = 64, 128, 256
    product = Work("fp32", 2 * m * k * n, 4 * (m * k + k * n + m * n), 1)
    assert asked(lambda a, b: a @ b.t(), (m, k), (n, k)) == [("mm", product)]  # the transpose is a view
    half = Work("bf16", 2 * m * k * n, 2 * (m * k + k * n + m * n), 1)
    assert asked(torch.mm, (m, k), (k, n), dtype=torch.bfloat16) == [("mm", half)]
    [(_, odd)] = asked(torch.mm, (m, k), (k, 257), dtype=torch.bfloat16)  # rows of 514 bytes
    assert odd.kind == "unaligned bf16" and odd.flops == 2 * m * k * 257

    elements = m * k
    assert asked(lambda a: a * a, (m, k)) == [("mul", Work("", 0, 4 * 2 * elements, 1))]  # read once
    assert asked(lambda a, b: a.add_(b), (m, k), (m, k)) == [("add_", Work("", 0, 4 * 3 * elements, 1))]
    assert asked(lambda a, b: a.copy_(b), (m, k), (m, k)) == [("copy_", Work("", 0, 4 * 2 * elements, 1))]
    assert asked(lambda a: a.zero_(), (m, k)) == [("zero_", Work("", 0, 4 * elements, 1))]
    assert asked(torch.zeros_like, (m, k)) == [("zeros_like", Work("", 0, 4 * elements, 1))]
    expanded = asked(lambda a, row: a + row.expand(m, k), (m, k), (k,))
    assert expanded == [("add", Work("", 0, 4 * (2 * elements + k), 1))]
    assert asked(lambda a: a[:, :16] + 1, (m, k)) == [("add", Work("", 0, 4 * 2 * m * 16, 1))]
    assert asked(lambda a: (a.view(-1), a.t(), a.detach(), a[0], a.expand(2, m, k), torch.empty_like(a)), (m, k)) == []


def test_an_embedding_reads_the_rows_that_it_is_asked_for() -> None:
    rows, width, vocabulary = 8, 32, 50_000
    seen = asked(lambda table: F.embedding(torch.zeros(rows, dtype=torch.int64), table), (vocabulary, width))
    name, found = seen[-1]
    assert name == "embedding"
    assert 4 * 2 * rows * width <= found.nbytes <= 4 * 2 * rows * width + 2 * 8 * rows


@pytest.mark.parametrize(
    ("dtype", "kind", "kernel"), [(torch.bfloat16, "bf16", "flash"), (torch.float32, "3xtf32", "efficient")]
)
def test_attention_is_one_kernel_and_the_causal_one_half_of_it(dtype: torch.dtype, kind: str, kernel: str) -> None:
    batch, heads, length, width = 2, 4, 128, 64
    shape = (batch, heads, length, width)

    def run(causal: bool) -> Work:
        seen = asked(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), shape, shape, shape, dtype=dtype
        )
        assert [name for name, _ in seen] == [f"_scaled_dot_product_{kernel}_attention"]
        return seen[0][1]

    full = run(causal=False)
    assert full.flops == 4 * batch * heads * length * length * width
    assert (full.kind, full.launches) == (f"{ATTENTION}{kind}", 1)
    assert full.nbytes == pytest.approx(4 * batch * heads * length * width * dtype.itemsize, rel=0.03)
    assert run(causal=True).flops == full.flops // 2


def test_a_formula_that_does_not_fit_leaves_the_speed_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def misfit(*args: Any, **kwargs: Any) -> int:
        raise ValueError("made to fail")

    monkeypatch.setitem(operator_cost.FORMULAS, torch.ops.aten.mm, misfit)
    [(_, found)] = asked(torch.mm, (8, 8), (8, 8))
    assert estimate([(found, 1)], A100, tf32=False) is None


def traced(folder: Path, model: dict[str, Any] | None = None, **over: Any) -> tuple[trial.Trial, Trace, int]:
    values = tiny(device=SIMULATED, **over)
    values["model"] = model or values["model"]
    trace, details = trace_trial(values, folder)
    return trial_parser.parse(values), trace, details["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_of_gpt2_has_the_flops_of_the_formula(tmp_path: Path, precision: str) -> None:
    """6 per matrix weight and token (Kaplan et al., 2020), and causal attention: 2 products forward, 5 backward."""
    batch, length, layers, width = 4, 256, 3, 768
    model = yaml.safe_load((ROOT / "conf/model/gpt2.yaml").read_text())
    model["config"]["n_layer"] = layers
    _, trace, parameters = traced(tmp_path, model, seq_len=length, micro_batch=batch, precision=precision)
    matrices = parameters - 1024 * width  # position embeddings are looked up
    attention = layers * batch * (2 + 5) * 2 * length * length * width // 2
    flops = sum(count * work.flops for work, count in trace.kernels)
    assert flops == pytest.approx(6 * matrices * batch * length + attention, rel=0.005)


@pytest.mark.slow
def test_the_optimizer_s_bytes_and_launches(tmp_path: Path) -> None:
    """The difference to SGD shows what AdamW moves; SGD reads the weight and its gradient, and writes the weight."""

    def total(optimizer: str) -> tuple[int, int, int]:
        _, trace, parameters = traced(tmp_path, optimizer=optimizer, seq_len=8, micro_batch=1)
        moved = sum(count * work.nbytes for work, count in trace.kernels)
        return moved, sum(count * work.launches for work, count in trace.kernels), 4 * parameters

    sgd, sgd_launches, weights = total("sgd")
    fused, fused_launches, _ = total("adamw_torch_fused")
    foreach, foreach_launches, _ = total("adamw_torch")
    # fused: reads weight, gradient and two moments, writes all but the gradient: 7 against 3
    assert fused - sgd == pytest.approx(4 * weights, rel=0.01)
    # foreach: decay 2, lerp 3, square's decay 2, addcmul 3, sqrt 2, two scalings 2 each, addcdiv 4
    assert foreach - sgd == pytest.approx((20 - 3) * weights, rel=0.01)
    assert 1 <= fused_launches < foreach_launches
    assert foreach_launches - sgd_launches >= 7


@pytest.mark.slow
def test_only_the_last_step_counts_and_accumulation_multiplies_it(tmp_path: Path) -> None:
    def columns(**over: Any) -> dict[str, Any]:
        chosen, trace, _ = traced(tmp_path, **({"seq_len": 512, "micro_batch": 4} | over))
        return predicted_row.speed(chosen, trace, A100)[0]

    one, four = columns(), columns(grad_accum=4)
    assert one["estimated_tokens_per_s"] == pytest.approx(4 * 512 / one["estimated_step_s"])
    assert four["estimated_tokens_per_s"] == pytest.approx(4 * 4 * 512 / four["estimated_step_s"])
    assert four["estimated_flops"] == 4 * one["estimated_flops"]
    # one optimizer's step instead of four, and gradients are added up
    assert four["estimated_step_s"] == pytest.approx(4 * one["estimated_step_s"], rel=0.1)
    parts = [one[f"estimated_{part}_s"] for part in ("compute", "memory", "launch")]
    assert sum(parts) == pytest.approx(one["estimated_step_s"])
    assert min(parts) >= 0
    recomputed = columns(checkpointing="full")
    assert 1.2 < recomputed["estimated_flops"] / one["estimated_flops"] < 4 / 3


@pytest.mark.slow
def test_no_estimate_where_a_peak_is_unknown_or_others_set_the_pace(tmp_path: Path) -> None:
    chosen, trace, _ = traced(tmp_path, precision="bf16", seq_len=64)
    whole, why = predicted_row.speed(chosen, trace, A100)
    assert whole["estimated_step_s"] > 0 and why is None

    def untimed(one: trial.Trial, card: gpu_lookup.Gpu = A100) -> str:
        """Why there is no time; what needs none is there all the same."""
        found, why = predicted_row.speed(one, trace, card)
        assert "estimated_step_s" not in found and why is not None
        assert found["estimated_flops"] == whole["estimated_flops"] > 0
        assert found["estimated_moved_bytes"] == whole["estimated_moved_bytes"]
        return why

    assert "a peak rate of t4-16gb" in untimed(chosen, gpu_lookup.gpu_named("t4-16gb"))
    assert "host limits the speed" in untimed(chosen.model_copy(update={"offload_optimizer": True}))
    ranks = chosen.model_copy(update={"sharding": "fsdp2", "world_size": 16})
    assert "device.interconnect (between nodes)" in untimed(ranks)  # nobody said what links the two nodes
    linked = ranks.model_copy(update={"device": chosen.device.model_copy(update={"interconnect": "ib-hdr200"})})
    found, why = predicted_row.speed(linked, trace, A100)
    assert found["estimated_link"] and why is None


@pytest.mark.slow
def test_tf32_is_faster_than_fp32_by_its_matrix_products_only(tmp_path: Path) -> None:
    chosen, trace, _ = traced(tmp_path, seq_len=512, micro_batch=4)
    tf32 = chosen.model_copy(update={"precision": "tf32"})
    plain, fast = (predicted_row.speed(one, trace, A100)[0] for one in (chosen, tf32))
    assert fast["estimated_compute_s"] < plain["estimated_compute_s"]
    assert fast["estimated_moved_bytes"] == plain["estimated_moved_bytes"]
    assert fast["estimated_step_s"] < plain["estimated_step_s"]
