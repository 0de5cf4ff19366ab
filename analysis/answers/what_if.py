"""Tables of what other allocator settings would have done with the steps that a sweep recorded (`record=true`).

These are replays, not measurements, and each table says so. Its first row is the replay under the recorded settings,
with the verdict whether it matched the recording.
"""

from pathlib import Path

import pandas as pd

from vramsweep.analysis.data.load import Table
from vramsweep.harness.allocator.replay import Row, what_if
from vramsweep.harness.allocator.settings_grid import grid, rank
from vramsweep.harness.files import file_names
from vramsweep.harness.files.sweep_folder import own_files
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import format_gib

MOST = 4  # recordings; each is a table of its own
BEST = 8  # settings shown of those tried


def what_if_tables(table: Table) -> tuple[list[tuple[str, str, pd.DataFrame]], list[str]]:
    """Return (title, file name, frame of text cells) for each recording of the sweep, and notes on unreadable ones."""
    tables, notes, folder = [], [], Path(table.source)
    own = own_files(folder).relative_to(folder)
    recorded = table.frame[table.frame["recording"].notna()]
    for _, row in recorded.head(MOST).iterrows():
        path = file_names.is_inside(folder, str(own / str(row["recording"])))
        if path is None:
            notes.append(f"recording of trial {row['trial_id']} left out: {row['recording']} is not in {table.source}")
            continue
        try:
            result = what_if(path, grid(limited=False))
            if result.history == "none":
                raise UserError(f"{path.name} has no history, only a final state")
        except (UserError, OSError) as error:
            notes.append(f"recording of trial {row['trial_id']}: {error}")
            continue
        first, others = result.rows[0], rank(result.rows[1:])
        match = first.match
        exact = "exact" if match is not None and match.exact else "NOT exact, so take the rest with care"
        where = f"{row['model']}, {row['seq_len']} tokens, {row['precision']}"
        title = f"Allocator what-if from trial {row['trial_id']} ({where}); a replay of its own settings is {exact}"
        name = file_names.make_safe(f"what_if_{row['trial_id']}")
        tables.append((title, name, pd.DataFrame([_cells(r) for r in (first, *others[:BEST])])))
    if len(recorded) > MOST:
        notes.append(f"only the first {MOST} of {len(recorded)} recordings have tables; `vramsweep replay` shows any")
    return tables, notes


def _cells(row: Row) -> dict[str, str]:
    return {
        "settings": (row.settings or "(defaults)") + (", as recorded" if row.start == "recorded" else ""),
        "predicted peak reserved (GiB)": "–" if row.peak_reserved is None else format_gib(row.peak_reserved),
        "reserved but unused (GiB)": "–" if row.reserved_unallocated is None else format_gib(row.reserved_unallocated),
        "cudaMallocs": "–" if row.device_allocs is None else f"{row.device_allocs:,}",
        "out of memory": row.out_of_memory or "no",
    }
