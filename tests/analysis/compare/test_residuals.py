"""Predictions paired with measurements: who is whose counterpart, how far apart, and what is said about it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import synthetic
from conftest import Cli, cases

from vramsweep.analysis.compare.residuals import (
    COMPONENTS,
    OUTCOME,
    not_compared,
    pair,
    residuals,
    sentences,
    summary,
    tables,
)
from vramsweep.analysis.data.load import Table, from_frame
from vramsweep.analysis.figures.residuals import of_residuals
from vramsweep.harness.rows.schema import Row

pytestmark = pytest.mark.deterministic

H100 = "NVIDIA H100 80GB HBM3"
LENGTHS = (256, 1024, 4096)


def table(*rows: list[Row]) -> Table:
    return synthetic.table([row for part in rows for row in part])


def measured(**over: Any) -> list[Row]:
    return synthetic.sweep(lengths=LENGTHS, batches=(1,), **({"gpu_name": H100} | over))


def predicted(**over: Any) -> list[Row]:
    chosen = {"device": "simulated", "simulated_gpu": "h100-80gb", "repeats": 1, "seed": 7, "protocol": "other"} | over
    return synthetic.sweep(lengths=LENGTHS, batches=(1,), **chosen)


def scaled(rows: list[Row], **factors: float) -> list[Row]:
    return [{**row, **{c: int(row[c] * f) for c, f in factors.items() if row[c] is not None}} for row in rows]


def test_each_configuration_and_component_has_one_residual() -> None:
    off = scaled(predicted(), peak_reserved_bytes=1.01, backward_peak_allocated_bytes=0.9)
    found = residuals(table(measured(), off))
    assert set(found.groupby("configuration")["component"].agg(tuple)) == {COMPONENTS}
    assert found["configuration"].nunique() == 2 * len(LENGTHS)
    relative = found.groupby("component")["relative"]
    assert relative.min()["peak_reserved_bytes"] == pytest.approx(0.01, abs=1e-6)
    assert relative.max()["backward_peak_allocated_bytes"] == pytest.approx(-0.1, abs=1e-6)
    exact = found[found["component"] == "peak_allocated_bytes"]
    assert exact["residual_bytes"].eq(0).all()
    assert exact["repeats"].eq(2).all()
    assert exact["trial_ids_measured"].iloc[0].split() == ["cudef-b1-s256-r0", "cudef-b1-s256-r1"]
    assert exact["trial_id_predicted"].iloc[0] == "sidef-b1-s256-r0"
    difference = found["predicted_bytes"] - found["measured_bytes"]
    assert difference.dropna().tolist() == found["residual_bytes"].dropna().tolist()


@pytest.mark.slow
def test_the_order_of_the_rows_does_not_matter() -> None:
    one, other = (residuals(table(*sides)).drop(columns="configuration") for sides in (
        (measured(), predicted()), (predicted()[::-1], measured()[::-1])
    ))  # fmt: skip
    key = ["settings", "component"]
    assert one.sort_values(key)["residual_bytes"].tolist() == other.sort_values(key)["residual_bytes"].tolist()


@pytest.mark.parametrize(("why", "left", "right"), cases("rows_that_are_no_pair"))
def test_what_is_not_a_pair(why: str, left: str, right: str) -> None:
    sides = ((measured, left), (predicted, right))
    mixed = table(*(make(**json.loads(over)) for make, over in sides if over != "null"))
    found = residuals(mixed)
    assert found.empty, why
    assert len(pair(mixed)) == 0
    assert sentences(found) == []
    assert of_residuals(found) == []
    assert all(frame.empty for _, _, frame in tables(found))


def test_what_could_not_be_compared_is_said() -> None:
    rest = table(measured(gpu_name="NVIDIA Imaginary 9000"), predicted())
    assert not_compared(rest) == [
        "12 measured rows from NVIDIA Imaginary 9000 not compared, because `vramsweep gpus` does not list the GPU"
    ]
    refused = predicted(allocators=("expandable",), outcome="invalid", reason="cannot be simulated")
    some = table(measured(), predicted(allocators=("default",)), refused)
    assert not_compared(some) == [
        "6 measured rows not compared, because no prediction has equal settings for the GPU",
        "3 not predicted: cannot be simulated",
    ]
    assert not_compared(table(measured())) == []


def test_settings_that_only_the_resolved_trial_holds_must_agree() -> None:
    def asked(rows: list[Row], **trial: Any) -> list[Row]:
        return [{**row, "trial": row["trial"] | trial} for row in rows]

    one = asked(measured(repeats=1), optimizer="sgd", device={"name": "cuda"}, protocol={"measured_steps": 10})
    same = asked(predicted(), optimizer="sgd", device={"name": "simulated", "gpu": "h100-80gb"})
    other = asked(predicted(), optimizer="adamw_torch")
    frames = [pd.DataFrame(one + rows) for rows in (same, other)]
    for frame, expected in zip(frames, (6, 0), strict=True):
        leaves = pd.json_normalize(frame["trial"].tolist()).add_prefix("trial.").astype("string")
        assert len(pair(from_frame(pd.concat([frame, leaves], axis=1), "test"))) == expected


def test_null_on_either_side_is_null_and_not_zero() -> None:
    found = residuals(table(measured(load_peak_allocated_bytes=None), predicted(peak_reserved_bytes=None)))
    by = found.set_index("component")["residual_bytes"]
    assert by["load_peak_allocated_bytes"].isna().all()
    assert by["peak_reserved_bytes"].isna().all()
    assert by["peak_allocated_bytes"].notna().all()
    assert "peak_reserved_bytes" not in set(summary(found)["component"])
    figure = of_residuals(found)[0]
    assert [trace.name for trace in figure.plot.data[1:]] == ["allocated"]


def test_outcomes_that_differ_are_rows_and_sentences() -> None:
    died = [{**row, "outcome": "oom", "gpu_name": None, "peak_allocated_bytes": None} for row in measured()]
    ran = [row for row in measured() if row["seq_len"] < 4096]
    mixed = table(ran, [row for row in died if row["seq_len"] == 4096], [
        {**row, "outcome": "oom" if row["seq_len"] == 256 else "ok"} for row in predicted()
    ])  # fmt: skip
    found = residuals(mixed)
    ended = found[found["component"] == OUTCOME].set_index("seq_len")
    assert set(ended.loc[256, "outcome_predicted"]) == {"oom"}
    assert set(ended.loc[4096, "outcome_measured"]) == {"oom"}  # its GPU is known from the host's other rows
    assert ended["residual_bytes"].isna().all()
    said = " ".join(sentences(found))
    ran = "Predicted to run out of memory, but ran: 2 configurations (256 tokens · default; 256 tokens · expand"
    assert ran in said
    assert "Predicted to fit, but ran out of memory: 2 configurations (4,096 tokens" in said
    worst = tables(found)[1][2]
    assert worst["ended"].iloc[0].startswith("predicted o") and worst["ended"].iloc[-1] == "ok"


def test_repeats_that_differ_and_predictions_made_twice() -> None:
    rows = measured(allocators=("default",), repeats=3)
    rows[1] = {**rows[1], "peak_reserved_bytes": rows[1]["peak_reserved_bytes"] + 2**21}
    newer = [{**row, "trial_id": "n" + row["trial_id"]} for row in predicted(torch_version="9.9+cpu")]
    mixed = table(rows, predicted(), newer)
    found = residuals(mixed)
    assert len(pair(mixed, "torch_version")) == len(rows)
    assert found["trial_id_predicted"].str.startswith("n").all()  # the last prediction counts
    assert found.set_index("component").loc["peak_reserved_bytes", "spread_bytes"].tolist() == [2**21, 0, 0]
    assert found.set_index("component").loc["peak_reserved_bytes", "residual_bytes"].tolist() == [0, 0, 0]
    said = sentences(found)
    assert "Predicted with another release of torch or transformers than measured: 3 configurations." in said
    assert any("Repeats differ in memory in 1 configuration, most in peak reserved (2.0 MiB at 256" in s for s in said)


def test_the_same_release_in_two_builds_is_no_difference() -> None:
    found = residuals(table(measured(torch_version="2.11.0+cu128"), predicted(torch_version="2.11.0+cpu")))
    assert not found["versions_differ"].any()


def test_words_name_the_worst_and_where() -> None:
    rows = predicted(allocators=("default",))
    rows[1]["peak_allocated_bytes"] = int(rows[1]["peak_allocated_bytes"] * 1.02)
    rows = scaled(rows, forward_peak_allocated_bytes=0.95)
    rows[2]["forward_peak_allocated_bytes"] = int(rows[2]["forward_peak_allocated_bytes"] * 0.94 / 0.95)
    said = sentences(residuals(table(measured(allocators=("default",)), rows)))
    assert said == [
        "Predicted against measured (3 configurations): peak allocated +0.00 % median, worst +2.00 % at 1,024 tokens; "
        "peak reserved exact; the phase that differs most is forward, −5.00 % median, worst −6.00 % "
        "at 4,096 tokens."
    ]


@pytest.mark.slow
def test_ten_thousand_configurations() -> None:
    sides = []
    for rows in (measured(repeats=1, allocators=("default",)), predicted(allocators=("default",))):
        frame = pd.DataFrame(rows[:1] * 10_000)
        frame["seq_len"] = np.arange(10_000) + 1
        frame["trial_id"] = [f"{rows[0]['device']}{n}" for n in range(10_000)]
        sides.append(frame)
    found = residuals(from_frame(pd.concat(sides), "test"))
    assert len(found) == 10_000 * len(COMPONENTS)
    for figure in of_residuals(found):
        assert sum(len(trace.x) for trace in figure.plot.data if trace.x is not None) < 4000
    assert len(tables(found)[1][2]) == 60


@pytest.mark.slow
def test_report_and_paper_have_the_residuals(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramsweep.analysis.report.write.drawing.images", lambda *_: [])
    few = {"allocators": ("default",), "repeats": 1}
    folder = synthetic.write(tmp_path, measured(**few) + scaled(predicted(**few), peak_reserved_bytes=1.01))
    cli.run("report", folder, "--images", "none")
    cli.run("paper", folder)
    for place in (folder / "figures", folder / "paper"):
        assert len(pd.read_csv(place / "residuals.csv")) == len(LENGTHS) * len(COMPONENTS)
    page = (folder / "report.html").read_text()
    assert "peak reserved +1.00 % median" in page and "Predicted against measured per configuration" in page
    assert (folder / "paper" / "tables" / "residuals.tex").exists()
    synthetic.write(tmp_path, measured(**few))
    cli.run("report", folder, "--images", "none")
    assert not (folder / "figures" / "residuals.csv").exists()  # what is no longer true does not stay
