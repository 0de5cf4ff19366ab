"""Test that trials are skipped if one that needs no more memory ran out of it, and when they run after all."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import SETTINGS, TARGETS, cases, tiny
from launchers import Fake

from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.sweep import plan, row_builder, run_trials, sweep_status
from vramsweep.harness.sweep.oom_dominance import OomDominance
from vramsweep.harness.sweep.plan import Planned, Settings


def planned(**over: Any) -> Planned:
    return plan.expand_trials([tiny(**over)], 1)[0][0]


def row(outcome: str = "oom", **over: Any) -> Row:
    return row_builder.initial_columns(planned(**over)) | {"outcome": outcome}


@pytest.mark.parametrize(("full", "asked", "skipped"), cases("dominated"))
def test_only_what_needs_no_less_is_dominated(full: str, asked: str, skipped: str) -> None:
    """A length that 8 does not divide is padded, and needs more than the next one that 8 does."""
    known, item = json.loads(full), planned(**json.loads(asked))
    found = OomDominance([row(**known)]).reason(item)
    assert (found is not None) is (skipped == "yes")
    if found:
        assert found.startswith(f"not run, because {planned(**known).trial_id} (length ")
    for other in ("ok", "host_oom", "crash", "skipped"):
        assert OomDominance([row(other, **known)]).reason(item) is None


def test_a_step_of_the_user_s_may_do_anything() -> None:
    own = {"runner": {"name": "custom", "target": f"{TARGETS / 'faults.py'}:good"}}
    assert OomDominance([row(**own)]).reason(planned(seq_len=64, **own)) is None
    assert OomDominance([row()]).reason(planned(seq_len=99999)) is None  # which is no trial


def swept(folder: Path, room: int, points: Sequence[tuple[int, int]], skip: bool) -> tuple[Fake, list[Row], int]:
    fake = Fake(room)
    settings = Settings(**(SETTINGS | {"skip_dominated": skip}))
    values = [tiny(seq_len=length, micro_batch=batch) for length, batch in points]
    items = [item for (item,) in plan.expand_trials(values, 1)]
    rows, code = run_trials.run(plan.order_trials([items]), settings, folder, launcher=fake)  # type: ignore[arg-type]
    return fake, [rows[item.trial_id] for item in items], code


def test_a_sweep_leaves_them_out_until_that_is_no_longer_asked_for(tmp_path: Path) -> None:
    points = [(256, 1), (256, 4), (128, 1), (128, 4), (32, 1), (32, 4)]
    fake, rows, code = swept(tmp_path, 200, points, skip=True)
    assert [one["outcome"] for one in rows] == ["oom", "skipped", "ok", "oom", "ok", "ok"] and code == 0
    assert fake.tried == [(256, 1), (32, 1), (32, 4), (128, 1), (128, 4)]
    why = f"not run, because {rows[0]['trial_id']} (length 256, batch 1) ran out of memory; this trial needs no less"
    assert (rows[1]["attempt"], rows[1]["terminal"], rows[1]["reason"]) == (0, True, why)
    told = sweep_status.read_status(tmp_path)
    assert (told.state, told.done, told.total, told.ok, told.oom, told.skipped) == ("finished", 6, 6, 3, 2, 1)
    (file,) = journal.files(tmp_path)
    before = file.read_bytes()
    again, rows, _ = swept(tmp_path, 200, points, skip=True)
    assert not again.tried and rows[1]["outcome"] == "skipped" and file.read_bytes() == before
    unasked, rows, _ = swept(tmp_path, 200, points, skip=False)
    assert unasked.tried == [(256, 4)] and rows[1]["outcome"] == "oom" and rows[1]["attempt"] == 1
    assert sweep_status.read_status(tmp_path).skipped == 0
    assert not swept(tmp_path, 200, points, skip=True)[0].tried  # what has run counts


def test_one_whose_dominator_is_not_asked_for_any_more_runs(tmp_path: Path) -> None:
    swept(tmp_path, 200, [(256, 1), (256, 4)], skip=True)
    fake, rows, _ = swept(tmp_path, 5000, [(256, 4)], skip=True)
    assert fake.tried == [(256, 4)] and rows[0]["outcome"] == "ok"


def test_settings() -> None:
    with pytest.raises(UserError, match=r"skip_dominated=1: allowed is true or false"):
        Settings(**(SETTINGS | {"skip_dominated": 1}))
    with pytest.raises(UserError, match=r"edge_of=batch: allowed is null, seq_len or micro_batch"):
        Settings(**(SETTINGS | {"edge_of": "batch"}))
