"""The effect of Ctrl-C once, Ctrl-C twice, SIGTERM and SIGHUP on a sweep.

Ctrl-C once: the running trial finishes, its row is kept, and `Finished` is raised where nothing is half done. Ctrl-C
twice, or SIGTERM: KeyboardInterrupt is raised at once, wherever the code is. SIGHUP, when the terminal goes, acts like
one Ctrl-C, however often it comes; a line in the sweep's folder says so. Workers have sessions of their own, so a
terminal's Ctrl-C reaches only the launcher.

Signals that cannot be caught leave orphans, which orphans.py kills.
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

from vramsweep.harness.files.bounded_reads import open_descriptor
from vramsweep.harness.messages.terminal import discard

LOG = "interrupted.log"  # among the sweep's own files
ASKED = "finishing the running trials, then the report; Ctrl-C again stops at once"


class Finished(KeyboardInterrupt):
    """The user has asked to stop, and what ran then has finished."""


class Interrupts:
    """The user's request to stop a sweep. Only the main thread receives signals: in other threads nothing changes."""

    def __init__(self, log: Path = Path(os.devnull)) -> None:
        self.asked = False
        self.status = 130  # exit status of a process that is stopped so
        self._log, self._terminals = log, [number for number in (1, 2) if os.isatty(number)]
        self._busy = False
        self.answer: Callable[[str], None] = to_stderr  # prints from within a signal's handler

    @contextlib.contextmanager
    def heard(self) -> Iterator[Interrupts]:
        """Handle SIGINT, SIGTERM and SIGHUP in the block as described above."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        own = {signal.SIGINT: self._once, signal.SIGTERM: _at_once, signal.SIGHUP: self._hung_up}
        before = {number: now for number in own if (now := signal.getsignal(number)) is not signal.SIG_IGN}
        for number in before:  # signals that a shell, or nohup, made a background job ignore stay ignored
            signal.signal(number, own[number])
        try:
            yield self
        finally:
            if self.status == 129:  # the kernel and the shell both send it, and a report may follow
                before[signal.SIGHUP] = signal.SIG_IGN
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Let the block finish when the user asks to stop only once. Raises Finished after it."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
        self.check()

    def check(self) -> None:
        """Raise Finished if the sweep is to stop."""
        if self.stops():
            raise Finished

    def stops(self) -> bool:
        """Return whether the sweep is to stop."""
        return self.asked

    def bound(self, seconds: float) -> float:
        """Return how many of `seconds` an attempt may take from now on: all of them."""
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
            with os.fdopen(open_descriptor(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as log:
                log.write(f"the terminal was closed (SIGHUP): {ASKED.partition(';')[0]}\n".encode())
        if not asked:
            self._once(number, frame)


class Deadline(Interrupts):
    """A limit that stops a sweep after `seconds`. Ctrl-C and the like are left to the caller that needs rows."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._until = time.monotonic() + seconds

    @contextlib.contextmanager
    def heard(self) -> Iterator[Interrupts]:
        """Change nothing for the block."""
        yield self

    def stops(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() >= self._until

    def bound(self, seconds: float) -> float:
        """Return how many of `seconds` are left before the time is over, at least 1 ms."""
        return max(0.001, min(seconds, self._until - time.monotonic()))


def to_stderr(text: str) -> None:
    """Write to stderr without print, because print may be what was interrupted."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


@contextlib.contextmanager
def ignore_hangup() -> Iterator[None]:
    """Ignore SIGHUP in the block and in processes started there, so that they keep writing when the terminal goes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before if before is not None else signal.SIG_DFL)


def on_sigterm() -> None:
    """Make SIGTERM raise KeyboardInterrupt too from now on, unless it is ignored."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, _at_once)


def _at_once(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
