"""What a command is doing, for whoever waits longer than two seconds; on stderr, as stdout is for answers.

On a terminal it is a line that is drawn anew and goes away; elsewhere a line after `FIRST_S`, then one every `NEXT_S`.
Not covered: a sweep's own region and lines (harness/sweep/progress.py).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable

from rich.live import Live

from vramsweep.harness.messages.console import Console
from vramsweep.harness.messages.terminal import Unwritten, escape_others, escape_text

FIRST_S, NEXT_S = 2.0, 10.0  # until the first line of a log, and between two
LOOK_S = 0.5  # between two looks at what there is to say


class Activity(contextlib.AbstractContextManager["Activity"]):
    """Shows what is being done while the block lasts, and for how long it has been. A thread shows it, as most who wait
    are blocked; it has ended when the block has. `clock` gives seconds."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._phase_began = clock()
        self._due = self._began + FIRST_S
        self._text, self._done, self._total = text, 0, 0
        self._stream, self._over = sys.stderr, threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)
        console = Console(file=self._stream)
        # what others print meanwhile goes above the line, but not from another stream into this one
        self._live = None if not console.redraws else Live(
            console=console, get_renderable=self.line, auto_refresh=False, transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )  # fmt: skip

    def __enter__(self) -> Activity:
        if self._live is not None:
            self._live.start(refresh=True)
            escape_others()  # Rich has taken the streams over, until the line is gone
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._live is not None:
            self._live.stop()

    def update(self, text: str, done: int = 0, total: int = 0) -> None:
        """From now on this is being done: `done` of `total`, where these are known and not in the text alone."""
        if total != self._total or done < self._done:
            self._phase_began = self._clock()
        self._text, self._done, self._total = text, done, total

    def postpone(self) -> None:
        """Something else was said just now: the next line can wait."""
        self._due = self._clock() + NEXT_S

    def line(self) -> str:
        """What there is to say now."""
        now, left = self._clock(), ""
        if 0 < self._done < self._total:
            left = f", ETA {duration((now - self._phase_began) / self._done * (self._total - self._done))}"
        return escape_text(f"{self._text} ({duration(now - self._began)}{left})")

    def look(self) -> None:
        """Show it: on a terminal anew, else if it is due."""
        if self._live is not None:
            self._live.refresh()
        elif self._clock() >= self._due:
            print(self.line(), file=self._stream, flush=True)
            self.postpone()

    def _show(self) -> None:
        with contextlib.suppress(OSError, ValueError, Unwritten):  # nobody reads it; who prints next is told
            while not self._over.wait(LOOK_S):
                self.look()


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
