"""A check of every step of a replay under the recorded settings.

A recording shows changes of the cache only as segment events. If a request caused the segment events before it, the
simulator must make the same ones. Otherwise, a release of exactly what can be released is taken for an empty_cache, and
any other release is repeated as recorded and reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.allocator.recording import SEGMENT_ACTIONS, Event, Recording
from vramsweep.harness.allocator.simulator import OutOfMemory, SegmentEvent, Simulator

RELEASES = ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Match:
    """The comparison of a replay under the recorded settings with the recording.

    `segment_events` counts the recorded ones, `extra` those that only the replay made. `matched` counts those that the
    replay made too, at the same point with the same kind, size and stream. `blocks_in_place` counts requests served at
    the recorded address. `unexplained_releases` counts segments that the recording gives back for a reason unknown to
    the replay (a memory limit, garbage collection); they are given back as recorded and count as not matched.
    `releases_before_growth` counts cache releases directly before a new segment: calls of empty_cache or out-of-memory
    retries, which a recording does not distinguish.
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
        """Return whether every segment event, address and failure is the recorded one."""
        return self.first_difference is None


class Follower:
    """A simulator that follows a recording, and a comparison of their blocks' addresses and segment events.

    `memory_limit` is the limit in force while recording, if known. The simulator then repeats retries and garbage
    collection by itself. `step` takes the events in order and raises OutOfMemory if only the simulator fails.
    """

    def __init__(self, recording: Recording, config: AllocatorConfig, memory_limit: int | None) -> None:
        self._made: list[SegmentEvent] = []
        self.simulator = Simulator(config, memory_limit, self._made.append, self._recorded_address)
        self._recording = recording
        self._limited = memory_limit is not None
        self._run: list[Event] = []  # the recorded segment events since the last other event
        self._held: list[tuple[str, int]] = []  # frees completed late, by another stream or by a retry that waited
        self._counts = dict.fromkeys(Match.__dataclass_fields__, 0)
        self._first: str | None = None
        self._diverged = False

    def step(self, index: int, private: int) -> None:
        """Replay the recorded event `index` in the pool `private`, and compare; keep a segment event for later."""
        events = self._recording.events
        event = events[index]
        action, addr, size, stream = event
        if action in SEGMENT_ACTIONS:
            self._run.append(event)
            return
        if self._limited and action == "free_completed" and events[index - 1][:2] != ("free_requested", addr):
            self._hold(addr)
            return
        if not (self._limited and self._by_malloc(action, size, stream, private)):
            self._complete_held()
            self._release_as_recorded(index)
        if action == "alloc":
            self._alloc(addr, size, stream, private, index)
        elif action == "oom":
            self._counts["out_of_memory_events"] += 1
            if self._limited:
                self._expect_failure(size, stream, private, index)
        else:
            apply(self.simulator, *event, private)
        self._complete_held()
        self._compare(index)

    def finish(self) -> None:
        """Complete the delayed frees, repeat the last recorded releases, and compare the last segment events."""
        end = len(self._recording.events)
        self._complete_held()
        self._release_as_recorded(end)
        self._compare(end)

    def match(self) -> Match:
        """Return the comparison so far."""
        return Match(**{**self._counts, "first_difference": self._first})  # type: ignore[arg-type]

    def _alloc(self, addr: int, size: int, stream: int, private: int, index: int) -> None:
        self._counts["blocks"] += 1
        try:
            self.simulator.malloc(addr, size, stream, private)
        except OutOfMemory:
            self._differs(index, f"the replay runs out of memory, but the recording allocates {size} bytes")
            raise
        at = self.simulator.live[addr].addr
        if at == addr:
            self._counts["blocks_in_place"] += 1
        else:
            self._differs(index, f"the replay places {size} bytes at {at:#x}, the recording at {addr:#x}")

    def _expect_failure(self, size: int, stream: int, private: int, index: int) -> None:
        try:
            self.simulator.malloc("refused", size, stream, private)
        except OutOfMemory:
            return
        self._differs(index, f"the recording runs out of memory, but the replay allocates {size} bytes")
        self.simulator.free("refused")

    def _by_malloc(self, action: str, size: int, stream: int, private: int) -> bool:
        """Return whether malloc caused the releases before a request, so that the simulator will repeat them.

        If garbage collection is due but the whole cache was given back, empty_cache caused them.
        """
        releases = self._releases()
        if action != "oom" and not (action == "alloc" and releases):
            return False
        why = self.simulator.makes_room(size, stream, private)
        return why == "retry" or (why == "garbage" and not self._is_whole_cache(releases))

    def _releases(self) -> list[Event]:
        return [e for e in self._run if e[0] in RELEASES]

    def _is_whole_cache(self, releases: Sequence[Event]) -> bool:
        return [_shape(e) for e in self.simulator.releasable()] == [_shape(e) for e in releases]

    def _hold(self, addr: int) -> None:
        """Delay a free under a handle of its own, because the address may be given out again at once."""
        block = self.simulator.pending.pop(addr, None)
        if block is not None:  # None if the replay has diverged and already completed it
            self.simulator.pending["held", addr] = block
            self._held.append(("held", addr))

    def _complete_held(self) -> None:
        for handle in self._held:
            self.simulator.free_completed(handle)
        self._held.clear()

    def _release_as_recorded(self, index: int) -> None:
        """Repeat the recorded releases of the cache before the next event."""
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
        what = f"{_say(releases)} has a reason that the replay does not know"
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
            self._differs(index, f"the recording has {recorded}, the replay {replayed}")
        self._counts["segment_events"] += len(run)
        self._counts["matched"] += same
        self._counts["extra"] += max(0, len(made) - len(run))
        run.clear()
        made.clear()

    def _differs(self, index: int, what: str, diverges: bool = True) -> None:
        self._diverged = self._diverged or diverges
        if self._first is None:
            self._first = f"event {index}: {what}"

    def _recorded_address(self, kind: str, size: int) -> int | None:
        """Return the driver's address of a segment like the recorded one here, because addresses later decide between
        equally large free blocks. A new range of address space begins where its first page is mapped. None if there is
        no such segment, or once the replay has diverged, because the address may be taken."""
        if self._diverged:
            return None
        fitting = (e for e in self._run if e[0] == kind and (e[2] == size or kind == "segment_map"))
        return next((addr for _, addr, _, _ in fitting), None)


def apply(simulator: Simulator, action: str, addr: int, size: int, stream: int, private: int) -> None:
    """Apply one event of a recording to a simulator; ignore actions that are not requests."""
    if action == "alloc":
        simulator.malloc(addr, size, stream, private)
    elif action == "free_requested":
        simulator.free_requested(addr)
    elif action == "free_completed":
        simulator.free_completed(addr)
    elif action == "empty_cache":
        simulator.empty_cache()


def _shape(event: Event | SegmentEvent) -> tuple[str, int, int]:
    return event[0], event[2], event[3]


def _say(events: Sequence[Event | SegmentEvent]) -> str:
    return f"{events[0][0]} of {events[0][2]} bytes" if events else "nothing"
