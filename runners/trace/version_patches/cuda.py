"""Earlier torch on a GPU: which kernels serve attention and norms, where handles keep their workspaces."""

from collections.abc import Iterator

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import Replacement
from vramsweep.runners.trace import cuda_allocations, cuda_emulation, sdpa_kernels, trace_data


def flash_first(trial: Trial) -> Iterator[Replacement]:
    """Put cuDNN's attention last on every GPU."""
    yield trace_data, "CUDNN_FIRST", False


def any_dropout(trial: Trial) -> Iterator[Replacement]:
    """Let cuDNN's attention take every probability of dropout."""
    yield sdpa_kernels, "IN_SIXTEENTHS", False


def lt_apart(trial: Trial) -> Iterator[Replacement]:
    """Give cuBLASLt's handles workspaces of their own."""
    yield cuda_allocations, "LT_APART", True


def norm_in_parts(trial: Trial) -> Iterator[Replacement]:
    """Run RMSNorm as one operator after another, each of which autograd may keep."""
    yield cuda_emulation, "NORM_FUSED", False
