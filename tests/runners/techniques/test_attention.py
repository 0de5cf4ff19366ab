"""Attention's kernels: forced, refused and recorded on this CPU, and as a card would run them in the trace."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import ROOT, Run, parametrized, tiny
from torch._subclasses.fake_tensor import FakeTensorMode
from traces import on_this_gpu, total, trace_tiny
from transformers import modeling_flash_attention_utils as utils
from transformers.integrations.sdpa_attention import repeat_kv

from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.spec import trial, trial_parser
from vramsweep.runners.measure.dispatch_modes import SdpaKernels
from vramsweep.runners.predict import trace_cache
from vramsweep.runners.techniques.attention import STATE, flash_attn_func
from vramsweep.runners.trace.cuda_allocations import scratch
from vramsweep.runners.trace.sdpa_kernels import Attention, chosen_kernel
from vramsweep.runners.trace.trace_data import Trace, generation
from vramsweep.runners.worker import run_rank

pytestmark = pytest.mark.deterministic

GPU = "a100-80gb"
HALF: dict[str, Any] = {"precision": "bf16", "seq_len": 128, "micro_batch": 2}
LAYERS, HEADS, WIDTH = 2, 4, 16


def model(kv_heads: int) -> dict[str, Any]:
    return {"config": {"num_key_value_heads": kv_heads}}


def traced(folder: Path, gpu: str = GPU, runner: str = "torch", **over: Any) -> tuple[Trace, dict[str, Any]]:
    return trace_tiny(folder, device={"name": "simulated", "gpu": gpu}, runner={"name": runner}, **over)


def activations(trace: Trace) -> int:
    return total(trace, "activations") // 3  # of the three steps


@pytest.mark.slow
@parametrized("kernels_of_real_steps")
def test_real_steps_run_the_kernel_that_is_asked_for(
    tmp_path: Path, runner: str, attention: str, kernels: list[str] | None
) -> None:
    row = run_rank.run(trial_parser.parse(tiny(attention=attention, runner={"name": runner})), tmp_path)
    assert row is not None
    assert row["attention_kernels"] == kernels
    assert row["attention_effective"] == ("eager" if attention == "eager" else "sdpa")
    assert 5 < row["loss_last"] < 8
    assert torch.backends.cuda.math_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()


def test_a_kernel_that_torch_refuses_makes_a_trial_invalid(tmp_path: Path) -> None:
    """The CPU's flash kernel has no dropout, which GPT-2 has."""
    values = tiny(attention="sdpa_flash")
    values["model"] = yaml.safe_load((ROOT / "conf/model/gpt2.yaml").read_text())
    values["model"]["config"] |= {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 512}
    with pytest.raises(trial.InvalidTrial, match=r"attention=sdpa_flash cannot run .*dropout.*; use attention=sdpa"):
        run_rank.run(trial_parser.parse(values), tmp_path)


def test_what_runs_is_seen_whether_it_is_an_operator_or_not() -> None:
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    with SdpaKernels() as kernels:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        assert kernels.seen == {"flash"}
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        assert kernels.seen == {"flash", "math"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "over", "kernels"),
    [
        ("sdpa", {}, ["flash"]),
        ("sdpa", {"padding": 0.25}, ["efficient"]),
        ("sdpa_flash", {}, ["flash"]),
        ("sdpa_efficient", {"model": model(HEADS)}, ["efficient"]),
        ("sdpa_cudnn", {}, ["cudnn"]),
        ("sdpa_cudnn", {"padding": 0.25}, ["cudnn"]),
        ("sdpa_math", {}, ["math"]),
        ("flash_attention_2", {}, None),
    ],
)
def test_the_card_s_kernel_is_the_one_that_is_asked_for(
    tmp_path: Path, attention: str, over: dict[str, Any], kernels: list[str] | None
) -> None:
    _, details = traced(tmp_path, attention=attention, **HALF, **over)
    assert details["attention_kernels"] == kernels
    assert details["attention_effective"] == (attention if kernels is None else "sdpa")


def test_a_kernel_that_the_card_would_refuse_makes_a_trial_invalid(tmp_path: Path) -> None:
    with pytest.raises(trial.InvalidTrial, match=r"efficient: it takes no shared heads.*use attention=sdpa"):
        traced(tmp_path, attention="sdpa_efficient", **HALF)
    wide = {"config": {"head_dim": 160}}
    with pytest.raises(trial.InvalidTrial, match="at most 128"):
        traced(tmp_path, attention="sdpa_cudnn", model=wide | {"model_type": "qwen3"}, **HALF)


def test_flash_attn_is_named_where_it_is_missing() -> None:
    with pytest.raises(trial.InvalidTrial, match="pip install 'flash-attn"):
        trial_parser.parse(tiny(attention="flash_attention_2", precision="bf16", device={"name": "cuda"}))


@pytest.mark.slow
def test_scores_are_stored_by_the_formula_only(tmp_path: Path) -> None:
    def made(attention: str) -> int:
        return activations(traced(tmp_path, attention=attention, model=model(HEADS), **HALF | {"seq_len": 512})[0])

    scores = 2 * HEADS * 512 * 512  # of each layer; fp32 in the formula of torch, bf16 and fp32 in the model's
    flash, efficient, cudnn, math = (made(f"sdpa_{name}") for name in ("flash", "efficient", "cudnn", "math"))
    assert flash == pytest.approx(efficient, rel=0.001) == pytest.approx(cudnn, rel=0.001)
    assert math - flash >= LAYERS * scores * 4
    assert made("eager") - flash >= LAYERS * scores * 2


@pytest.mark.slow
def test_flash_attn_keeps_what_torch_s_flash_kernel_keeps(tmp_path: Path) -> None:
    """With as many heads of keys as of queries and with shared ones, which neither copies; to the generator's state."""
    for runner, kv_heads in (("torch", HEADS), ("torch", 2), ("torch", 1), ("trainer", 2)):
        (flash, _), (own, details) = (
            traced(tmp_path, runner=runner, attention=name, model=model(kv_heads), **HALF)
            for name in ("sdpa_flash", "flash_attention_2")
        )
        assert details["attention_effective"] == "flash_attention_2"
        assert activations(own) == pytest.approx(activations(flash), abs=LAYERS * 16)
        own_flops, flops = (sum(work.flops * n for work, n in one.kernels) for one in (own, flash))
        assert own_flops == flops


@pytest.mark.slow
def test_flash_attn_copies_no_shared_heads_where_masks_make_torch_copy_them(tmp_path: Path) -> None:
    """transformers repeats keys and values for a masked sdpa (its repeat_kv); flash-attn takes documents without."""
    packed: dict[str, Any] = {"packing": "documents", **HALF, "micro_batch": 1}

    def more(kv_heads: int) -> int:
        sdpa, own = (
            traced(tmp_path, attention=name, model=model(kv_heads), **packed)[0]
            for name in ("sdpa", "flash_attention_2")
        )
        return activations(sdpa) - activations(own)

    key = torch.empty(1, 2, 128, WIDTH, dtype=torch.bfloat16)
    copies = repeat_kv(key, HEADS // 2).nbytes - key.nbytes
    assert more(2) - more(HEADS) == LAYERS * 2 * copies > 0


def test_flash_attn_s_tensors_are_those_of_the_kernel_in_torch() -> None:
    """torch has the kernel of flash-attn too: its shapes, dense and of sequences one after the other."""
    batch, length, shared = 2, 96, 2
    with FakeTensorMode():
        q = torch.empty(batch, length, HEADS, WIDTH, dtype=torch.bfloat16)
        k = torch.empty(batch, length, shared, WIDTH, dtype=torch.bfloat16)
        out, lse, state = torch.ops.vramsweep.flash_forward(q, k, k, True, batch)
        own = torch.ops.aten._flash_attention_forward(q, k, k, None, None, length, length, 0.0, True, False)
        assert (out.shape, lse.shape, lse.dtype) == (own[0].shape, own[1].shape, own[1].dtype)
        assert state.nbytes == 16
        rows, keys = q.flatten(0, 1), k.flatten(0, 1)
        starts = torch.empty(batch + 1, dtype=torch.int32)
        out, lse, _ = torch.ops.vramsweep.flash_forward(rows, keys, keys, True, batch)
        own = torch.ops.aten._flash_attention_forward(
            rows, keys, keys, starts, starts, length, length, 0.0, True, False
        )
        assert (out.shape, lse.shape, lse.dtype) == (own[0].shape, own[1].shape, own[1].dtype)


def test_gradients_of_what_stands_in_have_the_shapes_of_their_tensors() -> None:
    with FakeTensorMode():
        for width in (WIDTH, 20):  # padded to 24
            q = torch.empty(2, 96, HEADS, width, dtype=torch.bfloat16, requires_grad=True)
            k, v = (torch.empty(2, 96, 2, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
            flash_attn_func(q, k, v, causal=True).sum().backward()
            assert all(t.grad is not None and t.grad.shape == t.shape for t in (q, k, v))


@pytest.mark.slow
def test_flash_attn_s_backward_pass_has_accumulators(tmp_path: Path) -> None:
    """Lengths rounded up to 128 and widths to 32, in fp32: the same bytes for torch's kernel and for flash-attn's."""
    grown: dict[str, int] = {}
    for attention in ("sdpa_flash", "flash_attention_2"):
        trace, _ = traced(tmp_path, attention=attention, **HALF | {"seq_len": 100, "micro_batch": 3})
        # dQ in fp32: 3 samples, 100 tokens rounded up to 128, 4 heads, width 16 rounded up to 32
        grown[attention] = sum(size == 3 * 128 * HEADS * 32 * 4 for size in trace.sizes)
    assert grown["sdpa_flash"] == grown["flash_attention_2"] > 0
    assert scratch(torch.ops.aten.mm.default, (), (8, 0)) == []


@pytest.mark.slow
def test_transformers_own_state_is_as_before(tmp_path: Path) -> None:
    before = {name: getattr(utils, name, None) for name in STATE}
    traced(tmp_path, attention="flash_attention_2", **HALF)
    assert {name: getattr(utils, name, None) for name in STATE} == before


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math"])
def test_a_card_runs_the_kernel_that_is_asked_for(run_sweep: Run, attention: str) -> None:
    asked = tiny(attention=attention, model=model(HEADS), **HALF | {"seq_len": 256})
    ((measured, predicted),) = on_this_gpu(run_sweep, asked)
    assert measured["attention_kernels"] == [attention.removeprefix("sdpa_")] == predicted["attention_kernels"]
    column = "forward_peak_allocated_bytes"
    assert predicted[column] == pytest.approx(measured[column], rel=0.05)


@pytest.mark.gpu
def test_a_card_runs_flash_attn(run_sweep: Run) -> None:
    pytest.importorskip("flash_attn")
    over = HALF | {"seq_len": 256, "attention": "flash_attention_2"}
    ways: list[dict[str, Any]] = [{}, {"padding": 0.25}, {"packing": "documents", "micro_batch": 1}]
    for measured, predicted in on_this_gpu(run_sweep, *(tiny(**over | way) for way in ways)):
        assert measured["attention_effective"] == "flash_attention_2" == predicted["attention_effective"]
        column = "forward_peak_allocated_bytes"
        assert predicted[column] == pytest.approx(measured[column], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "columns"), [(136, {136}), (132, {132, 136}), (131, {131, 136})])
def test_a_mask_is_copied_only_where_its_rows_are_not_aligned_to_8_elements(
    tmp_path: Path, length: int, columns: set[int]
) -> None:
    """As by torch 2.2.2: lengths of 8 more than a multiple of 16 held no copy on a card (the published sweep)."""
    over: dict[str, Any] = {"attention": "sdpa_efficient", "padding": 0.5, "precision": "bf16", "micro_batch": 1}
    trace, _ = traced(tmp_path, seq_len=length, **over)
    masks = [
        size // (2 * length) for size in trace.sizes if size in {2 * length * n for n in range(length, length + 16)}
    ]
    assert {n: masks.count(n) for n in set(masks)} == dict.fromkeys(columns, LAYERS * 3)


def test_cards_that_share_traces_choose_the_same_kernels() -> None:
    chosen: dict[Any, set[Any]] = {}
    with FakeTensorMode():
        for card in gpu_lookup.GPUS:
            kernels = []
            for width, shared, masked in itertools.product((64, 128, 192, 256), (8, 2), (False, True)):
                tensors = [torch.empty(1, heads, 64, width, dtype=torch.bfloat16) for heads in (8, shared, shared)]
                mask = torch.ones(1, 1, 64, 64, dtype=torch.bool) if masked else None
                asked = Attention(*tensors, mask, 0.0, False, None, shared != 8)
                kernels.append(chosen_kernel(asked, card.capability))
            chosen.setdefault(generation(card.capability, True), set()).add(tuple(kernels))
    assert len(chosen) > 2 and all(len(kinds) == 1 for kinds in chosen.values())


def test_traces_are_apart_where_cudnn_may_attend() -> None:
    def keys(**over: Any) -> set[str]:
        cards = ("a100-80gb", "rtx5090-32gb", "h100-80gb", "h200-141gb", "b200")
        trials = [(trial_parser.parse(tiny(device={"name": "simulated", "gpu": card}, **over)), card) for card in cards]
        return {trace_cache.trace_key(one, gpu_lookup.gpu_named(card)) for one, card in trials}

    assert len(keys(precision="bf16")) == 3
    assert len(keys(precision="fp32")) == len(keys(precision="bf16", attention="eager")) == 1
