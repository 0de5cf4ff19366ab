"""What findings and figures say of reserve at the peak, of allocators along length, of misses and of open intervals."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pandas as pd
import pytest
import synthetic

from vramsweep.analysis.data.groups import Group, groups
from vramsweep.analysis.data.load import Table, from_frame
from vramsweep.analysis.figures import plots, rows
from vramsweep.analysis.model.curves import Array
from vramsweep.analysis.model.fit import Fit, Prediction, fit_table
from vramsweep.analysis.model.frontier import frontier
from vramsweep.analysis.report import findings
from vramsweep.harness.row import Row

GIB = 2**30


def known(made: list[Row]) -> tuple[Table, list[Group], list[Fit]]:
    table = from_frame(pd.DataFrame(made), "test")
    found = groups(table)
    return table, found, fit_table(table, found=found)[0]


def finding(made: list[Row], start: str) -> str:
    table, found, _ = known(made)
    return next(text for text in findings.findings(table, found, []) if text.startswith(start))


@pytest.mark.slow
def test_what_is_reserved_is_told_at_the_peak_and_only_beside_it_between_steps() -> None:
    said = finding(synthetic.sweep(batches=(1, 2), lengths=(1024, 2048, 4096), repeats=1), "Most reserved")
    assert said == (  # peak 13.44 GiB, of which 15 % and 128 MiB more are reserved; 3 GiB stay between steps
        "Most reserved beyond allocated at the peak: 2.14 GiB, 14 % of reserved, at 4,096 tokens, batch 2 (default), "
        "in the backward phase. Between steps, when activations are freed, 12.58 GiB are cached."
    )


@pytest.mark.slow
def test_where_allocated_is_not_known_active_stands_in_for_it_and_that_is_said() -> None:
    made = synthetic.sweep(batches=(1,), allocators=("default",), foreign="somewhere", peak_allocated_bytes=None)
    made = [{**row, "reserved_unallocated_bytes": None, "backward_peak_allocated_bytes": None} for row in made]
    said = finding(made, "Most reserved")
    assert said.startswith("Most reserved beyond active (allocated is not known) at the peak: 2.1")
    assert "Between steps" not in said
    figure = rows.unallocated(known(made)[1])
    assert figure is not None and figure.name == "reserved_unallocated"
    assert "Allocated is not known of these rows: active stands in for it." in figure.caption
    assert figure.plot.layout.yaxis.title.text == "reserved − active (GiB)"


@pytest.mark.slow
def test_a_resident_set_is_no_reserve() -> None:
    made = synthetic.sweep(batches=(1,), device="cpu", memory_source="cpu_tensors_and_rss")
    table, found, _ = known(made)
    assert not [text for text in findings.findings(table, found, []) if "Most reserved" in text]
    assert rows.unallocated(found) is None


@pytest.mark.slow
def test_the_figure_of_reserve_is_of_the_peak() -> None:
    made = synthetic.sweep(batches=(1,), repeats=1)
    figure = rows.unallocated(known(made)[1])
    assert figure is not None
    of_row = {row["trial_id"]: row for row in made}
    for _, drawn in figure.data.iterrows():
        row = of_row[drawn["trial_id"]]
        assert drawn["beyond_bytes"] == row["peak_reserved_bytes"] - row["peak_allocated_bytes"]


@pytest.mark.slow
def test_allocators_are_compared_along_length() -> None:
    said = finding(synthetic.sweep(batches=(1,)), "Allocator expandable against default")
    assert "peak reserved SMALLER (smaller in 10 of 10 pairs; geometric mean -11.05 %); the gap grows by " in said
    assert "at 128 tokens to -1.75 GiB (-11.20 %) at 8,192 tokens. Its speed: SAME (" in said
    said = finding(synthetic.sweep(batches=(1,), lengths=(128, 256)), "Allocator expandable against default")
    assert "the gap" not in said
    assert "(smaller in 2 of 2 pairs; geometric mean -10.93 %, -400.0 MiB)" in said


@pytest.mark.slow
def test_two_verdicts_that_turn_at_one_place_are_said_once() -> None:
    made = synthetic.sweep(batches=(1,), lengths=range(64, 1025, 64), repeats=1, allocators=("default", "expandable"))
    for row in made:
        more = 1.1 if (row["allocator"] == "default") == (row["seq_len"] > 512) else 1.0
        row["peak_reserved_bytes"] = int(row["peak_allocated_bytes"] * more) // 2**21 * 2**21
    said = finding(made, "Allocator expandable against default")
    assert said.count("512 and 576") == 1
    assert "SMALLER from about 576 tokens on" in said


@pytest.mark.slow
def test_no_speed_no_verdict_on_it() -> None:
    made = synthetic.sweep(batches=(1,), device="simulated", tokens_per_s=None, step_median_s=None)
    assert "speed" not in finding(made, "Allocator")


@pytest.mark.slow
def test_throughput_marks_what_its_fit_misses() -> None:
    made = synthetic.sweep(batches=(1,), allocators=("default",), lengths=range(128, 4097, 128), repeats=1)
    _, found, fits = known(made)
    figure = plots.throughput(fits, found)
    assert figure is not None
    inside = figure.data[~figure.data["outside"]]
    assert len(inside) >= 29
    for row in made:
        if row["seq_len"] in (1024, 2048):
            row |= {"step_median_s": row["step_median_s"] * 1.25, "tokens_per_s": row["tokens_per_s"] / 1.25}
        if row["seq_len"] == 3072:
            row |= {"step_median_s": row["step_median_s"] * 1.5, "tokens_per_s": row["tokens_per_s"] / 1.5}
    _, found, _ = known(made)
    figure = plots.throughput(fits, found)
    assert figure is not None
    assert set(figure.data.loc[figure.data["outside"], "seq_len"]) >= {1024, 2048, 3072}
    number = int(figure.data["outside"].sum())
    assert f"Open markers: {number} of 32 lie outside the fit's 95 % interval for a new run, of which about 2" in (
        figure.caption
    )
    assert "% slower than fitted, at 3,072 tokens; others at 1,024, 2,048" in figure.caption
    marks = [trace.marker.symbol for trace in figure.plot.data if trace.mode == "markers"]
    assert marks == ["circle", "circle-open"]
    assert [trace.showlegend for trace in figure.plot.data if trace.mode == "markers"] == [True, False]


@pytest.mark.slow
def test_captions_say_what_lines_rest_on() -> None:
    made = synthetic.sweep(batches=(1,), lengths=(128, 256, 512, 1024, 2048, 4096, 8192))
    _, found, fits = known(made)
    memory, allocators = plots.memory_by_length(fits, found), plots.allocators(fits, found)
    assert memory is not None and allocators is not None
    for figure in (memory, allocators):
        assert "which rests on the peak of each phase, over batch and length together; bands" in figure.caption
        assert set(figure.data["rests_on"]) == {"phases"}
    mixed = [replace(fit, basis="points") if fit.metric.limited else fit for fit in fits]
    figure = plots.memory_by_length(mixed, found)
    assert figure is not None
    assert "together (peak allocated), or on these points alone (peak reserved)" in figure.caption


class _Endless(Fit):
    """A fit whose upper end nothing bounds beyond 1,000 tokens, and is not known at all before."""

    def predict(self, x: Array) -> Prediction:
        found = super().predict(x)
        open_ended = np.where(x > 1000, np.inf, np.nan)
        return replace(found, high=open_ended, new_high=open_ended)


@pytest.mark.slow
def test_bands_without_an_end_stop_outside_the_figure() -> None:
    _, found, fits = known(synthetic.sweep(batches=(1,), allocators=("default",)))
    fits = [_Endless(**{one.name: getattr(fit, one.name) for one in fields(Fit)}) for fit in fits]
    for figure in (plots.memory_by_length(fits, found), plots.throughput(fits, found)):
        assert figure is not None
        low, high = figure.plot.layout.yaxis.range
        bands = [np.asarray(trace.y, dtype=float) for trace in figure.plot.data if trace.fill == "toself"]
        assert bands
        for band in bands:
            assert np.isfinite(band).all()
            assert band.min() >= 2 * low - high and band.max() <= 2 * high - low


@pytest.mark.slow
def test_a_frontier_without_an_upper_end_says_so() -> None:
    made = synthetic.sweep(batches=(1,), lengths=(1024, 1536, 2048, 3072))
    hidden = [{key: None if "_peak_" in key and "reserved" not in key else v for key, v in r.items()} for r in made]
    table, found, fits = known(hidden)
    figure = rows.frontier_chart(frontier(table, fits=fits, found=found), found)
    assert figure is not None
    assert "Where there is no bar upwards, no upper end is known." in figure.caption
    for trace in figure.plot.data:
        assert np.isfinite(np.asarray(trace.error_y.array, dtype=float)).all()
        assert np.isfinite(np.asarray(trace.error_y.arrayminus, dtype=float)).all()


@pytest.mark.slow
def test_groups_of_one_label_stay_apart() -> None:
    made: list[Row] = []
    for model, precision in (("a · b", "c"), ("a · b", "d"), ("a", "b · c")):
        mine = synthetic.sweep((512, 1024, 2048, 4096), (1,), ("default",), 1, model=model, precision=precision)
        made += [{**row, "trial_id": f"{model}{precision}{row['trial_id']}"} for row in mine]
    _, found, fits = known(made)
    assert sorted(group.label for group in found) == ["a · b · c", "a · b · c", "a · b · d"]
    assert len({group.id for group in found}) == 3
    assert sorted(plots.names(found)) == ["a · b · c (1)", "a · b · c (2)", "a · b · d"]
    pareto, throughput = rows.pareto(found), plots.throughput(fits, found)
    assert pareto is not None and throughput is not None
    assert len(pareto.data) == 3
    assert len(throughput.data) == len(made)
