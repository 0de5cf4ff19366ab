"""Fits: the published line, the true kind recovered, honest intervals, censoring, repeats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic

from vramsweep.analysis.data.importers import open_rows
from vramsweep.analysis.data.load import Table, from_frame
from vramsweep.analysis.data.metrics import METRICS, MIB
from vramsweep.analysis.model import words
from vramsweep.analysis.model.curves import Array, fit_curve
from vramsweep.analysis.model.fit import aicc, fit_points, fit_table
from vramsweep.analysis.model.observe import Points, observations

PUBLIC = Path(__file__).parents[2] / "../shared/data/qwen15-0.5b-zero3/without-expandable-segments.csv"
STEP = METRICS["step_median_s"]
MEMORY = METRICS["peak_allocated_bytes"]
NONE = np.empty(0)
TRUTHS: dict[str, Callable[[Array], Array]] = {
    "linear": lambda x: 1 + x / 500,
    "quadratic": lambda x: 1 + x / 1000 + 2 * (x / 1000) ** 2,
    "hinge": lambda x: np.maximum(3, 1 + x / 500),
}


def points(x: Array, y: Array, bound_x: Array = NONE, bound_y: Array = NONE) -> Points:
    return Points(x, y, tuple(map(str, range(len(x)))), bound_x, bound_y)


@pytest.fixture(scope="module")
def public() -> Table:
    if not PUBLIC.is_file():
        pytest.skip("the public data set is not beside this checkout (../shared/data)")
    return open_rows(PUBLIC)[0]


def test_the_published_line(public: Table) -> None:
    fits, _ = fit_table(public, ["peak_active_bytes"], start=918)
    line = fits[0].candidate("linear")
    assert line is not None
    curve = line.model.curves[True]
    assert words.equation(curve, fits[0].metric) == "y = 2.9598x + 8163.2190 (MiB)"


def test_the_chosen_model_explains_the_public_data_to_7_mib(public: Table) -> None:
    fit = fit_table(public, ["peak_active_bytes"])[0][0]
    rms = {c.model.name: c.rms / MIB for c in fit.candidates}
    assert rms["straight line"] == pytest.approx(432, abs=1)
    assert rms["quadratic"] == pytest.approx(116, abs=1)
    assert rms["hinge (two lines)"] == pytest.approx(28, abs=1)
    assert fit.chosen.model.name == "hinge (two lines), per class of 8"
    assert fit.chosen.rms / MIB < 7
    assert len(fit.points.x) == 2052  # repeated lengths are kept


@pytest.mark.parametrize("kind", list(TRUTHS))
def test_the_choice_recovers_the_true_kind(kind: str) -> None:
    x = np.linspace(64, 4096, 40).round()
    hits = 0
    for seed in range(40):
        y = TRUTHS[kind](x) + np.random.default_rng(seed).normal(0, 0.1, len(x))
        fit = fit_points(points(x, y), STEP)
        assert fit is not None
        hits += fit.chosen.model.kind == kind
    assert hits >= 34


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(TRUTHS))
def test_95_percent_intervals_cover_the_truth_92_to_98_times_in_100(kind: str) -> None:
    """200 data sets per kind; of the curve and of a new run, over six lengths, when the kind is known."""
    x = np.linspace(64, 4096, 30).round()
    at = np.array([64.0, 500.0, 1200.0, 2000.0, 3000.0, 4096.0])
    truth = TRUTHS[kind](at)
    curve = new = total = 0
    for seed in range(200):
        random = np.random.default_rng(10_000 + seed)
        fit = _of_kind(kind, points(x, TRUTHS[kind](x) + random.normal(0, 0.1, len(x))))
        if fit is None:
            continue
        drawn = truth + random.normal(0, 0.1, len(at))
        predicted = fit.predict(at)
        curve += int(((predicted.low <= truth) & (truth <= predicted.high)).sum())
        new += int(((predicted.new_low <= drawn) & (drawn <= predicted.new_high)).sum())
        total += len(at)
    assert total > 1100
    assert 0.92 <= curve / total <= 0.98
    assert 0.92 <= new / total <= 0.98


def _of_kind(kind: str, observed: Points):  # type: ignore[no-untyped-def]
    """The fit that would be made if only this kind existed: choosing is tested elsewhere."""
    from vramsweep.analysis.model.fit import Candidate, Fit, Model

    curve = fit_curve(kind, observed.x, observed.y)
    if curve is None:
        return None
    chosen = Candidate(Model(kind, {True: curve}), 0.0, 0.0, 0.0, 0.0, NONE)
    return Fit(STEP, {}, "", observed, (chosen,), chosen, "", False, ())


def test_exact_memory_gives_an_exact_hinge() -> None:
    x = np.array([128.0, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192])
    fit = fit_points(points(x, np.maximum(3e9, 2e9 + 1e6 * x)), MEMORY)
    assert fit is not None
    assert fit.chosen.model.name == "hinge (two lines)"
    assert fit.chosen.model.curves[True].knots[0] == pytest.approx(1000, abs=1)
    assert fit.chosen.model.curves[True].lines()[1][3] == pytest.approx(1e6, rel=1e-6)


def test_exactly_linear_memory_is_a_line_not_something_richer() -> None:
    x = np.arange(128.0, 4097, 128)
    fit = fit_points(points(x, 2e9 + 1e6 * x), MEMORY)
    assert fit is not None
    assert fit.chosen.model.name == "straight line"


def test_alignment_classes_are_found_when_they_explain_the_residuals() -> None:
    x = np.arange(1.0, 401)
    y = 2e9 + 1e6 * x + np.where(x % 16 == 0, 0, 3e7)
    fit = fit_points(points(x, y), MEMORY)
    assert fit is not None
    assert fit.chosen.model.name == "straight line, per class of 16"
    assert fit.predict(np.array([160.0, 161.0])).value[1] > fit.predict(np.array([160.0, 161.0])).value[0] + 2e7


def test_a_row_that_ran_out_of_memory_pulls_the_curve_up_to_the_device_but_not_down() -> None:
    x = np.array([100.0, 200, 300, 400, 500])
    y = 1e9 + 1e6 * x
    reserved = METRICS["peak_reserved_bytes"]
    free = fit_points(points(x, y), reserved)
    low = fit_points(points(x, y, np.array([2000.0]), np.array([2e9])), reserved)  # the line says 3e9: no news
    high = fit_points(points(x, y, np.array([600.0]), np.array([3e9])), reserved)  # the line says 1.6e9: it is wrong
    assert free is not None and low is not None and high is not None
    at = np.array([600.0])
    assert low.candidates[0].model.predict(at) == pytest.approx(free.candidates[0].model.predict(at))
    assert high.candidates[0].model.predict(at)[0] > free.candidates[0].model.predict(at)[0] + 1e8


def test_censoring_only_enters_what_the_device_limits() -> None:
    table = from_frame(pd.DataFrame(synthetic.sweep(batches=(4,), allocators=("default",))), "test")
    assert len(observations(table.frame, METRICS["peak_reserved_bytes"]).bound_x) == 6
    assert len(observations(table.frame, METRICS["peak_allocated_bytes"]).bound_x) == 0


def test_memory_that_differs_between_repeats_is_said() -> None:
    rows = synthetic.sweep(lengths=(128, 256, 512), batches=(1,), allocators=("default",))
    rows[0] = {**rows[0], "peak_allocated_bytes": rows[0]["peak_allocated_bytes"] + 2**20}
    fits, _ = fit_table(from_frame(pd.DataFrame(rows), "test"), ["peak_allocated_bytes", "step_median_s"])
    assert "memory should repeat exactly" in fits[0].warnings[0]
    assert fits[1].warnings == ()


def test_huber_resists_an_outlier() -> None:
    random = np.random.default_rng(0)
    x = np.arange(1.0, 41) * 100
    y = 1 + x / 500 + random.normal(0, 0.01, len(x))
    y[35] += 50
    plain, robust = fit_points(points(x, y), STEP), fit_points(points(x, y), STEP, robust=True)
    assert plain is not None and robust is not None
    slopes = [f.candidates[0].model.curves[True].coefficients[1] for f in (plain, robust)]
    assert abs(slopes[1] - 1 / 500) < 1e-5 < abs(slopes[0] - 1 / 500)


def test_predictions_beyond_the_measured_lengths_are_marked() -> None:
    x = np.arange(1.0, 21) * 100
    fit = fit_points(points(x, 1e9 + 1e6 * x), MEMORY)
    assert fit is not None
    assert fit.predict(np.array([50.0, 100.0, 2000.0, 2001.0])).extrapolated.tolist() == [True, False, False, True]


def test_too_few_lengths_are_not_fitted() -> None:
    assert fit_points(points(np.array([1.0, 2.0]), np.array([1.0, 2.0])), MEMORY) is None


def test_aicc_by_hand() -> None:
    assert aicc(10.0, 20, 2) == pytest.approx(20 * np.log(0.5) + 6 + 24 / 16)
    assert aicc(10.0, 4, 2) == float("inf")


def test_the_words_name_bytes_per_token_fixed_part_knot_and_phase() -> None:
    table = from_frame(pd.DataFrame(synthetic.sweep(batches=(1,), allocators=("default",))), "test")
    said = words.text(fit_table(table, ["peak_allocated_bytes"])[0][0])
    assert "bytes per token" in said and "fixed part of 2.00 GiB" in said and "the lines meet at 716 tokens" in said
    assert "the optimizer phase has the largest peak" in said and "the backward phase has the largest peak" in said
    assert "beyond that it is a guess" in said
