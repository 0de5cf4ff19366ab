"""What the caching allocator would hold at each moment of a traced run: the trace replayed under one setting.

`replay` is pure: a trace, a setting and a memory limit in, peaks out, all in bytes. The replay is
harness.allocator.simulator; this module only splits it into phases and finds what the peak was made of.
"""

from __future__ import annotations

from dataclasses import dataclass

from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.allocator.simulator import OutOfMemory, Simulator, Stats
from vramsweep.runners.lag import Lag
from vramsweep.runners.trace import CATEGORIES, Mark, Trace

COUNTERS = ("allocated", "active", "requested", "reserved", "inactive_split")
Peaks = dict[str, int]


@dataclass(frozen=True)
class Prediction:
    """Peaks of each phase in order, of the whole run, what the peak allocated was made of, and where memory ran out.

    `breakdown` sums to `peak["allocated"]`: what was asked for, by category, and under "rounding" what the allocator
    made of it (multiples of 512, and blocks whose rest was too small to split off). `phases` ends with the phase in
    which memory ran out, if it did; `failed` is that phase's mark.
    """

    phases: tuple[tuple[Mark, Peaks], ...]
    peak: Peaks
    breakdown: dict[str, int]
    final: Stats
    failed: Mark | None
    failed_request: int | None


def replay(trace: Trace, config: AllocatorConfig, memory_limit: int | None, lag: Lag | None = None) -> Prediction:
    """Replay the trace from an empty allocator. Raises UserError for settings that cannot be simulated.

    With `lag`, a fresh one, blocks that another stream uses stay active until it is done; without, no longer than they
    are allocated.
    """
    simulator = Simulator(config, memory_limit)
    blocks: dict[int, int] = {}  # storage to the size of its block
    phases: list[tuple[Mark, Peaks]] = []
    peak = dict.fromkeys(COUNTERS, 0)
    busiest = 0  # events until the peak allocated
    start = 0
    for mark in trace.marks:
        _restart_peaks(simulator)
        failed_request = None
        for index in range(start, mark.end):
            event = trace.events[index]
            if lag is not None:
                lag.advance(index)
            if event < 0:
                simulator.free_requested(-event - 1)
                if lag is None or not lag.freed(-event - 1):
                    simulator.free_completed(-event - 1)
                continue
            if event == 0:
                simulator.empty_cache()
                continue
            number = event - 1
            for earlier in lag.returned() if lag is not None else ():
                simulator.free_completed(earlier)
            try:
                simulator.malloc(number, trace.sizes[number], trace.streams[number])
            except OutOfMemory:
                failed_request = trace.sizes[number]
                break
            blocks[number] = simulator.live[number].size
            if simulator.allocated > peak["allocated"]:
                peak["allocated"] = simulator.allocated
                busiest = index + 1
        peaks = {c: getattr(simulator, f"peak_{c}") for c in COUNTERS}
        peak = {c: max(peak[c], peaks[c]) for c in COUNTERS}
        phases.append((mark, peaks))
        start = mark.end
        if failed_request is not None:
            break
    breakdown = _breakdown(trace, blocks, busiest)
    failed = phases[-1][0] if phases and failed_request is not None else None
    return Prediction(tuple(phases), peak, breakdown, simulator.stats(), failed, failed_request if failed else None)


def _restart_peaks(simulator: Simulator) -> None:
    """As torch.cuda.reset_peak_memory_stats does."""
    for counter in COUNTERS:
        setattr(simulator, f"peak_{counter}", getattr(simulator, counter))


def _breakdown(trace: Trace, blocks: dict[int, int], until: int) -> dict[str, int]:
    held = dict.fromkeys((*CATEGORIES, "rounding"), 0)
    for event in filter(None, trace.events[:until]):
        number, sign = abs(event) - 1, 1 if event > 0 else -1
        held[trace.categories[number]] += sign * trace.sizes[number]
        held["rounding"] += sign * (blocks[number] - trace.sizes[number])
    return held
