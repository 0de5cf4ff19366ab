"""Flags: what speaks against a row, from what real rows hold."""

import json

import pytest
from conftest import cases

from vramsweep.harness.rows.quality_flags import BY_NAME, FLAGS, flags
from vramsweep.harness.spec.techniques import catalog


@pytest.mark.parametrize(("row", "found", "note"), cases("flags") + cases("settings_in_effect"))
def test_flags(row: str, found: str, note: str) -> None:
    assert flags(json.loads(row)) == found.split(), note


def test_names_are_unique_and_explained() -> None:
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
    assert all(flag.meaning for flag in FLAGS)
    assert set(BY_NAME) == {flag.name for flag in FLAGS}


def test_every_optimizer_that_can_be_asked_for_is_known_by_the_class_that_runs_it() -> None:
    """The names that the tests of optimizers hold real classes to."""
    ran = dict(cases("classes_of_optimizers"))
    for entry in catalog.entries("optimizer"):
        row = {"optimizer": entry.name, "optimizer_effective": ran.get(str(entry.name), "AdamW")}
        assert flags(row) == [], row
