"""A sensible grid of allocator settings, and a ranking of the replays under them."""

from collections.abc import Sequence

from vramsweep.harness.allocator.replay import Row, WhatIf

_SINGLES = (
    "expandable_segments:True",
    "large_segment_size_mb:12",
    "large_segment_size_mb:40",
    *(f"max_split_size_mb:{mb}" for mb in (32, 64, 128, 256, 512)),
    *(f"roundup_power2_divisions:{parts}" for parts in (2, 4, 8, 16)),
)
_PAIRS = (
    "expandable_segments:True,large_segment_size_mb:12",
    "expandable_segments:True,roundup_power2_divisions:8",
    *(f"max_split_size_mb:{mb},roundup_power2_divisions:8" for mb in (64, 128, 256)),
)
_WITH_LIMIT = tuple(f"garbage_collection_threshold:{share}" for share in (0.6, 0.8, 0.9))


def grid(limited: bool) -> tuple[str, ...]:
    """Return the settings to try; garbage collection only under a memory limit, because it does nothing without one."""
    return _SINGLES + _PAIRS + (_WITH_LIMIT if limited else ())


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
