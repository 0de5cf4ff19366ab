"""Fits: the published line, known truths, what rows and predictions add, out of memory, repeats."""

from collections.abc import Callable
from dataclasses import replace

import fit_cover
import numpy as np
import pytest
import synthetic
from conftest import ROOT

from vramsweep.analysis.data.importers import open_rows
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import METRICS, MIB
from vramsweep.analysis.model import fit_wording
from vramsweep.analysis.model.curves import KINDS, Array, Curve, powers
from vramsweep.analysis.model.estimate import Data, estimate
from vramsweep.analysis.model.fit import Fit, fit_points, fit_table
from vramsweep.analysis.model.observations import Points, observations

pytestmark = pytest.mark.deterministic

PUBLIC = ROOT / "../shared/data/qwen15-0.5b-zero3/without-expandable-segments.csv"
MEMORY = METRICS["peak_allocated_bytes"]
RESERVED = METRICS["peak_reserved_bytes"]
NONE = np.empty(0)


def fitted(
    x: Array, y: Array, metric: str = "peak_allocated_bytes", bounds: tuple[float, ...] = (), **more: object
) -> Fit:
    """The fit of these points; `bounds` are lengths that ran out of memory, each with what it needed more than."""
    points = Points(x, y, tuple(map(str, range(len(x)))), np.array(bounds[::2], float), np.array(bounds[1::2], float))
    fit = fit_points(points, METRICS[metric], **more)  # type: ignore[arg-type]
    assert fit is not None
    return fit


CELLS = {(cell.name, cell.noise, cell.lengths): cell for cell in fit_cover.cells()}


def reserved(x: Array, y: Array, *bounds: float) -> Fit:
    return fitted(x, y, "peak_reserved_bytes", bounds)


@pytest.fixture(scope="module")
def public() -> Table:
    if not PUBLIC.is_file():
        pytest.skip("the public data set is not beside this checkout (../shared/data)")
    return open_rows(PUBLIC)[0]


@pytest.mark.slow
def test_the_public_data_is_explained_per_class_of_8_with_a_flat_part_and_a_knot(public: Table) -> None:
    fit = fit_table(public, ["peak_active_bytes"])[0][0]
    assert fit.chosen.model.modulus == 8 and fit.chosen.rms / MIB < 6.5
    assert len(fit.points.x) == 2052  # repeated lengths are kept
    for curve in fit.chosen.model.curves.values():
        assert curve.pieces[0][0] / MIB == pytest.approx(10_900, abs=1) and abs(curve.pieces[0][1]) < 100
        assert 900 < curve.knots[0] < 950
    said = fit_wording.text(fit)
    assert "lengths divisible by 8: up to 93" in said and "flat at 10.6 GiB" in said
    assert "length % 8 == 0: y = max(10900" in said and "length % 8 != 0: y = max(10900" in said
    assert said.count("(MiB), RMS ") == 6  # two classes each of line, parabola and what was chosen


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "quadratic", "hinge", "plateau"])
def test_a_known_truth_is_recovered_in_40_noisy_lengths(kind: str) -> None:
    truths: dict[str, Callable[[Array], Array]] = {
        "linear": lambda x: 1e9 + 1e6 * x,
        "quadratic": lambda x: 1e9 + 1e6 * x + 300 * x**2,
        "hinge": lambda x: np.maximum(3e9, 1e9 + 2e6 * x),
        "plateau": lambda x: np.maximum(3e9, 1e9 + 1e6 * x + 300 * x**2),
    }
    x = np.linspace(64, 4096, 40).round()
    hits = 0
    for seed in range(20):
        y = truths[kind](x) + np.random.default_rng(seed).normal(0, 5e7, len(x))
        hits += fitted(x, y).chosen.model.kind == kind
    assert hits >= 17


def test_exact_memory_gives_an_exact_hinge() -> None:
    x = np.array([128.0, 257, 512, 1025, 1536, 2047, 3072, 4097, 6145, 8191])
    fit = fitted(x, np.maximum(3e9, 2e9 + 1e6 * x))
    curve = fit.chosen.model.curves[True]
    assert fit.chosen.model.name == "hinge (two lines)" and fit.identified
    assert curve.knots[0] == pytest.approx(1000, abs=0.01)
    assert curve.lines()[1][3] == pytest.approx(1e6, rel=1e-7)
    assert fit.predict(np.array([16_384.0])).value[0] == pytest.approx(2e9 + 1e6 * 16_384, rel=1e-7)


def test_a_piece_with_one_length_is_known_not_to_be_known() -> None:
    """The knot lies in the last gap: any steeper line through the last point would do."""
    x = np.array([128.0, 256, 512, 768, 1024, 1536, 2048])
    fit = fitted(x, 8e9 + np.maximum(0, x - 1700) * 4e6)
    beyond = fit.predict(np.array([4096.0]))
    assert not fit.identified and fit.next_x is not None and fit.next_x > 1536
    assert beyond.new_low[0] <= 8e9 + 2396 * 4e6 <= beyond.new_high[0]
    assert beyond.new_high[0] > 1.5 * beyond.new_low[0]
    assert f"measure {fit.next_x:,} tokens next" in fit_wording.text(fit)


def test_flat_to_the_end_has_a_lower_bound_only() -> None:
    fit = fitted(x := np.array([64.0, 128, 192, 256, 320, 384, 448]), np.full(7, 9e9))
    at = fit.predict(np.array([300.0, 900.0]))
    assert np.isfinite(at.new_high[0]) and at.new_high[1] == np.inf and at.new_low[1] > 8.9e9
    assert fit_wording.as_json(fit)["predicted"][1]["new_run"][1] is None
    assert "GiB or more" in fit_wording.text(fit)
    assert fitted(x, 0 * x).predict(300).new_high < 2 * MIB > reserved(x, 0 * x).predict(300).new_high  # all zero


@pytest.mark.parametrize("lengths", [3, 4, 5])
def test_fewer_than_six_lengths_are_bounded_on_one_side_beyond_them_and_name_the_next(lengths: int) -> None:
    x = np.array([256.0, 512, 1024, 2048, 4096])[:lengths]
    fit = fitted(x, 3e9 + 2e6 * x)
    assert fit.predict(np.array([x[-1] * 1.5])).new_high[0] == np.inf
    assert fit.next_x == round(1.5 * x[-1]) - 1  # that 8 does not divide, as it does all that were measured
    both = fitted(x + np.arange(lengths) % 2, 3e9 + 2e6 * x)
    assert both.next_x == int(1.5 * both.range[1])


@pytest.mark.slow
def test_alignment_classes_are_found_when_they_explain_the_residuals() -> None:
    x = np.arange(1.0, 401)
    fit = fitted(x, 2e9 + 1e6 * x + np.where(x % 16 == 0, 0, 3e7))
    assert fit.chosen.model.name == "straight line, per class of 16"
    assert fit.predict(np.array([160.0, 161.0])).value[1] > fit.predict(np.array([160.0, 161.0])).value[0] + 2e7


def test_values_that_come_in_blocks_are_known_to_no_better_than_a_block() -> None:
    block = 20 * MIB
    x = np.array([128.0, 256, 512, 768, 1024, 1536, 2048])
    fit = fitted(x, np.ceil((9e9 + np.maximum(0, x - 700) * 3e6) / block) * block)
    inside = fit.predict(np.array([400.0]))
    assert inside.new_high[0] - inside.new_low[0] > block / 4


def test_a_row_that_ran_out_of_memory_bends_the_curve_up_to_the_device_but_not_down() -> None:
    x = np.array([100.0, 200, 300, 400, 500, 600, 700])
    y = 1e9 + 1e6 * x
    free = reserved(x, y)
    low = reserved(x, y, 2000, 2e9)  # the line says 3e9: no news
    high = reserved(x, y, 900, 2.6e9)  # the line says 1.9e9: it is wrong
    at = np.array([900.0])
    assert low.predict(at).value == pytest.approx(free.predict(at).value, rel=1e-3)
    assert high.predict(at).value[0] > 2.6e9 > free.predict(at).new_high[0]
    assert next(one.probability for one in high.candidates if one.model.kind == "hinge") > 0.75
    assert high.predict(np.array([600.0])).value[0] == pytest.approx(1.6e9, rel=0.02)


def test_a_row_whose_allocator_had_to_retry_is_a_bound_not_a_point() -> None:
    rows = synthetic.sweep(batches=(1,), allocators=("default",), repeats=1, device_gib=200)
    rows[-1] = {**rows[-1], "alloc_retries": 3}
    frame = synthetic.table(rows).frame
    seen = observations(frame, RESERVED)
    assert len(seen.x) == len(rows) - 1 and list(seen.bound_x) == [8192] and "free its cache" in seen.warnings[0]
    assert seen.bound_y[0] == rows[-1]["peak_reserved_bytes"]
    assert len(observations(frame, MEMORY).x) == len(rows)


def test_censoring_only_enters_what_the_device_limits() -> None:
    table = synthetic.table(synthetic.sweep(batches=(4,), allocators=("default",)))
    assert len(observations(table.frame, RESERVED).bound_x) == 6
    assert len(observations(table.frame, MEMORY).bound_x) == 0


def test_memory_that_differs_between_repeats_is_said() -> None:
    rows = synthetic.curve((128, 256, 512, 1024, 2048), repeats=2)
    rows[0] = {**rows[0], "peak_allocated_bytes": rows[0]["peak_allocated_bytes"] + 2**20}
    fits, _ = fit_table(synthetic.table(rows), ["peak_allocated_bytes", "step_median_s"])
    assert "memory should repeat exactly" in fits[0].warnings[0]
    assert fits[1].warnings == ()


@pytest.mark.slow
def test_an_outlier_is_named_and_no_curve_follows_it() -> None:
    random = np.random.default_rng(0)
    x = np.arange(1.0, 41) * 100
    y = 1 + x / 500 + random.normal(0, 0.01, len(x))
    y[35] += 50
    times = fitted(x, y, "step_median_s")
    assert times.candidates[0].model.curves[True].pieces[0][1] == pytest.approx(1 / 500, abs=1e-5)  # a plain line, too
    assert times.chosen.model.kind == "linear" and times.outliers == (3600,) and len(times.points.x) == 40
    x = np.arange(1.0, 18) * 120
    y = (2000 + 2.5 * x) * MIB
    y[8] = 30_000 * MIB
    fit = fitted(x, y)
    assert fit.chosen.worst < 1 * MIB and fit.predict(np.array([1080.0])).new_high[0] < 4701 * MIB
    (warning,) = fit.warnings
    assert "the curve ignores an outlier at 1,080 tokens, 24.7 GiB above it" in warning  # 30,000 - 4,700 MiB
    assert "17 rows, 17 lengths" in fit_wording.text(fit) and fit_wording.as_json(fit)["outliers"] == [1080]
    y[3] = 500 * MIB
    assert fitted(x, y).outliers == (480, 1080)
    rows = synthetic.curve(range(128, 2049, 128))
    rows[4] |= {name: rows[4][name] + 20 * 2**30 for name in ("peak_allocated_bytes", "backward_peak_allocated_bytes")}
    tables = (synthetic.table(some) for some in (rows, rows[:4] + rows[5:]))
    own, right = (fit_table(table, ["peak_allocated_bytes"])[0][0] for table in tables)
    assert own.basis == right.basis == "phases" and own.outliers == (640,)
    assert own.value(own.points.x) == pytest.approx(right.value(own.points.x), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own rows, replayed", "imported rows, hinge", "three lines", "end gap"])
def test_what_memory_does_is_no_outlier(kind: str) -> None:
    """Knots, pieces with one length, blocks, replays of reserved memory."""
    for cell in (cell for cell in CELLS.values() if kind in cell.name and not cell.beside):
        random = np.random.default_rng(7)
        for _ in range(3):
            assert fit_cover.fitted(cell, cell.truth(random), random)[0].outliers == (), cell


def test_step_times_err_in_proportion() -> None:
    """3 % of a long step is much in seconds: short steps must not be drowned."""
    x = np.geomspace(64, 8192, 24).round()
    random = np.random.default_rng(3)
    fit = fitted(x, (0.02 + 1e-4 * x) * np.exp(random.normal(0, 0.03, len(x))), "step_median_s")
    short = fit.predict(np.array([64.0]))
    assert short.value[0] == pytest.approx(0.0264, rel=0.1) and short.new_high[0] < 0.032


def test_predictions_beyond_the_measured_lengths_are_marked() -> None:
    x = np.arange(1.0, 21) * 100
    found = fitted(x, 1e9 + 1e6 * x).predict(np.array([50.0, 100.0, 2000.0, 2001.0]))
    assert found.extrapolated.tolist() == [True, False, False, True]


def test_too_few_lengths_are_not_fitted() -> None:
    assert fit_points(Points(np.array([1.0, 2]), np.array([1.0, 2]), ("a", "b"), NONE, NONE), MEMORY) is None


def test_the_evidence_of_a_regression_is_the_density_that_scipy_says() -> None:
    from scipy.stats import multivariate_normal

    random = np.random.default_rng(1)
    x = np.arange(1.0, 7)
    y = 3 + 2 * x + random.normal(0, 0.5, 6)
    data = Data(x, powers(x), y, 0.01, noises=("constant",))
    (kind,) = (k for k in KINDS if k.pieces == ((0, 1),))
    found = estimate(data, (kind,))
    design = data.features[:, :2] * data.scales[:2]
    covered = (s**2 * np.eye(6) + design @ design.T for s in data.sizes("constant"))
    each = [multivariate_normal(np.zeros(6), one).logpdf(y) for one in covered]
    mean = np.log(np.mean(np.exp(np.array(each) - max(each)))) + max(each) + np.log(kind.weight)
    assert found.log + 3 * np.log(2 * np.pi) * -1 == pytest.approx(mean, abs=1e-6)


def test_phases_find_a_knot_that_the_points_of_one_batch_do_not_show() -> None:
    """At batch 1 the peak is flat; at batch 4 activations lead. Together they say where batch 1 will rise."""
    rows = synthetic.sweep(lengths=(64, 128, 256, 384, 512), batches=(1, 4), allocators=("default",), repeats=1)
    table = synthetic.table(rows)
    fit = next(f for f in fit_table(table, ["peak_allocated_bytes"])[0] if f.label == "batch 1")
    assert np.ptp(fit.points.y) == 0  # flat
    at = fit.predict(np.array([2048.0]))
    assert fit.basis == "phases" and at.value[0] == pytest.approx(2 * 2**30 + 2048 * 1_500_000, rel=0.01)
    assert "on the peak of each phase" in fit_wording.text(fit)


def test_reserved_stands_on_allocated() -> None:
    rows = synthetic.sweep(lengths=(128, 256, 512, 1024, 1536, 2048), batches=(1,), repeats=1, device_gib=200)
    table = synthetic.table(rows)
    for fit in fit_table(table, ["peak_reserved_bytes"])[0]:
        share = 1.15 if fit.label == "default" else 1.02
        at = fit.predict(np.array([4096.0]))
        truth = (2 * 2**30 + 4096 * 1_500_000) * share + 2**27
        assert fit.basis == "phases" and at.value[0] == pytest.approx(truth, rel=0.01)
        assert at.new_low[0] < truth < at.new_high[0]


def test_a_drop_of_reserved_is_found_and_said() -> None:
    x = np.arange(100.0, 2100, 50)
    y = 14e9 + 3e6 * x - np.where(x > 1575, 860 * MIB, 0) + np.random.default_rng(0).normal(0, 2e7, len(x))
    fit = reserved(x, np.round(y / MIB / 2) * 2 * MIB)
    assert fit.chosen.model.name == "two lines apart"
    assert "it drops by 0.8" in fit_wording.text(fit) and "at 1,5" in fit_wording.text(fit)


def test_the_words_name_bytes_per_token_fixed_part_knot_and_phase() -> None:
    table = synthetic.table(synthetic.sweep(batches=(1,), allocators=("default",)))
    said = fit_wording.text(fit_table(table, ["peak_allocated_bytes"])[0][0])
    assert "bytes per position" in said and "fixed part of 2.0 GiB" in said and "the lines meet at 716 tokens" in said
    assert "the optimizer phase has the largest peak" in said and "the backward phase has the largest peak" in said
    assert "beyond that it is a guess" in said and "stores its scores" not in said


def test_a_maximum_of_pieces_is_what_its_parts_are() -> None:
    curve = Curve("plateau", ((5.0, 0.0, 0.0), (1.0, 0.0, 0.01)))
    assert curve.knots[0] == pytest.approx(20) and list(curve.predict(np.array([0.0, 30.0]))) == [5.0, 10.0]
    assert curve.parameters == pytest.approx({"a1": 5.0, "b1": 0.0, "a2": 1.0, "b2": 0.0, "c2": 0.01, "k1": 20.0})


OWN = [cell for cell in CELLS.values() if not cell.foreign and cell.lengths in ("3", "6")]  # more: as the docs' table


@pytest.mark.slow
@pytest.mark.parametrize("cell", OWN, ids=lambda c: f"{c.name}, {c.noise}")
def test_intervals_of_own_rows_hold_inside_and_at_twice_the_longest_length(cell: fit_cover.Cell) -> None:
    """80 draws: a cover of 0.95 passes with 99.99 %; one of 0.75 does not. The table with more draws is in the docs."""
    found = fit_cover.measure(cell, 80, seed=1)
    assert found["cover inside"] >= 0.86 and found["at twice"] >= 0.86
    if found["identified"] > 0.1:  # with noise of 3 %, hardly any are beside a prediction
        assert found["error, identified"] <= 0.025


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["512 B", "2 MiB", "20 MiB blocks"])
def test_foreign_hinges_are_found_and_lines_are_not_bent(noise: str) -> None:
    names = ("hinge", "line", "hinge, knot in an end gap")
    hinge, line, gap = (CELLS[f"imported rows, {name}", noise, "7"] for name in names)
    assert fit_cover.measure(hinge, 100, seed=1)["right kind"] >= 0.92
    assert fit_cover.measure(line, 100, seed=1)["right kind"] >= 0.88
    assert fit_cover.measure(gap, 60, seed=1)["at twice"] > 0.85


def test_a_row_that_ran_out_of_memory_against_all_others_is_taken_for_something_elses_doing() -> None:
    x = np.array([128.0, 512, 1024, 2048])
    y = np.array([1000.0, 1160, 1240, 1500]) * MIB
    inside, plain = reserved(x, y, 256, 79e9), reserved(x, y)
    at = np.array([256.0, 2048])
    assert (inside.predict(at).new_high < 1.5 * plain.predict(at).new_high).all()  # nowhere near 79e9
    assert any("something else" in warning for warning in inside.warnings)

    x = np.array([128.0, 256, 512, 1024, 1536, 2048])
    y = (0.15625 * x + 980.0625) * MIB
    beyond = reserved(x, y, 3072, 79e9)
    assert beyond.chosen.model.kind == "linear"
    assert {"linear", "quadratic"} <= {one.model.kind for one in beyond.candidates}
    found = beyond.predict(np.array([1800.0, 3072]))
    assert found.new_high[0] < 1300 * MIB  # nothing changes where it was measured
    assert found.new_low[1] < 1500 * MIB and np.isinf(found.new_high[1])  # 79e9 must lie in it, as must the line
    assert beyond.next_x is None or beyond.next_x < 3072

    torn = reserved(x, 7.8125 * MIB * x, 512, 24e9)  # once it fitted, once it did not
    assert torn.predict(np.array([2048.0])).new_low[0] == pytest.approx(16000 * MIB, rel=0.01)


def test_a_kind_with_as_many_numbers_as_lengths_is_chosen_where_it_is_the_most_probable() -> None:
    x = np.array([256.0, 512, 1024, 2048])
    y = np.array([3843.0, 4613, 6154, 9236]) * MIB
    fit = reserved(x, y, 4096, 25.0e9)
    assert fit.chosen.probability == pytest.approx(max(next(iter(fit.posteriors.values())).probability.values()))
    assert fit.chosen.model.kind != "linear" and not fit.identified


def test_a_curve_lies_within_its_own_interval_where_its_last_piece_has_one_length() -> None:
    x = np.array([256.0, 512, 1024, 2048])
    fit = fitted(x, np.array([3843.0, 3845, 3844, 9236]) * MIB)
    for key, curve in fit.chosen.model.curves.items():
        for name, value in curve.parameters.items():
            low, high = fit.intervals[key][name]
            assert low <= value <= high, name


def test_nothing_falls_below_zero_and_no_length_below_one_is_asked_for() -> None:
    fit = fitted(np.array([100.0, 120, 900]), np.array([2e9, 3.5e9, 3e9]))
    assert (fit.predict(np.array([1.0, 5000, 50_000])).new_low >= 0).all()
    assert fit.next_x is None or fit.next_x >= 1


@pytest.mark.slow
def test_classes_may_be_of_different_kinds() -> None:
    x = np.arange(16.0, 1600, 9)
    noise = np.random.default_rng(5).normal(0, 3e6, len(x))
    hinge, bowl = 4e9 + 2e6 * np.maximum(0, x - 600), 4e9 + 1.2e6 * np.maximum(0, x - 400) + 900 * x**2
    fit = fitted(x, np.where(x % 8 == 0, hinge, bowl) + noise)
    kinds = {key: curve.kind for key, curve in fit.chosen.model.curves.items()}
    assert fit.chosen.model.modulus == 8 and len(set(kinds.values())) == 2, kinds
    assert fit.chosen.probability > 0.3 and " and " in fit.chosen.model.name


def test_a_knot_that_one_length_tells_of_lies_anywhere_in_its_gap() -> None:
    """A third of a gigabyte at the last of seven lengths: neither the steepest rise nor the flattest is likelier."""
    x = np.array([128.0, 256, 512, 768, 1024, 1536, 2048])
    fit = fitted(x, np.where(x > 2000, 8.3e9, 8e9))
    low, high = fit.intervals[True]["k1"]
    assert low == pytest.approx(1536 + 0.025 * 512, abs=25) and 1980 < high < 2048 - 0.025 * 512
    beyond = fit.predict(np.array([2560.0]))  # at least as steep as if the rise began at 1,536
    assert beyond.new_low[0] == pytest.approx(8.6e9, rel=0.005) and beyond.value[0] < 9.5e9


def test_a_row_that_did_not_fit_among_others_says_nothing_of_a_rise_beyond_them() -> None:
    x, y = np.array([128.0, 256, 512, 768, 1024, 1536]), np.full(6, 8000.0 * MIB)
    assert reserved(x, y, 700, 7500.0 * MIB).chosen.model.kind == "linear"
    alone, both = reserved(x, y, 2048, 9000.0 * MIB), reserved(x, y, 700, 7500.0 * MIB, 2048, 9000.0 * MIB)
    at = np.array([3072.0])
    assert both.predict(at).new_low == pytest.approx(alone.predict(at).new_low, rel=0.02)
    assert both.value(at) == pytest.approx(alone.value(at), rel=0.02)


def test_lengths_less_round_than_those_measured_may_need_more_as_blocks_go_in_512_bytes() -> None:
    """Activations of 12 layers x 9 sizes, each in a block of its own, under bf16: to the byte at multiples of 64."""
    x, asked = np.array([128.0, 256, 512, 1024, 1152, 1536, 2048]), np.array([131.0, 500, 777, 1001, 1999, 2047])

    def needs(x: Array) -> Array:
        each = [np.ceil(2 * width * x / 512) * 512 for width in (12, 52, 68, 76, 100, 180, 324, 500, 772)]
        return 4e9 + 12 * np.sum(each, axis=0)

    for known in (x, np.sort([*x, 1151.0])):
        found = fitted(known, needs(known)).predict(asked)
        assert ((found.new_low <= needs(asked)) & (needs(asked) <= found.new_high)).all()
    assert needs(asked).max() - fitted(x, needs(x)).value(asked)[-1] > 0  # more than the line has
    cpu = replace(fitted(x, needs(x)), settings={"device": "cpu"}).predict(np.array([131.0, 128]))
    assert np.ptp(cpu.new_high - fitted(x, needs(x)).predict(np.array([131.0, 128])).new_high) == 32 * 1024  # no blocks


def test_four_lengths_whose_blocks_are_not_split_tell_more_than_nothing() -> None:
    """A replay of Qwen1.5-0.5B: 23 MiB between two lengths of one level once made the interval 11 % wide."""
    sweep = next(grid.sweep for grid in fit_cover.grids() if (grid.name, grid.metric) == REPLAY)
    at = np.array([128.0, 768, 1408, 2048])
    asked = sweep[(sweep.index > 128) & (sweep.index < 2048) & ~sweep.index.isin(at)]
    found = fitted(at, sweep[at].to_numpy(float)).predict(asked.index.to_numpy(float))
    inside = (found.new_low <= asked.to_numpy()) & (asked.to_numpy() <= found.new_high)
    assert inside.mean() >= 0.92 and np.median((found.new_high - found.new_low) / found.value) < 0.06


REPLAY = ("qwen0.5b, default", "peak_allocated_bytes")
GRIDS = [grid for grid in fit_cover.grids() if not grid.others]


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["peak_active_bytes", "peak_reserved_bytes"])
def test_a_public_sweep_s_usual_grid_tells_of_all_other_lengths(public: Table, metric: str) -> None:
    """4 to 12 multiples of 64 or 128; without what other lengths may need more, 0.4 to 0.6 of them lay inside."""
    mine = [grid for grid in GRIDS if grid.metric == metric and "segments" in grid.name]
    found = [fit_cover.on_grid(grid, 6, seed=3) for grid in mine]  # of two draws a mean strays by 0.01
    assert len(mine) > 15 and 0.92 <= np.mean([one["cover"] for one in found]) <= 0.99
    assert np.mean([one["of others"] for one in found]) >= 0.92
    whole = [one for grid, one in zip(mine, found, strict=True) if grid.count >= 6]
    if metric == "peak_active_bytes":
        assert max(one["half-width"] for one in whole) <= 184 and min(one["cover"] for one in whole) > 0.9


@pytest.mark.slow
def test_replays_of_every_kind_of_length_lie_inside_the_intervals_of_the_usual_grid() -> None:
    for metric, before in (("peak_allocated_bytes", 550), ("peak_reserved_bytes", 3062)):
        mine = [grid for grid in fit_cover.grids() if ", " in grid.name and grid.metric == metric]
        found = [fit_cover.on_grid(grid, 2, seed=3) for grid in mine]
        assert len(found) > 50 and 0.92 <= np.mean([one["cover"] for one in found]) <= 0.99
        assert np.mean([one["score"] for one in found]) < before  # of the fits that did not know of other classes


def test_a_few_lengths_of_the_other_class_tell_what_it_needs_more() -> None:
    x = np.array([128.0, 256, 512, 768, 1024, 1280, 1536, 2048])
    odd, asked = np.array([1151.0, 1793]), np.array([901.0, 2041])

    def needs(x: Array) -> Array:
        return (8000 + 3 * x * np.where(x % 8 == 0, 1, 1.03)) * MIB

    alone, both = fitted(x, needs(x)), fitted(np.sort([*x, *odd]), needs(np.sort([*x, *odd])))
    assert alone.only and not alone.identified and alone.next_x is not None and alone.next_x % 8 != 0
    first = "only lengths divisible by 8 were measured; others may need more: a new run at 2,047 tokens: "
    assert fit_wording.explain(alone)[0].startswith(first) and first in fit_wording.summary([alone])
    said = fit_wording.text(alone)
    assert said.splitlines()[1].strip().startswith(first) and said.count(first) == 1
    assert "holds for lengths divisible by 8 from 128 to 2,048 tokens" in said
    assert fit_wording.as_json(alone)["only"] == "lengths divisible by 8"
    assert both.only is None and both.identified and both.value(asked) == pytest.approx(needs(asked), rel=2e-3)
    for fit in (alone, both):
        found = fit.predict(asked)
        assert ((found.new_low <= needs(asked)) & (needs(asked) <= found.new_high)).all()
    wide = [np.ptp([fit.predict(asked).new_low, fit.predict(asked).new_high], axis=0) for fit in (alone, both)]
    assert (wide[1] < wide[0] / 2).all()
    assert fit_wording.explain(both)[0].startswith("lengths not divisible by 8 are estimated from only 2 of them: ")
    even = alone.predict(np.array([512.0, 2048]))
    assert (even.new_high - even.new_low < 2048).all()  # what was measured is as sure as it was


def test_lengths_that_8_does_not_divide_alone_say_that_others_may_need_less() -> None:
    x = np.arange(101.0, 1500, 104)
    fit = fitted(x, (8000 + 3 * x) * MIB)
    found = fit.predict(np.array([1200.0, 1201]))
    assert fit.only is False and fit.next_x is not None and fit.next_x % 8 == 0
    assert found.new_low[0] < (8000 + 3 * 1200 * 0.97) * MIB and found.new_low[1] > (8000 + 3 * 1201 * 0.98) * MIB
    assert "others may need less" in fit_wording.explain(fit)[0]


def test_other_axes_and_step_times_know_no_alignment() -> None:
    x = np.arange(1.0, 18) * 64
    assert fitted(x, 1e-3 * x, "step_median_s").only is None
    assert fitted(x, 1e9 + 1e6 * x, axis="tokens").only is None and fitted(x, 1e9 + 1e6 * x).only
