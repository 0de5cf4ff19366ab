"""A sensible grid of allocator settings, and a ranking of the replays under them."""

import json
from collections.abc import Sequence
from pathlib import Path

from vramsweep.harness.allocator.replay import Row, WhatIf

_GRID: dict[str, list[str]] = json.loads(Path(__file__).with_name("settings_grid.json").read_text("utf-8"))


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
