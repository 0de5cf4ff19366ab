"""Facts about GPUs, found by name or made like a listed one: their limits, peaks and tables, and what fits into them.

gpus.json has the listed GPUs: published figures, each entry with its source; nothing is measured here. A GPU that is
not listed has no known peak, and MFU is then null.

Sources are NVIDIA's data sheet or architecture white paper of the product. Rates are dense, that is, without structured
sparsity, and of tensor cores with fp32 accumulation. Memory has two figures: the nominal size, and what torch reports,
which is less.
"""

import json
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Capability = tuple[int, int]  # CUDA's compute capability: major, minor
TERA = 1e12
GIB = 1 << 30
MIB = 1 << 20

# Bytes that a process takes of the GPU outside torch's allocator: the CUDA context with the kernels it loads. It is a
# part of torch's total_memory. A process of the plain loop or the Trainer took 748 to 767 MiB of an H100 (torch 2.11,
# CUDA 13.0; results/reference/h100-80gb), idle ones in public out-of-memory messages 230 MiB (A10) to 676 MiB. This is
# the largest, rounded up, so that what is said to fit does. `device.headroom_gib` is for what takes more:
# cudaMallocAsync (821 to 837 MiB) and a group of ranks, 837 MiB with FSDP2's, of one rank, and 1,330 to 1,721 MiB with
# DeepSpeed's.
CONTEXT_BYTES = 768 * MIB

# The share of the nominal size that may be missing, if nobody published what torch reports. No listed GPU lacks more (a
# T4 reports 9.0 % less than 16 GiB, an L4 8.2 % less than 24, because their memory holds its own ECC).
SHORTFALL = 0.09


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
_BY_DEVICE = {device: gpu for gpu in GPUS for device in gpu.devices}


def gpu_named(name: str | None) -> Gpu:
    """Return the product of this name in the table. Raises KeyError for a name that is not there."""
    return {gpu.name: gpu for gpu in GPUS}[str(name)]


def resolve_gpu(name: str | None, memory_gib: float | None, capability: str | None, headroom_gib: float) -> Gpu:
    """Return the product of this name, or one like it that is not listed. Raises KeyError for a name that is not there.

    With `memory_gib` it nominally has that much memory; what torch reports of it is unknown. With `capability` ("8.6")
    too, it has that compute capability. Nothing is then known of its speed, so it is like no product. The listed GPU of
    the nearest capability, then of the nearest size, gives its multiprocessors.
    """
    found = replace(gpu_named(name), headroom_gib=headroom_gib)
    if memory_gib is None:
        return found
    size = f"{round(memory_gib, 2) or memory_gib:g} GiB"
    found = replace(found, name=f"{found.name} with {size}", devices=(), memory_gib=memory_gib, reported_mib=None)
    if capability is None:
        return found
    major, minor = map(int, capability.split("."))

    def distance(gpu: Gpu) -> tuple[float, float]:
        own, other = (10 * c[0] + c[1] for c in (gpu.capability, (major, minor)))
        return abs(own - other), abs(gpu.memory_gib - memory_gib)

    unknown: dict[str, Any] = dict.fromkeys(("fp32", "tf32", "half", "bf16", "fp8", "link", "product"))
    return replace(
        found,
        name=f"{size} of capability {major}.{minor}",
        capability=(major, minor),
        multiprocessors=min(GPUS, key=distance).multiprocessors,
        source="device.memory_gib and device.capability",
        **unknown,
    )


def find_gpu(device_name: str) -> Gpu | None:
    """Return the product of a driver's device name ("NVIDIA H100 80GB HBM3"), or None if it is not listed.

    The whole name counts: "RTX 4090 D", "RTX 4090 Laptop GPU" and "H200 NVL" are other products than what they begin
    with. A MIG slice ("... MIG 1g.10gb") is only a part of a product.
    """
    return _BY_DEVICE.get(device_name.strip().removeprefix("NVIDIA ").removeprefix("Tesla "))


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return a device's dense peak in FLOP/s for one of the trial's precisions, or None if it is not known."""
    gpu = find_gpu(device_name)
    return None if gpu is None else peak_of(gpu, precision)


def peak_of(gpu: Gpu, precision: str) -> float | None:
    """Return the dense peak of a GPU in FLOP/s for one of the trial's precisions, or None if it is not known."""
    peaks = {"fp32": gpu.fp32, "tf32": gpu.tf32, "fp16": gpu.half, "fp8": gpu.fp8}
    return (peaks | dict.fromkeys(("bf16", "bf16_pure", "bf16_master"), gpu.bf16))[precision]


def reported_bytes(gpu: Gpu) -> int | None:
    """Return the bytes of memory that torch.cuda.get_device_properties reports; None if nobody published them."""
    return None if gpu.reported_mib is None else gpu.reported_mib * MIB


def memory_limit(gpu: Gpu) -> int:
    """Return the limit of PyTorch's allocator in bytes: what torch reports, less the CUDA context and headroom.

    Simulation, frontier and advice all use it to say whether something fits.
    """
    if (reported := reported_bytes(gpu)) is None:
        reported = int(gpu.memory_gib * GIB * (1 - SHORTFALL))
    return reported - CONTEXT_BYTES - int(gpu.headroom_gib * GIB)


def lowest_limit_gpu(memory_gib: float) -> Gpu | None:
    """Return the GPU of this nominal size with the lowest known limit; None for a size that no GPU has."""
    cards = [gpu for gpu in GPUS if gpu.memory_gib == memory_gib]
    return min([gpu for gpu in cards if gpu.reported_mib is not None] or cards, key=memory_limit, default=None)


def gpus_with_enough(nbytes: int, headroom_gib: float, least: Capability) -> list[Gpu]:
    """Return the GPUs of at least this capability whose allocator can have as many bytes, with the headroom left free.
    The lowest limit comes first; of equal ones, the oldest GPU."""
    able = (replace(gpu, headroom_gib=headroom_gib) for gpu in reversed(GPUS) if gpu.capability >= least)
    return sorted((gpu for gpu in able if memory_limit(gpu) >= nbytes), key=memory_limit)


def gpu_lines() -> str:
    """Return the GPUs for a help text: their names and the allocator's limits in GiB under each compute capability."""
    lines = []
    for capability in sorted({gpu.capability for gpu in GPUS}, reverse=True):
        alike = [gpu for gpu in GPUS if gpu.capability == capability]
        text = ", ".join(f"{gpu.name}\N{NO-BREAK SPACE}{memory_limit(gpu) / GIB:.1f}" for gpu in alike)
        head = f"  {'.'.join(map(str, capability)):<6}"
        wrapped = textwrap.wrap(text, 79, initial_indent=head, subsequent_indent=" " * 8, break_on_hyphens=False)
        lines += [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapped]
    return "\n".join(lines)


CARDS = f"GPUs (details: vramsweep gpus): compute capability, names, allocator's limit in GiB\n{gpu_lines()}"
