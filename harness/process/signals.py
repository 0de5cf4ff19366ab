"""Ctrl-C once, Ctrl-C twice, SIGTERM, SIGHUP: when a sweep stops.

Once: the trial that runs comes to its end, and its row is kept; then `Finished` is raised, at a place where nothing is
half done. Twice, or SIGTERM: KeyboardInterrupt is raised at once, wherever that is. SIGHUP, when the terminal goes, is
once, however often it comes, and a line in the sweep's folder says so. Workers have sessions of their own, so that a
terminal's Ctrl-C is for the launcher alone.

Not covered: signals that cannot be caught (orphans.py ends what those leave).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from vramsweep.harness.files.bounded_reads import open_to_append
from vramsweep.harness.messages.terminal import discard

LOG = "interrupted.log"  # among the sweep's own files
ASKED = "finishing what runs, then the report; Ctrl-C again stops now"


class Finished(KeyboardInterrupt):
    """The user has asked to stop, and what ran then has come to its end."""


class Interrupts:
    """Whether the user has asked a sweep to stop. Only the main thread hears of signals: elsewhere nothing changes."""

    def __init__(self, log: Path = Path(os.devnull)) -> None:
        self.asked = False
        self.status = 130  # of a process that ends so
        self._log, self._terminals = log, [number for number in (1, 2) if os.isatty(number)]
        self._busy = False
        self.answer: Callable[[str], None] = to_stderr  # says something from within a signal's handler

    @contextlib.contextmanager
    def heard(self) -> Iterator[Interrupts]:
        """For the block, SIGINT, SIGTERM and SIGHUP do as described above."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        own = {signal.SIGINT: self._once, signal.SIGTERM: _at_once, signal.SIGHUP: self._hung_up}
        before = {number: now for number in own if (now := signal.getsignal(number)) is not signal.SIG_IGN}
        for number in before:  # what a shell, or nohup, has told a job in the background to ignore stays ignored
            signal.signal(number, own[number])
        try:
            yield self
        finally:
            if self.status == 129:  # it comes from the kernel and from the shell, and a report may follow
                before[signal.SIGHUP] = signal.SIG_IGN
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """What the block does comes to its end, when asked to stop only once. Raises Finished after it."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
        self.check()

    def check(self) -> None:
        """Raises Finished where the sweep is to stop."""
        if self.stops():
            raise Finished

    def stops(self) -> bool:
        """Whether the sweep is to stop."""
        return self.asked

    def bound(self, seconds: float) -> float:
        """Return how much of so many seconds an attempt may take from now on."""
        return seconds

    def _once(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if not self._busy:
            raise Finished
        self.answer(ASKED)

    def _hung_up(self, number: int, frame: FrameType | None) -> None:
        if self.status == 129:
            return
        self.status, asked = 129, self.asked
        with contextlib.suppress(OSError):
            discard(self._terminals)
            with open_to_append(self._log) as log:
                log.write(f"the terminal has gone (SIGHUP): {ASKED.partition(';')[0]}\n".encode())
        if not asked:
            self._once(number, frame)


class Deadline(Interrupts):
    """Stops a sweep once its time is over; Ctrl-C and the like are left to whoever asked for its rows."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._until = time.monotonic() + seconds

    @contextlib.contextmanager
    def heard(self) -> Iterator[Interrupts]:
        """Change nothing for the block."""
        yield self

    def stops(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._until

    def bound(self, seconds: float) -> float:
        """Return how much of so many seconds is left before the time is over."""
        return max(0.001, min(seconds, self._until - time.monotonic()))


def to_stderr(text: str) -> None:
    """Not by print: it may be what was interrupted."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


@contextlib.contextmanager
def ignore_hangup() -> Iterator[None]:
    """Ignore SIGHUP in the block and in what it starts: they write on when the terminal goes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before if before is not None else signal.SIG_DFL)


def on_sigterm() -> None:
    """From now on SIGTERM raises KeyboardInterrupt too, unless it is ignored."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, _at_once)


def _at_once(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
