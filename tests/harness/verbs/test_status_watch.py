"""`status --watch`, and reading a sweep while it runs: what is shown, what is read, when it ends."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Cli, cases, refusal, tiny, wait_for

from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import journal, journal_lock
from vramsweep.harness.rows.journal import Journal, Tail
from vramsweep.harness.rows.schema import Row, complete_row
from vramsweep.harness.spec.trial_identity import ID_VERSION
from vramsweep.harness.sweep import plan, row_builder, sweep_status
from vramsweep.harness.verbs.status import Watched, failures, label, lines, rate

NOW = datetime(2026, 11, 24, 18, 0, 0, tzinfo=UTC)


def row(number: int, ago_s: float = 0, **over: Any) -> Row:
    """A finished trial of its own, that began so many seconds ago."""
    (item,) = plan.expand_trials([tiny(seq_len=32 * (number + 1))], 1)[0]
    base = row_builder.initial_columns(item) | {"attempt": 1, "terminal": True, "outcome": "ok", "duration_s": 2.0}
    return complete_row(base | {"started_at": (NOW - timedelta(seconds=ago_s)).isoformat(timespec="seconds")} | over)


def written_plan(folder: Path, rows: list[Row], **over: Any) -> None:
    """plan.json as the sweep of these trials would have it."""
    systems = list(dict.fromkeys(journal.system_of(one) for one in rows))
    record = {"id_version": ID_VERSION, "trials": [one["trial_id"] for one in rows], "systems": systems,
              "system": [systems.index(journal.system_of(one)) for one in rows], "any_system": False,
              "started_at": (NOW - timedelta(seconds=600)).isoformat()}  # fmt: skip
    (folder / journal.PLAN).write_text(json.dumps(record | over))


def started(folder: Path, one: Row, attempt: int = 1) -> None:
    place = folder / "attempts" / one["trial_id"] / str(attempt)
    place.mkdir(parents=True)
    (place / "spec.json").write_text(json.dumps({"trial": one["trial"]}))
    os.utime(place / "spec.json", (NOW.timestamp() - 75,) * 2)


def test_a_sweep_that_runs(tmp_path: Path) -> None:
    rows = [row(0, 400), row(1, 300), row(2, 200, outcome="oom", reason="full"), row(3, 100), row(4), row(5), row(6)]
    lost = row(5, 90, outcome="crash", reason="killed by signal 9", terminal=False)
    with Journal(tmp_path) as book:
        written_plan(tmp_path, rows, price_per_hour=12)
        watched = Watched(tmp_path)
        empty = watched.look(NOW)
        assert "0/7: no rows yet" in empty.log() and empty.speed() == "speed not known yet"
        book.extend([*rows[:4], lost])
        started(tmp_path, rows[0])
        started(tmp_path, rows[4])
        started(tmp_path, rows[5], attempt=2)
        seen = watched.look(NOW)
        assert (seen.status.state, seen.status.done, seen.status.total) == ("running", 4, 7)
        assert seen.status == sweep_status.read_status(tmp_path)
        assert seen.rate == pytest.approx(4 / 400 * 60)
        assert lines(seen) == [
            f"{tmp_path}  running",
            "  4/7: 3 ok, 1 oom",
            "  0.6 trials a minute, 5:00 left, until 18:05Z, cost so far 2.00",
            "  running: tiny · torch · seq 160 · batch 2 · fp32, 1:15",
            "  running: tiny · torch · seq 192 · batch 2 · fp32, attempt 2, 1:15",
            "  crash: tiny · torch · seq 192 · batch 2 · fp32: killed by signal 9 (17:58:30Z)",
        ]
        assert seen.log().endswith(f"1 oom; last failure: crash: {label(lost)}: killed by signal 9 (17:58:30Z)")
    done = watched.look(NOW)
    assert done.status.state == "stopped" and done.speed() == "nothing is running" and done.running == ()


def test_what_is_not_known_is_not_shown(tmp_path: Path) -> None:
    with Journal(tmp_path) as book:
        book.append(row(0, 60))
        (tmp_path / journal.PLAN).write_text("{")
        seen = Watched(tmp_path).look(NOW)
    assert seen.status.total is None
    assert lines(seen) == [f"{tmp_path}  running", "  1/?: 1 ok", "  1 trials a minute"]
    written_plan(tmp_path, [row(0)], price_per_hour="12")
    assert Watched(tmp_path).look(NOW).cost is None
    assert "name a folder under results/" in refusal(UserError, Watched(tmp_path / "none").look, NOW)


def test_the_rate_is_that_of_the_last_trials_and_a_batch_counts_as_a_whole() -> None:
    assert rate([], NOW) is None and rate([row(0, attempt=0)], NOW) is None
    early = [row(n, 10**6) for n in range(30)]
    assert rate([*early, *(row(n, 20 * (20 - n)) for n in range(20))], NOW) == pytest.approx(20 / 400 * 60)
    assert rate([row(n, 60) for n in range(90)], NOW) == pytest.approx(90)
    assert rate([row(0, -30)], NOW) == 60  # another machine's clock is ahead


def test_failures_are_those_that_nothing_came_after() -> None:
    timeout, crash = {"outcome": "timeout", "reason": "600 s"}, {"outcome": "crash", "reason": "killed"}
    rows = [row(0, 50, **timeout), row(1, 40, **crash), row(1, 30), row(2, 20, outcome="oom"), row(3, 10, **crash)]
    assert failures(rows) == (
        f"crash: {label(rows[4])}: killed (17:59:50Z)", f"timeout: {label(rows[0])}: 600 s (17:59:10Z)",
    )  # fmt: skip
    many = [row(n, 100 - n, **crash) for n in range(9)]
    assert [one.split(": ")[1] for one in failures(many)] == [label(one) for one in reversed(many[4:])]


def test_only_what_is_new_is_read_and_only_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail, parsed = Tail(tmp_path, ("trial_id", "started_at")), list[bytes]()
    real = journal.parsed
    monkeypatch.setattr(journal, "parsed", lambda text: parsed.append(text) or real(text))
    with pytest.raises(UserError, match=r"holds no sweep"):
        tail.look()
    with Journal(tmp_path) as book:
        book.extend([row(0, 90), row(1, 80)])
        assert tail.look() and not tail.look() and len(parsed) == 2
        torn = journal.line(row(2, 70))
        file = tmp_path / journal.NAME
        with file.open("ab") as other:
            other.write(torn[:50])
        assert not tail.look() and len(tail.rows) == 2 and tail.unreadable == 0
        with file.open("ab") as other:
            other.write(torn[50:])
        assert tail.look() and len(tail.rows) == 3 and len(parsed) == 3
        with file.open("ab") as other:
            other.write(b"half a row\n")
        assert tail.look() and tail.unreadable == 1
    with Journal(tmp_path, "node2") as book:
        book.append(row(9, 85))
    tail.look()
    assert [one["trial_id"] for one in tail.rows] == [row(n)["trial_id"] for n in (0, 9, 1, 2)]
    assert set(tail.rows[0]) == {"trial_id", "started_at"} and len(parsed) == 5
    file.write_bytes(journal.line(row(4, 5)))
    assert tail.look() and len(tail.rows) == 2 and tail.unreadable == 0
    assert [one["trial_id"] for one in tail.rows] == [one["trial_id"] for one in journal.read(tmp_path)[0]]


@pytest.mark.parametrize(
    ("launcher", "quiet_s"),
    [(journal_lock.own_identity(), 60), ({}, 10), ({**journal_lock.own_identity(), "ticks": 1}, 0)],
)
def test_it_waits_between_batches_for_as_long_as_the_launcher_may_go_on(
    tmp_path: Path, launcher: dict[str, Any], quiet_s: float
) -> None:
    written_plan(tmp_path, [row(0), row(1)], launcher=launcher)
    watched = Watched(tmp_path)
    with Journal(tmp_path) as book:
        book.append(row(0))
        assert watched.ended(watched.look(NOW), 1000)[0] is False
    seen = watched.look(NOW)
    assert seen.status.state == "stopped"
    ended, told = watched.ended(seen, 2000)
    assert ended is (quiet_s == 0)
    assert told.status.state == ("running" if quiet_s == 60 else "stopped")  # its launcher is seen to be there
    assert watched.ended(seen, 2000 + quiet_s) == (True, seen)
    assert quiet_s == 0 or not watched.ended(seen, 1999 + quiet_s)[0]


def test_lines_where_there_is_no_terminal(tmp_path: Path, cli: Cli) -> None:
    written_plan(tmp_path, [row(0)], launcher={**journal_lock.own_identity(), "ticks": 1})
    with Journal(tmp_path) as book:
        book.append(row(0))
    (told,) = cli.run("status", "--watch", "0.1", tmp_path).out.splitlines()
    assert told.endswith(f"Z {tmp_path}  finished  1/1: 1 ok")


@pytest.mark.parametrize(("typed", "said"), cases("watch_mistakes"))
def test_mistakes(typed: str, said: str, here: Path, cli: Cli) -> None:
    with Journal(here / "results" / "x") as book:
        book.append(row(0))
    told = cli.refuse("status", *typed.split())
    assert said in told and told.count("\n") == 1


def test_one_who_looks_does_not_keep_a_sweep_from_its_journal(tmp_path: Path) -> None:
    """`held` has the lock for a moment; with a process that does nothing else, a sweep still begins."""
    with Journal(tmp_path) as book:
        book.append(row(0))
    code = "import sys\nfrom pathlib import Path\nfrom vramsweep.harness.rows import journal_lock\nprint(flush=True)\n"
    code += "while True: journal_lock.is_locked(Path(sys.argv[1]))"
    looking = [sys.executable, "-c", code, str(tmp_path / journal.NAME)]
    with subprocess.Popen(looking, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            for _ in range(20):
                Journal(tmp_path).close()
        finally:
            process.kill()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """A sweep's folder whose journal is locked and ends in a torn line."""
    rows = [row(n, 60 - n, peak_allocated_bytes=1 << 30, peak_reserved_bytes=2 << 30) for n in range(3)]
    with Journal(tmp_path / "t") as book:
        book.extend(rows[:2])
        written_plan(tmp_path / "t", rows, launcher=journal_lock.own_identity())
        with (tmp_path / "t" / journal.NAME).open("ab") as other:
            other.write(journal.line(rows[2])[:99])
        yield tmp_path / "t"


@pytest.mark.slow
def test_a_report_can_be_made_while_the_sweep_runs(running: Path, cli: Cli) -> None:
    before = (running / journal.NAME).read_bytes()
    cli.run("report", running, "--images", "none")
    assert (running / "report.html").exists()
    assert (running / journal.NAME).read_bytes() == before
    assert sweep_status.read_status(running).state == "running"


@pytest.mark.slow
def test_ctrl_c_ends_it_on_a_terminal_without_a_traceback(running: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "vramsweep", "status", str(running), "--watch", "0.2"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=follower, stderr=follower, env={**os.environ, "TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever started us may ignore it
    )  # fmt: skip
    try:
        os.close(follower)
        said = b""

        def more() -> bool:
            nonlocal said
            try:
                said += os.read(leader, 1 << 16)
            except OSError:  # it has ended
                return True
            return b"2/3: 2 ok" in said

        wait_for(more)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        more()
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    assert b"Traceback" not in said and b"running" in said


@pytest.mark.slow
def test_a_sweep_is_watched_to_its_end(tmp_path: Path, cli: Cli) -> None:
    words = ["model=tiny", "device=cpu", "protocol=brief", "seq_len=32,64", f"results={tmp_path}", "name=w"]
    sweep = [sys.executable, "-m", "vramsweep", "sweep", "-m", *words, "report=false"]
    with subprocess.Popen(sweep, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        wait_for((tmp_path / "w" / "trials" / journal.PLAN).exists)
        said = cli.run("status", tmp_path / "w", "--watch", "0.2")
        assert process.wait(60) == 0
    assert not said.err
    lines = [text.partition("  ")[2] for text in said.out.splitlines()]
    assert lines[-1] == "finished  2/2: 2 ok" and len(lines) == len(set(lines)) >= 2
