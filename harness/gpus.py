"""Published figures of common GPUs: memory, its bandwidth, dense peak FLOP/s per precision. Nothing is measured here.

Sources are NVIDIA's data sheets and architecture white papers of each product: dense rates, that is, without structured
sparsity, tensor cores with fp32 accumulation. A GPU that is not listed has no known peak, and MFU is then null.
"""

from __future__ import annotations

from dataclasses import dataclass

TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """One product: `match` must all occur in the device's name, `memory_gib` is the nominal size.

    `bandwidth` is the memory's, in bytes/s; `capability` is the CUDA compute capability. Where one line stands for
    several products (an A100 may be SXM or PCIe), the figures are those of the fastest.
    """

    name: str
    match: tuple[str, ...]
    memory_gib: int
    bandwidth: float
    capability: tuple[int, int]
    fp32: float
    tf32: float | None
    half: float | None  # fp16 with fp32 accumulation
    bf16: float | None


# Longer names first: the first whose words all occur in the device's name wins.
GPUS: tuple[Gpu, ...] = (
    Gpu("b200", ("B200",), 180, 8 * TERA, (10, 0), 80 * TERA, 1100 * TERA, 2250 * TERA, 2250 * TERA),
    Gpu("h200-141gb", ("H200",), 141, 4.8 * TERA, (9, 0), 67 * TERA, 494.7 * TERA, 989.4 * TERA, 989.4 * TERA),
    Gpu("h100-nvl-94gb", ("H100", "NVL"), 94, 3.9 * TERA, (9, 0), 60 * TERA, 417.5 * TERA, 835.5 * TERA, 835.5 * TERA),
    Gpu("h100-pcie-80gb", ("H100", "PCIe"), 80, 2 * TERA, (9, 0), 51 * TERA, 378 * TERA, 756 * TERA, 756 * TERA),
    Gpu("h100-80gb", ("H100",), 80, 3.35 * TERA, (9, 0), 67 * TERA, 494.7 * TERA, 989.4 * TERA, 989.4 * TERA),
    Gpu("a100-40gb", ("A100", "40GB"), 40, 1.555 * TERA, (8, 0), 19.5 * TERA, 156 * TERA, 312 * TERA, 312 * TERA),
    Gpu("a100-80gb", ("A100",), 80, 2.039 * TERA, (8, 0), 19.5 * TERA, 156 * TERA, 312 * TERA, 312 * TERA),
    Gpu("l40s-48gb", ("L40S",), 48, 0.864 * TERA, (8, 9), 91.6 * TERA, 183 * TERA, 362 * TERA, 362 * TERA),
    Gpu("l4-24gb", ("L4",), 24, 0.3 * TERA, (8, 9), 30.3 * TERA, 60 * TERA, 121 * TERA, 121 * TERA),
    Gpu("a10-24gb", ("A10",), 24, 0.6 * TERA, (8, 6), 31.2 * TERA, 62.5 * TERA, 125 * TERA, 125 * TERA),
    Gpu("a30-24gb", ("A30",), 24, 0.933 * TERA, (8, 0), 10.3 * TERA, 82 * TERA, 165 * TERA, 165 * TERA),
    Gpu("v100-32gb", ("V100", "32GB"), 32, 0.9 * TERA, (7, 0), 15.7 * TERA, None, 125 * TERA, None),
    Gpu("v100-16gb", ("V100",), 16, 0.9 * TERA, (7, 0), 15.7 * TERA, None, 125 * TERA, None),
    Gpu("t4-16gb", ("T4",), 16, 0.32 * TERA, (7, 5), 8.1 * TERA, None, 65 * TERA, None),
    Gpu(
        "rtx4090-24gb", ("RTX", "4090"), 24, 1.008 * TERA, (8, 9), 82.6 * TERA, 82.6 * TERA, 165.2 * TERA, 165.2 * TERA
    ),
    Gpu("rtx3090-24gb", ("RTX", "3090"), 24, 0.936 * TERA, (8, 6), 35.6 * TERA, 35.6 * TERA, 71 * TERA, 71 * TERA),
)


# A name with one of these is another product than the one without, or a slice of it, and none of those is listed.
VARIANTS = {"Ti", "D", "SUPER", "Laptop", "Max", "MIG"}


def named(name: str | None) -> Gpu:
    """The product of this name in the table. Raises KeyError for a name that is not there."""
    return {gpu.name: gpu for gpu in GPUS}[str(name)]


def find(device_name: str) -> Gpu | None:
    """The product a driver's device name ("NVIDIA H100 80GB HBM3") stands for, or None if it is not listed."""
    words = set(device_name.replace("-", " ").split())
    if words & VARIANTS:
        return None
    return next((gpu for gpu in GPUS if words.issuperset(gpu.match)), None)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak in FLOP/s for one of the trial's precisions, or None if it is not known."""
    gpu = find(device_name)
    if gpu is None:
        return None
    return {"fp32": gpu.fp32, "tf32": gpu.tf32, "fp16": gpu.half, "bf16": gpu.bf16, "bf16_pure": gpu.bf16}[precision]
