"""Blocks, their sizes in bytes, and the pools that keep the free ones: the allocator's data, without its policy.

Sources: upstream's `Block`, `BlockPool` (ordered by stream, size, address) and `try_merge_blocks`; of the rounding
`DeviceCachingAllocator::round_size`, `roundup_power2_next_division`, `get_allocation_size`. A pool here is the part of
an upstream pool that belongs to one stream, because a request only searches its own stream's blocks.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from vramsweep.harness.allocator.config import INTERVALS, MIB

MIN_BLOCK = 512
SMALL_REQUEST = MIB  # a rounded request of at most this size belongs to the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_REQUEST = 10 * MIB  # from here on a segment has the size of its request, rounded up
ROUND_LARGE = 2 * MIB


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A piece of a segment. `prev` and `next` are its neighbours there; a block that has either is split.

    `free` is true for cached blocks and for unmapped address space, false while the block is live or waits for
    another stream. Addresses and sizes are in bytes.
    """

    pool: "Pool"
    addr: int
    size: int
    expandable: bool = False
    mapped: bool = True
    requested: int = 0
    prev: "Block | None" = None
    next: "Block | None" = None
    free: bool = False
    born: int = 0  # searches of the large pool when it was freed, from which the age of unsplit blocks counts

    @property
    def split(self) -> bool:
        """Return whether the block has a neighbour in its segment."""
        return self.prev is not None or self.next is not None


@dataclass(slots=True, eq=False, repr=False)
class Pool:
    """The free blocks of one pool and stream, ordered by size then address; unmapped ranges by address."""

    private: int
    stream: int
    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)

    def add(self, block: Block) -> None:
        """Mark the block as free, and insert it in order."""
        block.free = True
        if block.mapped:
            insort(self.free, (block.size, block.addr, block))
        else:
            insort(self.unmapped, (block.addr, block))

    def remove(self, block: Block) -> None:
        """Take the block out of the pool, but leave it marked as free."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.addr))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.addr,))]


def insert_after(block: Block, new: Block) -> None:
    """Link `new` in as the right-hand neighbour of `block`."""
    new.prev, new.next = block, block.next
    if block.next is not None:
        block.next.prev = new
    block.next = new


def merge_neighbours(block: Block) -> int:
    """Merge `block` with its free neighbours of the same mapped state; return the bytes it gained."""
    gained = 0
    before = block.prev
    if before is not None and before.free and before.mapped == block.mapped:
        before.pool.remove(before)
        gained += before.size
        block.addr = before.addr
        block.prev = before.prev
        if before.prev is not None:
            before.prev.next = block
    after = block.next
    if after is not None and after.free and after.mapped == block.mapped:
        after.pool.remove(after)
        gained += after.size
        block.next = after.next
        if after.next is not None:
            after.next.prev = block
    block.size += gained
    return gained


def round_request(size: int, divisions: tuple[int, ...]) -> int:
    """Return the block size for a request of `size` bytes, under `roundup_power2_divisions`."""
    if size < MIN_BLOCK:
        return MIN_BLOCK
    interval = min(max(size.bit_length() - 21, 0), INTERVALS - 1)
    parts = divisions[interval]
    if parts > 1 and size > MIN_BLOCK * parts:
        floor = 1 << (size.bit_length() - 1)
        return size if size == floor else round_up(size, floor // parts)
    return round_up(size, MIN_BLOCK)


def segment_size(rounded: int, large_segment: int) -> int:
    """Return the size to request from cudaMalloc for a block of `rounded` bytes that no cached block can serve."""
    if rounded <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return large_segment if rounded < MIN_LARGE_REQUEST else round_up(rounded, ROUND_LARGE)


def round_up(size: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `size`."""
    return -(-size // step) * step
