"""Test the progress of a command: a line that disappears on a terminal, a line now and then elsewhere."""

import io
import os
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, on_terminal, source

from vramsweep.harness.messages.console import FIRST_S, NEXT_S, Activity, Console


def test_a_log_gets_a_line_after_two_seconds_and_then_every_ten() -> None:
    now, log = [100.0], io.StringIO()
    activity = Activity("importing torch", Console(file=log), lambda: now[0])

    def said_at(seconds: float) -> str:
        before, now[0] = len(log.getvalue()), 100.0 + seconds
        activity.look()
        return log.getvalue()[before:]

    assert (FIRST_S, NEXT_S) == (2.0, 10.0)
    assert said_at(1.9) == ""
    assert said_at(2.0) == "importing torch (0:02)\n"
    activity.update("tracing step 2 of 3 of \x1b[8m")
    assert said_at(11.9) == ""
    assert said_at(12.0) == "tracing step 2 of 3 of \\x1b[8m (0:12)\n"  # at once as a whole, and nothing acts on it
    now[0] = 121.0
    activity.postpone()  # something else was said
    assert said_at(30.9) == ""
    assert said_at(31.0).endswith("(0:31)\n")


def test_its_thread_ends_with_the_block_and_a_quick_one_says_nothing() -> None:
    log = io.StringIO()
    with Activity("a moment", Console(file=log)) as activity:
        assert activity._thread.is_alive()
    assert not activity._thread.is_alive() and log.getvalue() == ""
    Activity("never begun").__exit__()


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    closed = io.StringIO()
    activity = Activity("x", Console(file=closed), iter(range(0, 1000, 100)).__next__)
    closed.close()
    activity._keep_looking()  # ends by itself, without a word


SHOWN = source("shown_activity.txt")


def test_on_a_terminal_it_is_drawn_and_goes_away() -> None:
    status, said = on_terminal(SHOWN)
    assert status == 0
    assert said.index("importing torch (0:00)") < said.index("tracing step 2 of 3 (0:00)") < said.rindex("\x1b[2K")
    tail = said[said.rindex("\x1b[2K") :]
    assert "tracing" not in tail and "the end" in tail
    assert "\x1b[?25l" not in said and "a note" in said and '{"answer": 1}' in said


def test_streams_that_go_to_two_places_do_not_mix(tmp_path: Path) -> None:
    """The answer into a pipe, or the log into a file, while the other one is a terminal."""
    prefix = "import os, sys\nos.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), int(sys.argv[2]))\n"
    out, err = tmp_path / "out", tmp_path / "err"
    _, said = on_terminal(prefix + SHOWN, str(out), "1")
    assert out.read_text() == '{"answer": 1}\nthe end\n'
    assert "tracing step 2 of 3" in said and "a note" in said and "answer" not in said
    _, said = on_terminal(prefix + SHOWN, str(err), "2")
    assert err.read_text() == "a note\n"
    assert said.split() == ['{"answer":', "1}", "the", "end"]


def test_a_pipe_gets_no_sequences() -> None:
    environ = os.environ | {"TERM": "xterm", "FORCE_COLOR": "1"}
    words = [sys.executable, "-c", SHOWN]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, env=environ)
    assert (done.stdout, done.stderr) == ('{"answer": 1}\nthe end\n', "a note\n")
