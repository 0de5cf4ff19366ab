"""The addresses of cudaMalloc. They decide which block is reused, because the allocator takes the lowest equal block.

Recordings of an H100 and an H200 show the driver's habit. Address space comes in chunks of a multiple of 32 MiB, each
below the one before. A segment goes to the lowest address in a chunk where it fits, in steps of 2 MiB. If there is
none, it begins a new chunk. The memory that libraries and the driver take for themselves in between is not modelled.
"""

from bisect import bisect_left

from vramsweep.harness.allocator.config import MIB
from vramsweep.harness.allocator.sizes import round_up

FIRST = 1 << 47
STEP, CHUNK = 2 * MIB, 32 * MIB


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
