"""Address space: the addresses of cudaMalloc, and expandable segments.

Addresses decide which block is reused, because the allocator takes the lowest equal block. Recordings of an H100 and an
H200 show the driver's habit. Address space comes in chunks of a multiple of 32 MiB, each below the one before. A
segment goes to the lowest address in a chunk where it fits, in steps of 2 MiB. If there is none, it begins a new chunk.
The memory that libraries and the driver take for themselves in between is not modelled.

The address space of expandable segments is reserved once per pool and stream, and memory mapped into it page by page.
Sources: `find_expandable_block`, `map_block`, `try_allocate_expandable_block`, `unmap_block` and
`ExpandableSegment::map`/`unmap`. Their functions work on one pool's blocks. The caller counts; it gets each range
mapped or unmapped as (address, size) in bytes.
"""

from bisect import bisect_left
from collections.abc import Callable

from vramsweep.harness.allocator.blocks import Block, Pool, insert_after, merge_neighbours, round_up
from vramsweep.harness.allocator.config import MIB

FIRST = 1 << 47
STEP, CHUNK = 2 * MIB, 32 * MIB
Told = Callable[[int, int], None]


class Addresses:
    """Address space of one process on one device; sizes in bytes."""

    def __init__(self) -> None:
        self._lowest = FIRST
        self._holes: list[tuple[int, int]] = []  # start and size, by start, no two adjacent
        self._own: set[int] = set()

    def take(self, size: int) -> int:
        """Return the address of a new segment."""
        size = round_up(size, STEP)
        at = next((n for n, (_, room) in enumerate(self._holes) if room >= size), None)
        if at is None:
            span = round_up(size, CHUNK)
            self._lowest -= span
            at = self._open(self._lowest, self._lowest + span)
        start, room = self._holes[at]
        self._holes[at : at + 1] = [(start + size, room - size)] if room > size else []
        self._own.add(start)
        return start

    def give(self, start: int, size: int) -> None:
        """Release a segment. One not taken here is ignored, because the driver may put other segments there."""
        if start in self._own:
            self._own.remove(start)
            self._open(start, start + round_up(size, STEP))

    def _open(self, start: int, end: int) -> int:
        """Add a hole, merged with adjacent ones; return its index."""
        at = bisect_left(self._holes, (start,))
        if at < len(self._holes) and self._holes[at][0] == end:
            end += self._holes.pop(at)[1]
        if at and sum(self._holes[at - 1]) == start:
            at -= 1
            start = self._holes.pop(at)[0]
        self._holes.insert(at, (start, end - start))
        return at

    def taken(self, start: int) -> None:
        """Note an address that was not taken here; new chunks are below it. The holes of earlier chunks stay available,
        so supplied addresses must lie outside of them."""
        self._lowest = min(self._lowest, start)


def grow(pool: Pool, size: int, page: int, new_range: Callable[[], tuple[int, int]], mapped: Told) -> Block:
    """Take a free block of at least `size` bytes out of the pool and return it; map the missing pages.

    `new_range` reserves address space, as (address, size), if no range has enough left.
    """
    if (block := _find(pool, size)) is None:
        addr, span = new_range()
        block = Block(pool, addr, span, expandable=True, mapped=False)
        pool.add(block)
    if not block.mapped:
        _map(block, min(block.size, size), page, mapped)
    while block.size < size:  # a free block with address space behind it
        beyond = block.next
        assert beyond is not None
        _map(beyond, min(size - block.size, beyond.size), page, mapped)
        block = beyond
    pool.remove(block)
    return block


def whole_pages(block: Block, page: int) -> tuple[int, int]:
    """Return the part of a free block that can be unmapped, as (address, size); size 0 if no page is wholly free."""
    first = block
    while first.prev is not None:
        first = first.prev
    base = first.addr
    start = base + round_up(block.addr - base, page)
    end = base + (block.addr + block.size - base) // page * page
    return start, max(end - start, 0)


def unmap(block: Block, page: int) -> tuple[int, int]:
    """Give back the wholly free pages of a free block; return them as (address, size)."""
    start, size = whole_pages(block, page)
    if size == 0:
        return start, 0
    pool = block.pool
    pool.remove(block)
    ahead, behind = start - block.addr, block.addr + block.size - (start + size)
    if behind:
        rest = Block(pool, start + size, behind, expandable=True)
        insert_after(block, rest)
        pool.add(rest)
    if ahead:
        rest = Block(pool, start, size, expandable=True, mapped=False)
        block.size = ahead
        insert_after(block, rest)
        pool.add(block)
        block = rest
    block.addr, block.size, block.mapped = start, size, False
    merge_neighbours(block)
    if block.split:
        pool.add(block)  # else the whole range is unmapped, and its address space is given back too
    return start, size


def reach(block: Block) -> int:
    """Return the size that a free block can reach without moving: its own plus the unmapped space behind it."""
    beyond = block.next
    return block.size + (beyond.size if beyond is not None and not beyond.mapped else 0)


def _find(pool: Pool, size: int) -> Block | None:
    """Return the lowest block where `size` bytes are free or unmapped; search only where something is unmapped."""
    for _addr, unmapped in pool.unmapped:
        before = unmapped.prev
        start = before if before is not None and before.free else unmapped
        room, block = 0, start
        while block is not None and block.free and room < size:
            room += block.size
            block = block.next  # type: ignore[assignment]
        if room >= size:
            return start
    return None


def _map(block: Block, size: int, page: int, mapped: Told) -> None:
    """Map pages from the start of an unmapped block until `size` bytes are there."""
    pool = block.pool
    pool.remove(block)
    size = min(round_up(size, page), block.size)
    rest = block.size - size
    block.size, block.mapped = size, True
    if rest:
        beyond = Block(pool, block.addr + size, rest, expandable=True, mapped=False)
        insert_after(block, beyond)
        pool.add(beyond)
    mapped(block.addr, size)
    merge_neighbours(block)
    pool.add(block)
