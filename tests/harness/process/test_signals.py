"""Signals in this very process: once, twice, while something runs and while nothing does."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import source

from vramsweep.harness.process.signals import Deadline, Finished, Interrupts, ignore_hangup

pytestmark = pytest.mark.usefixtures("as_in_a_terminal")


def ask(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # Python runs handlers between its instructions


def test_what_runs_is_finished_first(capfd: pytest.CaptureFixture[str]) -> None:
    done = []
    with Interrupts().heard() as interrupts, pytest.raises(Finished), interrupts.finishing():
        ask()
        done.append(1)
    assert done == [1]
    assert "Ctrl-C again stops at once" in capfd.readouterr().err


def test_a_deadline_stops_when_its_time_is_over_and_hears_nothing() -> None:
    late, early = Deadline(0.0), Deadline(60.0)
    early.check()
    with early.heard(), pytest.raises(KeyboardInterrupt) as stop:
        ask()
    assert not isinstance(stop.value, Finished) and not early.asked
    assert 50 < early.bound(100.0) <= 60 and early.bound(5.0) == 5.0
    with pytest.raises(Finished):
        late.check()
    assert 0 < late.bound(100.0) < 1


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,)])
def test_twice_is_at_once_and_sigterm_is(numbers: tuple[int, ...]) -> None:
    done = []
    with Interrupts().heard() as interrupts, pytest.raises(KeyboardInterrupt) as stop, interrupts.finishing():
        for number in numbers:
            ask(number)
        done.append(1)
    assert not done and not isinstance(stop.value, Finished)


def test_a_terminal_may_go_while_something_is_written() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with ignore_hangup():
        ask(signal.SIGHUP)
        code = "import os, signal; os.kill(os.getpid(), signal.SIGHUP); print('written')"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"written\n"
    assert signal.getsignal(signal.SIGHUP) == before


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_is_ignored_stays_ignored(number: int, tmp_path: Path) -> None:
    """As by a shell's job in the background, or nohup: what its terminal does is for others."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interrupts(tmp_path / "log").heard() as interrupts, interrupts.finishing():
            ask(number)
        assert signal.getsignal(number) is signal.SIG_IGN
        assert interrupts.status == 130 and not list(tmp_path.iterdir())
    finally:
        signal.signal(number, before)


GONE = source("terminal_that_goes.txt")


def test_a_terminal_that_goes_is_asked_once_however_often_it_is_said(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", GONE, str(tmp_path)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    assert b"ready" in os.read(ours, 4096)
    os.close(ours)
    assert process.wait(60) == 129
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "row"]
    told = (tmp_path / "log").read_text()
    assert told == "the terminal was closed (SIGHUP): finishing the running trials, then the report\n"
