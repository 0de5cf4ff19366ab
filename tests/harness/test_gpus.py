"""The table of GPUs: names as drivers give them."""

from __future__ import annotations

import pytest

from vramsweep.harness import gpus


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA A10", "a10-24gb"),
        ("Tesla T4", "t4-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090", "rtx3090-24gb"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A10G", None),
        ("NVIDIA A1000", None),
        ("NVIDIA L40", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("", None),
    ],
)
def test_find(name: str, expected: str | None) -> None:
    found = gpus.find(name)
    assert (found.name if found else None) == expected


def test_peaks_follow_the_precision_and_the_unknown_is_none() -> None:
    assert gpus.peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert gpus.peak_flops("NVIDIA H100 80GB HBM3", "fp32") == 67e12
    assert gpus.peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert gpus.peak_flops("Tesla T4", "bf16") is None
    assert gpus.peak_flops("Some Future Card", "bf16") is None


def test_names_are_unique() -> None:
    assert len({gpu.name for gpu in gpus.GPUS}) == len(gpus.GPUS)


def test_a_figure_in_another_unit_would_stand_out() -> None:
    """FLOPs per byte at the peaks: from 9.6 (A100, fp32) to 106 (L40S), and from 76 (RTX 3090, half) to 419 (L40S)."""
    for gpu in gpus.GPUS:
        assert 5 < gpu.fp32 / gpu.bandwidth < 150, gpu.name
        assert 50 < (gpu.half or 0) / gpu.bandwidth < 500, gpu.name
