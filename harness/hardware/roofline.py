"""The roofline of a step on a GPU: how fast it could be, summed over its kernels.

The model is Williams, Waterman and Patterson's ("Roofline", Communications of the ACM 52(4), 2009), kernel by kernel.
Each takes the longest of its arithmetic at the GPU's peak, its traffic at the memory's bandwidth, and its launches.
Real kernels reach neither peak, so a real step is usually slower; step_time.py says by how much.
runners/trace/operator_cost.py finds a step's kernels.

All of this is estimated: it never enters a measured column.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from vramsweep.harness.hardware.gpu_lookup import Gpu
from vramsweep.harness.hardware.interconnects import Collective

# Seconds that a kernel launched by a host takes at least. A plain assumption, not a published figure, and the same for
# every GPU: a launch takes a few microseconds, and PyTorch's own work per operator comes on top.
LAUNCH_S = 4e-6
UNKNOWN = "unknown"  # the kind of arithmetic of an operator whose FLOPs are not known
# Beginnings of the kind of a fused attention kernel, whose seconds are a part of their own, and of a product with rows
# that do not begin at multiples of 16 bytes.
ATTENTION, BACKWARD, UNALIGNED = "attention in ", "attention backward in ", "unaligned "


class Work(NamedTuple):
    """The demand of one operator on the GPU. `kind` names the arithmetic its `flops` are done in, "" if there are none.

    Kinds: fp32, 3xtf32 (fp32 made of three tf32 products), half, bf16, fp8; any other has no known peak. Words before
    them tell fused attention and unaligned products apart. Kernels over lists of tensors or 8-bit states, which are
    mostly an optimizer's, have no FLOPs, and kinds of their own. `nbytes` is what is read and written.
    """

    kind: str
    flops: int
    nbytes: int
    launches: int


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step by what bounds each kernel. They sum to `step_s`."""

    compute_s: float
    attention_s: float
    memory_s: float
    launch_s: float

    @property
    def step_s(self) -> float:
        """Seconds of the whole step: its kernels one after the other."""
        return self.compute_s + self.attention_s + self.memory_s + self.launch_s


Called = TypeVar("Called", Work, Collective)


def merge_work(calls: Iterable[tuple[Called, int]]) -> list[tuple[Called, int]]:
    """Return each different call once, with its count, sorted: the sum of seconds is one number whatever the order."""
    counts: Counter[Called] = Counter()
    for call, count in calls:
        counts[call] += count
    return sorted(counts.items(), key=lambda item: item[0])


def estimate(kernels: Iterable[tuple[Work, int]], gpu: Gpu, tf32: bool) -> Estimate | None:
    """Return the roofline of a step of these operators, each with how often it runs; None if it needs an unknown peak.

    `tf32` says that fp32 matrix products run on tensor cores, as torch.backends.cuda.matmul.allow_tf32 does.
    """
    peaks = peak_rates(gpu, tf32)
    seconds = {"compute": 0.0, "attention": 0.0, "memory": 0.0, "launch": 0.0}
    for work, count in kernels:
        if (peak := peaks.get(arithmetic(work))) is None:
            return None
        bounds = {  # fused attention is a part of its own, because it gets less of the peak than a product does
            "attention" if work.kind.startswith("attention") else "compute": work.flops / peak,
            "memory": work.nbytes / gpu.bandwidth,
            "launch": work.launches * LAUNCH_S,
        }
        longest = max(bounds, key=lambda name: bounds[name])
        seconds[longest] += count * bounds[longest]
    return Estimate(**{f"{name}_s": found for name, found in seconds.items()})


def total_flops(kernels: Iterable[tuple[Work, int]]) -> int | None:
    """Return the FLOPs of a step of these operators; None if those of one are not known."""
    found = list(kernels)
    return None if any(work.kind == UNKNOWN for work, _ in found) else sum(count * work.flops for work, count in found)


def arithmetic(work: Work) -> str:
    """Return the kind of arithmetic alone, "" if the operator has no FLOPs."""
    return work.kind.rpartition(" ")[2] if work.flops else ""


def peak_rates(gpu: Gpu, tf32: bool) -> dict[str, float | None]:
    """Return FLOP/s by kind of arithmetic. If a GPU has no tf32, `tf32` changes nothing."""
    tensor = gpu.tf32 or gpu.fp32
    return {
        "": gpu.fp32,  # never divides anything but zero
        "fp32": tensor if tf32 else gpu.fp32,
        "3xtf32": gpu.fp32 if gpu.tf32 is None else gpu.tf32 / 3,
        "half": gpu.half,
        "bf16": gpu.bf16,
        "fp8": gpu.fp8,
    }
