"""Which trials are left out as one that needs no more ran out of memory, and when they run after all."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import SETTINGS, TARGETS, tiny

from vramsweep.harness import account, journal, plan, status, sweep
from vramsweep.harness.attempt import Attempted
from vramsweep.harness.dominated import Dominators
from vramsweep.harness.errors import UserError
from vramsweep.harness.occupancy import Occupancy
from vramsweep.harness.outcome import Evidence
from vramsweep.harness.plan import Planned, Settings
from vramsweep.harness.row import Row


def planned(**over: Any) -> Planned:
    return plan.expand([tiny(**over)], 1)[0][0]


def row(outcome: str = "oom", **over: Any) -> Row:
    return account.before(planned(**over)) | {"outcome": outcome}


@pytest.mark.parametrize(
    ("full", "asked", "skipped"),
    [
        ({"seq_len": 64}, {"seq_len": 128}, True),
        ({"seq_len": 64}, {"seq_len": 65}, True),
        ({"seq_len": 64}, {"seq_len": 63}, False),
        ({"seq_len": 63}, {"seq_len": 64}, False),  # padded, and needs more than 64 do
        ({"seq_len": 63}, {"seq_len": 4000}, False),
        ({"seq_len": 63}, {"seq_len": 65}, True),
        ({"seq_len": 63}, {"seq_len": 63, "micro_batch": 3}, True),
        ({"micro_batch": 2}, {"micro_batch": 3}, True),
        ({"micro_batch": 2}, {"micro_batch": 1, "seq_len": 128}, False),
        ({"micro_batch": 1}, {"micro_batch": 2, "seq_len": 128}, True),
        ({}, {"seq_len": 64, "precision": "bf16"}, False),
        ({}, {"seq_len": 64, "grad_accum": 2}, False),
        ({}, {"seq_len": 64, "data": "lengths:lognormal(512,0.8)"}, False),
        ({}, {"seq_len": 64, "protocol": {"measured_steps": 3}}, False),
        ({}, {}, False),  # itself
    ],
)
def test_only_what_needs_no_less_is_dominated(full: dict[str, Any], asked: dict[str, Any], skipped: bool) -> None:
    found = Dominators([row(**full)]).reason(planned(**asked))
    assert (found is not None) is skipped
    if found:
        assert found.startswith(f"not run, as {planned(**full).trial_id} (length ")
    for other in ("ok", "host_oom", "crash", "skipped"):
        assert Dominators([row(other, **full)]).reason(planned(**asked)) is None


def test_a_step_of_the_user_s_may_do_anything() -> None:
    own = {"runner": {"name": "custom", "target": f"{TARGETS / 'faults.py'}:good"}}
    assert Dominators([row(**own)]).reason(planned(seq_len=64, **own)) is None
    assert Dominators([row()]).reason(planned(seq_len=99999)) is None  # which is no trial


class Fake:
    """A launcher for which a product of length and batch that is larger than `room` is too much; it keeps a list."""

    isolation, run, occupancy, threads = "warm", "mark", Occupancy(), ThreadPoolExecutor()

    def __init__(self, room: int) -> None:
        self.room, self.tried = room, list[tuple[int, int]]()

    def own_pids(self) -> set[int]:
        return set()

    def attempt(self, spec: Any, folder: Path, environ: Any, runner: str, deadline_s: float, *look: Any) -> Attempted:
        point = spec["trial"]["seq_len"], spec["trial"]["micro_batch"]
        self.tried.append(point)
        error = {"error": {"type": "torch.OutOfMemoryError", "message": "CUDA out of memory"}}
        full = point[0] * point[1] > self.room
        return Attempted(Evidence(exit_code=int(full), result=error if full else {"values": {}}), 1.0, "warm")


def swept(folder: Path, room: int, points: Sequence[tuple[int, int]], skip: bool) -> tuple[Fake, list[Row], int]:
    fake = Fake(room)
    settings = Settings(**(SETTINGS | {"skip_dominated": skip}))
    values = [tiny(seq_len=length, micro_batch=batch) for length, batch in points]
    items = [item for (item,) in plan.expand(values, 1)]
    rows, code = sweep.run(plan.order([items]), settings, folder, launcher=fake)  # type: ignore[arg-type]
    return fake, [rows[item.trial_id] for item in items], code


def test_a_sweep_leaves_them_out_until_that_is_no_longer_asked_for(tmp_path: Path) -> None:
    points = [(256, 1), (256, 4), (128, 1), (128, 4), (32, 1), (32, 4)]
    fake, rows, code = swept(tmp_path, 200, points, skip=True)
    assert [one["outcome"] for one in rows] == ["oom", "skipped", "ok", "oom", "ok", "ok"] and code == 0
    assert fake.tried == [(256, 1), (32, 1), (32, 4), (128, 1), (128, 4)]
    assert (
        rows[1]["reason"]
        == f"not run, as {rows[0]['trial_id']} (length 256, batch 1) ran out of memory and needs no more"
    )
    assert (rows[1]["attempt"], rows[1]["terminal"]) == (0, True)
    told = status.read(tmp_path)
    assert (told.state, told.done, told.total, told.ok, told.oom, told.skipped) == ("finished", 6, 6, 3, 2, 1)
    before = (tmp_path / journal.NAME).read_bytes()
    again, rows, _ = swept(tmp_path, 200, points, skip=True)
    assert not again.tried and rows[1]["outcome"] == "skipped" and (tmp_path / journal.NAME).read_bytes() == before
    unasked, rows, _ = swept(tmp_path, 200, points, skip=False)
    assert unasked.tried == [(256, 4)] and rows[1]["outcome"] == "oom" and rows[1]["attempt"] == 1
    assert status.read(tmp_path).skipped == 0
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
