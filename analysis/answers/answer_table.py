"""Answers: the table that a sweep of a question ends in. A preset names its answer, and the sweep's plan keeps it.

A new one is an entry of `ANSWERS`, its name in harness/registry.py, and in conf/sweep/ a preset with `answer: NAME`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from vramsweep.analysis.answers import claims, edges, estimates, ways
from vramsweep.analysis.data import markup
from vramsweep.analysis.data.load import Table
from vramsweep.harness.errors import UserError
from vramsweep.harness.journal import plans

WIDTH = 80
FOLDED = 30


@dataclass(frozen=True)
class Answer:
    """`make` gives the table, whose cells are text, and notes below it: pure, from rows alone. `verdict` is the column
    of what each line comes to, if there is one."""

    name: str
    title: str
    make: Callable[[Table], tuple[pd.DataFrame, list[str]]]
    verdict: str | None = None


@dataclass(frozen=True)
class Answered:
    """An answer's table and notes, of one sweep."""

    name: str
    title: str
    frame: pd.DataFrame
    notes: tuple[str, ...]
    verdict: str | None = None

    @property
    def wide(self) -> bool:
        """Whether a table of it takes more than `WIDTH` columns, so that each line is shown as a card."""
        return sum(width + 2 for width in _widths(self.frame)) - 2 > WIDTH

    def text(self) -> str:
        """For a terminal, in `WIDTH` columns: a table where it fits, else each line as a card."""
        body = "No row answers this."
        if len(self.frame):
            body = _in_cards(self.cards()) if self.wide else _table(self.frame)
        return "\n".join([self.title, "", body, *(textwrap.fill(note, WIDTH) for note in self.notes)])

    def cards(self) -> Iterator[tuple[str, str | None, dict[str, str]]]:
        """Each line as a heading, which is its first cell, its verdict if there is one, and the other cells by name."""
        first = str(self.frame.columns[0])
        for row in self.frame.astype("string").to_dict("records"):
            cells = {str(name): str(cell) for name, cell in row.items()}
            yield cells.pop(first), cells.pop(self.verdict) if self.verdict else None, cells

    def markdown(self) -> str:
        """The title, the table and the notes."""
        body = markup.markdown(self.frame) if len(self.frame) else "No row answers this.\n"
        return "\n".join([f"# {self.title}\n", body, *(f"{markup.prose(note)}\n" for note in self.notes)])


ANSWERS = (
    Answer("claims", "Are the guides right?", claims.make, verdict="verdict"),
    Answer("fit-24gb", "What fits on a card of 24 GB?", ways.make),
    Answer("forum-gpt2", "What does it take, and what does each change do?", estimates.changes),
    Answer("composition", "What is a peak made of, and what do estimates say?", estimates.composition),
    Answer("seqlen-zero3", "How long, and how many, under ZeRO-3?", edges.make),
)
NAMES = tuple(answer.name for answer in ANSWERS)


def answered(table: Table, name: str | None) -> Answered | None:
    """The answer of this name, None where none is asked for. Raises UserError for a name that is not known."""
    if name is None:
        return None
    found = next((answer for answer in ANSWERS if answer.name == name), None)
    if found is None:
        raise UserError(f"answer={name}: there is no such answer; allowed: {', '.join(NAMES)}")
    frame, notes = found.make(table)
    return Answered(found.name, found.title, frame, tuple(notes), found.verdict)


def asked(folder: Path) -> str | None:
    """The answer that the sweep in this folder was run for; None for rows from elsewhere."""
    name = next((one.get("answer") for one in reversed(plans(folder))), None)
    return name if isinstance(name, str) else None


def _widths(frame: pd.DataFrame) -> list[int]:
    """Of each column; the first may have as little as `FOLDED`, where its cells are folded."""
    first, *others = (max(len(str(text)) for text in (name, *frame[name])) for name in frame.columns)
    left = WIDTH - sum(width + 2 for width in others)
    return [min(first, max(left, FOLDED)), *others]


def _table(frame: pd.DataFrame) -> str:
    """Aligned columns, numbers to the right; what is long in the first goes on below."""
    right, widths = [markup.numeric(frame[name]) for name in frame.columns], _widths(frame)
    lines: list[list[str]] = []
    for first, *cells in ([str(cell) for cell in row] for row in ([*frame.columns], *frame.to_numpy())):
        head, *more = textwrap.wrap(first, widths[0]) or [""]
        lines += [[head, *cells], *([part, *("" for _ in cells)] for part in more)]
    aligned = (
        "  ".join(f"{c:>{w}}" if r else f"{c:<{w}}" for c, w, r in zip(line, widths, right, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in aligned) + "\n"


def _in_cards(cards: Iterable[tuple[str, str | None, dict[str, str]]]) -> str:
    """The heading of each, behind its verdict, and the cells below, wrapped."""
    told = []
    for title, verdict, cells in cards:
        lines = [textwrap.fill(f"{verdict.upper()}: {title}" if verdict else title, WIDTH)]
        lines += [
            textwrap.fill(f"{name}: {cell}", WIDTH, initial_indent="  ", subsequent_indent="    ")
            for name, cell in cells.items()
        ]
        told.append("\n".join(lines) + "\n")
    return "\n".join(told)
