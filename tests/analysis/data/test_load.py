"""Rows to a table: what is read, what is refused, what is said."""

from pathlib import Path

import pandas as pd
import pytest
import synthetic

from vramsweep.analysis.data import groups, load
from vramsweep.analysis.data.pairing import Chosen
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows.schema import complete_row

pytestmark = pytest.mark.deterministic


def test_a_torn_last_line_is_skipped_and_said_and_the_tolerant_way_agrees_with_the_fast_one(tmp_path: Path) -> None:
    folder = synthetic.write(tmp_path, synthetic.sweep(lengths=(128, 256, 4096), batches=(1, 4)))
    fast = load.load(folder).frame
    with (folder / "journal.jsonl").open("a") as stream:
        stream.write('{"trial_id": "torn", "seq_l')
    slow = load.load(folder)
    assert "1 line of journal.jsonl could not be read and was skipped" in slow.warnings
    pd.testing.assert_frame_equal(fast, slow.frame[fast.columns], check_dtype=True)


def test_a_column_that_only_later_pieces_of_a_journal_hold_has_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = synthetic.curve((128, 256, 512))
    rows[1] |= {"reason": "2026-01-01", "gpu_power_w": 300, "throttle_reasons": []}  # like a date, an int, and nothing
    rows[2] |= {"gpu_power_w": 300.5, "rank_peak_reserved_bytes": [1, 2]}
    monkeypatch.setattr(load, "_PIECE", 1)  # a line at a time
    monkeypatch.setattr(load, "_read_lines", None)
    frame = load.load(synthetic.write(tmp_path, rows)).frame
    assert frame["reason"].tolist() == [pd.NA, "2026-01-01", pd.NA]
    assert frame["gpu_power_w"].tolist() == [pd.NA, 300.0, 300.5]
    assert list(frame["throttle_reasons"][1]) == []
    assert list(frame["rank_peak_reserved_bytes"][2]) == [1.0, 2.0]


def test_only_the_last_terminal_row_of_a_trial_counts() -> None:
    first = complete_row({"trial_id": "a", "terminal": False, "outcome": "crash", "attempt": 1})
    second = complete_row({"trial_id": "a", "terminal": True, "outcome": "ok", "attempt": 2, "seq_len": 8})
    again = complete_row({"trial_id": "a", "terminal": True, "outcome": "oom", "attempt": 3, "seq_len": 8})
    running = complete_row({"trial_id": "b", "terminal": False, "outcome": "timeout", "attempt": 1})
    table = load.from_frame(pd.DataFrame([first, second, again, running]), "test")
    assert list(table.frame["outcome"]) == ["oom"]
    assert any("1 trial not finished" in note for note in table.warnings)
    assert any("superseded" in note for note in table.warnings)


def test_text_and_nan_where_numbers_should_be_become_unknown_and_are_said(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(
        "trial_id,outcome,terminal,seq_len,peak_allocated_bytes,tokens_per_s\n"
        "a,ok,true,128,1000,nan\nb,ok,true,lots,2000,inf\nc,ok,true,512,12.5,3\n"
    )
    table = load.load(file)
    assert table.frame["seq_len"].isna().tolist() == [False, True, False]
    assert table.frame["tokens_per_s"].isna().tolist() == [True, True, False]
    assert any("seq_len" in note and "'lots'" in note for note in table.warnings)
    assert any("peak_allocated_bytes" in note and "12.5" in note for note in table.warnings)
    assert not any("nan" in note for note in table.warnings)


def test_rows_of_another_schema_version_are_read_and_said(tmp_path: Path) -> None:
    rows = synthetic.sweep(lengths=(128,), batches=(1,), repeats=1)
    newer = {**rows[1], "schema_version": 3, "brand_new": 3}
    newer.pop("hfu")
    folder = synthetic.write(tmp_path, [rows[0], newer])
    table = load.load(folder)
    assert len(table.frame) == 2
    assert any("brand_new" in note for note in table.warnings)
    assert any("schema version 2, 3" in note for note in table.warnings)


@pytest.mark.parametrize("text", ["", "\n", "not json\n", '{"trial_id": "a", "terminal": false}\n'])
def test_a_journal_without_finished_rows_is_a_user_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "journal.jsonl").write_text(text)
    with pytest.raises(UserError, match="nothing to analyse"):
        load.load(tmp_path)


def test_groups_split_on_settings_and_never_mix_predicted_foreign_and_measured() -> None:
    base = synthetic.sweep(lengths=(128, 256), batches=(1, 2), repeats=2)
    simulated = synthetic.sweep(lengths=(128, 256), batches=(1, 2), repeats=2, device="simulated")
    foreign = synthetic.sweep(lengths=(128, 256), batches=(1, 2), repeats=2, foreign="x.csv")
    foreign = [{**row, "trial_id": "f" + row["trial_id"]} for row in foreign]
    table = load.from_frame(pd.DataFrame([*base, *simulated, *foreign]), "test")
    found = groups.groups(table)
    assert len(found) == 12
    for group in found:
        for name in ("device", "foreign", "memory_source", "allocator", "micro_batch"):
            assert group.frame[name].nunique(dropna=False) == 1
    assert sum(len(group.rows) for group in found) == len(table.frame)


def test_a_setting_that_only_the_resolved_trial_holds_splits_groups(tmp_path: Path) -> None:
    rows = [
        {**row, "trial_id": f"{row['trial_id']}-{rank}", "trial": {"lora": {"rank": rank}, "seq_len": row["seq_len"]}}
        for rank in (8, 64)
        for row in synthetic.curve((128, 256, 512))
    ]
    found = groups.groups(load.load(synthetic.write(tmp_path, rows)))
    assert [group.label for group in found] == ["lora.rank 8", "lora.rank 64"]


def test_rows_that_ran_out_of_memory_join_the_group_of_equal_settings() -> None:
    table = synthetic.table(synthetic.sweep(batches=(4,), allocators=("default",)))
    assert table.frame.loc[table.frame["outcome"] == "oom", "gpu_name"].isna().all()
    assert len(groups.groups(table)) == 1


def test_one_group_stands_for_those_that_differ_in_the_allocator_alone() -> None:
    table = synthetic.table(synthetic.sweep(batches=(1, 2)))
    found = groups.groups(table)
    assert {group.settings["allocator"] for group in found} > {"default"}
    shown = groups.whatever(found, "allocator")
    assert [group.settings["micro_batch"] for group in shown] == [1, 2]
    assert len({group.settings["allocator"] for group in shown}) == 1


def test_what_follows_an_axis_tells_no_groups_apart() -> None:
    """As the passes of a step follow its batch."""
    rows = [row | {"grad_accum": 8 // batch, "trial_id": f"{row['trial_id']}-{batch}"}
            for batch in (1, 2, 4) for row in synthetic.curve((128, 256, 512), batches=(batch,))]  # fmt: skip
    found = groups.groups(synthetic.table(rows))
    assert len(found) == 3 and {"micro_batch", "grad_accum"} <= found[0].settings.keys()
    assert len(groups.whatever(found, "micro_batch")) == 1


def test_labels_show_only_what_varies() -> None:
    assert groups.label(
        {"allocator": "default", "micro_batch": 4, "checkpointing": "full", "device_used_bytes": None}
    ) == ("default · batch 4 · checkpointing full · device used bytes unknown")
    assert groups.label({"runner": "deepspeed", "sharding": "zero2"}) == "deepspeed · zero2"
    assert groups.label({"runner": "torch", "sharding": "none"}) == "torch · no sharding"
    assert groups.label({"trial.runner.command": "/usr/bin/python3 a/train.py --lr 1"}) == "a/train.py --lr 1"
    assert groups.label({"trial.runner.command": "torchrun b.py"}) == "torchrun b.py"
    assert groups.label({"trial.fingerprints./a/my_run.py": "3f0fe6a897"}) == "my_run.py of SHA-256 3f0fe6a8"
    assert groups.label({}) == "all rows"


def test_flagged_rows_are_said_and_kept(tmp_path: Path) -> None:
    rows = synthetic.sweep(lengths=(128, 256), batches=(1,), repeats=1)
    rows[0]["flags"] = ["throttled", "contended"]
    rows[1]["flags"] = []
    table = load.load(synthetic.write(tmp_path, rows))
    assert len(table.frame) == len(rows)
    said = [note for note in table.warnings if "flagged" in note]
    assert [note.split(" (")[0] for note in said] == ["1 row is flagged contended", "1 row is flagged throttled"]
    assert "flagged throttled (the clocks were lowered because of heat" in said[1]
    which = f"): allocator={rows[0]['allocator']} seq_len={rows[0]['seq_len']}; see vramsweep check"
    assert all(note.endswith(which) for note in said)  # which row, after what the flag means


def test_a_trial_measured_again_with_other_memory_is_said(tmp_path: Path) -> None:
    rows = synthetic.curve((128, 256))
    again = [{**rows[0], "peak_reserved_bytes": rows[0]["peak_reserved_bytes"] + 1}, {**rows[1]}]
    notes = load.load(synthetic.write(tmp_path, rows + again)).warnings
    (said,) = [note for note in notes if "measured again" in note]
    low = rows[0]["peak_reserved_bytes"]
    assert f"peak_reserved_bytes of trial {rows[0]['trial_id']}, measured again, differs by 1 B" in said
    assert f"{low:,} and {low + 1:,}" in said


def test_the_host_of_a_gpu_and_a_library_that_not_all_rows_use_are_no_other_system(tmp_path: Path) -> None:
    rows = synthetic.curve((128, 256))
    for number, one in enumerate(rows):
        one |= {"device": "cuda", "gpu_name": "NVIDIA H100 80GB HBM3", "cpu_name": f"host {number}"}
    other = [
        row | {"trial_id": row["trial_id"] + "d", "runner": "deepspeed", "deepspeed_version": "0.19.8"} for row in rows
    ]
    table = load.load(synthetic.write(tmp_path, [*rows, *other]))
    assert not any("systems" in note for note in table.warnings)
    assert sorted(len(group.rows) for group in groups.groups(table)) == [2, 2]


def test_a_row_that_does_not_name_its_card_gives_way_to_one_that_does(tmp_path: Path) -> None:
    """Version 1 did not know the card of a worker that died: its out of memory would stay as a false frontier."""
    (row,) = synthetic.curve((128,))
    row |= {"device": "cuda", "gpu_name": "NVIDIA H100 80GB HBM3", "torch_version": "2.13.0+cu130", "outcome": "ok"}
    died = row | {"gpu_name": None, "torch_version": "2.13.0", "outcome": "oom"}
    table = load.load(synthetic.write(tmp_path, [died, row]))
    assert table.frame["outcome"].tolist() == ["ok"]


def of_cards(*cards: str, **fixed: object) -> Chosen:
    """Predictions of three lengths for each card, made as `vramsweep predict` does."""
    rows = [
        {**row, "trial_id": f"{row['trial_id']}-{name}", "simulated_gpu": name, "foreign": None, "gpu_name": None}
        for name in cards
        for row in synthetic.curve((128, 256, 512), device="simulated", **fixed)
    ]
    return Chosen(load.from_frame(pd.DataFrame(rows), "predictions"))


def measured(gpu: str | None) -> groups.Group:
    """Rows from elsewhere, of which nothing but the card is known."""
    rows = {"trial_id": ["a", "b"], "outcome": "ok", "seq_len": [128, 256], "gpu_name": gpu, "foreign": "x.csv"}
    return groups.groups(load.from_frame(pd.DataFrame(rows), "measured"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-40GB", "a100-40gb"])
def test_predictions_of_another_card_are_not_taken(gpu: str) -> None:
    found = of_cards("h100-80gb", "a100-40gb").of(measured(gpu))
    assert found is not None and found["simulated_gpu"].tolist() == ["a100-40gb"] * 3
    with pytest.raises(UserError, match=rf"has no prediction for {gpu}, only for h100-80gb"):
        of_cards("h100-80gb").of(measured(gpu))


def test_labels_name_every_setting_that_differs_also_one_that_follows_another() -> None:
    """One of two questions in a folder has accumulation and checkpointing, the other neither: labels name both."""
    apart = {"grad_accum": 2, "checkpointing": "full", "seq_len": 4096}
    rows = [
        *synthetic.curve((512, 1024)),
        *(row | {"trial_id": f"x{row['trial_id']}"} | apart for row in synthetic.curve((1,))),
    ]
    refused = {**rows[0], "trial_id": "y", "outcome": "invalid", "seq_len": 16384, "attention": "eager"}
    found = groups.groups(synthetic.table([*rows, {**refused, "trial.model.max_positions": "8192"}]))
    assert [group.label for group in found] == [
        "grad accum 1 · checkpointing none",
        "grad accum 2 · checkpointing full",
    ]
    assert [len(group.rows) for group in found] == [2, 1]  # what cannot be decides neither labels nor groups


def test_batches_whose_passes_follow_them_are_compared_as_batches() -> None:
    """At one number of samples a step; labels name both."""
    rows = [
        row | {"grad_accum": 8 // int(row["micro_batch"])}
        for row in synthetic.sweep((256, 512), (1, 2, 4, 8), ("default",), 1)
    ]
    found = groups.groups(synthetic.table(rows))
    assert len(found) == 4 and groups.others_equal(found, ("micro_batch",)) == found
    assert {one.label for one in found} == {f"batch {n} · grad accum {8 // n}" for n in (1, 2, 4, 8)}


@pytest.mark.slow
def test_of_predictions_of_several_cards_or_trials_the_rows_must_say_which_is_theirs() -> None:
    with pytest.raises(UserError, match=r"simulated_gpu h100-80gb, a100-40gb, .* add --set gpu_name=\.\.\."):
        of_cards("h100-80gb", "a100-40gb").of(measured(None))
    assert of_cards("h100-80gb").of(measured(None)) is not None
    rows = of_cards("h100-80gb")._rows
    twice = pd.concat([rows.assign(**{"trial.lora.rank": rank}) for rank in ("8", "64")], ignore_index=True)
    twice["trial_id"] += twice["trial.lora.rank"]
    with pytest.raises(UserError, match=r"trial.lora.rank 8, 64, .* give predictions of only one"):
        Chosen(load.from_frame(twice, "predictions")).of(measured(None))
