"""The rounding of the native caching allocator: sizes of blocks and of segments, all in bytes.

Sources: `DeviceCachingAllocator::round_size`, `roundup_power2_next_division`, `get_allocation_size`.
"""

from vramsweep.harness.allocator.config import INTERVALS, MIB

MIN_BLOCK = 512
SMALL_REQUEST = MIB  # a rounded request of at most this size belongs to the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_REQUEST = 10 * MIB  # from here on a segment has the size of its request, rounded up
ROUND_LARGE = 2 * MIB


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
