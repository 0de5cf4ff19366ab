"""What an H100 did (results/reference/h100-80gb), and what is made of it here: replays of its recordings, predictions.

The recordings and rows are the card's own; nothing here was fitted to them.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Run

from vramsweep.harness.allocator.replay import what_if
from vramsweep.harness.row import Row

sys.path.insert(0, str(ROOT / "benchmarks"))
import card_page

FOLDER = ROOT / "results" / "reference" / "h100-80gb"
ROWS: list[Row] = [json.loads(line) for line in (FOLDER / "rows.jsonl").read_text().splitlines()]


def recorded(tmp_path: Path, name: str) -> tuple[Path, dict[str, Any]]:
    with zipfile.ZipFile(FOLDER / "recordings.zip") as archive:
        path = Path(archive.extract(f"{name}.pickle", tmp_path))
    run: dict[str, Any] = json.loads((FOLDER / "summary.json").read_text())["parts"]["recordings"][name]
    return path, run


def test_one_recording_tells_what_another_setting_reserves(tmp_path: Path) -> None:
    path, own = recorded(tmp_path, "default")
    _, other = recorded(tmp_path, "expandable")
    table = what_if(path, [other["conf"]])
    match = table.rows[0].match
    assert match is not None and match.exact, match
    assert table.rows[0].peak_reserved == own["peak_reserved_bytes"]
    assert table.rows[-1].peak_reserved == other["peak_reserved_bytes"] != own["peak_reserved_bytes"]
    assert table.rows[-1].peak_allocated == other["peak_allocated_bytes"] != own["peak_allocated_bytes"]


@pytest.mark.slow
def test_every_recording_is_replayed_exactly_and_tells_of_the_others() -> None:
    found = list(card_page.replays(FOLDER))
    assert len(found) == 10 + sum(map(len, card_page.CROSS.values()))
    for one, other, run, replay in found:
        assert replay.peak_reserved == run["peak_reserved_bytes"], (one, other)
        assert replay.retries == run["retries"], (one, other)
        if one == other:  # as recorded, to its end
            assert replay.match is not None and replay.match.exact, (one, replay.match)
        else:
            assert (replay.out_of_memory is not None) == run["out_of_memory"], (one, other)
            assert replay.peak_allocated == run["peak_allocated_bytes"], (one, other)


def test_cold_and_warm_trials_had_the_same_memory() -> None:
    ok = [row for row in ROWS if row["outcome"] == "ok" and row["device"] == "cuda"]
    both = [(a, b) for a in ok for b in ok if a["trial_id"] == b["trial_id"] and a["isolation"] < b["isolation"]]
    assert len(both) == 2
    for cold, warm in both:
        peaks = [name for name in cold if "_peak_" in f"_{name}" and name.endswith("_bytes") and "host" not in name]
        assert len(peaks) > 10
        assert {name: cold[name] for name in peaks} == {name: warm[name] for name in peaks}


def test_what_was_predicted_for_the_card_was_measured_on_it() -> None:
    """The differences as they were found, of predictions kept beside the rows; docs/h100.md tells each."""
    both = card_page.pairs(ROWS)
    assert len(both) == 34
    assert max(abs(card_page.off(m, p, "peak_allocated_bytes")) for m, p in both) < 0.002
    assert sum(abs(card_page.off(m, p, "peak_reserved_bytes")) > 0.01 for m, p in both) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "over",
    [
        {"runner": {"name": "torch"}, "precision": "fp32"},
        {"runner": {"name": "torch"}, "precision": "bf16_pure"},
        {"runner": {"name": "trainer"}, "precision": "bf16"},
        {"runner": {"name": "deepspeed"}, "sharding": "zero2", "precision": "bf16"},
    ],
    ids=lambda over: "-".join([over["runner"]["name"], over["precision"]]),
)
def test_this_version_predicts_what_the_card_measured(run_sweep: Run, over: dict[str, Any]) -> None:
    """Other versions of torch and transformers than the card's, so that what they changed counts in as well."""
    (measured,) = [
        row
        for row in ROWS
        if row["device"] == "cuda" and row["sweep"] == "factors" and row["trial"]["model"]["name"] == "gpt2"
        and all(row["trial"][axis] == value for axis, value in over.items() if axis != "runner")
        and row["trial"]["runner"]["name"] == over["runner"]["name"]
        and all(row["trial"][axis] == "none" for axis in ("adapter", "checkpointing"))
        and row["trial"]["attention"] == "sdpa" and row["trial"]["optimizer"] == "default"
        and row["trial"]["sharding"] == over.get("sharding", "none")
    ]  # fmt: skip
    values = {name: value for name, value in measured["trial"].items() if name not in ("repeat", "fingerprints")}
    (row,) = run_sweep(values | {"device": {"name": "simulated", "gpu": "h100-80gb"}}, timeout_s=300)
    assert row["outcome"] == "ok", row["reason"]
    assert row["peak_allocated_bytes"] == pytest.approx(measured["peak_allocated_bytes"], rel=0.002)
    assert row["peak_reserved_bytes"] == pytest.approx(measured["peak_reserved_bytes"], rel=0.01)
