"""Test the file that a worker leaves, and which processes may overwrite it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vramsweep.harness.process.attempt import read_result
from vramsweep.harness.process.worker_files import RESULT
from vramsweep.runners.rank import result_file


def left(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / RESULT).read_text())
    assert [path.name for path in folder.iterdir()] == [RESULT]  # nothing aside stays
    return found


def test_an_error_does_not_take_a_published_measurement_away(tmp_path: Path) -> None:
    """A rank that fails between rank 0's publication and the end of the barrier."""
    result_file.values(tmp_path, {"peak_allocated_bytes": 7}, complete=False)
    result_file.error(tmp_path, {"error": {"type": "torch.OutOfMemoryError", "message": "CUDA out of memory"}})
    assert left(tmp_path) == {"values": {"peak_allocated_bytes": 7}, "complete": False}


def test_the_first_rank_to_fail_tells_why(tmp_path: Path) -> None:
    cause = {"error": {"type": "torch.OutOfMemoryError", "message": "CUDA out of memory"}}
    result_file.error(tmp_path, cause)
    result_file.error(tmp_path, {"error": {"type": "builtins.RuntimeError", "message": "Connection closed by peer"}})
    assert left(tmp_path) == cause


def test_the_first_last_word_stands(tmp_path: Path) -> None:
    result_file.values(tmp_path, {"peak_allocated_bytes": 7}, complete=False)
    result_file.note(tmp_path, "rank 1: out of memory while FLOPs are counted")
    result_file.note(tmp_path, "rank 0: Connection closed by peer")
    result_file.values(tmp_path, {"peak_allocated_bytes": 8}, complete=False)
    values = left(tmp_path)["values"]
    assert values == {"peak_allocated_bytes": 7, "notes": ["rank 1: out of memory while FLOPs are counted"]}


def test_half_characters_do_not_reach_the_journal(tmp_path: Path) -> None:
    result_file.error(tmp_path, {"error": {"type": "x", "message": "no file \ud800 here"}})
    found, problem = read_result(tmp_path)
    assert problem is None and found is not None
    assert found["error"]["message"] == "no file ? here"


def test_an_error_is_left_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    cause = {"error": {"type": "torch.OutOfMemoryError", "message": "CUDA out of memory"}}
    result_file.error(tmp_path, cause)
    result_file.error(tmp_path, {"error": {"type": "x", "message": "for its sake"}})
    assert left(tmp_path) == cause
