"""DeepSpeed's ZeRO."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from vramsweep.harness.trial import Trial


@contextlib.contextmanager
def linear_by_init(trial: Trial) -> Iterator[None]:
    """A model that exists already keeps torch's own linear layers when it is divided."""
    original = Init.__init__

    @functools.wraps(original)
    def init(self: Any, module: Any = None, *args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as stack:
            if module is not None:
                stack.enter_context(mock.patch.object(Init, "_enable_mem_efficient_linear", lambda self: None))
            original(self, module, *args, **kwargs)

    with mock.patch.object(Init, "__init__", init):
        yield


@contextlib.contextmanager
def live_parameters(trial: Trial) -> Iterator[None]:
    """Counters start anew when a backward pass has ended, before what it left is released, and not with a forward pass.

    The first forward pass only starts the recording of what is used when.
    """
    reset, leftovers = PartitionedParameterCoordinator.reset_step, DeepSpeedZeRoOffload.release_backward_leftovers

    def at_the_start(self: Any) -> None:
        if self.is_invalid_trace():
            reset(self)

    def at_the_end(self: Any) -> None:
        reset(self.get_param_coordinator())
        leftovers(self)

    with (
        mock.patch.object(PartitionedParameterCoordinator, "reset_step", at_the_start),
        mock.patch.object(DeepSpeedZeRoOffload, "release_backward_leftovers", at_the_end),
    ):
        yield


def half_buffers(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """The whole module is cast, buffers too, as today with a buffer_dtype."""
    original = DeepSpeedEngine._mixed_precision_dtypes

    def dtypes(self: Any) -> tuple[Any, Any]:
        weights, _ = original(self)
        return weights, weights

    return mock.patch.object(DeepSpeedEngine, "_mixed_precision_dtypes", dtypes)
