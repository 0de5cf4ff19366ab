"""Answers of torch's memory counters to a traced script: the simulated allocator as it stands at that moment.

Each question first passes the trace's events since the last one to a simulator with the trial's setting and GPU. What
the script then does may depend on both, so the trace is kept for them alone (`Trace.answers`). Counters of the small
and the large pool are unknown, so `memory_stats` lacks them. The row's own peaks come from a replay without resets.
"""

import ast
import collections
import functools
import itertools
import linecache
import math
import re
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.allocator.simulator import OutOfMemory, Simulator
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.messages.units import format_gib
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import Replacement
from vramsweep.runners.trace.step_tracer import Tracer
from vramsweep.runners.trace.trace_data import answers_of

COUNTERS = ("allocated", "active", "requested", "reserved", "inactive_split")
NUMBERS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")
SHARE = "the script's set_per_process_memory_fraction changes no prediction; set it in the allocator's setting instead"
# as torch begins it (c10/cuda/CUDACachingAllocator.cpp)
REFUSED = "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of {} GiB of which {} GiB is free."
HANDLER = re.compile(r"\b(OutOfMemoryError|RuntimeError|Exception|BaseException)\b")  # what catches such an error
NAMED = re.compile("OutOfMemoryError|out of memory")  # in the source of a library that handles one


class Counters:
    """The counters of one trace. `notes` are for the row; `searches` counts signs that a script looks for its batch."""

    def __init__(self, trial: Trial, tracer: Tracer) -> None:
        card = trial.device.card
        self._limit, self._trace, self._answers = gpu_lookup.memory_limit(card), tracer.trace, answers_of(trial)
        self.total = gpu_lookup.reported_bytes(card) or self._limit
        self._simulator = Simulator(allocator_config.parse(trial.allocator.conf), self._limit)
        self._done = self._taken = self._given = 0  # events; bytes allocated and freed since the last reset
        self.refused = 0  # requests that failed and that the script handled
        self._refused_at = -1  # storages when the last of them failed
        self.notes: list[str] = []
        self.searches = 0
        self._handles = tracer.raises_when_full
        tracer.after_operator = self.follow

    def _now(self) -> Simulator:
        """Return the simulator after all events of the trace so far, as an answer to the script."""
        self._trace.answers = self._answers
        self.follow()
        return self._simulator

    def follow(self) -> None:
        """Pass new events to the simulator. Raises torch.OutOfMemoryError as CUDA does, if a caller may handle it."""
        trace, simulator, refused = self._trace, self._simulator, 0
        if not self._done and self._handles and any(_handlers(frame.f_code.co_filename) for frame in _callers()):
            trace.answers = self._answers
        for event in trace.events[self._done :]:
            before = simulator.allocated
            if event > 0:
                try:
                    simulator.malloc(event - 1, trace.sizes[event - 1], trace.streams[event - 1])
                except OutOfMemory:
                    if self._handles and _is_handled():  # the cache was emptied, and nothing was allocated
                        refused, trace.sizes[event - 1] = trace.sizes[event - 1], 0
                        trace.events.insert(trace.events.index(event), 0)
                    else:  # the row will say so
                        simulator.limit = None
                    simulator.malloc(event - 1, trace.sizes[event - 1], trace.streams[event - 1])
                self._taken += simulator.allocated - before
            elif event:
                simulator.free(-event - 1)
                self._given += before - simulator.allocated
            else:
                simulator.empty_cache()
        self._done = len(trace.events)
        if refused:
            trace.answers = self._answers
            self.refused, self._refused_at = self.refused + 1, len(trace.sizes)
            raise torch.OutOfMemoryError(REFUSED.format(*map(format_gib, (refused, self.total, self._free()[0]))))

    def ends_full(self) -> bool:
        """Return whether the script requested nothing after its last request that failed."""
        return self._refused_at == len(self._trace.sizes)

    def stats(self, *_args: Any, **_kwargs: Any) -> dict[str, float]:
        """Return what is known of `torch.cuda.memory_stats`, in bytes and numbers; the rest is nan."""
        now = self._now()
        return collections.defaultdict(lambda: math.nan) | {
            **{f"{name}_bytes.all.current": getattr(now, name) for name in COUNTERS},
            **{f"{name}_bytes.all.peak": getattr(now, f"peak_{name}") for name in COUNTERS},
            "allocated_bytes.all.allocated": self._taken,
            "allocated_bytes.all.freed": self._given,
            "allocation.all.current": len(now.live),
            "segment.all.current": now.segments,
            **{name: getattr(now, name) for name in NUMBERS},
        }

    def _reset_peaks(self, *_args: Any, **_kwargs: Any) -> None:
        now = self._now()
        self.searches += 1
        for name in COUNTERS:
            setattr(now, f"peak_{name}", getattr(now, name))

    def _reset_sums(self, *_args: Any, **_kwargs: Any) -> None:
        now = self._now()
        self._taken = self._given = now.num_alloc_retries = now.num_ooms = 0

    def _free(self, *_args: Any, **_kwargs: Any) -> tuple[int, int]:
        """Return free and total bytes of the GPU: the context and the headroom are not free."""
        self.searches += 1
        return max(0, self._limit - self._now().reserved), self.total

    def _share(self, fraction: float, *_args: Any, **_kwargs: Any) -> None:
        self._now().limit = min(self._limit, int(fraction * self.total))
        self.notes = [SHARE]

    def replacements(self) -> Iterator[Replacement]:
        """Yield what to replace of torch: owner, name, stand-in; torch's other counters call these."""
        empty = torch.cuda.empty_cache  # the tracer's, which records it in the trace
        answers: dict[str, Any] = {
            "memory_stats": self.stats,
            "reset_peak_memory_stats": self._reset_peaks,
            "reset_accumulated_memory_stats": self._reset_sums,
            "set_per_process_memory_fraction": self._share,
            "device_memory_used": lambda *_args: self.total - self._free()[0],
            "memory_summary": lambda *_args, **_kwargs: "\n".join(f"{k:<32}{v:>20,}" for k, v in self.stats().items()),
            "memory_snapshot": lambda *_args, **_kwargs: [],
            **dict.fromkeys(("mem_get_info", "get_memory_info"), self._free),
            "empty_cache": lambda *_args: empty(),
            **dict.fromkeys(("_record_memory_history", "_dump_snapshot"), lambda *_args, **_kwargs: None),
        }
        for owner in (torch.cuda, torch.cuda.memory, torch.accelerator, getattr(torch.accelerator, "memory", None)):
            yield from ((owner, name, answer) for name, answer in answers.items() if hasattr(owner, name))


def _callers() -> Iterator[FrameType]:
    """Yield the frames of calling functions, from the script on, except torch's and ours."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    called = itertools.takewhile(lambda frame: frame.f_globals["__name__"] != "runpy", frames)
    return (f for f in called if not f.f_globals["__name__"].startswith(("torch.", "vramsweep.")))


def _is_handled() -> bool:
    """Return whether a calling function is at a line of a `try` that catches out-of-memory errors."""
    return any(frame.f_lineno in lines for frame in _callers() for lines in _handlers(frame.f_code.co_filename))


@functools.cache
def _handlers(file: str) -> list[range]:
    """Return the lines within each such `try` of a file; of a library's only if it names these errors."""
    source = "".join(linecache.getlines(file))
    if "site-packages" in file and not NAMED.search(source):
        return []
    tries = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Try | ast.TryStar))
    caught = (one for one in tries if any(h.type is None or HANDLER.search(ast.unparse(h.type)) for h in one.handlers))
    return [range(one.body[0].lineno, (one.body[-1].end_lineno or 0) + 1) for one in caught]
