"""A trace as data: the requests and frees of a step in order, and what each storage was for. All sizes are in bytes.

Nothing here imports torch, so that a stored trace is read, replayed and explained without it. step_tracer.py makes
traces; runners/predict/replay_trace.py replays them.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field

from vramsweep.harness.hardware.gpu_lookup import Capability, memory_limit
from vramsweep.harness.hardware.interconnects import Collective
from vramsweep.harness.hardware.roofline import Work
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.spec.version_differences import installed_has
from vramsweep.runners.trace.stream_lag import Note

WORKSPACES = "workspaces"  # a category of storages
KIB = 1 << 10
# Of each handle and stream of cuBLASLt, if it does not use cuBLAS's (parseCUDABlasLtWorkspaceSize)
LT_WORKSPACE = 1024 * KIB
CUDNN_FIRST = not installed_has("flash_first")  # in wheels for CUDA 13 and 12.9; others have an older cuDNN
Phase = Literal["load", "forward", "backward", "optimizer"]
STATE = ("parameters", "buffers", "gradients", "optimizer_state")
CATEGORIES = (*STATE, "activations", "recomputed_activations", "communication", "temporaries", WORKSPACES)
AGAIN = " (recomputed)"  # ends the operator's name in a maker
HOST_CATEGORIES = ("parameters", "gradients", "optimizer_state", "activations", "loading", "other")
Number = Annotated[int, Field(ge=0, lt=1 << 63)]  # limits for what is read from a file (trace_cache.py)
AS_WRITTEN = ConfigDict(strict=True, extra="forbid")


class Mark(NamedTuple):
    """End of a phase, which has the events from the previous mark to before `end`. `step` is None while loading."""

    end: Number
    step: Number | None
    phase: Phase


class Maker(NamedTuple):
    """What requests storages: the module's path, the operator, and the innermost source line of the model's or the
    user's code, as "modeling_llama.py:164" (storage_origins.py). What is not known is ""."""

    module: str
    operator: str
    line: str


@dataclass
class Storages:
    """A memory's storages: i has `sizes[i]` bytes and a category; event i + 1 allocates it, event -(i + 1) frees it."""

    __pydantic_config__ = AS_WRITTEN
    sizes: list[Number] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


@dataclass
class HostStorages(Storages):
    """Storages in host memory, of `HOST_CATEGORIES`; `pinned[i]`: page-locked. "loading" does not outlive it."""

    pinned: list[bool] = field(default_factory=list)


@dataclass
class Trace(Storages):
    """Storages in GPU memory, of `CATEGORIES`, and in `host` the host's. Event 0 is `torch.cuda.empty_cache`.

    `streams[i]` is the stream that requested storage i (0 is the default); each has its own pool in the allocator.
    `kernels` are the last step's operators in order, `collectives` its calls to other ranks, each with its number of
    runs. `makers[origins[i]]` requested storage i; the module's path is, for a parameter, its name.
    `notes` say what streams do, if blocks are freed that another stream still uses (stream_lag.py).
    `answers` is `answers_of` the trial if its script asked torch's memory counters; "" if it did not.
    `stepwise` are storages whose sizes follow another number, with the formula and that number (cuda_allocations.py).
    `not_covered` names what the GPU allocates beyond the trace: by code, the operators or modules that do.
    """

    streams: list[Number] = field(default_factory=list)
    origins: list[Number] = field(default_factory=list)
    makers: list[Maker] = field(default_factory=list)
    kernels: list[tuple[Work, Number]] = field(default_factory=list)
    collectives: list[tuple[Collective, Number]] = field(default_factory=list)
    host: HostStorages = field(default_factory=HostStorages)
    notes: list[Note] = field(default_factory=list)
    stepwise: list[tuple[Number, str, Number]] = field(default_factory=list)
    not_covered: dict[str, list[str]] = field(default_factory=dict)
    answers: str = ""

    def serves(self, trial: Trial) -> bool:
        """Return whether the trial's script would get the same answers."""
        return self.answers in ("", answers_of(trial))


def answers_of(trial: Trial) -> str:
    """Return what the answers of torch's memory counters depend on, besides the trace: the setting and the limit."""
    return f"{trial.allocator.conf} within {memory_limit(trial.device.card)}"


def generation(capability: Capability, cudnn: bool) -> tuple[Any, ...]:
    """Return all of a GPU's compute capability that a trace depends on, except workspaces: a key for sharing traces.

    It says whether the GPU has bf16 tensor cores, on which attention kernels and half-precision products depend. If
    attention may be `cudnn`'s, it also says whether cuDNN comes first and how wide its heads may be.
    """
    return capability >= (8, 0), *((prefers_cudnn(capability), widest_cudnn(capability)) if cudnn else ())


def on(trace: Trace, capability: Capability) -> Trace:
    """Return the trace as a GPU of this compute capability and the same generation has it: with its own workspaces.

    Events, marks and notes are the same lists.
    """
    size = cublas_workspace(capability)
    sizes = [fitted(s, c, size) for s, c in zip(trace.sizes, trace.categories, strict=True)]
    return replace(trace, sizes=sizes)


def cublas_workspace(capability: Capability) -> int:
    """Return the bytes that torch allocates for each cuBLAS handle and stream (at::cuda::getChosenWorkspaceSize)."""
    return 4096 * KIB * 8 if capability[0] == 9 else 4096 * KIB * 2 + 16 * KIB * 8


def fitted(size: int, category: str, workspace: int) -> int:
    """Return a storage's size on a GPU whose cuBLAS workspaces have this size; cuBLASLt's keep theirs.

    No GPU has a cuBLAS workspace as large as cuBLASLt's, so the size says which it is.
    """
    return workspace if category == WORKSPACES and size != LT_WORKSPACE else size


def prefers_cudnn(capability: Capability) -> bool:
    """Return whether cuDNN's kernel comes first: on Hopper, data centres' Blackwell (check_prefer_cudnn_attention)."""
    return capability[0] in (9, 10) and bool(CUDNN_FIRST)


def widest_cudnn(capability: Capability) -> int:
    """Return cuDNN's widest heads: on Hopper as an H200 ran, elsewhere torch's limit (check_cudnn_tensor_shapes)."""
    return 256 if capability[0] == 9 else 128
