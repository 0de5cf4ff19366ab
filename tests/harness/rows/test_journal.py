"""The journal: torn lines, locks, disks that refuse."""

import contextlib
import errno
import fcntl
import json
import os
import resource
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest
from conftest import literal_cases, refusal, source

from vramsweep.analysis.data.load import from_frame, load
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import journal, journal_lock
from vramsweep.harness.rows.journal import Journal
from vramsweep.harness.rows.schema import RowError, system_of


def row(trial_id: str, **over: Any) -> dict[str, Any]:
    return {"trial_id": trial_id, "terminal": True, "attempt": 1, "outcome": "ok"} | over


def append(folder: Path, *trials: str) -> Path:
    """Write a row of each trial; the journal's file."""
    with Journal(folder) as book:
        book.extend([row(one) for one in trials])
    return book.path


def held(folder: Path) -> tuple[list[str], int]:
    """The trials of a journal's rows, and how many of its lines are none."""
    rows, unreadable = journal.read(folder)
    return [one["trial_id"] for one in rows], unreadable


def test_rows_come_back(tmp_path: Path) -> None:
    with Journal(tmp_path) as book:
        for n in range(3):
            book.append({"trial_id": f"t{n}", "attempt": n, "terminal": n > 0, "outcome": "ok"})
    rows, unreadable = journal.read(tmp_path)
    assert [row["attempt"] for row in rows] == [0, 1, 2]
    assert unreadable == 0
    assert set(journal.terminal(rows)) == {"t1", "t2"}


@pytest.mark.parametrize("kept", [1, 20, -2])
def test_a_torn_last_line_loses_only_itself(tmp_path: Path, kept: int) -> None:
    file = append(tmp_path, "whole", "torn")
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(lines[0] + b"\n" + lines[1][:kept])
    append(tmp_path, "after")
    assert held(tmp_path) == (["whole", "after"], 1)


def test_a_row_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    file = append(tmp_path, "a")
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    append(tmp_path, "b")
    assert held(tmp_path) == (["a", "b"], 0)


def test_lines_that_are_no_rows_are_counted(tmp_path: Path) -> None:
    (tmp_path / journal.NAME).write_bytes(b'garbage\n[1]\n{"a":1}\n\xff\xfe\n{"trial_id":"x","outcome":"ok"}\n')
    assert held(tmp_path) == (["x"], 4)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(UserError, match="another sweep is writing"):
        Journal(tmp_path)


def test_the_lock_goes_with_a_killed_writer(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", source("writer_that_is_killed.txt"), str(tmp_path)], check=False)
    append(tmp_path, "after")
    assert held(tmp_path) == (["kept", "after"], 0)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "choose a writable folder" in refusal(UserError, Journal, tmp_path / "file" / "sweep")


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / journal.NAME).symlink_to(elsewhere)
    assert "is a link" in refusal(UserError, Journal, tmp_path / "t")
    assert elsewhere.read_bytes() == b""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "choose a writable folder" in refusal(UserError, Journal, tmp_path / "sweep")


def test_a_full_disk_keeps_the_rows_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(tmp_path) as book:
        book.append(row("before"))
        real = os.write

        def full(fd: int, data: bytes) -> int:
            real(fd, data[:7])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        assert "the disk is full" in refusal(UserError, book.append, row("lost"))
        monkeypatch.undo()
    append(tmp_path, "after")
    assert held(tmp_path) == (["before", "after"], 1)


def test_a_file_that_may_grow_no_further_is_not_a_full_disk(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(tmp_path) as book:
        book.append(row("before"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (book.path.stat().st_size + 100, before[1]))
        try:
            with pytest.raises(UserError, match=r"ulimit -f\): .*journal.jsonl takes no more rows"):
                book.append(row("half"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        book.append(row("after"))
    assert held(tmp_path) == (["before", "after"], 1)


OTHERS: dict[str, tuple[Callable[[Path, bytes], Any], str | None]] = {
    "a row is appended": (lambda file, data: file.write_bytes(data + journal.line(row("c"))), None),
    "half a line is appended": (lambda file, data: file.write_bytes(data + b'{"trial_id'), None),
    "an editor saves what it had read, and more": (
        lambda file, data: file.write_bytes(data[: len(data) // 2] + b"x" * len(data)),
        "cut or rewritten",
    ),
    "it is cut": (lambda file, data: file.write_bytes(data[:-9]), "cut or rewritten"),
    "it is emptied": (lambda file, data: file.write_bytes(b""), "cut or rewritten"),
    "it is replaced": (lambda file, data: (file.unlink(), file.write_bytes(data)), "deleted or moved"),
    "it is deleted": (lambda file, data: file.unlink(), "deleted or moved"),
}


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("what", OTHERS)
def test_what_others_do_to_a_journal_meanwhile_loses_no_row_in_silence(
    tmp_path: Path, what: str, at_the_end: bool
) -> None:
    meddle, said = OTHERS[what]
    book = Journal(tmp_path)
    book.extend([row("a"), row("b")])
    meddle(book.path, book.path.read_bytes())
    with pytest.raises(UserError, match=said) if said else contextlib.nullcontext(), book:
        if not at_the_end:
            book.append(row("after"))
    if book.path.exists() and said != "deleted or moved":  # then what was written since is in the other file
        rows, _ = journal.read(tmp_path)
        assert at_the_end or rows[-1]["trial_id"] == "after"
        assert said or {one["trial_id"] for one in rows} >= {"a", "b"}


@pytest.mark.parametrize("marks", [(b"", b"\r\n"), (b"\xef\xbb\xbf", b"\n"), (b"\xef\xbb\xbf", b"\r\n")])
def test_lines_that_git_or_an_editor_has_changed_are_read_as_they_were(
    tmp_path: Path, marks: tuple[bytes, bytes]
) -> None:
    file = append(tmp_path, "a", "b")
    before = journal.read(tmp_path)
    file.write_bytes(marks[0] + file.read_bytes().replace(b"\n", marks[1]) + marks[1])
    tail = journal.Tail(tmp_path, ("trial_id",))
    assert journal.read(tmp_path) == before
    assert tail.look() and tail.unreadable == 0
    append(tmp_path, "c")
    assert held(tmp_path) == (["a", "b", "c"], 0)
    assert tail.look() and [one["trial_id"] for one in tail.rows] == ["a", "b", "c"]
    found = load(tmp_path)
    assert (found.frame["trial_id"].tolist(), found.warnings) == (["a", "b", "c"], ())


def test_a_line_longer_than_any_row_is_one_unreadable_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LONGEST", 10_000)
    lines = [journal.line(row("a")), b"x" * 25_000 + b"\n", journal.line(row("b"))]
    (tmp_path / journal.NAME).write_bytes(b"".join(lines))
    assert held(tmp_path) == (["a", "b"], 1)
    tail = journal.Tail(tmp_path, ("trial_id",))
    assert tail.look() and [one["trial_id"] for one in tail.rows] == ["a", "b"]


@pytest.mark.parametrize("row", [{"trial_id": 5}, {"nonsense": 1}])
def test_a_row_outside_the_schema_is_not_written(tmp_path: Path, row: dict[str, Any]) -> None:
    with Journal(tmp_path) as book, pytest.raises(RowError):
        book.append(row)
    assert (tmp_path / journal.NAME).read_bytes() == b""


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    with Journal(tmp_path) as book, pytest.raises(ValueError, match="JSON"):
        book.append({"trial_id": "x", "loss_first": float("nan")})
    with Journal(tmp_path) as book:
        book.append({"trial_id": "x", "reason": "a\nb"})
    assert json.loads((tmp_path / journal.NAME).read_text().splitlines()[-1])["reason"] == "a\nb"


def test_no_journal(tmp_path: Path) -> None:
    assert "name a folder under results" in refusal(UserError, journal.read, tmp_path)


@pytest.mark.slow
@pytest.mark.deterministic
def test_a_journal_cut_at_any_byte_or_with_any_byte_changed_is_never_half_believed(tmp_path: Path) -> None:
    """Every length of the file, and every byte of it with each of its bits turned, and with all of them."""
    with Journal(tmp_path) as book:
        for name in "abc":
            book.append(row(name, peak_allocated_bytes=4096, reason='a "quoted" text\n'))
    file = tmp_path / journal.NAME
    before, _ = journal.read(tmp_path)
    whole = file.read_bytes()
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole)):
        lines = whole[:size].split(b"\n")
        rows = [journal.parsed(text) for text in lines if text]
        complete = sum(end <= size for end in ends)
        assert rows == before[:complete] + [None] * (len(rows) - complete), size
        assert len(rows) - complete == (size > 0 and whole[size - 1] != ord("\n") and size not in ends), size
    for at in range(len(whole)):
        touched = sum(end < at for end in ends)
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            damaged = bytearray(whole)
            damaged[at] ^= mask
            found = [journal.parsed(text) for text in bytes(damaged).split(b"\n") if text]
            kept = [one for one in found if one is not None]
            lost = {touched, touched + 1} if at in ends else {touched}  # two rows on one line
            assert kept == [one for number, one in enumerate(before) if number not in lost] or (
                at == ends[-1] and kept == before[:-1]
            ), (at, mask)
            assert None in found, (at, mask)


def test_rows_without_a_checksum_are_read(tmp_path: Path) -> None:
    (tmp_path / journal.NAME).write_text('{"trial_id":"old","schema_version":1,"outcome":"ok"}\n')
    assert held(tmp_path) == (["old"], 0)


def test_the_checksum_is_of_the_row_as_it_stands(tmp_path: Path) -> None:
    """Reckoned here by the standard library from the text, as any other program would."""
    text = append(tmp_path, "a").read_bytes().rstrip(b"\n")
    whole = json.loads(text)
    before = text[: text.rindex(b',"checksum"')] + b"}"
    assert whole["checksum"] == f"{zlib.crc32(before):08x}"
    assert "checksum" not in journal.read(tmp_path)[0][0]


def test_each_writer_has_a_journal_and_readers_merge_them(tmp_path: Path) -> None:
    with Journal(tmp_path) as own, Journal(tmp_path, "node2") as other:
        own.append(row("a", started_at="2026-01-01T00:00:00+00:00"))
        other.append(row("b", started_at="2026-01-01T00:00:01+00:00"))
        own.append(row("b", started_at="2026-01-01T00:00:02+00:00", attempt=2))
    rows, unreadable = journal.read(tmp_path)
    assert [(r["trial_id"], r["attempt"]) for r in rows] == [("a", 1), ("b", 1), ("b", 2)]
    assert journal.terminal(rows)["b"]["attempt"] == 2
    assert unreadable == 0
    assert set(load(tmp_path).frame["trial_id"]) == {"a", "b"}


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_from_a_locked_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(number, os.strerror(number))))
    with Journal(tmp_path) as book:
        book.append(row("a"))
        assert journal_lock.is_locked(book.path)
        assert "another sweep is writing" in refusal(UserError, Journal, tmp_path)
    assert not journal_lock.is_locked(book.path)
    assert len(journal.read(tmp_path)[0]) == 1
    assert [path.name for path in tmp_path.iterdir()] == [journal.NAME]


OF_BEFORE = {"host": "vm", "pid": 1, "started": 1.0}
CLAIMS = [(journal_lock.own_identity() | change, taken) for change, taken in literal_cases("claims_on_a_journal")]


@pytest.mark.parametrize(("left", "taken"), [*CLAIMS, (OF_BEFORE, False), ("", False), ("garbage", False)])
def test_without_locks_a_claim_is_taken_over_from_a_process_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: Any, taken: bool
) -> None:
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    claim = tmp_path / f"{journal.NAME}.lock"
    claim.write_text(json.dumps(left))
    if taken:
        Journal(tmp_path).close()
        assert not claim.exists()
    else:
        with pytest.raises(UserError, match=r"journal.jsonl.lock .* remove that file"):
            Journal(tmp_path)
        assert claim.exists()


def test_of_two_who_take_a_claim_over_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see that its writer is gone; the other one is faster and has its own there by then."""
    path = tmp_path / journal.NAME
    journal_lock.claim_path(path).write_text(json.dumps(journal_lock.own_identity() | {"pid": 1 << 22}))
    gone = journal_lock._set_aside

    def later(place: Path) -> None:
        journal_lock.claim_path(place).write_text(json.dumps(journal_lock.own_identity()))
        gone(place)

    monkeypatch.setattr(journal_lock, "_set_aside", later)
    assert "another sweep is writing" in refusal(UserError, journal_lock._claim, path)
    assert json.loads(journal_lock.claim_path(path).read_text()) == journal_lock.own_identity()
    assert [one.name for one in tmp_path.iterdir()] == [journal_lock.claim_path(path).name]


def test_another_fault_of_the_lock_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    assert "cannot lock" in refusal(UserError, Journal, tmp_path)


def test_the_directory_entry_of_a_new_journal_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), real(fd))[1]
    )
    with Journal(tmp_path / "sweep"):
        assert synced == [str(tmp_path / "sweep")]
    with Journal(tmp_path / "sweep"):
        assert len(synced) == 1


H100 = {"device": "cuda", "gpu_name": "NVIDIA H100 80GB HBM3", "torch_version": "2.13.0+cu130"}
L4 = H100 | {"gpu_name": "NVIDIA L4"}


def test_a_row_of_another_system_finishes_nothing() -> None:
    older = H100 | {"torch_version": "2.12.0"}
    here = system_of(H100)
    rows = [row("a", **L4, outcome="oom"), row("b", **H100), row("b", **L4), row("c", **older)]
    mine, others = journal.finished(rows, dict.fromkeys("abcd", here))
    assert {k: v["gpu_name"] for k, v in mine.items()} == {"b": H100["gpu_name"]}
    assert sorted(others) == ["a", "c"]
    refused = row("a", attempt=0, outcome="invalid", torch_version="1.0")  # never started, so measured nowhere
    assert journal.finished([refused], {"a": here})[0] == {"a": refused}
    assert journal.finished([row("a", **H100)], {"a": ()}) == ({}, {})  # what cannot run here is not said to run again


def test_the_host_s_processor_is_part_of_a_cpu_s_system_only() -> None:
    assert system_of(H100 | {"cpu_name": "x"}) == system_of(H100 | {"cpu_name": "y"})
    assert system_of({"device": "cpu", "cpu_name": "x"}) != system_of({"device": "cpu", "cpu_name": "y"})
    simulated = {"device": "simulated", "torch_version": "2.13.0"}
    assert system_of(simulated | {"gpu_name": "h100-80gb"}) == system_of(simulated)


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_trial_that_was_once_refused_keeps_what_was_measured(refused_first: bool) -> None:
    """Measured on a node with four cards; on one with two it could not start, and was not tried."""
    measured, refused = row("a", **H100), row("a", attempt=0, outcome="invalid", torch_version="2.12.0", device="cuda")
    rows = [refused, measured] if refused_first else [measured, refused]
    assert journal.finished(rows, {"a": system_of(H100)})[0] == {"a": measured}
    table = from_frame(pd.DataFrame(rows), "x")
    assert table.frame["outcome"].tolist() == ["ok"]


def test_half_a_character_in_a_row_of_before_stops_nobody(tmp_path: Path) -> None:
    given = '{"trial_id":"a","terminal":true,"outcome":"crash","reason":"no \\ud800 here"}\n'
    (tmp_path / journal.NAME).write_text(given)
    (found,), unreadable = journal.read(tmp_path)
    assert (found["reason"], unreadable) == ("no ? here", 0)
    found["reason"].encode()
    assert load(tmp_path).frame["reason"].tolist() == ["no ? here"]
