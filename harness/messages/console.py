"""Rich's console for text from outside: markup off, and nothing that a terminal would act on (terminal.py)."""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import IO, Any

from rich import console
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from vramsweep.harness.messages.terminal import behind_escapes, escape_text

PIPED = 180  # columns, if the output is no terminal and COLUMNS says nothing


class Console(console.Console):
    """A console without markup by default, because names may hold brackets; with it, outside text needs rich's escape.

    Strings are escaped before they are measured (`render_str`), and so is all else that becomes a segment (`render`): a
    bar's columns, what others print meanwhile. Links are left out. A file or a pipe is `PIPED` columns wide, or as
    COLUMNS says.
    """

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, highlight=False, **options)
        if not self.file.isatty() and "width" not in options:
            columns = os.environ.get("COLUMNS", "")
            self.width = int(columns) if columns.isdigit() and int(columns) else PIPED

    @property
    def redraws(self) -> bool:
        """Ability to draw anew what was written: that of a terminal, whatever FORCE_COLOR says of a file."""
        return self.is_terminal and self.file.isatty() and not self.is_dumb_terminal

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing: the cursor is never hidden, because a killed process could not show it again."""
        return False

    @property
    def file(self) -> IO[str]:
        """Stream itself, however often it is wrapped, because Rich's own sequences are wanted."""
        return behind_escapes(super().file)

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text that a string stands for, in a cell or a line, escaped."""
        return super().render_str(escape_text(text), **options)

    def render(self, renderable: Any, options: console.ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of anything, escaped and without links."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control:
                yield segment
            else:
                yield Segment(escape_text(text), style.update_link(None) if style and style.link else style)


def make_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[RenderableType]] = (),
    *,
    title: str | None = None,
    numbers: Collection[str] = (),
) -> Table:
    """Make a table as every verb prints it: no column is cut off, and columns in `numbers` are right-aligned."""
    table = Table(
        title=title and f"\n{title}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False,
        pad_edge=False, show_header=any(heads),
    )  # fmt: skip
    for head in heads:
        table.add_column(head, justify="right" if head in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
