"""What estimates say beside a step, and what changes do: of fabricated rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from test_claims import GIB, Row, row, table

from vramsweep.analysis.answers import estimates
from vramsweep.analysis.data.load import from_frame

MIB = 1 << 20


def ran_out(need: float, **values: object) -> Row:
    return row(**{"outcome": "oom", "peak_allocated_bytes": None, "peak_reserved_bytes": None,
                  "unlimited_peak_reserved_bytes": int(need), **values})  # type: ignore[arg-type] # fmt: skip


def test_changes_are_told_from_the_run_that_all_others_come_from() -> None:
    found, notes = estimates.changes(
        table(
            row(6 * GIB, checkpointing="full", estimated_step_s=1.25),
            row(5 * GIB, micro_batch=2, grad_accum=2, estimated_step_s=1.0, calibrated_step_s=2.2),
            ran_out(9 * GIB, micro_batch=4, estimated_step_s=0.5, calibrated_step_s=2.0),
            ran_out(8 * GIB, micro_batch=4, optimizer="sgd"),
            row(3 * GIB, micro_batch=4, optimizer="sgd", checkpointing="full", outcome="ok"),
            row(2 * GIB, micro_batch=4, optimizer="adafactor", outcome="crash", peak_reserved_bytes=None),
            row(4 * GIB, micro_batch=4, checkpointing="full", estimated_step_s=3.0),
        )
    )
    by = {line["change"]: line for line in found.to_dict("records")}
    assert next(iter(by)) == "as it is"
    assert by["as it is"] == {"change": "as it is", "MiB": "9,216", "saves": "+0", "fits": "no", "time": "x1.00"}
    assert by["checkpointing=full"] == {
        "change": "checkpointing=full", "MiB": "4,096", "saves": "+5,120", "fits": "yes", "time": "x6.00",
    }  # fmt: skip
    # 3.0 to 0.5: one of the two is not calibrated
    assert by["micro_batch=2 grad_accum=2"]["time"] == "x1.10"  # as many samples, calibrated as the base is
    assert by["optimizer=sgd"]["time"] == "–" and by["optimizer=sgd"]["fits"] == "no"
    assert by["optimizer=adafactor"]["MiB"] == "crash"
    assert "micro_batch=1 checkpointing=full" in by and "optimizer=sgd checkpointing=full" not in list(by)[:3]
    assert "no other tool was asked" in notes[1] and "What a step reserves: 9,216" in notes[1]


def test_what_other_tools_say_stands_beside_the_step() -> None:
    rows = table(row(10 * GIB), ran_out(40 * GIB, model="big", parameters=4_000_000_000, world_size=8))
    ids = dict(zip(rows.frame["model"], rows.frame["trial_id"], strict=True))
    said = {"16 bytes a parameter": 16 * 10**9, "accelerate estimate-memory": None, "torch MemTracker": 11 * GIB}
    asked = replace(rows, others={ids["made-up"]: said, ids["big"]: {"DeepSpeed estimate_zero": 20 * GIB}})
    found, notes = estimates.composition(asked)
    small, big = found.to_dict("records")
    assert small["16 B"] == "14.9 +49%" and small["accel."] == "–" and small["peak"] == "10.0"
    assert big["DeepSp."] == "20.0 -50%" and big["peak"] == "40.0 *" and big["cards"] == "8"
    assert big["states"] == "–"  # unknown, not 0
    assert any("runs out of memory there" in note for note in notes)
    text = " ".join(notes)
    assert (
        "16 B: 16 bytes a parameter; DeepSp.: DeepSpeed estimate_zero. Beside each: how far" in text
        and "accel." not in text
    )
    _, without = estimates.changes(asked.where(rows.frame["model"] == "made-up"))
    assert "16 bytes a parameter: 15,259; torch MemTracker: 11,264. What a step reserves: 10,240." in without[1]


def test_states_are_summed_where_all_are_known() -> None:
    parts = {"peak_parameters_bytes": 4 * GIB, "peak_buffers_bytes": 0, "peak_gradients_bytes": GIB,
             "peak_optimizer_state_bytes": 2 * GIB}  # fmt: skip
    found, notes = estimates.composition(table(row(9 * GIB, checkpointing="full", **parts)))
    assert found.loc[0, "states"] == "7.0"
    assert found.loc[0, "model"] == "made-up ckpt"
    assert "others=true" in " ".join(notes) and "ckpt: full checkpointing." in notes


def test_a_table_without_rows_is_empty() -> None:
    nothing = table(row(device="cpu"))
    assert len(estimates.changes(nothing)[0]) == len(estimates.composition(nothing)[0]) == 0


def test_rows_of_which_little_is_known_are_lines_too() -> None:
    bare = {"device": "simulated", "outcome": "ok", "terminal": True, "model": "other", "trial_id": "t"}
    both = from_frame(pd.DataFrame([bare, {**row(4 * GIB), "trial_id": "u"}]), "test")
    for make in (estimates.changes, estimates.composition):
        found, _ = make(both)
        assert len(found) == 2 and "nan" not in str(found).lower() and "<NA>" not in found.to_csv()


def test_cards_are_told_apart_and_repeats_are_one() -> None:
    runs = [row(size * GIB, repeat=n, simulated_gpu=card) for card, least in (("l4-24gb", 4), ("t4-16gb", 8))
            for n, size in enumerate((least, least + 1, least + 2))]  # fmt: skip
    for make, column in ((estimates.changes, "MiB"), (estimates.composition, "peak")):
        found, _ = make(table(*runs))
        assert list(found["card"]) == ["predicted: l4-24gb", "predicted: t4-16gb"]
        assert list(found[column]) == (["5,120", "9,216"] if column == "MiB" else ["5.0", "9.0"])
    both, _ = estimates.changes(table(row(), row(device="cuda", gpu_name="NVIDIA L4", simulated_gpu=None)))
    assert [card.partition(":")[0] for card in both["card"]] == ["measured", "predicted"]


def test_a_verdict_is_told_though_the_size_is_not_known() -> None:
    """A measured run that ran out, and one of cudaMallocAsync, which does not say what it reserves."""
    card = {"device": "cuda", "gpu_name": "NVIDIA L4", "simulated_gpu": None, "step_median_s": 2.0}
    unknown = {"peak_reserved_bytes": None, **card}
    found, notes = estimates.changes(
        table(row(4 * GIB, **card), row(4 * GIB, **card, checkpointing="full"), row(allocator="async", **unknown),
              row(seq_len=2048, outcome="oom", **unknown | {"step_median_s": None}),
              row(seq_len=512, outcome="crash", **unknown | {"step_median_s": None}))
    )  # fmt: skip
    by = {line.pop("change"): list(line.values()) for line in found.to_dict("records")}
    assert by["allocator=async"] == ["–", "–", "yes", "x1.00"]
    assert by["seq_len=2048"] == ["oom", "–", "no", "–"]
    assert by["seq_len=512"] == ["crash", "–", "–", "–"]
    assert "measured: NVIDIA L4. time: of a token, measured." in notes[0]


def test_time_is_that_of_a_token() -> None:
    found, _ = estimates.changes(
        table(row(estimated_step_s=1.0), row(estimated_step_s=2.0, seq_len=2048),
              row(estimated_step_s=1.0, grad_accum=2), row(estimated_step_s=4.0, world_size=8, sharding="ddp"))
    )  # fmt: skip
    by = dict(zip(found["change"], found["time"], strict=True))
    assert by == {"as it is": "x1.00", "seq_len=2048": "x1.00", "grad_accum=2": "x0.50",
                  "sharding=ddp world_size=8": "x0.50"}  # fmt: skip


def test_only_what_ran_out_of_memory_has_a_star() -> None:
    rows = [row(5 * GIB, model="a"), ran_out(9 * GIB, model="b"), ran_out(9 * GIB, model="c", outcome="host_oom"),
            row(model="d", outcome="crash", peak_allocated_bytes=None), row(model="e", outcome="invalid"),
            row(model="f", outcome="oom", peak_allocated_bytes=None)]  # fmt: skip
    found, _ = estimates.composition(table(*rows))
    assert dict(zip(found["model"], found["peak"], strict=True)) == {
        "a": "5.0", "b": "9.0 *", "c": "9.0 *", "d": "crash", "e": "invalid", "f": "– *",
    }  # fmt: skip


@pytest.mark.parametrize("failed", [{"outcome": "crash", "peak_reserved_bytes": None}, {"outcome": "timeout"}])
def test_of_repeats_one_that_finished_counts(failed: dict[str, Any]) -> None:
    found, _ = estimates.changes(table(row(4 * GIB), row(5 * GIB, repeat=1), row(9 * GIB, repeat=2, **failed)))
    assert list(found["MiB"]) == ["4,096"]


def test_many_runs_are_told_apart_by_axis_not_by_pair() -> None:
    settings = [{"model": str(n % 7), "seq_len": str(n)} for n in range(40)] + [{"model": "3", "seq_len": "38"}]
    others = [sum(len(estimates._changed(one, other)) for other in settings) for one in settings]
    assert estimates._nearest(settings) == others.index(min(others)) == 38
    del settings[38]["model"]
    others = [sum(len(estimates._changed(one, other)) for other in settings) for one in settings]
    assert estimates._nearest(settings) == others.index(min(others))


def test_a_change_back_to_a_default_is_named() -> None:
    found, _ = estimates.changes(
        table(row(precision="fp32"), row(precision="fp32", checkpointing="full"), row(5 * GIB),
              row(precision="fp32", optimizer="sgd"))
    )  # fmt: skip
    assert set(found["change"]) == {"as it is", "precision=bf16", "checkpointing=full", "optimizer=sgd"}
