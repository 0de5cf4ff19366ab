"""What a trace is, as data: the requests and frees of a step in order, and what each storage was for.

Nothing here imports torch: a trace that is kept is read, replayed and explained without it. Not covered: what makes one
(step_tracer.py), where an allocator puts its storages (runners/predict/replay_trace.py). All sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field

from vramsweep.harness.hardware.gpu_lookup import Capability
from vramsweep.harness.hardware.interconnects import Collective
from vramsweep.harness.hardware.roofline import Work
from vramsweep.harness.spec.version_differences import FLASH_FIRST, installed_is
from vramsweep.runners.trace.stream_lag import Note

WORKSPACES = "workspaces"  # a category of storages
KIB = 1 << 10
# Of each handle and stream of cuBLASLt, where it does not use cuBLAS's (parseCUDABlasLtWorkspaceSize)
LT_WORKSPACE = 1024 * KIB
CUDNN_FIRST = not installed_is(FLASH_FIRST)  # of wheels for CUDA 13, and 12.9: others bring an earlier cuDNN
Maker = tuple[str, str]  # the module's path, the operator
Phase = Literal["load", "forward", "backward", "optimizer"]
CATEGORIES = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "activations",
    "communication",
    "temporaries",
    WORKSPACES,
)
HOST_CATEGORIES = ("parameters", "gradients", "optimizer_state", "activations", "loading", "other")
Number = Annotated[int, Field(ge=0, lt=1 << 63)]  # in what is read from a file (trace_cache.py)
AS_WRITTEN = ConfigDict(strict=True, extra="forbid")


class Mark(NamedTuple):
    """The end of a phase: events before `end` and after the mark before belong to it. `step` is None while loading."""

    end: Number
    step: Number | None
    phase: Phase


@dataclass
class Storages:
    """Storage number i has `sizes[i]` bytes and a category; event i + 1 allocates it, event -(i + 1) frees it."""

    __pydantic_config__ = AS_WRITTEN
    sizes: list[Number] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


@dataclass
class HostStorages(Storages):
    """Those in host memory, of `HOST_CATEGORIES`; `pinned[i]`: page-locked. What is "loading" does not outlive it."""

    pinned: list[bool] = field(default_factory=list)


@dataclass
class Trace(Storages):
    """Those in GPU memory, of `CATEGORIES`, and beside them the host's. Event 0 is `torch.cuda.empty_cache`.

    `streams[i]` is the stream that asked for it, 0 the default one: each has a pool of its own in the allocator.
    `kernels` are the operators of the last step in order, `collectives` its calls to other ranks, each with how often
    it ran.
    `origins[i]` says where in `makers` to find what asked for storage i: the module's path (of a parameter: its name),
    the operator (storage_origins.py).
    `notes` say what the streams do, where blocks are freed that another stream still uses (stream_lag.py).
    `stepwise` are storages whose sizes follow another number, with the formula and that number (cuda_allocations.py).
    """

    streams: list[Number] = field(default_factory=list)
    origins: list[Number] = field(default_factory=list)
    makers: list[Maker] = field(default_factory=list)
    kernels: list[tuple[Work, Number]] = field(default_factory=list)
    collectives: list[tuple[Collective, Number]] = field(default_factory=list)
    host: HostStorages = field(default_factory=HostStorages)
    notes: list[Note] = field(default_factory=list)
    stepwise: list[tuple[Number, str, Number]] = field(default_factory=list)


def generation(capability: Capability, cudnn: bool) -> tuple[Any, ...]:
    """All that a trace depends on of a card's compute capability, workspaces apart: cards that share it share traces.

    It is whether the card has bf16 tensor cores, as kernels of attention and products of halves ask, and, where
    attention may be `cudnn`'s, whether that comes first and how wide its heads may be.
    """
    return capability >= (8, 0), *((prefers_cudnn(capability), widest_cudnn(capability)) if cudnn else ())


def on(trace: Trace, capability: Capability) -> Trace:
    """The trace of a card of the same generation, as one of this compute capability has it: with its own workspaces.

    Events, marks and notes are the same lists.
    """
    size = cublas_workspace(capability)
    sizes = [fitted(s, c, size) for s, c in zip(trace.sizes, trace.categories, strict=True)]
    return replace(trace, sizes=sizes)


def cublas_workspace(capability: Capability) -> int:
    """Bytes that torch allocates for each cuBLAS handle and stream (at::cuda::getChosenWorkspaceSize)."""
    return 4096 * KIB * 8 if capability[0] == 9 else 4096 * KIB * 2 + 16 * KIB * 8


def fitted(size: int, category: str, workspace: int) -> int:
    """The size of a storage on a card whose cuBLAS handles have workspaces of this size; cuBLASLt's are the same.

    No card's is as large as cuBLASLt's, so the size says which it is.
    """
    return workspace if category == WORKSPACES and size != LT_WORKSPACE else size


def prefers_cudnn(capability: Capability) -> bool:
    """Whether cuDNN's kernel comes first: on Hopper and data centres' Blackwell (check_prefer_cudnn_attention)."""
    return CUDNN_FIRST and capability[0] in (9, 10)


def widest_cudnn(capability: Capability) -> int:
    """The widest heads of cuDNN's kernel: what an H200 served, elsewhere torch's limit (check_cudnn_tensor_shapes)."""
    return 256 if capability[0] == 9 else 128
