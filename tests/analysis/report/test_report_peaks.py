"""Test what figures state: prediction errors, the data behind a line, and open intervals."""

from dataclasses import fields, replace

import numpy as np
import pytest
import synthetic

from vramsweep.analysis.data.groups import groups
from vramsweep.analysis.figures.frontier import frontier_chart
from vramsweep.analysis.figures.memory import by_length
from vramsweep.analysis.figures.style import View, names
from vramsweep.analysis.figures.throughput import throughput
from vramsweep.analysis.figures.tradeoffs import pareto
from vramsweep.analysis.model.curves import Array
from vramsweep.analysis.model.fit import Fit, Prediction, fit_table
from vramsweep.analysis.model.memory_frontier import frontier
from vramsweep.harness.rows.schema import Row

pytestmark = [pytest.mark.slow, pytest.mark.deterministic]


def known(made: list[Row]) -> View:
    table = synthetic.table(made)
    found = groups(table)
    fits = fit_table(table, found=found)[0]
    return View(table, found, fits=fits, limits=frontier(table, fits=fits, found=found))


def test_throughput_marks_what_its_fit_misses() -> None:
    made = synthetic.curve(range(128, 4097, 128))
    view = known(made)
    (figure,) = throughput(view)
    inside = figure.data[~figure.data["outside"]]
    assert len(inside) >= 29
    for row in made:
        if row["seq_len"] in (1024, 2048):
            row |= {"step_median_s": row["step_median_s"] * 1.25, "tokens_per_s": row["tokens_per_s"] / 1.25}
        if row["seq_len"] == 3072:
            row |= {"step_median_s": row["step_median_s"] * 1.5, "tokens_per_s": row["tokens_per_s"] / 1.5}
    (figure,) = throughput(replace(known(made), fits=view.fits))
    assert set(figure.data.loc[figure.data["outside"], "seq_len"]) >= {1024, 2048, 3072}
    number = int(figure.data["outside"].sum())
    assert f"Open markers: {number} of 32 lie outside the fit's 95 % interval for a new run" in figure.caption
    assert "% slower than fitted, at 3,072 tokens." in figure.caption
    marks = [trace.marker.symbol for trace in figure.plot.data if trace.mode == "markers"]
    assert marks == ["circle", "circle-open"]


def test_captions_say_what_lines_rest_on() -> None:
    made = synthetic.sweep(batches=(1,), lengths=(128, 256, 512, 1024, 2048, 4096, 8192))
    view = known(made)
    (figure,) = by_length(view)
    assert "based on the peak of each phase, over batch and length together. Bands" in figure.caption
    assert set(figure.data["rests_on"].dropna()) == {"phases"}
    mixed = [replace(fit, basis="points") if fit.metric.limited else fit for fit in view.fits]
    (figure,) = by_length(replace(view, fits=mixed))
    assert "together (peak allocated), or on these points alone (peak reserved)" in figure.caption


class _Endless(Fit):
    """A fit whose upper end nothing bounds beyond 1,000 tokens, and is not known at all before."""

    def predict(self, x: Array) -> Prediction:
        found = super().predict(x)
        open_ended = np.where(x > 1000, np.inf, np.nan)
        return replace(found, high=open_ended, new_high=open_ended)


def test_bands_without_an_end_stop_outside_the_figure() -> None:
    view = known(synthetic.sweep(batches=(1,), allocators=("default",)))
    fits = [_Endless(**{one.name: getattr(fit, one.name) for one in fields(Fit)}) for fit in view.fits]
    for draw in (by_length, throughput):
        (figure,) = draw(replace(view, fits=fits))
        low, high = figure.plot.layout.yaxis.range
        bands = [np.asarray(trace.y, dtype=float) for trace in figure.plot.data if trace.fill == "toself"]
        assert bands
        for band in bands:
            assert np.isfinite(band).all()
            assert band.min() >= 2 * low - high and band.max() <= 2 * high - low


def test_a_frontier_is_solid_as_far_as_rows_ran_and_marked_beyond() -> None:
    made = synthetic.sweep(batches=(1, 4), allocators=("default",))
    view = known(made)
    (figure,) = frontier_chart(view)
    bars = [trace for trace in figure.plot.data if trace.type == "bar"]
    ran = {row["micro_batch"]: row["seq_len"] for row in made if row["outcome"] == "ok"}  # lengths rise
    proven = {trace.meta["settings"]["micro_batch"]: trace.x[0] for trace in bars if not trace.marker.pattern.shape}
    assert proven["4"] == ran[4] and proven["1"] == ran[1]
    ticks = [trace.x[0] for trace in figure.plot.data if trace.type == "scatter" and trace.mode == "markers"]
    assert ticks and all(np.isfinite(ticks))
    assert figure.plot.layout.xaxis.range[0] == 0
    assert not figure.plot.layout.yaxis.title.text


def test_a_frontier_without_an_upper_end_ends() -> None:
    made = synthetic.sweep(batches=(1,), lengths=(1024, 1536, 2048, 3072))
    hidden = [{key: None if "_peak_" in key and "reserved" not in key else v for key, v in r.items()} for r in made]
    (figure,) = frontier_chart(known(hidden))
    for trace in figure.plot.data:
        assert np.isfinite(np.asarray(trace.x, dtype=float)).all()


def test_a_point_that_the_host_limits_is_on_no_front() -> None:
    made: list[Row] = []
    for model, by, factor in (("a", "gpu", 1.0), ("b", "host", 1.5), ("c", "gpu", 2.0)):  # the faster, the more memory
        for row in synthetic.curve((512, 1024, 2048, 4096), model=model):
            more = {name: factor * row[name] for name in ("tokens_per_s", "peak_reserved_bytes")}
            made.append({**row, **more, "trial_id": f"{model}{row['trial_id']}", "bound_by": by})
    (figure,) = pareto(known(made))
    line, *points = (trace for trace in figure.plot.data if trace.mode != "text")
    hollow = {point.name: str(point.marker.symbol).endswith("-open") for point in points if point.name}
    assert hollow == {"a": False, "b": True, "c": False}
    assert len(line.y) == 2 and "hollow" in figure.caption


def test_groups_of_one_label_stay_apart() -> None:
    made: list[Row] = []
    for model, precision in (("a · b", "c"), ("a · b", "d"), ("a", "b · c")):
        mine = synthetic.curve((512, 1024, 2048, 4096), model=model, precision=precision)
        made += [{**row, "trial_id": f"{model}{precision}{row['trial_id']}"} for row in mine]
    view = known(made)
    found = view.groups
    assert sorted(group.label for group in found) == ["a · b · c", "a · b · c", "a · b · d"]
    assert len({group.id for group in found}) == 3
    assert sorted(names(found)) == ["a · b · c (1)", "a · b · c (2)", "a · b · d"]
    (trade,), (speed,) = pareto(view), throughput(view)
    assert len(trade.data) == 3
    assert len(speed.data) == len(made)
