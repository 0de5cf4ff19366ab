"""What torch did otherwise on a card: which kernel serves a call of attention, where handles keep their workspaces."""

from __future__ import annotations

from collections.abc import Iterator

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import Replacement
from vramsweep.runners.trace import cuda_allocations, sdpa_kernels, trace_data


def flash_first(trial: Trial) -> Iterator[Replacement]:
    """cuDNN's attention comes last on every card."""
    yield trace_data, "CUDNN_FIRST", False


def any_dropout(trial: Trial) -> Iterator[Replacement]:
    """cuDNN's attention takes every probability of dropout."""
    yield sdpa_kernels, "IN_SIXTEENTHS", False


def lt_apart(trial: Trial) -> Iterator[Replacement]:
    """cuBLASLt's handles have workspaces of their own."""
    yield cuda_allocations, "LT_APART", True
