"""Test that the report's answer claims no more than its rows show, be it much, little or nothing."""

import json
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import synthetic
from conftest import ROOT, parametrized
from synthetic import table

from vramsweep.analysis.data.groups import groups
from vramsweep.analysis.data.importers import open_rows
from vramsweep.analysis.data.load import POSITIONS, load
from vramsweep.analysis.figures.composition import OF_PEAK
from vramsweep.analysis.model.memory_frontier import frontier
from vramsweep.analysis.report import answer, tiles
from vramsweep.analysis.report.tiles import UNKNOWN, size_of_card
from vramsweep.harness.rows.schema import Row, complete_row

pytestmark = pytest.mark.deterministic

PUBLIC = ROOT.parent / "shared" / "data" / "qwen15-0.5b-zero3" / "without-expandable-segments.csv"
PERCENT = "\u202f%"


def of(*rows: Row) -> answer.Card:
    return answer.brief(table(rows))


def few(**over: Any) -> list[Row]:
    return synthetic.curve((256, 512, 1024, 2048), repeats=2, **over)


def test_rows_that_are_all_invalid_still_name_what_was_asked() -> None:
    card = of(*(row | {"outcome": "invalid"} for row in few()))
    assert card.asked == "What does training made-up (bf16, torch) need on Synthetic 24 GB?"


@pytest.mark.slow
def test_measured_rows_answer_every_question() -> None:
    card = of(*synthetic.sweep(device_gib=12))
    assert card.asked == "What does training made-up (bf16, torch) need on Synthetic 24 GB?"
    assert "length 128 to 8,192 (10 values)" in card.varied and "allocator default, expandable" in card.varied
    assert card.of == "batch 1 · expandable"  # of those that ran so long the largest batch, in the least memory
    assert card.fits.value == "Up to 6,144 tokens" and card.fits.basis == "measured"
    assert card.fits.about.startswith("8,192 ran out of memory; ") and "batch 4 ran too" in card.fits.about
    assert "on 12 GiB" in card.fits.interval
    # the formula of synthetic.py: 1,500,000 bytes a token on 2 GiB
    assert card.cost.value == "1.43 MiB per token" and "On top of 2.0 GiB" in card.cost.about
    assert card.speed.value.endswith(" tokens/s") and "(2 processes)" in card.speed.interval
    assert card.dominates.value == f"Length-dependent part, 81{PERCENT}"
    assert card.allocator.value == f"expandable: 11.0{PERCENT} less reserved"
    assert card.allocator.about.startswith("Up to 1.0 GiB less than with default, at 4,096 tokens")
    assert "; 3 settings fit only with expandable" in card.allocator.about  # 6,144, 3,072 and 1,536 on 12 GiB
    assert card.counts == {"measured": 120, "predicted": 0, "imported": 0, "flagged": 0, "unproven": 0}
    assert card.trust.value == "As much as its source"  # these rows came without their sweep


@pytest.mark.slow
def test_a_prediction_is_never_shown_as_measured() -> None:
    parts = dict.fromkeys(OF_PEAK.values(), 0) | {"peak_activations_bytes": 3 << 30, "peak_parameters_bytes": 1 << 30}
    speeds = {"tokens_per_s": None, "estimated_tokens_per_s": 9000.0, "simulated_gpu": "l4-24gb", "unproven": ["x"]}
    card = of(*few(device="simulated", gpu_name=None, **parts, **speeds))
    assert card.dominates.value == f"Activations, 75{PERCENT}"
    assert card.dominates.about.startswith(f"Then parameters 25{PERCENT}")
    assert card.fits.basis == "predicted, unproven"
    assert card.speed.value == "≤ 9,000 tokens/s" and card.speed.basis == "estimated"
    assert card.trust.value == "A prediction" and "8 unproven" in card.trust.interval
    assert all("measured" not in tile.basis for tile in card.tiles)
    rough = of(*few(device="simulated", gpu_name=None, **(speeds | {"calibrated_tokens_per_s": 4321.0})))
    assert (rough.speed.value, rough.speed.interval) == ("≈ 4,300 tokens/s", "at most 9,000 (roofline)")
    assert rough.speed.basis == "estimated"
    step = {"calibrated_step_s": 1.0, "calibrated_step_low_s": 0.8, "calibrated_step_high_s": 1.25}
    rough = of(*few(device="simulated", gpu_name=None, **(speeds | {"calibrated_tokens_per_s": 4321.0} | step)))
    assert rough.speed.interval == "3,500 to 5,400"  # 4,321 / 1.25 and / 0.8


@pytest.mark.slow
def test_measured_rows_come_before_predicted_ones() -> None:
    both = [*few(), *few(device="simulated", gpu_name=None, simulated_gpu="l4-24gb"),
            *few(device="simulated", gpu_name=None, simulated_gpu="a100-80gb", seed=2)]  # fmt: skip
    longer = {**both[-1], "trial_id": "longer", "seq_len": 9999}
    card = of(*both, longer)
    assert card.fits.value == "Yes, 2,048 tokens"
    assert [tile.basis for tile in (card.fits, card.cost, card.speed)] == ["measured"] * 3


@pytest.mark.slow
def test_where_nothing_fits_it_says_so_and_what_it_would_take() -> None:
    rows = [row | {"unlimited_peak_reserved_bytes": 5 << 30} for row in few(device_gib=1)]
    card = of(*rows)
    assert (card.fits.value, card.fits.interval) == ("Nothing fits", "the smallest needs 5.0 GiB: a GPU with 8 GiB")
    assert card.fits.about == "Even 256 tokens at batch 1 ran out of memory; all 8 trials did."
    assert card.dominates.value == "Backward"
    held = json.dumps({"parameters": 3 << 30, "activations": 1 << 30})
    assert of(*(row | {"oom_parts_bytes": held} for row in rows)).dominates.value == f"Parameters, 75{PERCENT}"
    assert [tile.value for tile in (card.cost, card.speed)] == [UNKNOWN, UNKNOWN]


def test_the_speed_is_of_the_model_that_the_answers_are_of() -> None:
    large = [row | {"tokens_per_s": 1000.0} for row in few(model="large")]
    small = few(model="small")
    small = [row | {"tokens_per_s": 9000.0} for row in small if row["seq_len"] < 2048]  # answers are of the longest
    card = of(*large, *small)
    assert card.of == "batch 1 · large" and card.speed.value == "1,000 tokens/s"


@pytest.mark.slow
def test_one_length_has_no_cost_and_no_row_no_answer() -> None:
    card = of(*synthetic.curve((512,), repeats=2))
    assert card.cost.value == UNKNOWN
    assert card.cost.about == "1 length ran, and a curve needs three; peak allocated is 3.0 GiB at 512."
    assert card.fits.value == "Yes, 512 tokens" and card.of == "" and card.varied == ""
    assert card.allocator.value == "Not varied" and "up to" in card.allocator.about
    nothing = of(complete_row({"trial_id": "a", "terminal": True, "outcome": "invalid", "reason": "no"}))
    assert {tile.value for tile in nothing.tiles} == {UNKNOWN}
    assert "1 invalid" in nothing.fits.about


@pytest.mark.slow
def test_a_flat_peak_costs_next_to_nothing() -> None:
    card = of(*synthetic.curve((64, 128, 256, 512), repeats=2))
    assert card.cost.value == "Next to nothing" and "is 3.0 GiB at 64 tokens, 3.0 GiB at 512." in card.cost.about
    assert card.dominates.value == f"Length-independent part, 100{PERCENT}"


@pytest.mark.slow
def test_other_cards_are_told_where_less_fits_and_what_ended_otherwise_was_tried() -> None:
    fixed: dict[str, Any] = {"device": "simulated", "gpu_name": None}
    rows = [*few(**fixed, simulated_gpu="l4-24gb"), *few(**fixed, simulated_gpu="t4-16gb", device_gib=4)]
    rows += few(**fixed, simulated_gpu="rtx2070-8gb", device_gib=3)
    for number, row in enumerate(rows):
        row.update({"trial_id": f"{number}", "trial.device.gpu": row["simulated_gpu"]})
    card = of(*rows)
    assert card.asked.endswith("need on 3 GPUs?") and card.of.endswith("l4-24gb")
    assert card.fits.about.endswith("only 512 on t4-16gb; nothing on rtx2070-8gb.")
    crashed = of(*few(), {**few()[-1], "trial_id": "x", "seq_len": 4096, "outcome": "crash"})
    assert crashed.fits.value == "Yes, 2,048 tokens" and crashed.fits.about.startswith("4,096 was tried: crash;")


@parametrized("ends_of_curves")
def test_an_end_that_the_curve_does_not_know_goes_unsaid(low: int | None, high: int | None, said: str) -> None:
    rows = table(few())
    found = groups(rows)
    limits = frontier(rows, found=found)
    limits = [replace(limit, value=4000, low=low, high=high, gib=24) for limit in limits[:1]]
    told = tiles.fits(rows.frame, tiles.head(found), found, limits).interval
    assert told == "by the curve up to 4,000 on 24 GiB" + said


@pytest.mark.slow
def test_where_the_model_has_no_more_positions_the_answer_says_so() -> None:
    for positions, said in (("2048", "All that made-up has positions for; "), ("4096", "The longest that was tried; ")):
        card = of(*(row | {POSITIONS: positions} for row in few()))
        assert card.fits.about.startswith(said)
        assert card.fits.interval.startswith("proven" if positions == "2048" else "by the curve up to 4,096, all that")


@pytest.mark.slow
def test_what_cannot_be_is_in_no_range_and_what_is_predicted_is_not_proven() -> None:
    fixed: dict[str, Any] = {"device": "simulated", "gpu_name": None, "simulated_gpu": "l4-24gb", POSITIONS: "2048"}
    rows = [row | fixed for row in few()]
    card = of(*rows, {**rows[0], "trial_id": "x", "seq_len": 16384, "outcome": "invalid"})
    assert card.varied == "length 256, 512, 1,024, 2,048"
    assert card.fits.interval == "predicted to fit on 24 GiB"
    assert card.trust.interval == "8 ok or oom: 8 predicted" and "all 8 trials fit" in card.fits.about


@pytest.mark.slow
def test_measured_pairs_of_allocators_come_before_predicted_ones() -> None:
    lengths = (512, 1024, 2048)
    ran = synthetic.sweep(lengths, (1,), repeats=1)
    simulated = synthetic.sweep(lengths, (1,), repeats=1, device="simulated", gpu_name=None, simulated_gpu="l4-24gb")
    for row in simulated:
        row["peak_reserved_bytes"] = (row["peak_reserved_bytes"] or 0) // (1 + (row["allocator"] == "expandable"))
    both = of(*ran, *simulated)
    assert both.allocator == of(*ran).allocator and both.allocator.basis == "measured"
    assert of(*simulated).allocator.value.startswith("expandable: 5")  # about half


@pytest.mark.slow
def test_rows_of_a_cpu_say_nothing_of_a_card() -> None:
    card = answer.brief(load(ROOT / "results" / "reference" / "gpt2-cpu"))
    assert "what fits on a GPU is unknown" in card.fits.about and "GiB" not in card.fits.interval
    assert "on the CPU" in card.asked
    assert card.counts["measured"] > 0 and card.counts["predicted"] == 0
    assert card.trust.value in ("Memory and speed: yes", "Memory yes, speed not yet", "Not yet")


@pytest.mark.slow
@pytest.mark.skipif(not PUBLIC.exists(), reason="the public data is not on this machine")
def test_rows_of_others_say_what_they_rest_on() -> None:
    rows, _ = open_rows(PUBLIC, "seq_len,peak_active_mib,peak_reserved_mib,iterations_per_s", ["micro_batch=1"])
    card = answer.brief(rows)
    assert card.fits.value == "Yes, 2,048 tokens" and card.fits.basis == "imported"
    assert card.fits.interval == "fits a GPU with 24 GiB"  # where it was measured
    assert card.cost.value == "2.85 MiB per token"  # published, of one line through all lengths from 918 on: 2.96
    assert "from 935 tokens on; lengths divisible by 8" in card.cost.about
    assert "an unknown GPU" in card.asked and card.trust.value == "As much as its source"


@parametrized("reported_gpu_sizes")
def test_the_card_of_a_row(row: dict[str, Any], gib: float | None) -> None:
    whole = pd.Series({"simulated_gpu": None, "gpu_name": None, "device_total_bytes": None} | row)
    assert size_of_card(whole) == gib
