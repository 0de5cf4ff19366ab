"""The listed GPUs: published figures, each entry of gpus.json with its source. gpu_lookup.py answers questions about
them.

Sources are NVIDIA's data sheet or architecture white paper of the product. Rates are dense, that is, without structured
sparsity, and of tensor cores with fp32 accumulation. Memory has two figures: the nominal size, and what torch reports,
which is less.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Capability = tuple[int, int]  # CUDA's compute capability: major, minor
TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """One product. `devices` are the driver's names for it, without "NVIDIA" or "Tesla" in front; no other name
    matches. There are none if products share a name: RTX 3080 of 10 and 12 GiB, a desktop's GPU and a laptop's. Torch
    gives the H100 of 96 GiB the name of others. The GH200's names with 480GB and 120GB count the CPU's memory.

    `memory_gib` is the nominal size, of which `headroom_gib` are left free. `reported_mib` is torch's total_memory in
    MiB, on Linux, ECC as shipped. It differs between drivers by some hundred MiB, so this is the product's smallest in
    logs and messages published on GitHub; None if none was found. Such messages are "CUDA:0 (NVIDIA L4, 22563MiB)",
    "_CudaDeviceProperties(name=..., total_memory=...)" and "GPU 0 has a total capacity of 79.10 GiB". `bandwidth` is
    the memory's, in bytes/s; `capability` is the CUDA compute capability; rates are in FLOP/s, None if not known.

    `multiprocessors` is torch's multi_processor_count, as the product's sheet or white paper gives it (CUDA cores / 128
    from Ampere's GA102 on). For the A10G, B200, B300, H20 and RTX PRO 6000 Server logs on GitHub give it; for the H800,
    DeepSeek-V3's report (arXiv:2412.19437, section 3.2).

    `link` (harness/hardware/interconnects.py) joins the GPUs of a node: NVLink if the product is a module for boards
    that have it. Else it is the PCI Express generation of its data sheet, because bridges are extra; None if nodes
    differ.

    `product` is the listed name whose speed the GPU has, even if `name` tells of another amount of memory; None for a
    GPU that is like no listed one.
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


def _read(row: dict[str, Any]) -> Gpu:
    """Return the GPU of an entry of gpus.json, which has rates in TFLOP/s and the bandwidth in GB/s."""
    rates: dict[str, Any] = {name: None if rate is None else rate * TERA for name, rate in row.pop("teraflops").items()}
    devices, capability = tuple(row.pop("devices")), tuple(row.pop("capability"))
    bandwidth = row.pop("gigabytes_per_s") * 1e9
    return Gpu(**row, devices=devices, capability=capability, bandwidth=bandwidth, product=row["name"], **rates)


GPUS = tuple(map(_read, json.loads(Path(__file__).with_name("gpus.json").read_text("utf-8"))))
