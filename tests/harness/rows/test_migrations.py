"""Rows and trials written before: the journals that are out there, and what of them still counts."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, cases, parametrized, tiny

from vramsweep.analysis.data.groups import groups
from vramsweep.analysis.data.load import load
from vramsweep.harness.rows import journal, migrations
from vramsweep.harness.spec import trial_identity, trial_parser
from vramsweep.harness.sweep import plan

REFERENCE = ROOT / "results" / "reference" / "gpt2-cpu"


def test_rows_of_version_1_finish_the_trials_of_today() -> None:
    """A sweep of the docs: planned now, its twelve rows of version 1 answer all of it on the machine they are of."""
    before = [json.loads(line) for line in (REFERENCE / "journal.jsonl").read_text().splitlines()]
    assert {row["schema_version"] for row in before} == {1}
    rows, unreadable = journal.read(REFERENCE)
    assert unreadable == 0
    wanted = {plan.expand_trials([row["trial"]], 1)[0][0].trial_id: row for row in before}
    assert {row["trial_id"] for row in rows} == set(wanted)
    mine, _ = journal.finished(rows, {i: journal.system_of(rows[0]) for i in wanted})
    assert len(mine) == len(before) == 12
    for row in rows:
        assert row["peak_allocated_bytes"] == wanted[row["trial_id"]]["peak_allocated_bytes"]
        assert (row["sharding"], row["runner"], row["offload_param"]) == ("none", "torch", False)
        assert row["trial"]["runner"] == {"name": "torch", "target": None, "options": {}}


def test_they_load_and_fit() -> None:
    table = load(REFERENCE)
    assert len(table.frame) == 12
    assert not table.warnings
    assert len(groups(table)) == 1


@parametrized("old_runner_layouts")
def test_the_old_layout_of_a_trial(old: dict[str, Any], new: dict[str, Any]) -> None:
    found = migrations.upgrade_layout(tiny() | {"runner": old})
    runner = "torch" if old["name"] == "fsdp" else old["name"]
    assert found == tiny() | new | {"runner": {"name": runner}}
    assert migrations.upgrade_layout(found) == found
    assert trial_parser.parse(found).runner.name == runner


def first(values: dict[str, Any], **row: Any) -> dict[str, Any]:
    """A row as version 1 would have written it."""
    import hashlib

    number = {"torch": 1, "trainer": 1, "deepspeed": 2, "fsdp": 1, "custom": 1}[values["runner"]["name"]]
    text = json.dumps({"trial": values, "measurement": number}, sort_keys=True, separators=(",", ":"))
    own = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {"schema_version": 1, "trial_id": own, "trial": values, "runner": values["runner"]["name"]} | row


OLD_RUNNER = {"world_size": 1, "zero_stage": None, "offload_optimizer": None, "offload_param": None, "target": None}


@pytest.mark.parametrize(("change", "counts"), cases("corrected_since"))
def test_what_has_been_corrected_since_runs_again(change: str, counts: str) -> None:
    """FLOPs of flash attention were not counted, FSDP's peaks were rank 0's, a simulated card had more memory."""
    values = tiny() | {"device": {"name": "cuda"}} | json.loads(change)
    values["runner"] = OLD_RUNNER | {"options": {}} | values["runner"]
    found = migrations.upgrade_row(first(values, outcome="ok"))
    same = trial_identity.trial_id(migrations.upgrade_layout(values))
    assert (found["trial_id"] == same) is (counts == "yes")
    other = migrations.upgrade_row(first(values) | {"trial_id": "0" * 16})  # measured by a version before that
    assert other["trial_id"] == "0" * 16


def test_exports_of_version_1_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(
        "trial_id,terminal,outcome,runner,zero_stage,seq_len,peak_allocated_bytes\n"
        "a,true,ok,deepspeed,3,64,10\nb,true,ok,fsdp,,64,10\nc,true,ok,torch,,64,10\n"
    )
    frame = load(tmp_path / "rows.csv").frame
    assert frame["sharding"].tolist() == ["zero3", "fsdp2", "none"]
    assert frame["runner"].tolist() == ["deepspeed", "torch", "torch"]


def test_what_was_corrected_is_flagged_and_fitted_apart(tmp_path: Path) -> None:
    """A row of version 1 of two ranks (rank 0's peaks) beside one of today of the same settings."""
    runner = OLD_RUNNER | {"name": "deepspeed", "zero_stage": 2, "world_size": 2}
    values = tiny(device={"name": "cuda"}) | {"runner": runner}
    common = {"terminal": True, "outcome": "ok", "seq_len": 32, "device": "cuda", "gpu_name": "NVIDIA H100 80GB HBM3"}
    old = first(values, **common, world_size=2, zero_stage=2, peak_allocated_bytes=11)
    new = migrations.upgrade_row(old) | {"trial_id": "n", "peak_allocated_bytes": 20}
    del new["flags"]
    (tmp_path / "journal.jsonl").write_text(f"{json.dumps(old)}\n{json.dumps(new)}\n")
    table = load(tmp_path)
    assert any("1 row is flagged corrected_since" in note for note in table.warnings)
    assert sorted(len(group.rows) for group in groups(table)) == [1, 1]


@pytest.mark.parametrize(("phase", "counts"), [("step 14", False), ("step 13", True), ("load", True), (None, True)])
def test_memory_that_ran_out_while_flops_were_counted_is_no_frontier(phase: str | None, counts: bool) -> None:
    values = tiny(device={"name": "cuda"}, protocol={"warmup_steps": 3, "measured_steps": 10})
    values["runner"] = OLD_RUNNER | {"name": "torch", "options": {}}
    found = migrations.upgrade_row(first(values, outcome="oom", phase=phase))
    assert (found["trial_id"] == trial_identity.trial_id(migrations.upgrade_layout(values))) is counts
    assert (found["flags"] is None) is counts


def test_a_share_of_another_card_s_peak_is_reckoned_anew() -> None:
    """The H200 NVL had the SXM module's 989.4 TFLOP/s; its data sheet says 835.5 (1,671 with sparsity)."""
    values = tiny(device={"name": "cuda"}) | {"runner": OLD_RUNNER | {"name": "torch", "options": {}}}
    card = {"gpu_name": "NVIDIA H200 NVL", "precision": "bf16", "peak_flops": 989.4e12, "mfu": 0.2, "hfu": None}
    found = migrations.upgrade_row(first(values, outcome="ok", **card))
    assert found["peak_flops"] == 835.5e12
    assert found["mfu"] == pytest.approx(0.2 * 989.4 / 835.5)
    assert found["hfu"] is None
