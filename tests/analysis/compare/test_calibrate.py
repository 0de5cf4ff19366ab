"""Calibration: known efficiencies come back from generated rows, and what the rows cannot tell is said."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import synthetic
from conftest import Cli
from synthetic import table

from vramsweep.analysis.compare.calibrate import FEWEST, PARTS, SECONDS, calibrate, calibrated, pairs, together
from vramsweep.analysis.report.content import collect
from vramsweep.harness.rows.schema import Row, complete_row

pytestmark = pytest.mark.deterministic

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
EFFICIENCIES = (0.62, 0.4, 0.81, 0.35)
CARD = {"simulated": "h100-80gb", "cuda": "NVIDIA H100 80GB HBM3"}


def row(device: str, length: int, batch: int, repeat: int = 0, **over: Any) -> Row:
    """Settings of one row, made up."""
    values = {
        "trial_id": f"{device}-{batch}-{length}-{repeat}-{over.get('precision', 'bf16')}", "terminal": True,
        "outcome": "ok", "model": "made-up", "seq_len": length, "micro_batch": batch, "grad_accum": 1,
        "precision": "bf16", "allocator": "default", "allocator_conf": "", "runner": "torch", "device": device,
        "optimizer_effective": "AdamW", "world_size": 1, "weights": "random", "protocol": "quick", "repeat": repeat,
        "gpu_name": CARD[device], "simulated_gpu": CARD[device] if device == "simulated" else None,
        "notes": [synthetic.NOTE],
    }  # fmt: skip
    return complete_row(values | over)


def parts(length: int, batch: int) -> tuple[float, ...]:
    """A roofline: products of the tokens, attention, the optimizer's traffic and the activations', launches.

    Each sequence moves something of its own, else moving would be products and launches together.
    """
    tokens = length * batch
    return 3e-6 * tokens, 6e-10 * tokens * length, 4e-3 + 8e-3 * batch + 1.5e-6 * tokens, 6e-3


def estimated(length: int, batch: int, **over: Any) -> Row:
    each = dict(zip(SECONDS, parts(length, batch), strict=True))
    step = sum(each.values())
    speed = {"estimated_step_s": step, "estimated_tokens_per_s": length * batch / step}
    return row("simulated", length, batch, **each | speed | over)


def measured(
    length: int, batch: int, noise: float = 0.0, efficiencies: Sequence[float] = EFFICIENCIES, **over: Any
) -> Row:
    step = sum(part / e for part, e in zip(parts(length, batch), efficiencies, strict=True)) * (1 + noise)
    return row("cuda", length, batch, step_median_s=step, tokens_per_s=length * batch / step, **over)


def sweep(noise: float = 0.0, lengths: Sequence[int] = LENGTHS, batches: Sequence[int] = (1, 4)) -> list[Row]:
    """Each configuration estimated once and measured three times."""
    random = np.random.default_rng(7)
    rows = []
    for length in lengths:
        for batch in batches:
            rows.append(estimated(length, batch))
            rows += [measured(length, batch, noise * random.normal(), repeat=r) for r in range(3)]
    return rows


@pytest.mark.parametrize(("noise", "near"), [(0.0, 1e-6), (0.01, 0.1)])
def test_known_efficiencies_come_back(noise: float, near: float) -> None:
    [found], notes = calibrate(table(sweep(noise)))
    assert not notes
    assert (found.gpu, found.precision, found.rows, found.configurations) == ("h100-80gb", "bf16", 42, 14)
    assert [1 / factor for factor in found.factors] == pytest.approx(EFFICIENCIES, rel=near)
    assert None not in found.efficiencies()
    assert found.remark() == ""
    for factor, margin, true in zip(found.factors, found.margins, EFFICIENCIES, strict=True):
        assert abs(factor - 1 / true) <= margin
    assert found.median_error <= max(noise, 1e-6)
    assert found.median_error <= found.worst_error <= max(5 * noise, 1e-6)
    assert "calibrated from 42 measured rows on h100-80gb (bf16), leave-one-out median error" in found.text()


def test_the_error_is_of_rows_that_were_left_out() -> None:
    rows = sweep()
    odd = [measured(512, 2, noise=0.3), estimated(512, 2)]
    [before], [after] = calibrate(table(rows))[0], calibrate(table([*rows, *odd]))[0]
    assert before.worst_error < 1e-6
    assert 0.2 < after.worst_error < 0.3  # 1 - 1 / 1.3: the odd one is not fitted to itself


def test_calibrated_rows_are_the_estimate_with_the_efficiencies() -> None:
    whole = table([*sweep(), estimated(65_536, 4), estimated(512, 1, precision="fp32")])
    rows = calibrated(whole, calibrate(whole)[0]).set_index("trial_id")
    one = rows.loc["simulated-4-2048-0-bf16"]
    expected = sum(part / e for part, e in zip(parts(2048, 4), EFFICIENCIES, strict=True))
    assert one["fitted_step_s"] == pytest.approx(expected)
    assert one["fitted_tokens_per_s"] == pytest.approx(2048 * 4 / expected)
    assert not one["extrapolated"]
    assert rows.loc["simulated-4-65536-0-bf16", "extrapolated"]
    other = rows.loc["simulated-1-512-0-fp32"]
    assert pd.isna(other["fitted_step_s"])
    assert pd.isna(other["fitted_tokens_per_s"])
    assert other["estimated_tokens_per_s"] > 0
    assert len(rows) == len(LENGTHS) * 2 + 2  # measured rows have no estimate


@pytest.mark.slow
def test_what_the_rows_cannot_tell_is_said() -> None:
    # one length and one batch, many models: all parts grow together
    def scaled(factor: float) -> list[Row]:
        seconds = {c: p * factor for c, p in zip(SECONDS, parts(512, 1), strict=True)}
        estimate = row("simulated", 512, 1, model=f"m{factor}", trial_id=f"s{factor}", **seconds)
        real = row("cuda", 512, 1, model=f"m{factor}", trial_id=f"m{factor}", step_median_s=0.1 * factor)
        return [estimate, real]

    [found], _ = calibrate(table([r for factor in (1.0, 2.0, 3.0, 5.0, 8.0) for r in scaled(factor)]))
    assert found.efficiencies() == [None] * len(PARTS)
    assert found.median_error < 1e-6
    assert all(part in found.remark() for part in PARTS)

    # launches would have to cost less than nothing, so their factor is at its bound
    free = [r for r in sweep() if r["device"] == "simulated"]
    free += [measured(length, b, efficiencies=(0.5, 0.5, 0.5, -10)) for length in LENGTHS for b in (1, 4)]
    [found], _ = calibrate(table(free))
    assert "launch not identifiable (fitted as 0 seconds)" in found.remark()
    assert found.as_json()["launch_efficiency"] is None
    assert found.as_json()["compute_efficiency"] == pytest.approx(0.5, rel=0.1)


def test_a_part_that_no_row_has_is_not_known_and_neither_are_steps_with_it() -> None:
    eager = [one | {"estimated_attention_s": 0.0} for one in sweep() if one["device"] == "simulated"]
    ran = {}
    for one in eager:
        step = sum(one[name] / e for name, e in zip(SECONDS, EFFICIENCIES, strict=True))
        ran[one["seq_len"], one["micro_batch"]] = step
    rows = [*eager, *(measured(*shape) | {"step_median_s": step} for shape, step in ran.items())]
    whole = table([*rows, estimated(16_384, 1)])
    [found], _ = calibrate(whole)
    assert found.remark() == "attention not identifiable (no row has any)"
    assert found.as_json()["attention_efficiency"] is None
    assert [f for f in found.factors if f is not None] == pytest.approx([1 / e for e in EFFICIENCIES if e != 0.4])
    fitted = calibrated(whole, [found]).set_index("trial_id")["fitted_step_s"]
    assert fitted["simulated-4-2048-0-bf16"] == pytest.approx(ran[2048, 4])
    assert pd.isna(fitted["simulated-1-16384-0-bf16"])


@pytest.mark.slow
def test_pairs_are_of_equal_settings_on_the_same_card() -> None:
    assert len(pairs(table(sweep(lengths=(128,), batches=(1,))))) == 1
    for over in ({"gpu_name": "NVIDIA A100-SXM4-80GB"}, {"gpu_name": "NVIDIA Nonesuch"}, {"gpu_name": None},
                 {"micro_batch": 2}, {"optimizer_effective": "SGD"}, {"checkpointing": "full"}, {"step_median_s": None},
                 {"outcome": "oom"}, {"foreign": "elsewhere"}, {"bound_by": "host"}):  # fmt: skip
        assert pairs(table([estimated(128, 1), measured(128, 1) | over])).empty
    apart = measured(128, 1) | {"protocol": "paper", "allocator": "expandable"}
    assert len(pairs(table([estimated(128, 1), apart]))) == 1
    # allocator settings have nothing to say about an estimate: one shape, measured twice
    other = {"allocator_conf": "expandable_segments:True"}
    both = [estimated(128, 1), measured(128, 1)]
    [found] = pairs(table([*both, *(r | other | {"trial_id": r["trial_id"] + "-e"} for r in both)])).to_dict("records")
    assert found["rows"] == 2


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([measured(128, 1), measured(256, 1)], "no measured CUDA row has a predicted row"),
        ([estimated(128, 1), estimated(256, 1)], "no measured CUDA row has a predicted row"),
        ([estimated(128, 1), measured(128, 1)], f"1 configuration both measured and predicted; .* {FEWEST} or more"),
        ([estimated(128, 1) | {"estimated_launch_s": None}, measured(128, 1)], "no measured CUDA row"),
    ],
)
def test_too_few_pairs_say_what_is_missing(rows: list[Row], why: str, tmp_path: Path, cli: Cli) -> None:
    calibrations, notes = calibrate(table(rows))
    assert not calibrations
    assert len(notes) == 1
    path = synthetic.write(tmp_path / "sweep", rows)
    assert re.search(f"nothing can be calibrated: .*{why}", cli.refuse("calibrate", path, path))


def test_two_sweeps_from_the_command_line(tmp_path: Path, cli: Cli) -> None:
    for device in ("cuda", "simulated"):
        rows = [r | {"trial": {"model": {"name": "made-up"}}} for r in sweep(0.01) if r["device"] == device]
        synthetic.write(tmp_path / device, rows)
    both = (tmp_path / "cuda", tmp_path / "simulated")
    text = cli.run("calibrate", *both).out
    assert "estimate, calibrated from 42 measured rows on h100-80gb (bf16), leave-one-out median error" in text
    assert "estimated, at most (tokens/s)" in text
    found = cli.json("calibrate", *both)
    assert found["calibrations"][0]["compute_efficiency"] == pytest.approx(EFFICIENCIES[0], rel=0.05)
    assert len(found["rows"]) == 14
    cli.refuse("calibrate", tmp_path / "nowhere", both[1])


@pytest.mark.slow
def test_a_setting_that_only_one_side_varies_is_named() -> None:
    one, other = table(sweep()), table(sweep())
    one.frame["trial.lookahead"] = "yes"
    other.frame["trial.precision"] = "bf16"  # is a column too
    _, notes = together(one, other)
    assert notes == ["trial.lookahead is ignored, because it varies in only one of the two sets of rows"]


@pytest.mark.slow
def test_a_report_says_estimated_wherever_it_shows_one() -> None:
    content = collect(table(sweep(0.01)))
    [sentence] = [s for s in content.findings if s.startswith("Estimated (roofline, not measured): at most ")]
    assert "on h100-80gb" in sentence
    [sentence] = [s for s in content.findings if "leave-one-out" in s]
    assert sentence.startswith("Not measured: ")
    assert "estimate, calibrated from 42 measured rows on h100-80gb" in sentence
    [figure] = [f for f in content.figures if f.name.startswith("estimated_throughput")]
    assert "not measured" in figure.title
    assert "estimated" in figure.plot.layout.yaxis.title.text
    assert figure.data["trial_id"].str.startswith("simulated").all()
    for other in content.figures:
        if other is not figure:
            assert not any("estimated" in str(column) for column in other.data.columns)
    [frame] = [f for _, name, f in content.tables if name == "estimated_throughput"]
    assert {"estimated, at most (tokens/s)", "estimated, by your measurements (tokens/s)"} <= set(frame.columns)


@pytest.mark.slow
def test_an_estimate_by_speeds_of_other_runs_has_two_digits_and_a_trial_is_one() -> None:
    content = collect(table([estimated(128, 1) | {"calibrated_tokens_per_s": 4321.0}]))
    [frame] = [f for _, name, f in content.tables if name == "estimated_throughput"]
    assert list(frame["estimated, by speeds of other runs (tokens/s)"]) == ["4,300"]
    assert content.subtitle.startswith("1 trial (1 ok) from ")
    alone = collect(table([r for r in sweep() if r["device"] == "simulated"]))
    [frame] = [f for _, name, f in alone.tables if name == "estimated_throughput"]
    assert "estimated, by your measurements (tokens/s)" not in frame.columns
    assert not any("calibrat" in note for note in alone.warnings)
