"""Signals in this very process: once, twice, while something runs and while nothing does."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from vramsweep.harness.interrupts import Finished, Interrupts

pytestmark = pytest.mark.usefixtures("as_in_a_terminal")


def ask() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # Python runs handlers between its instructions


def test_what_runs_is_finished_first(capfd: pytest.CaptureFixture[str]) -> None:
    done = []
    with Interrupts().heard() as interrupts, pytest.raises(Finished), interrupts.finishing():
        ask()
        done.append(1)
    assert done == [1]
    assert "Ctrl-C again stops now" in capfd.readouterr().err


def test_twice_is_at_once() -> None:
    done = []
    with Interrupts().heard() as interrupts, pytest.raises(KeyboardInterrupt) as stop, interrupts.finishing():
        ask()
        ask()
        done.append(1)
    assert not done and not isinstance(stop.value, Finished)


def test_sigterm_is_at_once() -> None:
    with Interrupts().heard() as interrupts, pytest.raises(KeyboardInterrupt) as stop, interrupts.finishing():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert not isinstance(stop.value, Finished)


def test_where_nothing_runs_once_is_enough() -> None:
    timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
    began = time.monotonic()
    with Interrupts().heard(), pytest.raises(Finished):
        timer.start()
        time.sleep(30)
    assert time.monotonic() - began < 10


def test_handlers_are_put_back_and_threads_have_none() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupts().heard():
        assert signal.getsignal(signal.SIGINT) is not before[0]
        inner: list[object] = []

        def elsewhere() -> None:
            with Interrupts().heard() as interrupts, interrupts.finishing():
                inner.append(1)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert inner == [1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_what_is_ignored_stays_ignored() -> None:
    """As by a shell's job in the background: a Ctrl-C in its terminal is for others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts().heard() as interrupts, interrupts.finishing():
        ask()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
