"""The roofline: each kernel takes what bounds it, and an unknown peak gives no estimate."""

import pytest
from conftest import parametrized

from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.hardware.roofline import ATTENTION, LAUNCH_S, Work, estimate, total_flops

H100 = gpu_lookup.gpu_named("h100-80gb")


def test_each_kernel_counts_for_what_bounds_it() -> None:
    kernels = [
        (Work("bf16", 10**12, 10**6, 1), 2),  # a large matrix product
        (Work(f"{ATTENTION}bf16", 10**12, 10**6, 1), 5),  # fused attention over a long sequence
        (Work(f"{ATTENTION}bf16", 10**6, 10**9, 1), 1),  # and over a short one, which moves more than it multiplies
        (Work("", 0, 10**9, 1), 3),  # moves a gigabyte
        (Work("", 0, 512, 1), 100),  # tiny
        (Work("", 0, 1024, 40), 1),  # tiny, but 40 launches
    ]
    found = estimate(kernels, H100, tf32=False)
    assert found is not None
    assert found.compute_s == pytest.approx(2 * 10**12 / 989.4e12)
    assert found.attention_s == pytest.approx(5 * 10**12 / 989.4e12)
    assert found.memory_s == pytest.approx(4 * 10**9 / 3.35e12)
    assert found.launch_s == pytest.approx(140 * LAUNCH_S)
    assert found.step_s == pytest.approx(found.compute_s + found.attention_s + found.memory_s + found.launch_s)
    assert total_flops(kernels) == 7 * 10**12 + 10**6


@parametrized("peaks_by_kind")
def test_peaks_by_kind(kind: str, gpu: str, tf32: bool, peak: float | None) -> None:
    found = estimate([(Work(kind, 10**15, 1, 1), 1)], gpu_lookup.gpu_named(gpu), tf32)
    assert (found and found.step_s) == (None if peak is None else pytest.approx(10**15 / peak))
