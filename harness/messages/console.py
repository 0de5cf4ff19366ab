"""Rich's console for text from outside, its tables, and the progress of a command that takes longer than two seconds.

Markup is off, and nothing is printed that a terminal would act on (terminal.py). Progress is on stderr, because stdout
is for answers. On a terminal it is redrawn and goes away; elsewhere it is a line after `FIRST_S`, then every `NEXT_S`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import IO, Any

from rich import console
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from vramsweep.harness.messages.terminal import Unwritten, behind_escapes, escape_others, escape_text

FIRST_S, NEXT_S = 2.0, 10.0  # seconds until the first line of a log, and between two lines
LOOK_S = 0.5  # seconds between two updates of what is shown
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


class Activity(contextlib.AbstractContextManager["Activity"]):
    """Shows what is being done while the block lasts, by a thread, because most who wait are blocked. A text is shown
    with the time that has passed, by `clock` in seconds. The result of a function is shown as it is."""

    def __init__(
        self,
        doing: str | Callable[[], RenderableType],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._doing, self._clock, self._began = doing, clock, clock()
        self._due = self._began + FIRST_S
        self._console, self._over = console or Console(file=sys.stderr), threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, daemon=True)
        # what is printed meanwhile goes above it, but not from a file or a pipe into the terminal
        self._live = Live(
            console=self._console, get_renderable=self.drawn, auto_refresh=False, transient=True,
            redirect_stdout=sys.stdout.isatty(), redirect_stderr=sys.stderr.isatty(),
        )  # fmt: skip

    def __enter__(self) -> Activity:
        if self._console.redraws:
            self._live.start(refresh=True)
            escape_others()  # Rich has replaced the streams until it stops
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._over.set()
            self._thread.join()
        self._live.stop()

    def update(self, text: str) -> None:
        """Show this text from now on."""
        self._doing = text

    def postpone(self) -> None:
        """Delay the next line, because something else was printed just now."""
        self._due = self._clock() + NEXT_S

    def drawn(self) -> RenderableType:
        """Return what there is to show now."""
        if not isinstance(self._doing, str):
            return self._doing()
        return f"{self._doing} ({duration(self._clock() - self._began)})"

    def look(self) -> None:
        """Show it: redraw on a terminal, else print a line if one is due."""
        if self._console.redraws:
            self._live.refresh()
        elif self._clock() >= self._due:
            print(escape_text(str(self.drawn())), file=self._console.file, flush=True)
            self.postpone()

    def _keep_looking(self) -> None:
        with contextlib.suppress(OSError, ValueError, Unwritten):  # nobody reads it; the next print reports it
            while not self._over.wait(LOOK_S):
                self.look()


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
