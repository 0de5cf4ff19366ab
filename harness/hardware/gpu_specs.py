"""The cards that are known: published figures, each entry with its source. Data alone; what asks of it is
gpu_lookup.py.

Sources are NVIDIA's data sheet or architecture white paper of the product. Rates are dense, that is, without
structured sparsity, tensor cores with fp32 accumulation. Memory has two figures: the nominal size and what torch
reports, which is less.
"""

from __future__ import annotations

from dataclasses import dataclass

Capability = tuple[int, int]  # CUDA's compute capability: major, minor
TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """One product. `devices` are the driver's names for it, without "NVIDIA" or "Tesla" in front; no others are it.
    There are none where products share a name (an RTX 3080 of 10 GiB and one of 12, a card and a laptop's).

    `memory_gib` is the nominal size, of which `headroom_gib` are left free. `reported_mib` is torch's total_memory in
    MiB, on Linux, ECC as shipped; it differs between drivers by some hundred MiB, so this is the smallest that logs and
    messages published on GitHub give for the product ("CUDA:0 (NVIDIA L4, 22563MiB)", "_CudaDeviceProperties(name=...,
    total_memory=...)", "GPU 0 has a total capacity of 79.10 GiB"); None where none was found. `bandwidth` is the
    memory's, in bytes/s; `capability` is the CUDA compute capability; rates are in FLOP/s, None where not known.

    `multiprocessors` is torch's multi_processor_count: what the product's sheet or white paper gives (CUDA cores / 128
    from Ampere's GA102 on); for the A10G, B200, B300, H20 and RTX PRO 6000 Server what logs on GitHub say, for the H800
    DeepSeek-V3's report (arXiv:2412.19437, section 3.2).

    `link` (harness/hardware/interconnects.py) is what joins the cards of a node: NVLink where the product is a module
    for boards that have it, else the PCI Express generation of its data sheet, as bridges are extra; None where nodes
    differ.

    `product` is the listed name whose speed the card has, also where `name` says of another amount of memory; None for
    a card that is like no listed one.
    """

    name: str
    devices: tuple[str, ...]
    memory_gib: float
    reported_mib: int | None
    bandwidth: float
    capability: Capability
    multiprocessors: int
    fp32: float | None
    tf32: float | None
    half: float | None  # fp16 with fp32 accumulation
    bf16: float | None
    fp8: float | None
    source: str
    link: str | None
    product: str | None
    headroom_gib: float = 0.0


def _gpu(
    name: str,
    devices: tuple[str, ...],
    memory: tuple[int, int | None, float],
    capability: Capability,
    multiprocessors: int,
    teraflops: tuple[float | None, ...],
    source: str,
    link: str | None = None,
) -> Gpu:
    """`memory`: GiB, reported MiB, GB/s; `teraflops`: fp32, tf32, fp16, bf16 and, where it is known, fp8."""
    rates = (None if rate is None else rate * TERA for rate in teraflops)
    fp32, tf32, half, bf16, fp8, *_ = (*rates, None)
    gib, reported, bandwidth = memory
    return Gpu(
        name, devices, gib, reported, bandwidth * 1e9, capability, multiprocessors,
        fp32, tf32, half, bf16, fp8, source, link, product=name,
    )  # fmt: skip


_TURING_RTX = "NVIDIA Turing GPU Architecture white paper, appendices: reference specification"
_GA104 = "NVIDIA Ampere GA102 GPU Architecture white paper, appendix: RTX 3070"
_CORES = "product page: CUDA cores x 2 x boost clock; tensor cores twice that (fp16, bf16) and as much (tf32)"
_VOLTA = "NVIDIA V100 Tensor Core GPU data sheet"
_TURING = "NVIDIA Turing GPU Architecture white paper, appendix: T4"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture white paper"
_ADA = "NVIDIA Ada GPU Architecture white paper"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet; tensor cores as in the H100 Architecture white paper"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet"
_H800 = "as the H100, which it differs from in NVLink and fp64"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip data sheet"
_BLACKWELL = "NVIDIA Blackwell data sheet, HGX B200: per GPU"
_ULTRA = "NVIDIA Blackwell Ultra data sheet, HGX B300: per GPU"
_RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture white paper"
_PRO = "NVIDIA RTX PRO Blackwell GPU Architecture white paper"

# fmt: off
GPUS: tuple[Gpu, ...] = (
    _gpu("b300-270gb", ("B300 SXM6 AC",), (270, 274114, 7700), (10, 3), 148, (75, 1100, 2250, 2250, 4500), _ULTRA,
         link="nvlink5"),
    _gpu("b200", ("B200",), (180, 182631, 7700), (10, 0), 148, (75, 1100, 2250, 2250, 4500), _BLACKWELL,
         link="nvlink5"),
    _gpu("h200-141gb", ("H200",), (141, 143156, 4800), (9, 0), 132, (67, 494.7, 989.4, 989.4, 1979), _H200,
         link="nvlink4"),
    _gpu("h200-nvl-141gb", ("H200 NVL",), (141, 143155, 4800), (9, 0), 132, (60, 417.5, 835.5, 835.5, 1671), _H200,
         link="pcie5"),
    _gpu("gh200-144gb", ("GH200 144G HBM3e",), (144, None, 4900), (9, 0), 132, (67, 494.7, 989.4, 989.4, 1979), _GH200),
    _gpu("gh200-96gb", ("GH200 480GB", "GH200 120GB"), (96, 96768, 4000), (9, 0), 132, (67, 494.7, 989.4, 989.4, 1979),
         _GH200),  # the name counts the CPU's memory
    # torch calls it H100, as others
    _gpu("h100-96gb", (), (96, 97320, 2400), (9, 0), 132, (67, 494.7, 989.4, 989.4, 1979),
         "pytorch/torchtitan docs/performance.md: 96 GB of HBM2e, 2.4 TB/s, 500 W; rates as the H100", link="nvlink4"),
    _gpu("h100-nvl-94gb", ("H100 NVL",), (94, 95320, 3900), (9, 0), 132, (60, 417.5, 835.5, 835.5, 1671),
         "NVIDIA H100 NVL data sheet", link="pcie5"),
    _gpu("h100-pcie-80gb", ("H100 PCIe",), (80, 81008, 2000), (9, 0), 114, (51, 378, 756, 756, 1513), _H100,
         link="pcie5"),
    _gpu("h100-80gb", ("H100 80GB HBM3",), (80, 80998, 3350), (9, 0), 132, (67, 494.7, 989.4, 989.4, 1979), _H100,
         link="nvlink4"),
    _gpu("h800-80gb", ("H800",), (80, 81008, 3350), (9, 0), 132, (67, 494.7, 989.4, 989.4, 1979), _H800,
         link="nvlink4-400"),
    _gpu("h20-96gb", ("H20",), (96, 97285, 4000), (9, 0), 78, (44, 74, 148, 148, 296),
         "NVIDIA H20 product specification, as resellers print it", link="nvlink4"),
    _gpu("a100-40gb", ("A100-SXM4-40GB", "A100-PCIE-40GB"), (40, 40377, 1555), (8, 0), 108, (19.5, 156, 312, 312),
         _A100),
    _gpu("a100-80gb", ("A100-SXM4-80GB",), (80, 81038, 2039), (8, 0), 108, (19.5, 156, 312, 312), _A100,
         link="nvlink3"),
    _gpu("a100-pcie-80gb", ("A100 80GB PCIe",), (80, 81154, 1935), (8, 0), 108, (19.5, 156, 312, 312), _A100,
         link="pcie4"),
    _gpu("a800-80gb", ("A800-SXM4-80GB",), (80, 81251, 2039), (8, 0), 108, (19.5, 156, 312, 312),
         "as the A100, slower NVLink", link="nvlink3-400"),
    _gpu("a800-pcie-80gb", ("A800 80GB PCIe",), (80, 81051, 1935), (8, 0), 108, (19.5, 156, 312, 312),
         "as the A100's PCIe card", link="pcie4"),
    _gpu("a40-48gb", ("A40",), (48, 45416, 696), (8, 6), 84, (37.4, 74.8, 149.7, 149.7), "NVIDIA A40 data sheet",
         link="pcie4"),
    _gpu("a30-24gb", ("A30",), (24, 24164, 933), (8, 0), 56, (10.3, 82, 165, 165), "NVIDIA A30 data sheet",
         link="pcie4"),
    _gpu("a10-24gb", ("A10",), (24, 22599, 600), (8, 6), 72, (31.2, 62.5, 125, 125), "NVIDIA A10 data sheet",
         link="pcie4"),
    _gpu("a10g-24gb", ("A10G",), (24, 22587, 600), (8, 6), 80, (35, 35, 70, 70),
         "NVIDIA A10G data sheet (published by AWS)", link="pcie4"),
    _gpu("l40s-48gb", ("L40S",), (48, 45455, 864), (8, 9), 142, (91.6, 183, 362.05, 362.05, 733),
         "NVIDIA L40S data sheet", link="pcie4"),
    _gpu("l40-48gb", ("L40",), (48, 45465, 864), (8, 9), 142, (90.5, 90.5, 181.05, 181.05, 362),
         "NVIDIA L40 data sheet", link="pcie4"),
    _gpu("l4-24gb", ("L4",), (24, 22563, 300), (8, 9), 58, (30.3, 60, 121, 121, 242.5), "NVIDIA L4 data sheet",
         link="pcie4"),
    _gpu("rtxpro6000-96gb", ("RTX PRO 6000 Blackwell Workstation Edition",), (96, 97249, 1792), (12, 0), 188,
         (126, 251.9, 503.8, 503.8), _PRO, link="pcie5"),
    _gpu("rtxpro6000-maxq-96gb", ("RTX PRO 6000 Blackwell Max-Q Workstation Edition",), (96, 97249, 1792), (12, 0), 188,
         (109.7, 219.5, 438.9, 438.9), _PRO, link="pcie5"),
    _gpu("rtxpro6000-server-96gb", ("RTX PRO 6000 Blackwell Server Edition",), (96, 97250, 1597), (12, 0), 188,
         (120, None, None, None),
         "NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet (gives no dense rate of its tensor cores)",
         link="pcie5"),
    _gpu("rtx6000ada-48gb", ("RTX 6000 Ada Generation",), (48, 48497, 960), (8, 9), 142,
         (91.1, 182.1, 364.2, 364.2, 728.5), _ADA, link="pcie4"),
    _gpu("a6000-48gb", ("RTX A6000",), (48, 48537, 768), (8, 6), 84, (38.7, 77.4, 154.8, 154.8), _GA102, link="pcie4"),
    _gpu("a5000-24gb", ("RTX A5000",), (24, 24248, 768), (8, 6), 64, (27.8, 55.6, 111.1, 111.1),
         "NVIDIA RTX A5000 data sheet", link="pcie4"),
    _gpu("a4000-16gb", ("RTX A4000",), (16, 16117, 448), (8, 6), 48, (19.2, 38.3, 76.7, 76.7),
         "NVIDIA RTX A4000 data sheet", link="pcie4"),
    _gpu("rtx5090-32gb", ("GeForce RTX 5090",), (32, 32102, 1792), (12, 0), 170, (104.8, 104.8, 209.5, 209.5, 419),
         _RTX_BLACKWELL, link="pcie5"),
    _gpu("rtx5080-16gb", ("GeForce RTX 5080",), (16, 15840, 960), (12, 0), 84, (56.3, 56.3, 112.6, 112.6, 225.1),
         _RTX_BLACKWELL, link="pcie5"),
    _gpu("rtx4090-24gb", ("GeForce RTX 4090",), (24, 24081, 1008), (8, 9), 128, (82.6, 82.6, 165.2, 165.2, 330.3), _ADA,
         link="pcie4"),
    _gpu("rtx4080-16gb", ("GeForce RTX 4080",), (16, None, 716.8), (8, 9), 76, (48.7, 48.7, 97.5, 97.5, 194.9), _ADA,
         link="pcie4"),
    _gpu("rtx3090ti-24gb", ("GeForce RTX 3090 Ti",), (24, 24110, 1008), (8, 6), 84, (40, 40, 80, 80), _ADA,
         link="pcie4"),
    _gpu("rtx3090-24gb", ("GeForce RTX 3090",), (24, 24124, 936.2), (8, 6), 82, (35.6, 35.6, 71, 71), _GA102,
         link="pcie4"),
    _gpu("rtx3080-10gb", (), (10, 10002, 760.3), (8, 6), 68, (29.8, 29.8, 59.5, 59.5), _GA102, link="pcie4"),
    _gpu("rtx3070-8gb", ("GeForce RTX 3070",), (8, 7753, 448), (8, 6), 46, (20.3, 20.3, 40.6, 40.6), _GA104,
         link="pcie4"),
    _gpu("rtx3060-12gb", (), (12, 11910, 360), (8, 6), 28, (12.7, 12.7, 25.5, 25.5), _CORES, link="pcie4"),
    _gpu("rtx4070-12gb", ("GeForce RTX 4070",), (12, 11994, 504.2), (8, 9), 46, (29.1, 29.1, 58.3, 58.3, 116.6), _CORES,
         link="pcie4"),
    _gpu("rtx4060ti-8gb", (), (8, 7806, 288), (8, 9), 34, (22.1, 22.1, 44.1, 44.1, 88.3), _CORES, link="pcie4"),
    _gpu("rtx2080ti-11gb", (), (11, 11009, 616), (7, 5), 68, (13.4, None, 53.8, None), _TURING_RTX, link="pcie3"),
    _gpu("rtx2070-8gb", (), (8, 7782, 448), (7, 5), 36, (7.5, None, 29.9, None), _TURING_RTX, link="pcie3"),
    _gpu("v100-32gb", ("V100-SXM2-32GB",), (32, 32494, 900), (7, 0), 80, (15.7, None, 125, None), _VOLTA,
         link="nvlink2"),
    _gpu("v100-16gb", ("V100-SXM2-16GB",), (16, 16130, 900), (7, 0), 80, (15.7, None, 125, None), _VOLTA,
         link="nvlink2"),
    _gpu("v100-pcie-32gb", ("V100-PCIE-32GB",), (32, 32510, 900), (7, 0), 80, (14, None, 112, None), _VOLTA,
         link="pcie3"),
    _gpu("v100-pcie-16gb", ("V100-PCIE-16GB",), (16, None, 900), (7, 0), 80, (14, None, 112, None), _VOLTA,
         link="pcie3"),
    _gpu("t4-16gb", ("T4",), (16, 14912, 320), (7, 5), 40, (8.1, None, 65, None), _TURING, link="pcie3"),
)
# fmt: on
