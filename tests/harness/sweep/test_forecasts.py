"""What `plan` expects of each trial: time and cost by rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Cli

from vramsweep.harness.config import compose
from vramsweep.harness.rows.journal import Journal
from vramsweep.harness.sweep import row_builder

pytestmark = pytest.mark.deterministic


@pytest.mark.slow
def test_what_plan_says(tmp_path: Path, cli: Cli) -> None:
    words = ["-m", "model=tiny", "device=cpu", "seq_len=16,64,256", f"results={tmp_path}", "price_per_hour=36"]
    asked = compose.resolve(words)
    items, folder = asked.trials, asked.folder
    assert folder is not None
    ended = {16: {"outcome": "ok"}, 64: {"outcome": "oom", "reason": "full"}}
    with Journal(folder) as book:
        for item in items:
            if item.trial and item.trial.seq_len in ended:
                row = {"sweep": folder.name, "terminal": True, "duration_s": 10.0} | row_builder.started_columns(1)
                book.append(row_builder.initial_columns(item) | row | ended[item.trial.seq_len])
    found = cli.json("plan", *words)
    by_length = {one["trial"]["seq_len"]: one for one in found["trials"]}
    assert [by_length[n]["expected_s"] for n in (16, 64, 256)] == [None, None, 160.0]
    assert by_length[256]["expected_cost"] == found["estimated_cost"] == pytest.approx(1.6)
    assert (found["estimated_s"], found["estimate_basis"]) == (160.0, "a trial of the same configuration")
    said = cli.run("plan", *words).out
    assert "estimated time: 2:40, cost: 1.60 at 36 an hour (a trial of the same configuration)" in said
    said = cli.run("plan", *words, "--all").out
    assert "~ 2 min 40 s" in said
