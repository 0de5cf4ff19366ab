"""The time of a step on a GPU, operator by operator: kernels on the GPU and launches by the host, which overlap.

A kernel takes the longer of its FLOPs at the peak and its bytes at the bandwidth (roofline.py), each times a factor of
its kind, and `kernel_s`. The host takes `host_s` for each launch. The GPU works while the host launches, so a step
lasts as long as the slower of the two. step_time.json holds values pooled over GPUs: benchmarks/step_times.py fits them
to measured steps, and says how far off they are for models that they were not made from.

Not covered: how collectives slow down the kernels that they overlap with; the size at which a product fills the GPU;
results with unaligned rows, which the factor of products with unaligned arguments absorbs.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from pydantic import TypeAdapter

from vramsweep.harness.hardware.gpu_lookup import Gpu
from vramsweep.harness.hardware.roofline import UNALIGNED, Work, arithmetic, peak_rates

UNALIGNED_PRODUCT, LEAST = "product unaligned", "least time of kernels"  # kinds of time


@dataclass(frozen=True)
class Speeds:
    """Speeds of `gpu` (a product, or "any"). `source` says in a line what they come from.

    `factors` say by kind how many times longer than its bound a kernel takes. `kernel_s` are the least seconds of a
    kernel, `host_s` the host's seconds a launch. `spread` ("gpu", "host") is half the width of the 95 % interval of
    log(measured / predicted).
    """

    gpu: str
    source: str
    factors: Mapping[str, float]
    kernel_s: float
    host_s: Mapping[str, float]
    spread: Mapping[str, float]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: of the GPU, of the host, and of both with a 95 % interval. `bound_by` is the slower one.

    `kernels_s` are those of kernels by kind, with the least time of all kernels as `LEAST`.
    """

    gpu_s: float
    host_s: float
    kernels_s: Mapping[str, float]
    step_s: float
    low_s: float
    high_s: float
    bound_by: str


_SPEEDS = TypeAdapter(Speeds)


@cache
def pooled() -> Speeds:
    """Return the speeds of all GPUs together."""
    return _SPEEDS.validate_json((resources.files(__package__) / "step_time.json").read_bytes())


def time_kernel(work: Work, gpu: Gpu, tf32: bool, speeds: Speeds) -> tuple[str, float] | None:
    """Return what bounds one operator on the GPU, and its seconds without the least time of its kernels; None if it
    needs an unknown peak."""
    if (peak := peak_rates(gpu, tf32).get(arithmetic(work))) is None:
        return None
    arithmetic_of, stream = factor_kinds(work, tf32 and gpu.tf32 is not None)
    computed = speeds.factors[arithmetic_of] * work.flops / peak if work.flops else 0.0
    streamed = speeds.factors[stream] * work.nbytes / gpu.bandwidth
    return (arithmetic_of, computed) if computed > streamed else (stream, streamed)


def factor_kinds(work: Work, tf32: bool) -> tuple[str, str]:
    """Return the kinds of factors that an operator's arithmetic and its traffic have; "" without arithmetic."""
    stream = work.kind if work.kind.startswith("optimizer") else "stream"
    if not work.flops:
        return "", stream
    named = {"fp32": "tf32" if tf32 else "fp32", "3xtf32": "tf32"}.get(arithmetic(work), "half")
    if work.kind.startswith("attention"):
        return "attention backward" if "backward" in work.kind else "attention forward", stream
    unaligned = work.kind.startswith(UNALIGNED) and named == "half"
    return UNALIGNED_PRODUCT if unaligned else f"product {named}", stream


def time_step(
    kernels: Iterable[tuple[Work, int]], gpu: Gpu, tf32: bool, speeds: Speeds, host: str, communication_s: float = 0.0
) -> StepTime | None:
    """Return the time of a step of these operators, each with how often it runs; None if it needs an unknown peak.

    `host` names the kind of the host's time. `communication_s` are seconds of collectives. They overlap with the rest;
    the upper end of the interval assumes that nothing does.
    """
    kernels_s, launches = defaultdict[str, float](float), 0
    for work, count in kernels:
        if (found := time_kernel(work, gpu, tf32, speeds)) is None:
            return None
        kernels_s[found[0]] += count * found[1]
        launches += count * work.launches
    kernels_s[LEAST] = launches * speeds.kernel_s
    alone_s, host_s = sum(kernels_s.values()), launches * speeds.host_s[host]
    gpu_s = max(alone_s, communication_s)
    of_gpu, of_host = (math.exp(speeds.spread[name]) for name in ("gpu", "host"))
    low_s = max(gpu_s / of_gpu, host_s / of_host)  # of two queues that may each be faster or slower
    high_s = max((alone_s + communication_s) * of_gpu, host_s * of_host)
    return StepTime(gpu_s, host_s, kernels_s, max(gpu_s, host_s), low_s, high_s, "gpu" if gpu_s >= host_s else "host")
