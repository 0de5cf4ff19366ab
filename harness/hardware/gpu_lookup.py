"""Facts about GPUs, found by name or made like a listed one: their limits, peaks and tables, and what fits into them.

gpu_specs.py has the figures; nothing is measured here. A GPU that is not listed has no known peak, and MFU is then
null.
"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

from vramsweep.harness.hardware.gpu_specs import GPUS, TERA, Capability, Gpu

__all__ = ["CONTEXT_BYTES", "GIB", "GPUS", "SHORTFALL", "TERA", "Capability", "Gpu", "find_gpu", "gpu_lines",
           "gpu_named", "gpus_with_enough", "lowest_limit_gpu", "memory_limit", "peak_flops", "peak_of",
           "reported_bytes", "resolve_gpu"]  # fmt: skip

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
