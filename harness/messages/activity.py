"""Progress of a command, for whoever waits longer than two seconds: on stderr, because stdout is for answers.

On a terminal it is redrawn and goes away; elsewhere it is a line after `FIRST_S`, then every `NEXT_S`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable

from rich.console import RenderableType
from rich.live import Live

from vramsweep.harness.messages.console import Console
from vramsweep.harness.messages.terminal import Unwritten, escape_others, escape_text

FIRST_S, NEXT_S = 2.0, 10.0  # seconds until the first line of a log, and between two lines
LOOK_S = 0.5  # seconds between two updates of what is shown


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
