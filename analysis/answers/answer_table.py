"""Answers to the question of a sweep: a card for each part of the answer. A preset names its answer, and the sweep's
plan keeps it.

To add one, add an entry to `ANSWERS`, its name to harness/spec/runner_table.py, and to conf/sweep/ a preset with
`answer: NAME`.
"""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from vramsweep.analysis.answers import claims
from vramsweep.analysis.data import markup
from vramsweep.analysis.data.load import Table
from vramsweep.harness.messages import suggestions
from vramsweep.harness.rows.journal import plans

WIDTH = 80


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
        notes = (f"{markup.prose(note)}\n" for note in self.notes)
        return "\n".join([f"# {self.title}\n", markup.markdown(self.frame), *notes])


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
