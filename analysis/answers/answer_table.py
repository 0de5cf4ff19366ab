"""Answers of a sweep: to its preset's question, and what other allocator settings would have done with its steps.

A preset names its answer, a card for each part of it, and the sweep's plan keeps the name.
To add one, add an entry to `ANSWERS`, its name to harness/spec/runner_table.py, and to conf/sweep/ a preset with
`answer: NAME`.
"""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from vramsweep.analysis.answers import claims
from vramsweep.analysis.data import export
from vramsweep.analysis.data.load import Table
from vramsweep.harness.allocator.replay import Row, grid, rank, what_if
from vramsweep.harness.files import file_names
from vramsweep.harness.files.sweep_folder import own_files
from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import format_gib
from vramsweep.harness.rows.journal import plans

WIDTH = 80
RECORDINGS = 4  # most recordings; each is a table of its own
BEST = 8  # settings shown of those tried


@dataclass(frozen=True)
class Answered:
    """An answer's table and notes, of one sweep."""

    title: str
    frame: pd.DataFrame
    notes: tuple[str, ...]

    def text(self) -> str:
        """Return text for a terminal, `WIDTH` columns wide: lines as cards, cells wrapped below verdict and heading."""
        shown = []
        for title, verdict, cells in self.cards():
            lines = [textwrap.fill(f"{verdict.upper()}: {title}", WIDTH)]
            lines += [
                textwrap.fill(f"{name}: {cell}", WIDTH, initial_indent="  ", subsequent_indent="    ")
                for name, cell in cells.items()
            ]
            shown.append("\n".join(lines) + "\n")
        return "\n".join([self.title, "", *shown, *(textwrap.fill(note, WIDTH) for note in self.notes)])

    def cards(self) -> Iterator[tuple[str, str, dict[str, str]]]:
        """Yield each line as a heading, which is its first cell, its verdict, and the other cells by name."""
        first = str(self.frame.columns[0])
        for row in self.frame.astype("string").to_dict("records"):
            cells = {str(name): str(cell) for name, cell in row.items()}
            yield cells.pop(first), cells.pop("verdict"), cells

    def markdown(self) -> str:
        """Return the title, the table and the notes."""
        notes = (f"{export.prose(note)}\n" for note in self.notes)
        return "\n".join([f"# {self.title}\n", export.markdown(self.frame), *notes])


# Each answer's title and the function that makes it, which is pure: from rows it makes a table of text cells, and notes
# below it. The column `verdict` has each line's verdict.
Make = Callable[[Table], tuple[pd.DataFrame, list[str]]]
ANSWERS: dict[str, tuple[str, Make]] = {"claims": ("Are the guides right?", claims.make)}
NAMES = tuple(ANSWERS)


def answer_question(table: Table, name: str | None) -> Answered | None:
    """Return the answer of this name, None without a name. Raises UserError for an unknown name."""
    if name is None:
        return None
    suggestions.check_listed(f"answer={name}", "answer", name, NAMES)
    title, make = ANSWERS[name]
    frame, notes = make(table)
    return Answered(title, frame, tuple(notes))


def read_question(folder: Path) -> str | None:
    """Return the name of the answer that the sweep in this folder was run for. None for rows from elsewhere, and for an
    answer that no longer exists."""
    name = next((one.get("answer") for one in reversed(plans(folder))), None)
    return name if name in NAMES else None


def what_if_tables(table: Table) -> tuple[list[tuple[str, str, pd.DataFrame]], list[str]]:
    """Return (title, file name, frame of text cells) for each recording of the sweep (`record=true`), and notes on
    unreadable ones. These are replays, not measurements, and each table says so. Its first row is the replay under the
    recorded settings, with the verdict whether it matched the recording."""
    tables, notes, folder = [], [], Path(table.source)
    own = own_files(folder).relative_to(folder)
    recorded = table.frame[table.frame["recording"].notna()]
    for _, row in recorded.head(RECORDINGS).iterrows():
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
    if len(recorded) > RECORDINGS:
        all_ = f"{len(recorded)} recordings have tables"
        notes.append(f"only the first {RECORDINGS} of {all_}; `vramsweep replay` shows any")
    return tables, notes


def _cells(row: Row) -> dict[str, str]:
    return {
        "settings": (row.settings or "(defaults)") + (", as recorded" if row.start == "recorded" else ""),
        "predicted peak reserved (GiB)": "–" if row.peak_reserved is None else format_gib(row.peak_reserved),
        "reserved but unused (GiB)": "–" if row.reserved_unallocated is None else format_gib(row.reserved_unallocated),
        "cudaMallocs": "–" if row.device_allocs is None else f"{row.device_allocs:,}",
        "out of memory": row.out_of_memory or "no",
    }
