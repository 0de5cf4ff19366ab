"""Replay a recording under the settings it was made with, checking each step, and under any other settings.

Under its own settings the replay starts from the recorded state and uses the addresses that cudaMalloc gave. Each event
is compared with the recording. Under other settings that state cannot be used, because the recorded settings shaped it.
The replay then starts with an empty allocator, and first allocates the blocks that were live at the start, in the order
that their addresses suggest. To compare like with like, the recorded settings are replayed that way too.

`grid` is a sensible grid of settings to try, and `rank` sorts the replays under them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from vramsweep.harness.allocator.config import AllocatorConfig, estimates, parse, without_effect
from vramsweep.harness.allocator.initial_state import Start, undo
from vramsweep.harness.allocator.peak_blocks import Holders, at_peak, find_vendor_library
from vramsweep.harness.allocator.recording import SEGMENT_ACTIONS, Recording
from vramsweep.harness.allocator.recording import load as load_recording
from vramsweep.harness.allocator.safe_unpickle import DEFAULT_MAX_BYTES
from vramsweep.harness.allocator.simulator import OutOfMemory, Simulator, Stats
from vramsweep.harness.allocator.snapshot import RecordingSimulator, write_snapshot
from vramsweep.harness.allocator.verify_replay import RELEASES, Follower, Match, apply

TIMELINE_POINTS = 2000
_T = TypeVar("_T")
_GRID: dict[str, list[str]] = json.loads(Path(__file__).with_name("settings_grid.json").read_text("utf-8"))


@dataclass(frozen=True)
class Point:
    """A point of the timeline: most bytes reserved and allocated in a stretch of events, and `time_us` at its end."""

    event: int
    time_us: int | None
    reserved: int
    allocated: int


class Timeline:
    """Reserved and allocated bytes over the events, one point for each of at most TIMELINE_POINTS stretches.

    A point has the peaks of its stretch. Single events cost nothing.
    """

    def __init__(self, simulator: Simulator, times: Sequence[int] | None) -> None:
        self.events = 0
        self.points: list[Point] = []
        self._simulator = simulator
        self._times = times
        self._allocated = 0  # the peak of all stretches so far; the simulator's own restarts with each stretch
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
        """Add a point for the stretch that ends here; an out-of-memory error ends one too."""
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

    `start` is "recorded" or "rebuilt". `device_allocs` counts calls of cudaMalloc (or cuMemMap), including those that
    rebuild the start. `out_of_memory` says where the replay ended early; sizes are then peaks up to that event. `notes`
    are caveats. Only a replay from the recorded state has `match` and `holders`. If the recording has no history, that
    replay has only the holders of the final state and the end of the timeline.
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
    """The what-if table of one recording; the first row is always the replay from the recorded state.

    `history` is "none" if there are fewer than two events, "part" if memory was reserved before the first event, else
    "whole". `library` is that of another vendor's devices, such as torch_npu, if the recorded stacks name one.
    `simulated` says that vramsweep wrote the recording.
    """

    recording: str
    device: int
    events: int
    memory_limit: int | None
    rows: tuple[Row, ...]
    history: str
    library: str | None
    simulated: bool = False

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
    snapshot: Path | None = None,
) -> WhatIf:
    """Return the table for the recording at `path`: as recorded, rebuilt, and under each of `settings`.

    `recorded_limit` (bytes, None if unknown) applies to the first row, `memory_limit` (bytes) to all others. `hear`
    gets a text before each replay. The replay under the last setting is written to `snapshot`. Raises UserError for a
    recording or setting that is bad or cannot be simulated.
    """
    configs = [parse(text) for text in settings]
    recording = load_recording(path, device, max_bytes)
    start = undo(recording)
    for config in configs:
        Simulator(config, memory_limit)  # refuse settings before the work starts
    hear("replaying as recorded")
    rows = [replay_as_recorded(recording, start, recorded_limit)]
    baseline = replay_under(recording, start, without_limits(recording.settings), memory_limit)
    rows.append(replace(baseline, settings=recording.settings.render()))
    for number, config in enumerate(configs, 1):
        hear(f"replaying under setting {number} of {len(configs)}: {config.render()}")
        rows.append(replay_under(recording, start, config, memory_limit, snapshot if number == len(configs) else None))
    history = "none" if len(recording.events) < 2 else "part" if start.segments else "whole"
    events, library = len(recording.events), find_vendor_library(recording)
    simulated = recording.simulated
    return WhatIf(recording.name, recording.device, events, memory_limit, tuple(rows), history, library, simulated)


def replay_as_recorded(recording: Recording, start: Start, memory_limit: int | None = None) -> Row:
    """Replay from the recorded state under the recorded settings, compared with the recording step by step."""
    follower = Follower(recording, without_limits(recording.settings), memory_limit)
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
    """Return by size the addresses that the driver gave, up to the first segment that it took back.

    Empty if the recording starts with segments. In a replay the n-th segment of a size gets the n-th address. Only
    these addresses reflect memory that the process took before torch. All segments existed at once, so none overlap.
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


def replay_under(
    recording: Recording, start: Start, config: AllocatorConfig, memory_limit: int | None, snapshot: Path | None = None
) -> Row:
    """Replay under `config` with the starting state rebuilt; end at the first request that does not fit.

    Write the replay to `snapshot`, with the recorded stacks. Raises UserError if it cannot be written.
    """
    given = _as_given(recording, start)
    left = {size: iter(addresses) for size, addresses in given.items()}

    def next_address(kind: str, size: int) -> int | None:
        return next(left.get(size, iter(())), None) if kind == "segment_alloc" else None

    stacks: list[Any] = []  # of the replay's requests, in order
    if snapshot is None:
        simulator = Simulator(config, memory_limit, next_address=next_address)
    else:
        recorded = _stacks_by_address(recording, start)

        def origin(address: int) -> int:
            stacks.append(next(recorded[address]))
            return len(stacks) - 1

        simulator = RecordingSimulator(config, memory_limit, origin, next_address=next_address)
    simulator.below(min((a for addresses in given.values() for a in addresses), default=None))
    timeline = Timeline(simulator, recording.times)
    index, out_of_memory = -1, None
    try:
        rebuild(simulator, start)
        for stretch in timeline.stretches(_operations(recording, start), len(recording.events)):
            for index, operation in stretch:  # noqa: B007 - `_ended` needs the last index
                apply(simulator, *operation)
    except OutOfMemory as error:
        out_of_memory = _ended(index, recording, error)
        timeline.mark()
    if isinstance(simulator, RecordingSimulator) and snapshot is not None:
        made = f"replayed by vramsweep under {config.render() or 'the defaults'}, not measured"
        found = simulator.snapshot(recording.device)
        write_snapshot(snapshot, found, lambda n: (stacks[n], None), made, recording=recording.name)
    notes = [*estimates(config), *without_effect(config, memory_limited=memory_limit is not None)]
    return _row(config, "rebuilt", timeline, out_of_memory, None, notes)


def _stacks_by_address(recording: Recording, start: Start) -> dict[int, Iterator[Any]]:
    """Return the frames of each address's requests in order; None for a block from before that was freed later."""
    found: dict[int, list[Any]] = {}
    freed = {addr for action, addr, _, _ in recording.events if action == "free_requested"}
    for segment in start.segments:
        for piece in segment.pieces:
            if piece.state in ("live", "pending"):
                found[piece.addr] = [None if piece.addr in freed else recording.held.get(piece.addr)]
    for index in range(start.first, len(recording.events)):
        if index in recording.stacks:
            found.setdefault(recording.events[index][1], []).append(recording.stacks[index])
    return {address: iter(frames) for address, frames in found.items()}


def rebuild(simulator: Simulator, start: Start) -> None:
    """Allocate again the blocks that were live at the start. Raises OutOfMemory.

    Segments are created in descending order of address, because that is mostly the order in which they were made.
    """
    for segment in sorted(start.segments, key=lambda s: -s.addr):
        for piece in segment.pieces:
            if piece.state in ("live", "pending"):
                simulator.malloc(piece.handle, piece.requested, segment.stream, segment.private)
            if piece.state == "pending":
                simulator.free_requested(piece.handle)


def without_limits(config: AllocatorConfig) -> AllocatorConfig:
    """Drop the limits: a recording does not say what the fraction is a share of, so callers give limits in bytes."""
    return replace(config, per_process_memory_fraction=1.0, throw_on_cudamalloc_oom=False)


def _ended(index: int, recording: Recording, error: OutOfMemory) -> str:
    where = "rebuilding the starting state" if index < 0 else f"event {index} of {len(recording.events)}"
    return f"{where}: {error}"


def _operations(recording: Recording, start: Start) -> Iterator[tuple[int, tuple[str, int, int, int, int]]]:
    """Yield the number of each event, and the event as `apply` takes it, for a replay under other settings.

    Several releases in a row become one empty_cache, whether the program called it or a retry did: both look the same.
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


def grid(limited: bool) -> tuple[str, ...]:
    """Return the settings to try; garbage collection only under a memory limit, because it does nothing without one."""
    return tuple(_GRID["always"] + (_GRID["limited"] if limited else []))


def rank(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Sort the rows, best first: those that fit, then by peak reserved, then by the number of cudaMallocs."""
    return tuple(sorted(rows, key=lambda r: (r.out_of_memory is not None, r.peak_reserved or 0, r.device_allocs or 0)))


def saving(result: WhatIf) -> tuple[Row, int] | None:
    """Return the best settings tried and the bytes they save, both rebuilt; None if none was tried or one ran out."""
    recorded, *tried = sorted(result.rows[1:], key=lambda row: row.settings != result.rows[0].settings)
    best = next(iter(rank(tried)), None)
    if best is None or recorded.out_of_memory or best.out_of_memory:
        return None
    return best, (recorded.peak_reserved or 0) - (best.peak_reserved or 0)
