"""Headers as people's scripts write them, read as our columns, in their units."""

from pathlib import Path

import pytest
from conftest import cases

from vramsweep.analysis.data.importers import open_rows, our_name

pytestmark = pytest.mark.deterministic


@pytest.mark.parametrize(("name", "ours"), cases("headers"))
def test_names_of_others_are_ours(name: str, ours: str) -> None:
    assert our_name(name, ["1"])[0] == ours


@pytest.mark.parametrize(("largest", "unit"), [("17179869184", "bytes"), ("16384", "mib"), ("16.0", "gib")])
def test_a_size_without_a_unit_is_told_by_its_values(largest: str, unit: str) -> None:
    name, assumed = our_name("reserved", ["1", largest, "OOM", ""])
    assert name == f"peak_reserved_{unit}" and "has no unit" in assumed


def test_a_file_of_such_names_is_read_and_what_was_assumed_is_said(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("seq, active, reserved, it/s, loss\n128, 10000, 12000, 4, 3.1\n256, 11000, 13000, 2, 3.0\n")
    table, notes = open_rows(file)
    assert list(table.frame["peak_active_bytes"]) == [10000 << 20, 11000 << 20]
    assert list(table.frame["tokens_per_s"]) == [512, 512]
    told = " ".join(notes)
    assert "active as peak_active_mib" in told and "up to 13,000, were read as MiB" in told
    assert "columns left out because their names are not known: loss" in told


def test_a_file_of_nothing_but_failures_is_one(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("4096, OOM\n8192, CUDA out of memory\n")
    table, _ = open_rows(file)
    assert list(table.frame["outcome"]) == ["oom", "oom"] and list(table.frame["seq_len"]) == [4096, 8192]
