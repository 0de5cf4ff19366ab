"""A look at a GPU: made-up readings give back their factors; rehearsed, its calls cost what is counted by hand."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import speed_readings
import torch
from measured_speeds import make_speeds
from speed_readings import Look, main

from vramsweep.harness.hardware.gpu_lookup import gpu_named
from vramsweep.harness.hardware.roofline import Work
from vramsweep.harness.hardware.step_time import pooled, time_kernel

SECONDS = [0.002, 0.001, 0.003]


def reading(kind: str, weight: float = 1.0, seconds: list[float] = SECONDS, **cost: Any) -> dict[str, Any]:
    """Make a reading; the median of its seconds is 2 ms if nothing else is said."""
    zero = {"precision": "", "flops": 0, "nbytes": 0, "launches": 1}
    return {"kind": kind, "what": "made up", "weight": weight, "seconds": seconds, **zero, **cost}


def test_factors_are_those_of_made_up_readings_and_the_rest_is_pooled() -> None:
    """An H100's data sheet: 989.4 TFLOP/s in bf16, 67 in fp32, 3.35 TB/s."""
    half = {"precision": "bf16", "nbytes": 1}
    speeds, kept = make_speeds(
        [
            reading("product half", 0.2, flops=round(989.4e9), **half),  # 1 ms at the peak, so a factor of 2
            reading("product half", 0.5, flops=round(989.4e9 / 2), **half),  # 4, with the most weight
            reading("product half", 0.2, flops=round(989.4e9 / 50), **half),  # 100
            reading("product fp32", precision="fp32", flops=10**6, nbytes=round(3.35e9)),  # bound by its bytes: 2
            reading("stream", nbytes=round(3.35e9 / 4)),  # 8
            reading("kernel", launches=1000),
            reading("host plain", launches=100, seconds=[0.001, 0.002, 0.004]),
            reading("host call"),
        ],
        gpu_named("h100-80gb"),
        "made up",
    )
    known = {kind: factor * 0.999 for kind, factor in {"product half": 4, "product fp32": 2, "stream": 8}.items()}
    timed = time_kernel(Work("bf16", round(989.4e9 / 2), 1, 1), gpu_named("h100-80gb"), False, speeds)
    assert timed == ("product half", pytest.approx(0.001998))  # and 2 us, the least time of a kernel, are 2 ms as read
    assert speeds.factors == pytest.approx({**pooled().factors, **known}, rel=1e-6)
    assert (speeds.gpu, speeds.kernel_s) == ("h100-80gb", pytest.approx(2e-6))
    assert speeds.host_s == pytest.approx({**pooled().host_s, "plain": 2e-5})
    assert speeds.spread["host"] == pytest.approx(1.96 * 0.693147, rel=1e-4)  # each reading is twice the one before
    assert speeds.spread["gpu"] == pooled().spread["gpu"]
    names = {*pooled().factors, "kernel", *(f"host {name}" for name in pooled().host_s)}
    assert set(kept) == names - {*known, "kernel", "host plain"}

    quiet = [reading("product half", precision="bf16", flops=10**12), reading("host plain", seconds=[0.002, 0.002])]
    speeds, _ = make_speeds(quiet, gpu_named("t4-16gb"), "made up")  # which has no peak in bf16
    assert speeds.factors == pooled().factors and speeds.spread == pooled().spread


@pytest.mark.slow
def test_costs_of_calls_are_those_counted_by_hand() -> None:
    look = Look("cpu")
    for kind, what, call, weight in look.products("product fp32", torch.float32):
        tokens, inputs, outputs = (int(word) for word in what.replace(",", "").split() if word.isdigit())
        found = look.read("fp32", kind, what, call, weight)
        assert found["flops"] == 2 * tokens * inputs * outputs
        assert found["nbytes"] == 4 * (tokens * inputs + inputs * outputs + tokens * outputs)
    cost = {kind: look.read("", kind, *rest) for kind, *rest in look.optimizers()}
    seven = 7 * 4 * 20 * (5_000_000 // 64)  # reads and writes parameters and both moments, and reads gradients
    assert cost["optimizer fused"]["nbytes"] == pytest.approx(seven, rel=1e-3)
    assert cost["optimizer foreach"]["nbytes"] > 2 * seven and len(cost["optimizer fused"]["seconds"]) == 6


@pytest.mark.slow
def test_a_part_that_fails_is_left_out_and_an_interrupt_keeps_what_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Look, *_: Any) -> Iterator[Any]:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        yield

    def stop(self: Look) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    for name, part in (("products", fail), ("host", fail), ("attention", fail), ("optimizers", stop)):
        monkeypatch.setattr(Look, name, part)
    monkeypatch.setattr(speed_readings, "BATCHES", 1)
    with pytest.raises(KeyboardInterrupt):
        main("cpu", "cpu", tmp_path / "speeds.json")
    found = json.loads((tmp_path / "speeds.json").read_text())
    assert found["left_out"] == dict.fromkeys(
        ["rest of product half", "rest of host", "rest of attention"], "CUDA out of memory."
    )
    assert found["gpu"] == "cpu" and {one["kind"] for one in found["readings"]} == {"stream", "kernel"}
    assert {"product half", "host plain"} <= set(found["pooled"]) and "stream" not in found["pooled"]
