"""The what-if tables of recorded steps."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from vramsweep.analysis.answers import answer_table
from vramsweep.analysis.answers.answer_table import what_if_tables
from vramsweep.analysis.data.importers import open_rows
from vramsweep.harness.allocator import replay
from vramsweep.harness.rows.journal import Journal

SMALL = ROOT / "tests" / "data" / "snapshots" / "silmont2000__b61be4_mem_snapshot.pickle"


def sweep(folder: Path, count: int) -> Path:
    with Journal(folder) as book:
        for n in range(count):
            recording = f"attempts/t{n}/1/recording.pickle"
            row = {"trial_id": f"t{n}", "terminal": True, "outcome": "ok", "model": "m", "seq_len": 64 + n}
            book.append(row | {"precision": "fp32", "device": "cuda", "recording": recording})
    return folder


def test_a_recorded_step_becomes_a_table_that_says_it_is_predicted(tmp_path: Path) -> None:
    target = sweep(tmp_path, 1) / "attempts" / "t0" / "1"
    target.mkdir(parents=True)
    shutil.copy(SMALL, target / "recording.pickle")
    (only,), notes = what_if_tables(open_rows(tmp_path, None)[0])
    title, name, frame = only
    assert "what-if from trial t0" in title
    assert title.endswith("is exact")
    assert name == "what_if_t0"
    assert frame.iloc[0]["settings"] == "(defaults), as recorded"
    assert frame.iloc[0]["predicted peak reserved (GiB)"] == "3.5"  # 3,606 MiB
    assert len(frame) > 5
    assert notes == []


def test_what_no_replay_counted_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = sweep(tmp_path, 1) / "attempts" / "t0" / "1"
    target.mkdir(parents=True)
    shutil.copy(SMALL, target / "recording.pickle")
    found = replay.what_if(SMALL, ())
    uncounted = replace(found, rows=[replace(found.rows[0], device_allocs=None)])
    monkeypatch.setattr(answer_table, "what_if", lambda *_: uncounted)
    ((_, _, frame),), _ = what_if_tables(open_rows(tmp_path, None)[0])
    assert frame.iloc[0]["cudaMallocs"] == "–"


def test_a_recording_that_is_gone_is_a_note(tmp_path: Path) -> None:
    tables, notes = what_if_tables(open_rows(sweep(tmp_path, 6), None)[0])
    assert tables == []
    assert len(notes) == 5
    assert "recording of trial" in notes[0]
    assert "6 recordings" in notes[-1]


def test_no_recordings_no_tables(tmp_path: Path) -> None:
    with Journal(tmp_path) as book:
        book.append({"trial_id": "a", "terminal": True, "outcome": "ok", "seq_len": 1})
    assert what_if_tables(open_rows(tmp_path, None)[0]) == ([], [])
