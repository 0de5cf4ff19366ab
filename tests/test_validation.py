"""Errors of predictions against published readings: their statistics, tables, text, page and figure."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest
import validation
import validation_page
import validation_text
from conftest import ROOT, refusal

from vramsweep.harness.messages.errors import UserError

GIB = 1 << 30


def reading(**values: Any) -> dict[str, Any]:
    return {
        "source": "s", "title": "project", "place": "f:1", "run": "a", "grade": "A", "note": "", "reason": None,
        "mistake": False,
        "outcome": "ok", "trial_id": "1", "label": "a", "versions": {}, "differences": [], "trace_basis": "traced",
        "context_bytes": GIB, "context_said": True, "peak_phase": "backward", "states_bytes": 6 * GIB, "moves": True,
        "quantity": "allocated", "phase": None, "unit": "GiB", "line": 1, "reading_note": "", "measured": 10.0 * GIB,
        "measured_outcome": None, "predicted": 11.0 * GIB, "predicted_most": None, "predicted_plain": None,
        "others": None, "gpu": "a100-80gb", "precision": "bf16", "world_size": 1,
        "estimated_compute_s": None, "estimated_attention_s": None,
        "estimated_memory_s": None, "estimated_launch_s": None, "estimated_communication_s": None,
        "estimated_launches": None,
    } | values  # fmt: skip


def errors(*readings: dict[str, Any]) -> pd.DataFrame:
    return validation.errors(pd.DataFrame(list(readings)))


def test_an_error_and_its_share_above_the_states() -> None:
    found = errors(
        reading(),
        reading(quantity="device"),  # of which the context is no part of the step's either
        reading(measured=6.0 * GIB),  # nothing above the states: there is no share
        reading(phase="forward"),  # what is held there is not known
        reading(phase="backward"),
        reading(quantity="step", measured=2.0, predicted=1.0, phase=None),
        reading(predicted=None),
    )
    assert found["error"].tolist()[:2] == pytest.approx([0.1, 0.1])
    assert found["share"].tolist()[:2] == pytest.approx([0.25, 1 / 3])
    assert found["share"].isna().tolist() == [False, False, True, True, False, True, True]
    assert found["kind"].tolist()[3:6] == ["allocated, forward phase", "allocated, backward phase", "step time"]
    assert found["error"].tolist()[5] == -0.5 and pd.isna(found["error"].tolist()[6])


def test_statistics_are_of_one_counter_and_one_class() -> None:
    sizes = [-4.0, 1.0, 2.0, 3.0, 20.0]
    moving = [reading(run=str(n), predicted=(10 + size / 10) * GIB) for n, size in enumerate(sizes)]
    others = reading(moves=False, predicted=10.0 * GIB), reading(quantity="reserved", predicted=20.0 * GIB)
    found = errors(*moving, *others)
    lines = validation.summary(validation.of_class(found), ["kind", "class"]).set_index(["kind", "class"])
    line = lines.loc[("allocated", "moves")]
    assert line["median"] == pytest.approx(0.02) and line["typical"] == pytest.approx(0.03)
    assert line["p90"] == pytest.approx(0.04 + 0.6 * 0.16) and line["worst"] == pytest.approx(0.2)
    assert line["share"] == pytest.approx(0.03 * 10 / 4)
    assert (line["readings"], line["runs"], line["sources"]) == (5, 5, 1)
    assert (line["bounded"], line["between"]) == (0, 0)
    assert lines.loc[("allocated", "fixed")]["worst"] == 0 and lines.loc[("reserved", "moves")]["worst"] == 1


def test_with_and_without_differences() -> None:
    found = errors(
        reading(predicted=10.1 * GIB, predicted_plain=9.0 * GIB, differences=["old"]),
        reading(predicted=9.8 * GIB, predicted_plain=8.0 * GIB, differences=["old", "older"]),
        reading(predicted=99.0 * GIB),
    )
    (line,) = validation_page.of_differences(found).to_dict("records")
    assert (line["readings"], line["differences"]) == ("2", "old, older")
    assert (line["median with them"], line["worst"]) == ("1.50 %", "-2.00 %")
    assert (line["median without"], line["worst without"]) == ("15.0 %", "-20.0 %")


def test_what_fits_is_counted_both_ways() -> None:
    oom = {"quantity": "outcome", "measured": None, "predicted": None}
    found = errors(
        reading(run="fits"), reading(run="the same trial"),
        reading(run="wrongly fits", trial_id="2", measured_outcome="oom", **oom),
        reading(run="runs out", trial_id="3", outcome="oom", measured_outcome="oom", **oom),
        reading(run="wrongly out", trial_id="4", outcome="oom", predicted=None),
        reading(run="not known", trial_id=None, outcome=None, reason="compile", predicted=None),
        reading(run="wrong", trial_id=None, outcome=None, reason="no such model", mistake=True, predicted=None),
    )  # fmt: skip
    (line,) = validation.of_outcomes(found).to_dict("records")
    assert list(line.values())[1:] == ["1", "1", "1", "1", "wrongly fits; wrongly out"]
    (left,) = validation_page.of_left_out(found).to_dict("records")
    assert (left["first"], left["runs"], left["why"]) == ("not known", "1", "compile")


def test_runs_of_one_name_in_two_files_of_a_source_are_two() -> None:
    oom = {"quantity": "outcome", "measured": None, "predicted": None, "outcome": "oom", "measured_outcome": "oom"}
    found = errors(reading(place="a:1", trial_id="1"), reading(place="b:1", trial_id="2", **oom))
    (line,) = validation.of_outcomes(found).to_dict("records")
    assert (line["fitted, as predicted"], line["ran out, as predicted"], line["which"]) == ("1", "1", "")
    two = errors(reading(place="a:1"), reading(place="b:1", trial_id="2"))
    assert validation.summary(two, ["kind"])["runs"].tolist() == [2]


def test_the_same_reading_of_the_same_trial_counts_once() -> None:
    found = errors(
        reading(run="fp32"), reading(run="tf32"), reading(run="other value", measured=12.0 * GIB),
        reading(run="other counter", quantity="reserved"), reading(run="other trial", trial_id="2"),
        reading(run="other source", title="elsewhere"), reading(run="not predicted", predicted=None),
        reading(run="unknown", trial_id=None, outcome=None, predicted=None, reason="compile"),
    )  # fmt: skip
    assert found[found["again"]]["run"].tolist() == ["tf32"]
    made = validation.Validation(found, {}, [], {})
    tables = {title: frame for title, _, frame in validation_page.all_tables(made)}
    assert tables["Both grades"].set_index("counter")["readings"].to_dict() == {"allocated": "4", "reserved": "1"}
    assert "tf32 (counted above)" in validation.of_readings(made.readings)["run"].tolist()
    every = validation_page.every_reading(made.readings).set_index("run")
    assert len(every) == len(found) and every.index[every["counted_before"]].tolist() == ["tf32"]
    assert every.loc["unknown", "why"] == "compile" and every.loc["unknown", "predicted"] == ""


def test_every_reading_is_in_bytes_or_seconds_with_what_is_known_of_it() -> None:
    found = errors(
        reading(note="padded", predicted_most=12.0 * GIB),
        reading(quantity="step", measured=0.5, predicted=0.4, note="padded", reading_note="rounded"),
        reading(quantity="outcome", measured=None, predicted=None, measured_outcome="oom", outcome="oom"),
        reading(mistake=True, reason="no such model"),
    )
    memory, speed, outcome = validation_page.every_reading(found).to_dict("records")
    sizes = [memory[name] for name in ("measured", "predicted", "upper_bound")]
    assert sizes == [str(size * GIB) for size in (10, 11, 12)]
    assert (memory["unit"], memory["error"], memory["upper_bound_error"]) == ("bytes", "+0.100000", "+0.200000")
    assert (memory["peak"], memory["peak_in"], memory["error_above_states"]) == ("moves", "backward", "+0.250000")
    assert [speed[name] for name in ("unit", "measured", "predicted", "why")] == ["s", "0.5", "0.4", "padded; rounded"]
    assert (outcome["measured"], outcome["predicted"], outcome["error"], outcome["unit"]) == ("oom", "oom", "", "")


def test_large_errors_of_one_reason_are_one_line() -> None:
    of_ranks = "of 8 ranks; active {0} to {0}, reserved {0} to {0}"
    found = errors(
        reading(run="near", predicted=10.5 * GIB, note=of_ranks.format(1)),
        reading(run="far", predicted=8.0 * GIB, note=of_ranks.format(2)),
        reading(run="other", note="padded"),
        reading(run="small", predicted=10.2 * GIB),
    )
    ranks, other = validation_page.of_reasons(found).to_dict("records")
    assert (ranks["readings"], ranks["least"], ranks["worst"]) == ("2", "+5.00 %", "-20.0 %")
    assert (ranks["worst run"], ranks["why"]) == ("far", "of 8 ranks")
    assert (other["readings"], other["least"], other["worst"], other["why"]) == ("1", "–", "+10.0 %", "padded")
    assert validation_page.of_near(found)["within 1 %"].tolist() == ["0"]
    assert validation_page.of_reasons(found.head(0)).empty and validation_page.of_near(found.head(0)).empty


def test_the_time_of_a_step_is_judged_by_its_middle_and_its_interval() -> None:
    def timed(run: str, measured: float, step: float, **over: Any) -> dict[str, Any]:
        ends = {"calibrated_step_low_s": step / 1.1, "calibrated_step_high_s": step * 1.1, "calibrated_step_s": step}
        return reading(run=run, trial_id=run, quantity="step", measured=measured, predicted=1.0, **ends | over)

    unknown = timed("d", 2.0, 2.0, calibrated_step_s=None)
    lines = validation.of_speed(
        errors(reading(), timed("a", 2.0, 2.1), timed("b", 2.0, 3.0), timed("c", 4.0, 4.0), unknown)
    )
    assert lines["readings"].tolist() == ["3", "3"]  # of the source, and of all: what has no time is not counted
    line = lines.iloc[-1]
    assert (line["median"], line["calibrated: median, signed"]) == ("5.00 %", "+5.00 %")  # of 5, 50 and 0 %
    assert (line["90th percentile"], line["within the interval"]) == ("41.0 %", "2 of 3")
    assert line["estimated: median, signed"] == "-50.0 %"
    assert validation.of_speed(errors(reading())).empty


@pytest.mark.slow
@pytest.mark.deterministic
def test_the_kept_page_and_csv_are_what_the_kept_readings_make(tmp_path: Path) -> None:
    place = ROOT / "results" / "reference" / "validation"
    figure, every = ROOT / "docs" / "images" / "validation.png", place / "every_reading.csv"
    made = validation.load(place / "readings.json")
    page = validation_page.page(made, ROOT / "docs", figure, every)
    assert page == (ROOT / "docs" / "published_runs.md").read_text()
    assert validation_page.csv_text(made) == every.read_text()


def test_memory_of_a_run_that_is_predicted_to_run_out_stays_in_the_errors() -> None:
    full = {"outcome": "oom", "moves": None, "peak_phase": None, "states_bytes": None}
    found = errors(
        reading(quantity="reserved"),
        reading(quantity="reserved", run="b", trial_id="2", predicted=12.0 * GIB, **full),
        reading(run="b", trial_id="2", predicted=None, reason="predicted to run out of memory", **full),
    )
    lines = validation.of_summary(found).set_index("peak")
    assert lines.loc[validation.FULL, "worst"] == "+20.0 %" and lines.loc["moves", "worst"] == "+10.0 %"
    assert "without a limit" in validation.of_misses(found)["why"].tolist()[1]
    assert validation.of_readings(found)["peak in"].tolist() == ["backward", validation.FULL]
    assert validation_page.of_left_out(found)["why"].tolist() == ["predicted to run out of memory"]


def test_others_are_judged_by_the_readings_that_they_speak_of() -> None:
    found = errors(
        reading(others={"rule": 5 * GIB, "tool": None}),
        reading(predicted=10.2 * GIB, others={"rule": 15 * GIB, "tool": 9 * GIB}),
        reading(predicted=99.0 * GIB),
    )
    rule, tool = validation.other_tools_errors(found, {"rule": "a paper", "tool": "a page"}).to_dict("records")
    assert (rule["readings"], rule["median, signed"], rule["median"]) == ("2", "+0.000 %", "50.0 %")
    assert (rule["vramsweep on the same: median"], tool["vramsweep on the same: median"]) == ("6.00 %", "2.00 %")
    assert (tool["readings"], tool["median, signed"]) == ("1", "-10.00 %")


def test_misses_say_why_and_whether_they_lie_between_the_bounds() -> None:
    found = errors(reading(note="padded", reading_note="rounded"), reading(run="b"), reading(predicted=10.2 * GIB))
    missed = validation.of_misses(found)
    assert missed["why"].tolist() == ["padded; rounded", "not found"] and missed["error"].tolist() == ["+10.0 %"] * 2
    sizes = (11.0, 9.995, 9.5)  # the second is short by less than a thousandth
    found = errors(*(reading(predicted=9.0 * GIB, predicted_most=most * GIB, run=str(most)) for most in sizes))
    whys = validation.of_misses(found)["why"].tolist()
    assert whys == ["between the bounds", "between the bounds", "outside the bounds"]
    assert validation.of_summary(found)["between the bounds"].tolist() == ["2 of 3"]


def test_text_page_and_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = reading(title="other | name", run="far", quantity="reserved", predicted=20.0 * GIB, moves=False)
    lost = reading(run="lost", predicted=None, outcome=None, reason="compile")
    wrong = reading(run="wrong", predicted=None, outcome=None, reason="allowed: a, b, c", mistake=True)
    record = {
        "made": {"torch": "2.13.0", "deepspeed": None}, "mistakes": ["f.yaml:3: unit"], "others": {},
        "readings": [reading(), far, lost, wrong],
    }  # fmt: skip
    path = tmp_path / "readings.json"
    path.write_text(json.dumps(record))
    made = validation.load(path)
    shown = validation_text.format_validation(made)
    assert "+10.0 %" in shown and "1 readings of 1 runs were not predicted" in shown and "1: compile" in shown
    assert "1 readings of 1 runs were left out as mistaken" in shown and "allowed:" not in shown
    assert "Every reading" in shown and "20.000 GiB" in shown
    many = validation.Validation(errors(*(reading(run=str(n)) for n in range(validation_text.FEW + 1))), {}, [], {})
    assert "more reasons" not in shown and "Every reading" not in validation_text.format_validation(many)
    validation_page.main(path, tmp_path / "page" / "a.md", tmp_path / "a.html", tmp_path / "a.csv")
    page = (tmp_path / "page" / "a.md").read_text()
    assert "torch 2.13.0" in page and "deepspeed" not in page and "](../a.html)" in page
    assert "(../a.csv)" in page and "20.000 GiB" not in page and "1024 MiB" not in page
    assert (tmp_path / "a.csv").read_text().count("\n") == 1 + 3  # all but the mistake
    assert "other \\| name" in page and "+100.0 %" in page and "- f.yaml:3: unit" in page and "allowed:" not in page
    plot = validation_page.draw_errors(made.readings)
    assert plot is not None
    texts = [a.text for a in plot.layout.annotations]
    assert "+100 %" in texts and {"allocated", "reserved"} <= set(texts)  # beyond the edge: its number
    beyond = [x for trace in plot.data for x in trace.x if trace.yaxis == "y3" or trace.yaxis == "y4"]
    assert max(beyond) == validation_page.REACH
    assert validation_page.draw_errors(made.readings[made.readings["error"].isna()]) is None
    lacking = [reading(run=str(n), predicted=None, reason=f"because {n}") for n in range(validation_text.MOST + 2)]
    text = validation_text.format_validation(validation.Validation(errors(*lacking), {}, [], {}))
    assert "and 2 more reasons: in readings.json" in text
    monkeypatch.setattr(validation_page, "draw_one", mock.Mock(side_effect=UserError("no browser")))
    files = (tmp_path / f"b.{suffix}" for suffix in ("md", "png", "csv"))
    assert refusal(UserError, validation_page.main, path, *files) == "no browser"
    assert (tmp_path / "b.md").exists()  # the page does not wait for a figure that cannot be drawn
