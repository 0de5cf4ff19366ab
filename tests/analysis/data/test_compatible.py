"""Test compatibility (docs/compatibility.md): earlier journals are read, promised columns stay, reading needs no POSIX.

Not covered: what only a real Windows or macOS shows, such as its paths, its libraries, its browser.
"""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TARGETS, cases

import vramsweep
from vramsweep.harness.rows.schema import BY_NAME, COLUMNS, is_stable

DATA = ROOT / "tests" / "data"
JOURNALS = sorted((DATA / "journals").glob("*.jsonl"))
# Columns that earlier versions had, and where what they said is now.
MOVED = {"zero_stage": "sharding", "gradient_checkpointing": "checkpointing", "optimizer": "optimizer_effective"}
ELSEWHERE = {"schema_version", "checksum"}


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.stem)
def test_a_journal_of_an_earlier_version_keeps_its_names_and_values(path: Path) -> None:
    for line, (_, row) in zip(written(path), vramsweep.load(path).iterrows(), strict=True):
        assert row["seq_len"] == line["seq_len"]
        for name, value in line.items():
            column = BY_NAME.get(name)
            if name in ELSEWHERE or name in MOVED or value is None or (column is not None and column.type is dict):
                continue
            if line["schema_version"] == 1 and name == "trial_id":
                continue  # ids hashed more then: harness/rows/migrations.py
            assert column is not None, f"{name} is lost"
            now = row[name]
            if isinstance(value, list):
                assert [one if isinstance(one, str) else float(one) for one in value if one is not None] == [
                    one for one in now if one is not None and one == one
                ], name
            elif isinstance(value, float):
                assert math.isclose(now, value, rel_tol=1e-12), name
            else:
                assert str(now).replace(" ", "T") == value if name == "started_at" else now == value, name
        # what was elsewhere
        assert row["sharding"] == ("none" if line.get("zero_stage") is None else f"zero{line['zero_stage']}")
        assert row["checkpointing"] == ("full" if line.get("gradient_checkpointing") else "none")
        assert row["optimizer_effective"] == "AdamW"
        assert row["optimizer"] == "default"


@pytest.mark.slow
def test_rows_of_all_versions_of_one_measurement_are_one_group() -> None:
    """Allocated memory of the same trial is the same whichever version measured or predicted it."""
    frames = [vramsweep.load(path) for path in JOURNALS]
    assert len(frames) >= 5
    first = {(row.device, row.seq_len): row.peak_allocated_bytes for row in frames[0].itertuples()}
    assert len(first) == 6
    for frame in frames[1:]:
        assert {(row.device, row.seq_len): row.peak_allocated_bytes for row in frame.itertuples()} == first
    measured = [set(frame[frame["device"] == "cpu"]["trial_id"]) for frame in frames]
    assert all(ids == measured[0] for ids in measured)  # so an update runs none of them again


@pytest.mark.parametrize("file", sorted((DATA / "columns").glob("*.csv")), ids=lambda file: file.stem)
def test_promised_columns_are_still_there_with_their_type_and_unit(file: Path) -> None:
    with file.open(encoding="utf-8", newline="") as stream:
        kept = [tuple(line) for line in csv.reader(stream)][1:]
    assert len(kept) > 150
    now = {one.name: (one.name, one.type.__name__, one.unit) for one in COLUMNS if is_stable(one)}
    assert [one for one in kept if now.get(one[0]) != one] == []


def test_the_names_of_the_notebook_s_surface_and_their_arguments() -> None:
    import inspect

    for name, words in cases("arguments_of_functions"):
        assert list(inspect.signature(getattr(vramsweep, name)).parameters) == words.split(), name


def test_how_the_journals_were_made_is_written_down() -> None:
    text = (DATA / "journals" / "README.md").read_text(encoding="utf-8")
    for path in JOURNALS:
        commits = {str(line["git_commit"])[:7] for line in written(path)}
        assert len(commits) == 1 and f"| `{path.name}` | `{commits.pop()}` |" in text


def test_the_citation_has_what_its_schema_requires_and_the_version_of_the_code() -> None:
    """https://github.com/citation-file-format/citation-file-format, schema 1.2.0: required keys and types of those."""
    import yaml

    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert found["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= found.keys()
    assert found["type"] == "software" and found["version"] == vramsweep.__version__
    assert found["license"] == "Apache-2.0"  # as in LICENSE
    for author in found["authors"]:
        assert author.keys() <= {"name", "alias", "website", "given-names", "family-names", "orcid", "affiliation"}
        assert author.get("name") or author.get("family-names")
    known = {"cff-version", "message", "title", "type", "authors", "version", "license", "abstract", "keywords"}
    assert found.keys() <= known | {"url", "repository-code", "date-released", "doi", "identifiers", "references"}
    assert all(isinstance(found[name], str) for name in ("message", "title", "version", "abstract"))
    assert len(set(found["keywords"])) == len(found["keywords"]) > 0


ROWS = ROOT / "results" / "reference" / "gpt2-cpu"
VERBS = (
    "fit rows --metric peak_allocated_bytes", "report rows --images none", "compare rows rows",
    "export rows out.csv", "export rows out.parquet", "paper rows", "check rows", "status rows", "columns", "gpus",
    "techniques", "report rows --images none",
)  # fmt: skip


@pytest.mark.slow
def test_verbs_run_elsewhere_and_a_report_is_written_over(here: Path) -> None:
    shutil.copytree(ROWS, here / "rows")
    environ = os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "warn_default_encoding", str(TARGETS / "elsewhere.py"), *VERBS]
    done = subprocess.run(command, env=environ, capture_output=True, check=False)
    said = done.stderr.decode("cp1252")
    assert done.returncode == 0 and "Traceback" not in said, said
    assert "–" in (here / "rows" / "report.html").read_text(encoding="utf-8")
