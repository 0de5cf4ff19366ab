"""Rich's console for what comes from outside: markup off, and nothing that a terminal would act on (terminal.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO, Any

from rich import console
from rich.box import SIMPLE_HEAD
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from vramsweep.harness.messages.terminal import behind_escapes, escape_text


class Console(console.Console):
    """Markup is off unless asked for: a name may hold brackets. With it, texts from outside need rich's escape.

    Texts are written out before they are measured (`render_str`), and whatever else becomes a segment (`render`): a
    bar's columns, what others print while it is there. Links are left out.
    """

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, **options)

    @property
    def redraws(self) -> bool:
        """Whether what was written can be drawn anew: a terminal, whatever FORCE_COLOR says of a file."""
        return self.is_terminal and self.file.isatty() and not self.is_dumb_terminal

    def show_cursor(self, show: bool = True) -> bool:
        """Nothing: it is never hidden, as a process that is killed could not show it again."""
        return False

    @property
    def file(self) -> IO[str]:
        """The stream itself, however often it is wrapped: Rich's own sequences are wanted."""
        return behind_escapes(super().file)

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> Text:
        """The text that a string stands for, in a cell or a line."""
        return super().render_str(escape_text(text), **options)

    def render(self, renderable: Any, options: console.ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of anything."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control:
                yield segment
            else:
                yield Segment(escape_text(text), style.update_link(None) if style and style.link else style)


def make_table(title: str, texts: Sequence[str], numbers: Sequence[str], more: Sequence[str] = ()) -> Table:
    """A table under its title without rows: columns of texts, of numbers, at the right, and of more texts."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in (*texts, *numbers, *more):
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return table
