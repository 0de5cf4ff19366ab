"""Replay of a trace under one setting: what the caching allocator would hold at each moment of the run.

`replay` is pure: a trace, a setting and a memory limit in, peaks out, all in bytes. harness.allocator.simulator is the
allocator; this module only splits the replay into phases and finds what the peak was made of.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.allocator.simulator import OutOfMemory, Simulator, Stats
from vramsweep.runners.trace.allocation_program import Program, build_program
from vramsweep.runners.trace.trace_data import CATEGORIES, HOST_CATEGORIES, HostStorages, Mark, Trace

COUNTERS = ("allocated", "active", "requested", "reserved", "inactive_split")
Peaks = dict[str, int]
Look = Callable[[int, Simulator], None]


@dataclass(frozen=True)
class Refused:
    """The request that does not fit: its phase's mark, its storage's number, bytes requested, allocated and reserved.

    `parts` are what would be held, by category as in Prediction.breakdown. They sum to `allocated` + `request`.
    """

    mark: Mark
    storage: int
    request: int
    allocated: int
    reserved: int
    parts: dict[str, int]


@dataclass(frozen=True)
class Prediction:
    """Peaks of each phase in order and of the whole run, the parts of the peak allocated, and where memory ran out.

    `breakdown` sums to `peak["allocated"]`: bytes requested by category, and what the allocator adds as "rounding".
    It adds up to multiples of 512, and blocks' rests that are too small to split off. If memory ran out, `refused` is
    the request and `phases` ends with its phase.
    """

    phases: tuple[tuple[Mark, Peaks], ...]
    peak: Peaks
    breakdown: dict[str, int]
    final: Stats
    refused: Refused | None


@dataclass(frozen=True)
class HostPrediction:
    """Host memory of one rank in bytes: peaks of each phase in order and of the whole run, and what that is made of.

    `breakdown` sums to `peak`: sizes by category, "rounding" (what page-locked memory takes beyond them) and "workers"
    (processes that the rank has started). `pinned` is the peak of page-locked memory, including blocks kept for reuse.
    """

    phases: tuple[tuple[Mark, int], ...]
    peak: int
    breakdown: dict[str, int]
    pinned: int


def replay(
    trace: Trace,
    config: AllocatorConfig,
    memory_limit: int | None,
    ahead: bool = False,
    look: Look | None = None,
    simulator: Simulator | None = None,
) -> Prediction:
    """Replay the trace from an empty allocator. Raises UserError for settings that cannot be simulated.

    A block that another stream uses when freed is returned at once: the lower bound, a GPU that keeps up with the CPU.
    With `ahead` it is returned when the CPU has waited for that stream (stream_lag.py). `look` is called after each
    operation of the trace's program with its number, which without `ahead` is the event's. `simulator` is an unused one
    with this setting and limit.
    """
    order = build_program(trace, ahead)
    simulator = simulator or Simulator(config, memory_limit)
    phases: list[tuple[Mark, Peaks]] = []
    peak = dict.fromkeys(COUNTERS, 0)
    busiest = 0  # number, from 1, of the storage whose request led to the peak allocated
    refused = None
    done = 0
    for mark, operations in order.phases:
        peaks, highest, asked = phase(
            simulator, operations, trace.sizes, trace.streams, peak["allocated"], look=look, first=done
        )
        busiest = highest or busiest
        done += len(operations)
        peak = {c: max(peak[c], peaks[c]) for c in COUNTERS}
        phases.append((mark, peaks))
        if asked:
            request, allocated = trace.sizes[asked - 1], simulator.allocated
            beside = _breakdown(trace, order, asked, allocated + request)
            refused = Refused(mark, asked - 1, request, allocated, simulator.reserved, beside)
            break
    breakdown = _breakdown(trace, order, busiest, peak["allocated"])
    return Prediction(tuple(phases), peak, breakdown, simulator.stats(), refused)


def phase(
    simulator: Simulator,
    operations: Sequence[int],
    sizes: Sequence[int] | Mapping[int, int],
    streams: Sequence[int] | Mapping[int, int],
    highest: int,
    look: Look | None = None,
    first: int = 0,
    storages: int | None = None,
) -> tuple[Peaks, int, int]:
    """Replay a phase of a program; return its peaks and the numbers (from 1; 0: none) of two storages.

    The first took allocated highest above `highest`; the second did not fit. `storages` defaults to `len(streams)`.
    """
    for counter in COUNTERS:  # as torch.cuda.reset_peak_memory_stats does
        setattr(simulator, f"peak_{counter}", getattr(simulator, counter))
    storages, found, refused = len(streams) if storages is None else storages, 0, 0
    malloc, free = simulator.malloc, simulator.free
    operation = 0
    try:
        for number, operation in enumerate(operations, first):
            if operation > 0:
                if operation <= storages:
                    malloc(operation - 1, sizes[operation - 1], streams[operation - 1])
                    if simulator.allocated > highest:
                        highest, found = simulator.allocated, operation
                else:
                    simulator.free_completed(operation - storages - 1)
            elif operation >= -storages:
                if operation:
                    free(-operation - 1)
                else:
                    simulator.empty_cache()
            else:
                simulator.free_requested(-operation - storages - 1)
            if look is not None:
                look(number, simulator)
    except OutOfMemory:
        refused = operation
    return {c: getattr(simulator, f"peak_{c}") for c in COUNTERS}, found, refused


def host_replay(storages: HostStorages, config: AllocatorConfig, workers: int = 0) -> HostPrediction:
    """Replay host memory: pageable tensors take their size, page-locked ones a block of torch's host allocator.

    Blocks are powers of two; they are never returned, but reused for a block of that size. Two sizes may be set, above
    which blocks are exact, or exact and returned (CachingHostAllocatorImpl in ATen/core/CachingHostAllocator.h).
    `workers` bytes are added from the first step on.
    """
    bounds = config.pinned_max_round_threshold_mb, config.pinned_max_cached_size_mb
    rounded, cached = (math.inf if size is None else size << 20 for size in bounds)
    held = dict.fromkeys((*HOST_CATEGORIES, "rounding", "workers"), 0)
    spare: Counter[int] = Counter()  # blocks by size
    phases: list[tuple[Mark, int]] = []
    peak, breakdown = 0, held.copy()
    total = locked = pinned = start = 0
    for mark in storages.marks:
        if mark.step is not None and held["workers"] < workers:
            held["workers"] = workers
            total += workers
        most = total
        if total > peak:
            peak, breakdown = total, held.copy()
        for event in storages.events[start : mark.end]:
            number, sign = abs(event) - 1, 1 if event > 0 else -1
            size = storages.sizes[number]
            held[storages.categories[number]] += sign * size
            grown = sign * size
            if storages.pinned[number]:
                block = 1 << (size - 1).bit_length() if size <= min(rounded, cached) else size
                grown = sign * block
                if block <= cached and (event < 0 or spare[block]):
                    spare[block] -= sign
                    grown = 0
                held["rounding"] += grown - sign * size
                locked += grown
                pinned = max(pinned, locked)
            total += grown
            most = max(most, total)
            if total > peak:
                peak, breakdown = total, held.copy()
        phases.append((mark, most))
        start = mark.end
    return HostPrediction(tuple(phases), peak, breakdown, pinned)


def _breakdown(trace: Trace, order: Program, busiest: int, allocated: int) -> dict[str, int]:
    """Return bytes by category of what was alive once storage `busiest` (from 1) had been requested."""
    alive = order.alive(busiest - 1) if busiest else ()
    return parts(((trace.categories[number], trace.sizes[number]) for number in alive), allocated if busiest else 0)


def parts(alive: Iterable[tuple[str, int]], allocated: int) -> dict[str, int]:
    """Sum storages, given as category and size, by category; "rounding" fills up to `allocated`."""
    held = dict.fromkeys((*CATEGORIES, "rounding"), 0)
    for category, size in alive:
        held[category] += size
    held["rounding"] = allocated - sum(held.values())
    return held
