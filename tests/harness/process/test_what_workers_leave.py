"""Test that an attempt becomes one row of the schema whatever its worker leaves in its folder, which is not trusted."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as some

from vramsweep.harness.process import attempt, waiting, worker_files
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.outcome import Evidence
from vramsweep.harness.rows.schema import BY_NAME, OF_PARENT, Row, complete_row
from vramsweep.harness.sweep import plan, row_builder

ITEM = plan.order_trials(plan.expand_trials([tiny()], 1))[0]
LEAVES = some.none() | some.booleans() | some.integers() | some.floats() | some.text()
LEAVES |= some.sampled_from([1 << 64, -1, float("inf"), "\ud800", "\x1b[31m", ""])
JSON = some.recursive(LEAVES, lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner), max_leaves=8)
COLUMNS = some.dictionaries(some.sampled_from([*BY_NAME, "steps_s", "no_such_column"]), JSON, max_size=6)
RESULTS = some.fixed_dictionaries({}, optional={"values": COLUMNS | JSON, "error": JSON, "complete": JSON}) | JSON
RECORDS = some.lists(
    some.fixed_dictionaries({}, optional=dict.fromkeys(("step", "event", "phase", "at_step", "rank", "traced"), JSON))
    | JSON,
    max_size=4,
)


def row(folder: Path, code: int | None) -> Row:
    """The row of an attempt that left what lies in the folder, as the sweep makes it."""
    result, problem = attempt.read_result(folder)
    records = attempt.read_steps(folder)
    rank = attempt.ended_rank(records)
    evidence = Evidence(exit_code=code, result=result, result_error=problem, deadline_s=1.0, rank=rank)
    base = {"sweep": "t", "isolation": "warm"} | row_builder.initial_columns(ITEM) | row_builder.started_columns(1)
    assert ITEM.trial is not None
    made = base | row_builder.process_columns(attempt.AttemptResult(evidence, 1.0, "warm"), {}, None)
    return complete_row(row_builder.classified_row(made, ITEM.trial, evidence, row_builder.phase(records), final=True))


@pytest.mark.slow
@given(result=RESULTS, records=RECORDS, code=some.sampled_from([0, 1, -9, -6, 74, None]), torn=some.binary(max_size=9))
@settings(max_examples=400, deadline=None)
def test_any_values_become_a_row_that_reads_back(
    result: Any, records: list[Any], code: int | None, torn: bytes
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / worker_files.RESULT).write_text(json.dumps(result))
        lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        (folder / worker_files.STEPS).write_bytes(lines + torn)
        made = row(folder, code)
        assert made["trial_id"] == ITEM.trial_id
        assert made["attempt"] == 1
        assert journal.parsed(journal.line(made)[:-1]) is not None


@given(left=some.binary(max_size=200), code=some.sampled_from([0, 1, -9]))
@settings(max_examples=200, deadline=None)
def test_any_bytes_become_a_row(left: bytes, code: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / worker_files.RESULT).write_bytes(left)
        (folder / worker_files.STEPS).write_bytes(left)
        assert row(folder, code)["outcome"] in ("bad_result", "crash")


@pytest.mark.parametrize("name", sorted(OF_PARENT))
def test_a_worker_does_not_say_who_its_row_is_of(tmp_path: Path, name: str) -> None:
    (tmp_path / worker_files.RESULT).write_text(json.dumps({"values": {name: None}, "complete": True}))
    result, problem = attempt.read_result(tmp_path)
    assert result is None
    assert name in str(problem)


def test_of_records_without_end_only_the_last_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "STEPS_LIMIT", 1 << 16)
    line = json.dumps({"step": 7}).encode() + b"\n"
    with (tmp_path / worker_files.STEPS).open("wb") as file:
        for _ in range(2 * attempt.STEPS_LIMIT // (1000 * len(line))):
            file.write(line * 1000)
    assert len(attempt.read_steps(tmp_path)) <= attempt.STEPS_LIMIT // len(line)
    assert attempt.read_steps(tmp_path)[-1] == {"step": 7}


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a link without end", "a link to nothing"])
@pytest.mark.parametrize("name", [worker_files.RESULT, worker_files.STEPS, *worker_files.LOGS])
def test_what_is_no_file_is_not_read(tmp_path: Path, name: str, kind: str) -> None:
    place = tmp_path / name
    if kind == "a folder":
        place.mkdir()
    elif kind == "a pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero" if kind == "a link without end" else tmp_path / "nowhere")
    assert row(tmp_path, 1)["outcome"] in ("crash", "bad_result")
    assert waiting.last_words(place) is None
    waiting.Logs(place).look()


def test_a_record_of_the_end_without_a_rank_is_none(tmp_path: Path) -> None:
    (tmp_path / worker_files.STEPS).write_text('{"event": "ended"}\n{"event": "ended", "rank": 1}\n')
    assert attempt.ended_rank(attempt.read_steps(tmp_path)) == 1
    assert attempt.ended_rank([{"event": "ended"}]) is None
