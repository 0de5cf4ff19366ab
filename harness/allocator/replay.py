"""Replay a recording: under the settings it was made with, checking each step, and under any other settings.

Under its own settings the replay starts from the recorded state, is given the addresses cudaMalloc gave, and is
compared with the recording event by event. Under other settings that starting state cannot be used, since it is
itself the work of the recorded settings: the blocks live at the start are allocated anew first, in the order their
addresses suggest, into an empty allocator. To compare like with like, the recorded settings are replayed that way too.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from harness.allocator.config import AllocatorConfig, parse, problems
from harness.allocator.recording import SEGMENT_ACTIONS, Event, Recording
from harness.allocator.recording import load as load_recording
from harness.allocator.restore import Start, undo
from harness.allocator.safepickle import DEFAULT_MAX_BYTES
from harness.allocator.simulator import OutOfMemory, SegmentEvent, Simulator, Stats

TIMELINE_POINTS = 2000
_RELEASES = ("segment_free", "segment_unmap")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Point:
    """The timeline at one stretch of events: the most bytes reserved and allocated in it; `time_us` at its end."""

    event: int
    time_us: int | None
    reserved: int
    allocated: int


@dataclass(frozen=True)
class Match:
    """How a replay under the recorded settings compares with the recording.

    `segment_events` counts those recorded, `matched` those the replay made too, in the same place with the same
    kind, size and stream; `extra` those only the replay made. `blocks_in_place` counts the requests served at the
    recorded address. `unexplained_releases` are segments the recording gives back for a reason the replay does not
    know (a memory limit, garbage collection): they are given back as recorded and count as not matched.
    `releases_before_growth` are cache releases directly before a new segment: a call of empty_cache or an
    out-of-memory retry, which a recording does not tell apart.
    """

    segment_events: int
    matched: int
    extra: int
    blocks: int
    blocks_in_place: int
    unexplained_releases: int
    releases_before_growth: int
    out_of_memory_events: int
    first_difference: str | None

    @property
    def exact(self) -> bool:
        """Every segment event and every address is the recorded one."""
        return self.matched == self.segment_events and self.extra == 0 and self.blocks_in_place == self.blocks


@dataclass(frozen=True)
class Row:
    """One line of the what-if table; sizes in bytes.

    `start` is "recorded" or "rebuilt". `device_allocs` counts cudaMalloc (or cuMemMap) calls, those for rebuilding
    the start included. `out_of_memory` says where the replay ended early; the sizes are then those up to there.
    `match` is set for the replay under the recorded settings, `notes` for what to bear in mind.
    """

    settings: str
    start: str
    peak_reserved: int
    reserved_unallocated: int
    peak_allocated: int
    device_allocs: int
    retries: int
    out_of_memory: str | None
    match: Match | None
    notes: tuple[str, ...]
    stats: Stats
    timeline: tuple[Point, ...]


@dataclass(frozen=True)
class WhatIf:
    """The what-if table of one recording; the first row is always the recorded settings as recorded."""

    recording: str
    device: int
    events: int
    memory_limit: int | None
    rows: tuple[Row, ...]

    def to_json(self, timelines: bool = True) -> str:
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
) -> WhatIf:
    """The table for the recording at `path`: as recorded, rebuilt, and under each of `settings`.

    `memory_limit` (bytes) applies to every row but the first; `recorded_limit` to the first, where it is known.
    Raises UserError for a bad recording, a bad setting or one that cannot be simulated.
    """
    configs = [parse(text) for text in settings]
    recording = load_recording(path, device, max_bytes)
    start = undo(recording)
    for config in configs:
        Simulator(config, memory_limit)  # refuse before the work starts
    rows = [replay_as_recorded(recording, start, recorded_limit)]
    for config in [recording.settings, *configs]:
        rows.append(replay_under(recording, start, config, memory_limit))
    return WhatIf(recording.name, recording.device, len(recording.events), memory_limit, tuple(rows))


def replay_as_recorded(recording: Recording, start: Start, memory_limit: int | None = None) -> Row:
    """Replay from the recorded state under the recorded settings, compared with the recording step by step."""
    config = replace(recording.settings, per_process_memory_fraction=1.0, throw_on_cudamalloc_oom=False)
    follower = _Follower(recording, config, memory_limit)
    simulator = follower.simulator
    for s in start.segments:
        simulator.adopt(s.private, s.stream, s.small, s.expandable, s.pieces)
    timeline = Timeline(simulator, recording.times)
    index, out_of_memory = 0, None
    try:
        for stretch in timeline.stretches(range(start.first, len(recording.events)), len(recording.events)):
            for index in stretch:
                follower.step(index, start.private[index] if start.private else 0)
        follower.finish()
    except OutOfMemory as error:
        out_of_memory = _ended(index, recording, error)
        timeline.close()
    return _row(recording.settings, "recorded", simulator, out_of_memory, follower.match(), (), timeline)


def replay_under(recording: Recording, start: Start, config: AllocatorConfig, memory_limit: int | None) -> Row:
    """Replay under `config` with the starting state rebuilt; ends at the first request that does not fit."""
    simulator = Simulator(config, memory_limit)
    timeline = Timeline(simulator, recording.times)
    index, out_of_memory = -1, None
    try:
        rebuild(simulator, start)
        for stretch in timeline.stretches(_operations(recording, start), len(recording.events)):
            for index, operation in stretch:  # noqa: B007 - it tells where the end was
                _apply(simulator, *operation)
    except OutOfMemory as error:
        out_of_memory = _ended(index, recording, error)
        timeline.close()
    notes = problems(config, None, memory_limited=memory_limit is not None)
    return _row(config, "rebuilt", simulator, out_of_memory, None, tuple(notes), timeline)


def rebuild(simulator: Simulator, start: Start) -> None:
    """Allocate what was live at the start anew. Raises OutOfMemory.

    Segments are made in descending order of address, which is mostly their order in time.
    """
    for segment in sorted(start.segments, key=lambda s: -s.addr):
        for piece in segment.pieces:
            if piece.state in ("live", "pending"):
                simulator.malloc(piece.handle, piece.requested, segment.stream, segment.private)
            if piece.state == "pending":
                simulator.free_requested(piece.handle)


class Timeline:
    """Reserved and allocated over the events, at most TIMELINE_POINTS of them, peaks kept.

    Events are handed out in stretches and each stretch becomes a point, so the events themselves cost nothing.
    When the number of events is not known, stretches double whenever the points would become too many.
    """

    def __init__(self, simulator: Simulator, times: Sequence[int] | None) -> None:
        self.events = 0
        self.points: list[Point] = []
        self._simulator = simulator
        self._times = times
        self._allocated = 0  # the peak so far; the simulator's own peak starts anew with each stretch
        self._reserved = 0

    def stretches(self, events: Iterable[_T], total: int | None = None) -> Iterator[list[_T]]:
        length = 1 if total is None else max(1, -(-total // TIMELINE_POINTS))
        source = iter(events)
        self._mark()
        while stretch := list(islice(source, length)):
            yield stretch
            self.events += len(stretch)
            self._mark()
            if len(self.points) > TIMELINE_POINTS + 1:
                self.points = [_merge(self.points[i : i + 2]) for i in range(0, len(self.points), 2)]
                length *= 2

    def close(self) -> None:
        """Add the point at which an out-of-memory error ended the replay."""
        self._mark()

    @property
    def peak_allocated(self) -> int:
        return max(self._allocated, self._simulator.peak_allocated)

    def _mark(self) -> None:
        s = self._simulator
        time = None if self._times is None or self.events == 0 else self._times[min(self.events, len(self._times)) - 1]
        reserved = s.peak_reserved if s.peak_reserved > self._reserved else s.reserved
        self.points.append(Point(self.events, time, reserved, s.peak_allocated))
        self._reserved = s.peak_reserved
        self._allocated = max(self._allocated, s.peak_allocated)
        s.peak_allocated = s.allocated


def _merge(points: Sequence[Point]) -> Point:
    last = points[-1]
    return replace(last, reserved=max(p.reserved for p in points), allocated=max(p.allocated for p in points))


class _Follower:
    """Steps through a recording beside a simulator and compares what both do to segments."""

    def __init__(self, recording: Recording, config: AllocatorConfig, memory_limit: int | None) -> None:
        self.simulator = Simulator(config, memory_limit, self._note, self._recorded_address)
        self._recording = recording
        self._limited = memory_limit is not None
        self._made: list[SegmentEvent] = []
        self._run: list[Event] = []  # the recorded segment events since the last other event
        self._held: list[tuple[str, int]] = []  # frees completed late: by another stream, or by a retry waiting for it
        self._counts = dict.fromkeys(Match.__dataclass_fields__, 0)
        self._first: str | None = None
        self._diverged = False

    def step(self, index: int, private: int) -> None:
        events = self._recording.events
        event = events[index]
        action, addr, size, stream = event
        if action in SEGMENT_ACTIONS:
            self._run.append(event)
            return
        if self._limited and action == "free_completed" and events[index - 1][:2] != ("free_requested", addr):
            self._hold(addr)
            return
        if not (self._limited and action in ("alloc", "oom") and self._by_malloc(size, stream, private)):
            self._complete_held()
            self._release_as_recorded(index)
        if action == "alloc":
            self._alloc(addr, size, stream, private, index)
        elif action == "oom":
            self._counts["out_of_memory_events"] += 1
            if self._limited:
                self._expect_failure(size, stream, private, index)
        else:
            _apply(self.simulator, *event, private)
        self._complete_held()
        self._compare(index)

    def finish(self) -> None:
        end = len(self._recording.events)
        self._complete_held()
        self._release_as_recorded(end)
        self._compare(end)

    def match(self) -> Match:
        return Match(**{**self._counts, "first_difference": self._first})  # type: ignore[arg-type]

    def _alloc(self, addr: int, size: int, stream: int, private: int, index: int) -> None:
        self._counts["blocks"] += 1
        try:
            self.simulator.malloc(addr, size, stream, private)
        except OutOfMemory:
            self._differs(index, f"the replay runs out of memory where the recording gets {size} bytes")
            raise
        at = self.simulator.live[addr].addr
        if at == addr:
            self._counts["blocks_in_place"] += 1
        else:
            self._differs(index, f"{size} bytes are placed at {at:#x}, recorded is {addr:#x}")

    def _expect_failure(self, size: int, stream: int, private: int, index: int) -> None:
        try:
            self.simulator.malloc("refused", size, stream, private)
        except OutOfMemory:
            return
        self._differs(index, f"the recording runs out of memory, the replay gets {size} bytes")
        self.simulator.free("refused")

    def _by_malloc(self, size: int, stream: int, private: int) -> bool:
        """Whether the releases before a request are malloc's own doing, which the simulator will then repeat.

        If garbage collection is due but the whole cache was given back, it was empty_cache.
        """
        releases = self._releases()
        why = self.simulator.makes_room(size, stream, private) if releases else None
        return why == "retry" or (why == "garbage" and not self._is_whole_cache(releases))

    def _releases(self) -> list[Event]:
        return [e for e in self._run if e[0] in _RELEASES]

    def _is_whole_cache(self, releases: Sequence[Event]) -> bool:
        return [_shape(e) for e in self.simulator.releasable()] == [_shape(e) for e in releases]

    def _hold(self, addr: int) -> None:
        """Under a handle of its own, as the address may be given out again at once."""
        block = self.simulator.pending.pop(addr, None)
        if block is not None:  # None: the replay has diverged and completed it already
            self.simulator.pending["held", addr] = block
            self._held.append(("held", addr))

    def _complete_held(self) -> None:
        for handle in self._held:
            self.simulator.free_completed(handle)
        self._held.clear()

    def _release_as_recorded(self, index: int) -> None:
        """Do what the recording did to the cache before the next event."""
        releases = self._releases()
        if not releases:
            return
        self._counts["releases_before_growth"] += len(releases) < len(self._run)
        if self._is_whole_cache(releases):
            self.simulator.empty_cache()
            return
        followed = [kind == "segment_free" and self.simulator.release_segment(addr) for kind, addr, _, _ in releases]
        self._made.clear()  # given back as recorded, not predicted
        self._run = [e for e in self._run if e not in releases]
        self._counts["segment_events"] += len(releases)
        self._counts["unexplained_releases"] += len(releases)
        what = f"{_say(releases)} is given back for a reason the replay does not know"
        self._differs(index, what, diverges=not all(followed))

    def _compare(self, index: int) -> None:
        run, made = self._run, self._made
        if not run and not made:
            return
        same = 0
        while same < min(len(run), len(made)) and _shape(run[same]) == _shape(made[same]):
            same += 1
        if same < max(len(run), len(made)):
            recorded, replayed = _say(run[same:]), _say(made[same:])
            self._differs(index, f"recorded is {recorded}, the replay has {replayed}")
        self._counts["segment_events"] += len(run)
        self._counts["matched"] += same
        self._counts["extra"] += max(0, len(made) - len(run))
        run.clear()
        made.clear()

    def _differs(self, index: int, what: str, diverges: bool = True) -> None:
        self._diverged = self._diverged or diverges
        if self._first is None:
            self._first = f"event {index}: {what}"

    def _note(self, event: SegmentEvent) -> None:
        self._made.append(event)

    def _recorded_address(self, kind: str, size: int) -> int | None:
        """Where the driver put the segment, if the recording makes such a one here; its choice decides between
        equally large free blocks later. A new range of address space begins where its first page is mapped.
        Once the replay has diverged the place may be taken."""
        if self._diverged:
            return None
        fitting = (e for e in self._run if e[0] == kind and (e[2] == size or kind == "segment_map"))
        return next((addr for _, addr, _, _ in fitting), None)


def _ended(index: int, recording: Recording, error: OutOfMemory) -> str:
    where = "rebuilding the starting state" if index < 0 else f"event {index} of {len(recording.events)}"
    return f"{where}: {error}"


def _shape(event: Event | SegmentEvent) -> tuple[str, int, int]:
    return event[0], event[2], event[3]


def _say(events: Sequence[Event | SegmentEvent]) -> str:
    return f"{events[0][0]} of {events[0][2]} bytes" if events else "nothing"


def _operations(recording: Recording, start: Start) -> Iterator[tuple[int, tuple[str, int, int, int, int]]]:
    """The events by number, for a replay under other settings: what the program asked for, not what the allocator did.

    A run of releases is an empty_cache by the program (or a retry, which cannot be told apart), once.
    """
    released = False
    for index in range(start.first, len(recording.events)):
        action, addr, size, stream = recording.events[index]
        if action in SEGMENT_ACTIONS:
            empties = action in _RELEASES and not released
            released = released or empties
            action = "empty_cache" if empties else action
        else:
            released = False
        yield index, (action, addr, size, stream, start.private[index] if start.private else 0)


def _apply(simulator: Simulator, action: str, addr: int, size: int, stream: int, private: int) -> None:
    if action == "alloc":
        simulator.malloc(addr, size, stream, private)
    elif action == "free_requested":
        simulator.free_requested(addr)
    elif action == "free_completed":
        simulator.free_completed(addr)
    elif action == "empty_cache":
        simulator.empty_cache()


def _row(
    config: AllocatorConfig,
    start: str,
    simulator: Simulator,
    out_of_memory: str | None,
    match: Match | None,
    notes: tuple[str, ...],
    timeline: Timeline,
) -> Row:
    stats = replace(simulator.stats(), peak_allocated=timeline.peak_allocated)
    return Row(
        settings=config.render(),
        start=start,
        peak_reserved=stats.peak_reserved,
        reserved_unallocated=stats.peak_reserved - stats.allocated_at_peak,
        peak_allocated=stats.peak_allocated,
        device_allocs=stats.num_device_alloc,
        retries=stats.num_alloc_retries,
        out_of_memory=out_of_memory,
        match=match,
        notes=notes,
        stats=stats,
        timeline=tuple(timeline.points),
    )
