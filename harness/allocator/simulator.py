"""The native caching allocator as a pure simulation: requests and frees in, statistics and segment events out.

It follows `DeviceCachingAllocator` of torch 2.13 (`malloc`, `get_free_block`, `alloc_block`, `alloc_found_block`,
`should_split`, `free`, `free_block`, `garbage_collect_cached_blocks`, `release_available_cached_blocks`,
`release_cached_blocks`). All sizes are in bytes. Free-memory callbacks and pools marked use-on-OOM are left out.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from vramsweep.harness.allocator import address_space, blocks
from vramsweep.harness.allocator.blocks import MIN_BLOCK, SMALL_REQUEST, SMALL_SEGMENT, Block, Pool, merge_neighbours
from vramsweep.harness.allocator.config import MIB, AllocatorConfig, as_simulated
from vramsweep.harness.messages.errors import UserError

SegmentEvent = tuple[str, int, int, int]  # kind, address, size, stream; kinds as in a recording
FIRST_RANGE = 1 << 56  # address space of expandable segments, away from cudaMalloc's
UNLIMITED_RANGE = 1 << 50


class OutOfMemory(Exception):
    """The simulated allocator could not serve a request within the memory limit, even after releasing its cache."""


@dataclass(frozen=True)
class Stats:
    """Counters of `torch.cuda.memory_stats`, as PyTorch defines them: `segments` and `num_*` are numbers, others bytes.

    `allocated_at_peak` is the most that was allocated while reserved was at its peak. So `peak_reserved -
    allocated_at_peak` is reserved but unused at a single moment, the busiest one.
    """

    allocated: int
    active: int
    requested: int
    reserved: int
    inactive_split: int
    peak_allocated: int
    peak_active: int
    peak_requested: int
    peak_reserved: int
    peak_inactive_split: int
    allocated_at_peak: int
    segments: int
    num_device_alloc: int
    num_device_free: int
    num_alloc_retries: int
    num_ooms: int


@dataclass(frozen=True)
class Piece:
    """A block of a segment that exists before the simulation starts, with `handle` and `requested` if it is in use."""

    addr: int
    size: int
    state: Literal["live", "pending", "free", "unmapped"]
    handle: Hashable = None
    requested: int = 0


class Simulator:
    """One device's allocator under one setting.

    The caller chooses a handle for each block. `memory_limit` (bytes) acts as
    `torch.cuda.set_per_process_memory_fraction` would; without it memory never runs out. `on_segment` gets every
    segment event in order. `next_address` may supply the driver's address for the next "segment_alloc" of a size or for
    a new range of address space ("segment_map"). Otherwise a model of the driver's habits supplies it.
    Raises UserError for settings that cannot be simulated.
    """

    __slots__ = (  # because the interpreter is slow with so many attributes otherwise
        "_addresses", "_divisions", "_expandable", "_gc_above", "_large_segment", "_max_split", "_next_address",
        "_next_range", "_on_segment", "_pools", "_searches", "_simple_search", "_split_rounding", "active",
        "allocated", "allocated_at_peak", "config", "inactive_split", "limit", "live", "num_alloc_retries",
        "num_device_alloc", "num_device_free", "num_ooms", "peak_active", "peak_allocated", "peak_inactive_split",
        "peak_requested", "peak_reserved", "pending", "requested", "reserved", "segments",
    )  # fmt: skip

    def __init__(
        self,
        config: AllocatorConfig,
        memory_limit: int | None = None,
        on_segment: Callable[[SegmentEvent], None] = lambda _event: None,
        next_address: Callable[[str, int], int | None] | None = None,
    ) -> None:
        self.config = config = as_simulated(config)
        self.limit = _limit(config, memory_limit)
        self.live: dict[Hashable, Block] = {}
        self.pending: dict[Hashable, Block] = {}  # free requested, but another stream still uses it
        self.allocated = self.active = self.requested = self.reserved = self.inactive_split = 0
        self.peak_allocated = self.peak_active = self.peak_requested = 0
        self.peak_reserved = self.peak_inactive_split = self.allocated_at_peak = 0
        self.segments = self.num_device_alloc = self.num_device_free = self.num_alloc_retries = self.num_ooms = 0
        self._on_segment = on_segment
        self._next_address = next_address
        self._addresses = address_space.Addresses()
        self._next_range = FIRST_RANGE
        self._pools: dict[tuple[int, int, bool], Pool] = {}
        self._large_segment = config.large_segment_size_mb * MIB
        self._max_split = None if config.max_split_size_mb is None else config.max_split_size_mb * MIB
        self._split_rounding = (config.max_non_split_rounding_mb or config.large_segment_size_mb) * MIB
        self._expandable = config.expandable_segments
        self._divisions = config.roundup_power2_divisions if any(config.roundup_power2_divisions) else None
        threshold = config.garbage_collection_threshold
        self._gc_above = None if threshold is None or self.limit is None else int(threshold * self.limit)
        self._searches = 0  # of the large pool, in which garbage collection measures age
        self._simple_search = not (self._expandable or self._max_split is not None or self._gc_above is not None)

    def below(self, address: int | None) -> None:
        """Place segments whose address is not supplied below this one; None: wherever the model places them."""
        if address is not None:
            self._addresses.taken(address)

    def malloc(self, handle: Hashable, size: int, stream: int = 0, private: int = 0) -> None:
        """Allocate `size` bytes for `handle` on `stream`, from private pool `private` (0: the common one).

        Raises OutOfMemory; ValueError if the handle is in use.
        """
        if handle in self.live or handle in self.pending:
            raise ValueError(f"block {handle!r} is already allocated")
        if not size:  # as in torch, which takes no memory for it and gives none back
            self.live[handle] = Block(self.pool(private, stream, True), 0, 0)
            return
        if self._divisions is not None:
            rounded = blocks.round_request(size, self._divisions)
        else:
            rounded = (size + 511) & -512 if size >= MIN_BLOCK else MIN_BLOCK
        small = rounded <= SMALL_REQUEST
        pool = self._pools.get((private, stream, small)) or self.pool(private, stream, small)
        free = pool.free
        at = bisect_left(free, (rounded,))
        if not self._simple_search:
            at = self._search(pool, at, rounded)
        block = free.pop(at)[2] if at < len(free) else self._new_block(pool, rounded)

        block.requested = size
        block.free = False
        rest = block.size - rounded
        split = block.prev is not None or block.next is not None
        if (
            rest >= MIN_BLOCK
            if pool.small or self._expandable
            else rest > SMALL_REQUEST and (self._max_split is None or rounded < self._max_split)
        ):
            remainder = Block(pool, block.addr + rounded, rest, block.expandable)
            remainder.free = True
            remainder.prev, remainder.next = block, block.next
            if block.next is not None:
                block.next.prev = remainder
            block.next = remainder
            block.size = rounded
            insort(free, (rest, remainder.addr, remainder))
            if not block.expandable:
                self._add_inactive_split(-rounded if split else rest)
        elif split and not block.expandable:
            self.inactive_split -= block.size

        self.live[handle] = block
        size_now = block.size
        self.active += size_now
        if self.active > self.peak_active:
            self.peak_active = self.active
        self.requested += size
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        self.allocated += size_now
        allocated = self.allocated
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        if self.reserved >= self.peak_reserved:
            if self.reserved > self.peak_reserved:
                self.peak_reserved = self.reserved
                self.allocated_at_peak = allocated
            elif allocated > self.allocated_at_peak:
                self.allocated_at_peak = allocated

    def free_requested(self, handle: Hashable) -> None:
        """Free a block for the program; it stays active until `free_completed`. Raises ValueError if it is not live."""
        if (block := self.live.pop(handle, None)) is None:
            raise ValueError(f"block {handle!r} is not allocated")
        self.pending[handle] = block
        self.allocated -= block.size

    def free_completed(self, handle: Hashable) -> None:
        """Return a block that no stream uses any more to its pool; do nothing if it is already there."""
        if (block := self.pending.pop(handle, None)) is not None:
            self._return(block)

    def free(self, handle: Hashable) -> None:
        """Free a block that no other stream uses. Raises ValueError if the handle is not live."""
        if (block := self.live.pop(handle, None)) is None:
            raise ValueError(f"block {handle!r} is not allocated")
        self.allocated -= block.size
        self._return(block)

    def _return(self, block: Block) -> None:
        """Return a block to its pool, merged with its free neighbours, as `free_block` does."""
        size = block.size
        if not size:
            return
        before, after = block.prev, block.next
        beside_free = (before is not None and before.free) or (after is not None and after.free)
        gained = merge_neighbours(block) if beside_free else 0
        if not block.expandable:
            is_split = block.prev is not None or block.next is not None
            self._add_inactive_split((block.size if is_split else 0) - gained)
        block.born = self._searches
        block.free = True
        insort(block.pool.free, (block.size, block.addr, block))
        self.active -= size
        self.requested -= block.requested

    def empty_cache(self) -> None:
        """Complete pending frees, then give back every unused segment or page, as `torch.cuda.empty_cache` does."""
        for handle in list(self.pending):
            self.free_completed(handle)
        for pool in self._common_pools(small=True):
            for block in [b for _, _, b in pool.free if not b.expandable and not b.split]:
                self._release(block)
            for block in [b for _, _, b in pool.free if b.expandable]:
                start, size = address_space.unmap(block, self._page(pool))
                if size:
                    self._count_segment("segment_unmap", start, size, pool.stream)

    def releasable(self) -> list[SegmentEvent]:
        """Return the segment events that `empty_cache` would cause now (if nothing is pending); cause none."""
        events: list[SegmentEvent] = []
        for pool in self._common_pools(small=True):
            whole = [b for _, _, b in pool.free if not b.expandable and not b.split]
            events += [("segment_free", b.addr, b.size, pool.stream) for b in whole]
            pages = [address_space.whole_pages(b, self._page(pool)) for _, _, b in pool.free if b.expandable]
            events += [("segment_unmap", start, size, pool.stream) for start, size in pages if size]
        return events

    def makes_room(self, size: int, stream: int = 0, private: int = 0) -> Literal["retry", "garbage"] | None:
        """Return why `malloc` of `size` bytes would first give memory back: a retry at the limit, or garbage."""
        rounded = blocks.round_request(size, self.config.roundup_power2_divisions)
        pool = self.pool(private, stream, rounded <= SMALL_REQUEST)
        searches = self._searches
        at = self._search(pool, bisect_left(pool.free, (rounded,)), rounded)
        self._searches = searches
        if at < len(pool.free):
            return None
        if not self._fits(blocks.segment_size(rounded, self._large_segment)):
            return "retry"
        return "garbage" if self._gc_above is not None and self.reserved > self._gc_above else None

    def release_segment(self, addr: int) -> bool:
        """Give back the unused segment at `addr`; return False if there is none."""
        for pool in self._pools.values():
            for _, start, block in pool.free:
                if start == addr and not block.expandable and not block.split:
                    self._release(block)
                    return True
        return False

    def stats(self) -> Stats:
        """Return the counters as they are now."""
        return Stats(**{name: getattr(self, name) for name in Stats.__dataclass_fields__})

    def pool(self, private: int, stream: int, small: bool) -> Pool:
        """Return the pool for this private pool, stream and size class; create it if it is new."""
        return self._pools.setdefault((private, stream, small), Pool(private, stream, small))

    def adopt(self, private: int, stream: int, small: bool, is_expandable: bool, pieces: Sequence["Piece"]) -> None:
        """Take over a segment (or range of expandable address space) that exists before any request."""
        pool = self.pool(private, stream, small)
        if is_expandable:
            self._simple_search = False  # because the setting may have been switched off since
        before: Block | None = None
        for piece in pieces:
            block = Block(pool, piece.addr, piece.size, is_expandable, mapped=piece.state != "unmapped")
            if before is not None:
                blocks.insert_after(before, block)
            before = block
            if block.mapped:
                self.reserved += piece.size
            if not is_expandable:
                self._addresses.taken(piece.addr)
            if piece.state in ("free", "unmapped"):
                pool.add(block)
                if not is_expandable and len(pieces) > 1:
                    self.inactive_split += piece.size
                continue
            block.requested = piece.requested
            (self.live if piece.state == "live" else self.pending)[piece.handle] = block
            self.allocated += piece.size if piece.state == "live" else 0
            self.active += piece.size
            self.requested += piece.requested
        self.segments += not is_expandable
        self.peak_allocated = self.allocated_at_peak = self.allocated
        self.peak_active, self.peak_requested = self.active, self.requested
        self.peak_reserved, self.peak_inactive_split = self.reserved, self.inactive_split

    def _search(self, pool: Pool, at: int, rounded: int) -> int:
        """Return the index of the free block that `get_free_block` takes, from best fit `at` on; the end if none."""
        free = pool.free
        nowhere = len(free)
        if self._gc_above is not None and not pool.small and pool.private == 0:
            self._searches += 1
        if at == nowhere:
            return nowhere
        if self._expandable:
            while (
                free[at][2].expandable
                and at + 1 < nowhere
                and address_space.reach(free[at + 1][2]) < address_space.reach(free[at][2])
            ):
                at += 1
        else:
            at = next((i for i in range(at, nowhere) if not free[i][2].expandable), nowhere)
        if self._max_split is not None and at < nowhere:
            found = free[at][0]
            if rounded < self._max_split <= found:
                return nowhere
            if rounded >= self._max_split and found >= rounded + self._split_rounding:
                return nowhere
        return at

    def _new_block(self, pool: Pool, rounded: int) -> Block:
        """Get memory from the device for a request that no cached block fits; it is not yet in the pool's free list.

        The order of the attempts is that of upstream's `malloc`. Raises OutOfMemory.
        """
        size = blocks.segment_size(rounded, self._large_segment)
        if self._gc_above is not None:
            self._collect_garbage(self._gc_above)
        if not self._fits(size) and not (self._release_oversize(pool, rounded) and self._fits(size)):
            self.empty_cache()
            self.num_alloc_retries += 1
            if not self._fits(size):
                self.num_ooms += 1
                raise OutOfMemory(f"{size} bytes do not fit, because {self.reserved} of {self.limit} are reserved")
        return self._device_malloc(pool, rounded, size)

    def _fits(self, size: int) -> bool:
        return self.limit is None or self.reserved + size <= self.limit

    def _device_malloc(self, pool: Pool, rounded: int, size: int) -> Block:
        if self._expandable:
            return address_space.grow(
                pool,
                rounded,
                self._page(pool),
                lambda: self._reserve_range(pool),
                lambda start, length: self._count_segment("segment_map", start, length, pool.stream),
            )
        addr = self._next_address("segment_alloc", size) if self._next_address is not None else None
        if addr is None:
            addr = self._addresses.take(size)
        else:
            self._addresses.taken(addr)
        self._count_segment("segment_alloc", addr, size, pool.stream)
        return Block(pool, addr, size)

    def _reserve_range(self, pool: Pool) -> tuple[int, int]:
        """Reserve address space as `find_expandable_block` does: 9/8 of the device's memory, in whole pages."""
        wanted = UNLIMITED_RANGE if self.limit is None else self.limit + self.limit // 8
        span = blocks.round_up(wanted, self._page(pool))
        start = self._next_address("segment_map", span) if self._next_address is not None else None
        if start is None:
            start = self._next_range
            self._next_range += blocks.round_up(span, SMALL_SEGMENT)
        return start, span

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.small else self._large_segment

    def _collect_garbage(self, above: int) -> None:
        """Free old unsplit large blocks until reserved is back at `above`, as `garbage_collect_cached_blocks` does."""
        if self.reserved <= above:
            return
        target = self.reserved - above
        whole = [b for p in self._common_pools(small=False) for _, _, b in p.free if not b.split and not b.expandable]
        total_age = sum(self._searches - b.born for b in whole)
        reclaimed = 0
        while whole and reclaimed < target:
            average = total_age / len(whole)
            old = [b for b in whole if self._searches - b.born >= average]
            if not old:
                return
            whole = [b for b in whole if self._searches - b.born < average]
            for block in old:
                reclaimed += block.size
                total_age -= self._searches - block.born
                self._release(block)

    def _release_oversize(self, pool: Pool, rounded: int) -> bool:
        """Free just enough blocks of max_split_size or more if it is set, like `release_available_cached_blocks`."""
        if self._max_split is None:
            return False
        wanted = max(rounded, self._max_split)
        free = pool.free
        at = bisect_left(free, (wanted,))
        if at < len(free) and not free[at][2].expandable:
            self._release(free[at][2])
            return True
        released = 0
        oversize = [b for size, _, b in free[:at] if size >= self._max_split]
        for block in reversed(oversize):
            if released >= wanted:
                break
            if not block.expandable:
                released += block.size
                self._release(block)
        return released >= wanted

    def _release(self, block: Block) -> None:
        """Free an unused, unsplit segment with cudaFree, as `release_block` does."""
        block.pool.remove(block)
        self._addresses.give(block.addr, block.size)
        self._count_segment("segment_free", block.addr, block.size, block.pool.stream)

    def _common_pools(self, small: bool) -> list[Pool]:
        """Return the pools that are not private, in upstream's order: large before small, then by stream."""
        wanted = [p for p in self._pools.values() if p.private == 0 and (small or not p.small)]
        return sorted(wanted, key=lambda p: (p.small, p.stream))

    def _count_segment(self, kind: str, addr: int, size: int, stream: int) -> None:
        if kind in ("segment_alloc", "segment_map"):
            self.reserved += size
            self.num_device_alloc += 1
            self.segments += kind == "segment_alloc"
        else:
            self.reserved -= size
            self.num_device_free += 1
            self.segments -= kind == "segment_free"
        self._on_segment((kind, addr, size, stream))

    def _add_inactive_split(self, change: int) -> None:
        self.inactive_split += change
        if self.inactive_split > self.peak_inactive_split:
            self.peak_inactive_split = self.inactive_split


def _limit(config: AllocatorConfig, memory_limit: int | None) -> int | None:
    """Return the memory limit in bytes. Raises UserError for settings that cannot be simulated."""
    if config.throw_on_cudamalloc_oom:
        raise UserError("throw_on_cudamalloc_oom cannot be replayed; leave it out (it only changes how requests fail)")
    if config.per_process_memory_fraction < 1:
        if memory_limit is None:
            raise UserError(
                "per_process_memory_fraction is a share of a memory limit; give one, such as --memory-limit 24GiB"
            )
        return int(memory_limit * config.per_process_memory_fraction)
    return memory_limit
