"""Replay a recording: under the settings it was made with, checking each step, and under any other settings.

Under its own settings the replay starts from the recorded state and uses the addresses that cudaMalloc gave. It is
compared with the recording event by event. Under other settings it cannot use that state, because the recorded settings
shaped it. Instead the blocks live at the start are first allocated anew into an empty allocator, in the order that
their addresses suggest. To compare like with like, the recorded settings are replayed that way too.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from vramsweep.harness.allocator.config import AllocatorConfig, estimates, parse, without_effect
from vramsweep.harness.allocator.initial_state import Start, undo
from vramsweep.harness.allocator.peak_blocks import Holders, at_peak, find_vendor_library
from vramsweep.harness.allocator.recording import SEGMENT_ACTIONS, Recording
from vramsweep.harness.allocator.recording import load as load_recording
from vramsweep.harness.allocator.safe_unpickle import DEFAULT_MAX_BYTES
from vramsweep.harness.allocator.simulator import OutOfMemory, Simulator, Stats
from vramsweep.harness.allocator.verify_replay import RELEASES, Follower, Match, apply

TIMELINE_POINTS = 2000
_T = TypeVar("_T")


@dataclass(frozen=True)
class Point:
    """One stretch of events in the timeline: the most bytes reserved and allocated in it, and `time_us` at its end."""

    event: int
    time_us: int | None
    reserved: int
    allocated: int


class Timeline:
    """Reserved and allocated bytes over the events, in at most TIMELINE_POINTS stretches; peaks are kept.

    Each stretch of events becomes a point, so single events cost nothing.
    """

    def __init__(self, simulator: Simulator, times: Sequence[int] | None) -> None:
        self.events = 0
        self.points: list[Point] = []
        self._simulator = simulator
        self._times = times
        self._allocated = 0  # the peak so far, because the simulator's own peak restarts with each stretch
        self._reserved = 0

    def stretches(self, events: Iterable[_T], total: int) -> Iterator[list[_T]]:
        """Yield the events in stretches for a recording of `total` events, and mark a point before and after each."""
        length = max(1, -(-total // TIMELINE_POINTS))
        source = iter(events)
        self.mark()
        while stretch := list(islice(source, length)):
            yield stretch
            self.events += len(stretch)
            self.mark()

    @property
    def peak_allocated(self) -> int:
        """Return the most bytes allocated so far, over all stretches."""
        return max(self._allocated, self._simulator.peak_allocated)

    def stats(self) -> Stats:
        """Return the simulator's statistics, with the peak allocated of all stretches."""
        return replace(self._simulator.stats(), peak_allocated=self.peak_allocated)

    def mark(self) -> None:
        """Add a point for the stretch that ends here, even if by an out-of-memory error."""
        s = self._simulator
        time = None if self._times is None or self.events == 0 else self._times[min(self.events, len(self._times)) - 1]
        reserved = s.peak_reserved if s.peak_reserved > self._reserved else s.reserved
        self.points.append(Point(self.events, time, reserved, s.peak_allocated))
        self._reserved = s.peak_reserved
        self._allocated = max(self._allocated, s.peak_allocated)
        s.peak_allocated = s.allocated


@dataclass(frozen=True)
class Row:
    """One line of the what-if table; sizes in bytes.

    `start` is "recorded" or "rebuilt". `device_allocs` counts cudaMalloc (or cuMemMap) calls, those for rebuilding
    the start included. `out_of_memory` says where the replay ended early; the sizes are then those up to there.
    `match` and `holders` are set for the replay from the recorded state; `notes` are caveats. For a recording without
    history, that replay only has the holders of the final state and the end of the timeline.
    """

    settings: str
    start: str
    peak_reserved: int | None
    reserved_unallocated: int | None
    peak_allocated: int | None
    device_allocs: int | None
    retries: int | None
    out_of_memory: str | None
    match: Match | None
    notes: tuple[str, ...]
    stats: Stats | None
    timeline: tuple[Point, ...]
    holders: Holders | None = None


@dataclass(frozen=True)
class WhatIf:
    """The what-if table of one recording; the first row is always the recorded settings as recorded.

    `history` is "none" if there are fewer than two events, "part" if memory was reserved before the first, else
    "whole". `library` is another vendor's, if the stacks name one.
    """

    recording: str
    device: int
    events: int
    memory_limit: int | None
    rows: tuple[Row, ...]
    history: str
    library: str | None

    def to_json(self, timelines: bool = True) -> str:
        """Return the table as JSON, with each row's timeline only if `timelines`."""
        data = asdict(self)
        if not timelines:
            for row in data["rows"]:
                del row["timeline"]
        return json.dumps(data, indent=1)


def what_if(
    path: Path,
    settings: Sequence[str] = (),
    *,
    memory_limit: int | None = None,
    recorded_limit: int | None = None,
    device: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    hear: Callable[[str], None] = lambda text: None,
) -> WhatIf:
    """Return the table for the recording at `path`: as recorded, rebuilt, and under each of `settings`.

    `memory_limit` (bytes) applies to every row but the first, `recorded_limit` to the first, if it is known. `hear`
    gets a text on each replay. Raises UserError for a bad recording, a bad setting or one that cannot be simulated.
    """
    configs = [parse(text) for text in settings]
    recording = load_recording(path, device, max_bytes)
    start = undo(recording)
    for config in configs:
        Simulator(config, memory_limit)  # refuse settings before the work starts
    hear("replaying as recorded")
    rows = [replay_as_recorded(recording, start, recorded_limit)]
    baseline = replay_under(recording, start, _without_limits(recording.settings), memory_limit)
    rows.append(replace(baseline, settings=recording.settings.render()))
    for number, config in enumerate(configs, 1):
        hear(f"replaying under setting {number} of {len(configs)}: {config.render()}")
        rows.append(replay_under(recording, start, config, memory_limit))
    history = "none" if len(recording.events) < 2 else "whole" if start.empty else "part"
    events, library = len(recording.events), find_vendor_library(recording)
    return WhatIf(recording.name, recording.device, events, memory_limit, tuple(rows), history, library)


def replay_as_recorded(recording: Recording, start: Start, memory_limit: int | None = None) -> Row:
    """Replay from the recorded state under the recorded settings, compared with the recording step by step."""
    follower = Follower(recording, _without_limits(recording.settings), memory_limit)
    simulator = follower.simulator
    for s in start.segments:
        simulator.adopt(s.private, s.stream, s.small, s.expandable, s.pieces)
    timeline = Timeline(simulator, recording.times)
    index, out_of_memory = 0, None
    busiest, most = start.first, simulator.allocated
    try:
        for stretch in timeline.stretches(range(start.first, len(recording.events)), len(recording.events)):
            for index in stretch:
                follower.step(index, start.private[index] if start.private else 0)
                if simulator.allocated > most:
                    busiest, most = index + 1, simulator.allocated
        follower.finish()
    except OutOfMemory as error:
        out_of_memory = _ended(index, recording, error)
        timeline.mark()
    row = _row(recording.settings, "recorded", timeline, out_of_memory, follower.match(), ())
    if len(recording.events) < 2:
        row = replace(row, peak_reserved=None, reserved_unallocated=None, peak_allocated=None, stats=None)
        row = replace(row, device_allocs=None, retries=None, match=None)
    return replace(row, holders=at_peak(recording, start, busiest, most))


def _as_given(recording: Recording, start: Start) -> dict[int, list[int]]:
    """Return the driver's addresses by size, up to the first segment it took back; none if segments existed before.

    The replay gives the n-th segment of a size the n-th address. These addresses are the only trace of memory that the
    process took before torch did. All these segments existed at once, so no two of them overlap.
    """
    given: dict[int, list[int]] = {}
    if start.segments:
        return given
    for action, address, size, _ in recording.events:
        if action == "segment_free":
            break
        if action == "segment_alloc":
            given.setdefault(size, []).append(address)
    return given


def replay_under(recording: Recording, start: Start, config: AllocatorConfig, memory_limit: int | None) -> Row:
    """Replay under `config` with the starting state rebuilt; end at the first request that does not fit."""
    given = _as_given(recording, start)
    left = {size: iter(addresses) for size, addresses in given.items()}
    simulator = Simulator(
        config, memory_limit,
        next_address=lambda kind, size: next(left.get(size, iter(())), None) if kind == "segment_alloc" else None,
    )  # fmt: skip
    simulator.below(min((a for addresses in given.values() for a in addresses), default=None))
    timeline = Timeline(simulator, recording.times)
    index, out_of_memory = -1, None
    try:
        rebuild(simulator, start)
        for stretch in timeline.stretches(_operations(recording, start), len(recording.events)):
            for index, operation in stretch:  # noqa: B007 - it tells where the end was
                apply(simulator, *operation)
    except OutOfMemory as error:
        out_of_memory = _ended(index, recording, error)
        timeline.mark()
    notes = [*estimates(config), *without_effect(config, memory_limited=memory_limit is not None)]
    return _row(config, "rebuilt", timeline, out_of_memory, None, notes)


def rebuild(simulator: Simulator, start: Start) -> None:
    """Allocate the blocks that were live at the start anew. Raises OutOfMemory.

    Segments are created in descending order of address, which is mostly their order in time.
    """
    for segment in sorted(start.segments, key=lambda s: -s.addr):
        for piece in segment.pieces:
            if piece.state in ("live", "pending"):
                simulator.malloc(piece.handle, piece.requested, segment.stream, segment.private)
            if piece.state == "pending":
                simulator.free_requested(piece.handle)


def _without_limits(config: AllocatorConfig) -> AllocatorConfig:
    """Drop the limits, which callers give in bytes, because a recording does not say of how much a fraction is."""
    return replace(config, per_process_memory_fraction=1.0, throw_on_cudamalloc_oom=False)


def _ended(index: int, recording: Recording, error: OutOfMemory) -> str:
    where = "rebuilding the starting state" if index < 0 else f"event {index} of {len(recording.events)}"
    return f"{where}: {error}"


def _operations(recording: Recording, start: Start) -> Iterator[tuple[int, tuple[str, int, int, int, int]]]:
    """Yield the events with their numbers for a replay under other settings, of which `apply` uses the requests.

    The first of a run of releases becomes an empty_cache of the program (or a retry, which cannot be distinguished).
    """
    released = False
    for index in range(start.first, len(recording.events)):
        action, addr, size, stream = recording.events[index]
        empties = action in RELEASES and not released
        released = action in SEGMENT_ACTIONS and (released or empties)
        private = start.private[index] if start.private else 0
        yield index, ("empty_cache" if empties else action, addr, size, stream, private)


def _row(
    config: AllocatorConfig,
    start: str,
    timeline: Timeline,
    ended: str | None,
    match: Match | None,
    notes: Sequence[str],
) -> Row:
    stats = timeline.stats()
    return Row(
        settings=config.render(),
        start=start,
        peak_reserved=stats.peak_reserved,
        reserved_unallocated=stats.peak_reserved - stats.allocated_at_peak,
        peak_allocated=stats.peak_allocated,
        device_allocs=stats.num_device_alloc,
        retries=stats.num_alloc_retries,
        out_of_memory=ended,
        match=match,
        notes=tuple(notes),
        stats=stats,
        timeline=tuple(timeline.points),
    )
