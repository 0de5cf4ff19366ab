"""The schema of rows, and the flags: what speaks against a row."""

import json

import pytest
from conftest import cases, parametrized

from vramsweep.harness.rows import quality_flags
from vramsweep.harness.rows.quality_flags import FLAGS, flags
from vramsweep.harness.rows.schema import BY_NAME, COLUMNS, Outcome, RowError, complete_row
from vramsweep.harness.spec.techniques import catalog


def test_a_row_has_every_column_and_null_for_the_unknown() -> None:
    row = complete_row({"trial_id": "x", "outcome": "ok"})
    assert list(row) == [column.name for column in COLUMNS]
    assert row["peak_allocated_bytes"] is None
    assert json.loads(json.dumps(row)) == row


def test_names_are_unique_and_units_are_in_them() -> None:
    assert len(BY_NAME) == len(COLUMNS)
    for column in COLUMNS:
        assert (column.unit == "B") == column.name.endswith("_bytes"), column.name
        if column.unit == "s":
            assert column.name.endswith("_s"), column.name


@parametrized("row_mistakes")
def test_what_does_not_fit_is_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(RowError, match=text):
        complete_row(values)


def test_a_whole_number_is_a_float() -> None:
    assert complete_row({"elapsed_s": 3})["elapsed_s"] == 3


def test_outcomes_are_the_design_s() -> None:
    names = "ok oom host_oom timeout crash cuda_error contended invalid bad_result environment skipped"
    assert [str(o) for o in Outcome] == names.split()


@pytest.mark.parametrize(("row", "found", "note"), cases("flags") + cases("settings_in_effect"))
def test_flags(row: str, found: str, note: str) -> None:
    assert flags(json.loads(row)) == found.split(), note


def test_names_are_unique_and_explained() -> None:
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
    assert all(flag.meaning for flag in FLAGS)
    assert set(quality_flags.BY_NAME) == {flag.name for flag in FLAGS}


def test_every_optimizer_that_can_be_asked_for_is_known_by_the_class_that_runs_it() -> None:
    """The names that the tests of optimizers hold real classes to."""
    ran = dict(cases("classes_of_optimizers"))
    for entry in catalog.entries("optimizer"):
        row = {"optimizer": entry.name, "optimizer_effective": ran.get(str(entry.name), "AdamW")}
        assert flags(row) == [], row
