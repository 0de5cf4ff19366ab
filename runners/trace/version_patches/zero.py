"""Earlier behaviour of DeepSpeed's ZeRO."""

import functools
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import Replacement, patched


def linear_by_init(trial: Trial) -> Iterator[Replacement]:
    """Keep torch's own linear layers in a model that exists already when it is divided."""
    original = Init.__init__

    @functools.wraps(original)
    def init(self: Any, module: Any = None, *args: Any, **kwargs: Any) -> None:
        with patched([(Init, "_enable_mem_efficient_linear", lambda self: None)] if module is not None else []):
            original(self, module, *args, **kwargs)

    yield Init, "__init__", init


def live_parameters(trial: Trial) -> Iterator[Replacement]:
    """Reset counters when a backward pass has ended, before what it left is released, and not with a forward pass.

    The first forward pass only starts the recording of what is used when.
    """
    reset, leftovers = PartitionedParameterCoordinator.reset_step, DeepSpeedZeRoOffload.release_backward_leftovers

    def at_the_start(self: Any) -> None:
        if self.is_invalid_trace():
            reset(self)

    def at_the_end(self: Any) -> None:
        reset(self.get_param_coordinator())
        leftovers(self)

    yield PartitionedParameterCoordinator, "reset_step", at_the_start
    yield DeepSpeedZeRoOffload, "release_backward_leftovers", at_the_end


def half_buffers(trial: Trial) -> Iterator[Replacement]:
    """Cast the whole module, buffers too, as today with a buffer_dtype."""
    original = DeepSpeedEngine._mixed_precision_dtypes

    def dtypes(self: Any) -> tuple[Any, Any]:
        weights, _ = original(self)
        return weights, weights

    yield DeepSpeedEngine, "_mixed_precision_dtypes", dtypes
