"""Compare each call's kernels and memory on an H200 (results/reference/h200-141gb/operators.json, made by
benchmarks/operators_on_a_card.py) with those of a trace of the same calls.

Two kinds of calls are not compared. Flash attention pads heads of a width that 8 does not divide once more, and
splits keys where the grid is small. The memory-efficient kernel copies the gradient before it makes its outputs, not
after, which only sizes that differ show.
"""

import itertools
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

from vramsweep.runners.trace import sdpa_kernels, trace_data
from vramsweep.runners.trace.cuda_allocations import Stepwise, scratch
from vramsweep.runners.trace.cuda_emulation import behave
from vramsweep.runners.trace.step_tracer import Tracer
from vramsweep.runners.trace.symbolic_trace import Point, compiled, following
from vramsweep.runners.trace.trace_data import WORKSPACES, cublas_workspace

HOPPER = (9, 0)
WORKSPACE = cublas_workspace(HOPPER)


@cache
def on_the_card() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / "reference" / "h200-141gb" / "operators.json").read_text())
    return found


@pytest.fixture(autouse=True)
def torch_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.11: cuDNN first, whatever the dropout."""
    monkeypatch.setattr(trace_data, "CUDNN_FIRST", True)
    monkeypatch.setattr(sdpa_kernels, "IN_SIXTEENTHS", False)


def mask_of(kind: str, batch: int, length: int, dtype: torch.dtype) -> torch.Tensor | None:
    if kind == "bool":
        return torch.ones(batch, 1, length, length, dtype=torch.bool).tril()
    if kind == "float":
        return torch.zeros(batch, 1, length, length, dtype=dtype)
    if kind == "row":
        return torch.ones(batch, 1, 1, length, dtype=torch.bool)
    return None


def asked(tracer: Tracer, first: int, last: int) -> list[int]:
    """Sizes asked for and given back (negative) between two events; the card had a handle's workspace before."""
    trace = tracer.trace
    events = [e for e in trace.events[first:last] if trace.categories[abs(e) - 1] != WORKSPACES]
    return [trace.sizes[abs(e) - 1] * (1 if e > 0 else -1) for e in events]


def shown(sizes: list[int]) -> tuple[list[int], int]:
    """Return the requested sizes in order, and the most bytes held. Left out are blocks of the smallest size (seeds,
    whose order differs) and the workspace that the GPU's handle for fp32 took in the first such call."""
    kept = [size for size in sizes if abs(size) > 512 and size != WORKSPACE]
    return [size for size in kept if size > 0], max(itertools.accumulate(kept))


def called(case: dict[str, Any]) -> tuple[set[str], list[int], list[int]]:
    """Kernels, and what forward and backward pass ask for."""
    batch, heads, shared, length, width, wide = case["shape"]
    dtype = getattr(torch, case["dtype"])
    tracer = Tracer(HOPPER)
    with behave(HOPPER) as kernels, tracer.record():
        sizes = ((heads, width), (shared, width), (shared, wide))
        made = [torch.randn(batch, length, h, w, dtype=dtype).transpose(1, 2) for h, w in sizes]
        for tensor in made:
            tensor.requires_grad_()
        mask, grad = mask_of(case["mask"], batch, length, dtype), torch.ones(batch, heads, length, wide, dtype=dtype)
        events = [len(tracer.trace.events)]
        out = F.scaled_dot_product_attention(
            *made, attn_mask=mask, dropout_p=case["dropout"], is_causal=case["mask"] == "causal",
            enable_gqa=case["gqa"],
        )  # fmt: skip
        events.append(len(tracer.trace.events))
        out.backward(grad)
        events.append(len(tracer.trace.events))
    return kernels, asked(tracer, *events[:2]), asked(tracer, *events[1:])


def cases(served: bool) -> Iterator[dict[str, Any]]:
    yield from (case for case in on_the_card()["attention"] if ("kernel" in case) == served)


@pytest.mark.slow
def test_the_kernel_is_the_card_s_and_takes_what_it_took() -> None:
    compared: dict[str, int] = {}
    for case in cases(served=True):
        kernels, *ours = called(case)
        assert sorted(kernels) == case["kernel"], case
        (kernel,) = kernels
        *_, width, wide = case["shape"]
        if kernel == "flash" or (kernel == "efficient" and width != wide):
            continue
        assert [*map(shown, ours)] == [shown(case["forward"]), shown(case["backward"])], case
        compared[kernel] = compared.get(kernel, 0) + 1
    assert compared == {"cudnn": 220, "efficient": 95, "math": 62}


def test_what_the_card_refused_is_refused() -> None:
    refused = list(cases(served=False))
    assert len(refused) == 15
    for case in refused:
        with pytest.raises(RuntimeError, match=r"must match the size|expand"):
            called(case)


@pytest.mark.slow
def test_sums_over_rows_take_what_they_took() -> None:
    for case in on_the_card()["sums"]:
        tracer = Tracer(HOPPER)
        with behave(HOPPER), tracer.record():
            made = torch.randn(case["rows"], case["columns"], dtype=getattr(torch, case["dtype"]))
            first = len(tracer.trace.events)
            kept = made.sum(0, keepdim=True)
            last = len(tracer.trace.events)
        assert kept.shape == (1, case["columns"])
        assert [size for size in asked(tracer, first, last) if size] == case["requests"], case  # 0: nothing


def test_the_formula_of_a_sum_s_scratch_says_what_it_takes() -> None:
    """The text, for lengths that were not traced, and the number of the traced one; rows where nothing is taken too."""
    taken = []
    for rows, columns in itertools.product((1, 17, 255, 4096, 8191, 65536, 10_000_001), (1, 2, 30, 768, 2304, 50257)):
        for capability in (HOPPER, (7, 5)):
            asked_for = scratch(
                torch.ops.aten.sum.dim_IntList, (torch.empty(rows, columns, device="meta"), [0]), capability
            )
            for size in asked_for:
                assert isinstance(size, Stepwise) and size.of == rows
                assert compiled(following(size.text, "seq_len * micro_batch"))(Point(rows, 1)) == size.size
                taken.append(size.size)
    assert 0 < taken.count(0) < len(taken)


@pytest.mark.parametrize(
    ("shape", "dims", "dtype", "device"),
    [
        ((), [0], torch.float32, "cpu"),
        ((), [-1], torch.float32, "cpu"),
        ((65536,), [0], torch.float32, "cpu"),
        ((0, 64), [0], torch.float32, "cpu"),
        ((65536, 0), [0], torch.float32, "cpu"),
        ((65536, 64), [1], torch.float32, "cpu"),
        ((65536, 64), [0], torch.int64, "cpu"),
        ((65536, 64), [0], torch.float64, "cpu"),
        ((65536, 64), [0], torch.float32, "meta"),  # in host memory
    ],
)
def test_what_is_no_sum_over_many_rows_takes_nothing(
    shape: tuple[int, ...], dims: list[int], dtype: torch.dtype, device: str
) -> None:
    tracer = Tracer(HOPPER)
    with behave(HOPPER), tracer.record():
        made = torch.ones(shape, dtype=dtype, device=device)
        first = len(tracer.trace.events)
        kept = made.sum(dims)
        last = len(tracer.trace.events)
    assert kept.dtype is made.dtype
    assert not any(size < 0 for size in asked(tracer, first, last))  # nothing is given back


def test_a_formula_has_no_end_that_a_file_could_choose() -> None:
    with pytest.raises(ValueError, match="no formula"):
        following("{}" * 5000, "seq_len * micro_batch")
