"""The journal: torn lines, locks, disks that refuse."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vramsweep.harness import journal
from vramsweep.harness.errors import UserError
from vramsweep.harness.journal import Journal
from vramsweep.harness.row import RowError


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
    with Journal(tmp_path) as book:
        book.append({"trial_id": "whole"})
        book.append({"trial_id": "torn"})
    file = tmp_path / journal.NAME
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(lines[0] + b"\n" + lines[1][:kept])
    with Journal(tmp_path) as book:
        book.append({"trial_id": "after"})
    rows, unreadable = journal.read(tmp_path)
    assert [row["trial_id"] for row in rows] == ["whole", "after"]
    assert unreadable == 1


def test_a_row_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    with Journal(tmp_path) as book:
        book.append({"trial_id": "a"})
    file = tmp_path / journal.NAME
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    with Journal(tmp_path) as book:
        book.append({"trial_id": "b"})
    assert [row["trial_id"] for row in journal.read(tmp_path)[0]] == ["a", "b"]


def test_lines_that_are_no_rows_are_counted(tmp_path: Path) -> None:
    (tmp_path / journal.NAME).write_bytes(b'garbage\n[1]\n{"a":1}\n\xff\xfe\n{"trial_id":"x"}\n')
    rows, unreadable = journal.read(tmp_path)
    assert len(rows) == 1
    assert unreadable == 4


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(UserError, match="another sweep is writing"):
        Journal(tmp_path)


def test_the_lock_goes_with_a_killed_writer(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from vramsweep.harness.journal import Journal
book = Journal(Path({str(tmp_path)!r}))
book.append({{"trial_id": "kept"}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    with Journal(tmp_path) as book:
        book.append({"trial_id": "after"})
    assert [row["trial_id"] for row in journal.read(tmp_path)[0]] == ["kept", "after"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose a writable folder"):
        Journal(tmp_path / "file" / "sweep")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="choose a writable folder"):
        Journal(tmp_path / "sweep")


def test_a_full_disk_keeps_the_rows_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(tmp_path) as book:
        book.append({"trial_id": "before"})
        real = os.write

        def full(fd: int, data: bytes) -> int:
            real(fd, data[:7])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(UserError, match="the disk is full"):
            book.append({"trial_id": "lost"})
        monkeypatch.undo()
    with Journal(tmp_path) as book:
        book.append({"trial_id": "after"})
    rows, unreadable = journal.read(tmp_path)
    assert [row["trial_id"] for row in rows] == ["before", "after"]
    assert unreadable == 1


def test_a_write_that_takes_only_part_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(tmp_path) as book:
        real = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
        with pytest.raises(UserError, match="the disk is full"):
            book.append({"trial_id": "half"})


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
    with pytest.raises(UserError, match="name a folder under results"):
        journal.read(tmp_path)
