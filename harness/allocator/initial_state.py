"""The allocator's state before a recording's first event, found by undoing the events from the final state.

A recording does not say how large a block was that was live at the start and freed later, so this has to be inferred.
The size was the rounded request, unless the rest was too small to split off. The large pool never splits off 1 MiB or
less (`DeviceCachingAllocator::should_split`), so a gap of that size after a block was part of it.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import Literal

from vramsweep.harness.allocator.blocks import SMALL_REQUEST, SMALL_SEGMENT, round_request
from vramsweep.harness.allocator.config import MIB, AllocatorConfig
from vramsweep.harness.allocator.recording import Recording, RecordingError, Segment
from vramsweep.harness.allocator.simulator import UNLIMITED_RANGE, Piece


@dataclass(frozen=True)
class Start:
    """The state before the first event. `segments` are in address order; an expandable one is a whole range of
    address space with its unmapped parts. `private` has, for each event, the private pool of its address (0: the common
    one); it is empty if the recording has no private pools. `first` is the first event to replay. It is 1 if a ring
    buffer dropped a segment_alloc but not the request that caused it, and that makes a difference.
    """

    segments: tuple[Segment, ...]
    private: list[int]
    first: int


@dataclass
class _Live:
    size: int
    requested: int
    state: Literal["live", "pending"]


@dataclass
class _Span:
    """A segment, or a run of mapped pages, while events are undone."""

    size: int
    stream: int
    small: bool
    private: int
    expandable: bool


class _Contradiction(Exception):
    """An event that cannot lead to the state after it; the message says what the event does."""


class _Undo:
    """Segments and live blocks by address; one method per kind of event to undo."""

    def __init__(self, recording: Recording) -> None:
        self.config: AllocatorConfig = recording.settings
        self.spans: dict[int, _Span] = {}
        self.live: dict[int, _Live] = {}
        for s in recording.segments:
            self.spans[s.addr] = _Span(s.size, s.stream, s.small, s.private, s.expandable)
            used = (p for p in s.pieces if p.state != "free")
            self.live |= {p.addr: _Live(p.size, p.requested, "live" if p.state == "live" else "pending") for p in used}
        self.span_addrs = sorted(self.spans)
        self.live_addrs = sorted(self.live)
        self.lowest_mapped: dict[tuple[int, int, bool], int] = {}
        for addr, span in self.spans.items():
            self._note_mapped(addr, span)

    def span_at(self, addr: int) -> tuple[int, _Span] | None:
        at = bisect_right(self.span_addrs, addr) - 1
        if at < 0:
            return None
        start = self.span_addrs[at]
        span = self.spans[start]
        return (start, span) if addr < start + span.size else None

    def alloc(self, addr: int) -> None:
        block = self.live.get(addr)
        if block is None or block.state == "pending":
            raise _Contradiction("allocates a block that is not live afterwards")
        del self.live[addr]
        del self.live_addrs[bisect_left(self.live_addrs, addr)]

    def free_requested(self, addr: int) -> None:
        block = self.live.get(addr)
        if block is None or block.state == "live":
            raise _Contradiction("frees a block that is not waiting to be freed afterwards")
        block.state = "live"

    def free_completed(self, addr: int, requested: int) -> None:
        found = self.span_at(addr)
        if found is None:
            raise _Contradiction("frees a block outside every segment")
        start, span = found
        size = round_request(requested, self.config.roundup_power2_divisions)
        max_split = self.config.max_split_size_mb
        if max_split is not None and size >= max_split * MIB and not span.expandable:
            size = span.size  # such blocks are never split
        at = bisect_left(self.live_addrs, addr)
        before = self.live_addrs[at - 1] if at > 0 and self.live_addrs[at - 1] >= start else None
        room = (self.live_addrs[at] if at < len(self.live_addrs) else start + span.size) - addr
        room = min(room, start + span.size - addr)
        if size > room or (before is not None and before + self.live[before].size > addr):
            raise _Contradiction("frees a block that overlaps another one")
        if not span.small and not span.expandable:
            if room - size <= SMALL_REQUEST:
                size = room
            if before is not None and addr - before - self.live[before].size <= SMALL_REQUEST:
                self.live[before].size = addr - before
        self.live[addr] = _Live(size, requested, "pending")
        self.live_addrs.insert(at, addr)

    def segment_alloc(self, addr: int, size: int) -> None:
        span = self.spans.get(addr)
        if span is None or span.size != size:
            raise _Contradiction("creates a segment that does not exist afterwards")
        if self._in_use(addr, size):
            raise _Contradiction("creates a segment that has live blocks before it exists")
        self._drop(addr)

    def segment_free(self, addr: int, size: int, stream: int, expandable: bool) -> None:
        at = bisect_right(self.span_addrs, addr)
        if self.span_at(addr) or (at < len(self.span_addrs) and self.span_addrs[at] < addr + size):
            raise _Contradiction("frees memory that still exists afterwards")
        if expandable:
            self._remap(addr, size, stream)
        else:
            self._add(addr, _Span(size, stream, size == SMALL_SEGMENT, 0, False))

    def _remap(self, addr: int, size: int, stream: int) -> None:
        """Restore unmapped pages: they join the mapped runs they touch, and their pool. Pages that touch none are in
        the large pool if their size is a multiple of its page size."""
        small, private = size % (self.config.large_segment_size_mb * MIB) != 0, 0
        start, end = addr, addr + size
        for found in (self.span_at(addr - 1), self.span_at(end)):
            if found is not None and found[1].expandable and found[1].stream == stream:
                other, span = found
                small, private = span.small, span.private
                start, end = min(start, other), max(end, other + span.size)
                self._drop(other)
        self._add(start, _Span(end - start, stream, small, private, True))

    def segment_map(self, addr: int, size: int) -> None:
        found = self.span_at(addr)
        if found is None or addr + size > found[0] + found[1].size or not found[1].expandable:
            raise _Contradiction("maps memory that is not mapped afterwards")
        if self._in_use(addr, size):
            raise _Contradiction("maps memory that has live blocks before it is mapped")
        start, span = found
        end = start + span.size
        self._drop(start)
        for left, right in ((start, addr), (addr + size, end)):
            if right > left:
                self._add(left, _Span(right - left, span.stream, span.small, span.private, True))

    def _drop(self, addr: int) -> None:
        del self.spans[addr]
        del self.span_addrs[bisect_left(self.span_addrs, addr)]

    def _add(self, addr: int, span: _Span) -> None:
        self.spans[addr] = span
        insort(self.span_addrs, addr)
        self._note_mapped(addr, span)

    def _note_mapped(self, addr: int, span: _Span) -> None:
        if span.expandable:
            key = (span.private, span.stream, span.small)
            self.lowest_mapped[key] = min(addr, self.lowest_mapped.get(key, addr))

    def _in_use(self, addr: int, size: int) -> bool:
        at = bisect_left(self.live_addrs, addr + size) - 1
        if at < 0:
            return False
        last = self.live_addrs[at]
        return last + self.live[last].size > addr

    def made_for(self, addr: int) -> bool:
        """Return whether the live block at `addr` must have caused a new segment: it is alone in one that
        max_split_size_mb would have withheld from it in the cache."""
        found, block = self.span_at(addr), self.live[addr]
        max_split = self.config.max_split_size_mb
        if max_split is None or found is None or found[0] != addr or found[1].expandable:
            return False
        alone = not self._in_use(addr + block.size, found[1].size - block.size)
        rounded = round_request(block.requested, self.config.roundup_power2_divisions)
        return alone and rounded < max_split * MIB <= found[1].size

    def start(self, private: list[int], first: int) -> Start:
        spans = sorted(self.spans.items())
        whole = ((a, s) for a, s in spans if not s.expandable)
        fixed = [Segment(a, s.size, s.stream, s.small, s.private, False, self._pieces(a, a + s.size)) for a, s in whole]
        ranges: dict[tuple[int, int, bool], list[tuple[int, _Span]]] = {}
        for addr, span in spans:
            if span.expandable:
                ranges.setdefault((span.private, span.stream, span.small), []).append((addr, span))
        grown = [self._range(key, mapped) for key, mapped in ranges.items()]
        return Start(tuple(sorted([*fixed, *grown], key=lambda s: s.addr)), private, first)

    def _range(self, key: tuple[int, int, bool], mapped: list[tuple[int, _Span]]) -> Segment:
        """Return a range of address space from the lowest page ever mapped there, with unmapped pieces between."""
        private, stream, small = key
        base = at = self.lowest_mapped[key]
        pieces: list[Piece] = []
        for addr, span in mapped:
            if addr > at:
                pieces.append(Piece(at, addr - at, "unmapped"))
            pieces += self._pieces(addr, addr + span.size)
            at = addr + span.size
        pieces.append(Piece(at, base + UNLIMITED_RANGE - at, "unmapped"))
        return Segment(base, UNLIMITED_RANGE, stream, small, private, True, tuple(pieces))

    def _pieces(self, start: int, end: int) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        at = start
        for index in range(bisect_left(self.live_addrs, start), bisect_left(self.live_addrs, end)):
            addr = self.live_addrs[index]
            block = self.live[addr]
            if addr > at:
                pieces.append(Piece(at, addr - at, "free"))
            pieces.append(Piece(addr, block.size, block.state, addr, block.requested))
            at = addr + block.size
        if end > at:
            pieces.append(Piece(at, end - at, "free"))
        return tuple(pieces)


def undo(recording: Recording) -> Start:
    """Return the state before the first event. Raises RecordingError if the events do not lead to the final state."""
    state = _Undo(recording)
    pools = any(s.private for s in recording.segments)
    private: list[int] = []
    first = 0
    for index in range(len(recording.events) - 1, -1, -1):
        action, addr, size, stream = recording.events[index]
        if pools:
            found = state.span_at(addr)
            private.append(found[1].private if found is not None else 0)
        if index == 0 and action == "alloc" and addr in state.live and state.made_for(addr):
            first = 1
            break
        try:
            match action:  # an out-of-memory error changes nothing
                case "alloc":
                    state.alloc(addr)
                case "free_requested":
                    state.free_requested(addr)
                case "free_completed":
                    state.free_completed(addr, size)
                case "segment_alloc":
                    state.segment_alloc(addr, size)
                case "segment_map":
                    state.segment_map(addr, size)
                case "segment_free" | "segment_unmap":
                    state.segment_free(addr, size, stream, action == "segment_unmap")
        except _Contradiction as problem:
            raise RecordingError(
                f"{recording.name}: event {index} ({action} of {size} bytes at {addr:#x}) {problem}. Events and final "
                "state disagree, so they cannot be replayed (was the history stopped before the dump?)"
            ) from None
    private.reverse()
    return state.start(private, first)
