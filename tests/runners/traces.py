"""What tests of traces share: a trial's trace, made in this process, and what is counted in one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from conftest import tiny

from vramsweep.harness import gpus, registry, trial
from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.runners import tracing
from vramsweep.runners.predict import Prediction, replay
from vramsweep.runners.trace import Trace

A100 = gpus.named("a100-80gb")
SIMULATED: dict[str, Any] = {"name": "simulated", "gpu": "a100-80gb"}


def trace_trial(values: dict[str, Any], folder: Path) -> tuple[Trace, dict[str, Any]]:
    """The trace for the trial's own card, and its details."""
    chosen = trial.parse(values)
    runner = importlib.import_module(registry.runner(chosen.runner.name).module)
    return tracing.trace_trial(chosen, chosen.device.card, folder, runner)


def trace_tiny(folder: Path, **over: Any) -> tuple[Trace, dict[str, Any]]:
    return trace_trial(tiny(**{"device": SIMULATED} | over), folder)


def traced(folder: Path, **over: Any) -> Trace:
    return trace_tiny(folder, **over)[0]


def predicted(values: dict[str, Any], folder: Path) -> tuple[Trace, Prediction]:
    found, _ = trace_trial(values, folder)
    return found, replay(found, AllocatorConfig(), None)


def total(trace: Trace, category: str) -> int:
    """Bytes of all storages that there ever were of a category."""
    return sum(size for size, name in zip(trace.sizes, trace.categories, strict=True) if name == category)


def sizes(trace: Trace) -> list[tuple[int, bool]]:
    """The bytes of each allocation and each free, in order; a scalar's are left out."""
    events = ((trace.sizes[abs(event) - 1], event > 0) for event in trace.events if event)
    return [(size, made) for size, made in events if size > 8]
