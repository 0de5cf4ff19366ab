"""Faults of the journal's bytes: cut, changed, and written by others while a sweep runs."""

from __future__ import annotations

import time
from collections.abc import Callable

from torture.arena import Arena, Count
from vramsweep.harness import journal

FOREIGN = (b"half a line of somebody", b"", b"\r\n", b'{"trial_id": "a"}\n')


def journal_damaged(change: Callable[[bytes, int], bytes], spared: int) -> Callable[[Arena, int], Count]:
    """Each byte of a real journal in turn: no row but those of the damaged lines is lost, none is other than it was."""

    def inject(arena: Arena, times: int) -> Count:
        count = Count()
        sweep = arena.sweep(count, trials=3)
        sweep.finish()
        whole, rows = sweep.journal(), sweep.rows()
        count.resumed = 0
        for at in range(0, len(whole), max(1, len(whole) // times)):
            count.injected += 1
            damaged = change(whole, at)
            found = [row for row in map(journal.parsed, filter(None, damaged.split(b"\n"))) if row is not None]
            wanted = rows[: whole[: at + 1].count(b"\n")] if len(damaged) < len(whole) else rows
            missing = sum(row not in found for row in wanted)
            count.lost += max(0, missing - spared)
            count.doubled += sum(row not in rows for row in found)  # half-believed
            count.resumed += 1
        return count

    return inject


def appended_to(arena: Arena, times: int) -> Count:
    """Somebody else writes to the journal at a random moment; every row of the sweep's own must stay readable."""
    count = Count()
    while count.injected < times:
        sweep = arena.sweep(count, trials=6)
        sweep.start()
        at = arena.random.randrange(1, 5)
        while len(sweep.rows()) < at and not sweep.ended():
            time.sleep(0.01)
        with (sweep.place / journal.NAME).open("ab") as file:
            file.write(arena.random.choice(FOREIGN))
        sweep.inject()
        sweep.finish()
    return count
