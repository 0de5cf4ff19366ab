"""Figures of rows whose parts are known, and what all figures promise: of which rows, from where on, on which axis."""

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
import synthetic

from vramsweep.analysis.data.groups import groups
from vramsweep.analysis.data.load import from_frame
from vramsweep.analysis.data.pairing import Beside
from vramsweep.analysis.figures import figure_table, layout
from vramsweep.analysis.figures.allocators import compared
from vramsweep.analysis.figures.composition import LATER, OF_PEAK, composition
from vramsweep.analysis.figures.memory import by_length
from vramsweep.analysis.figures.plots import Figure
from vramsweep.analysis.figures.steps import steps
from vramsweep.analysis.figures.style import View
from vramsweep.analysis.figures.throughput import iterations
from vramsweep.analysis.model.fit import fit_table
from vramsweep.analysis.report.content import collect
from vramsweep.harness.rows.schema import Row

pytestmark = pytest.mark.deterministic

GIB = 2**30
LENGTHS = (512, 1024, 2048, 4096)
NOT_TIMED = dict.fromkeys(("tokens_per_s", "step_times_s", "step_median_s", "step_iqr_s", "mfu", "gpu_name"))


def predicted(**over: Any) -> list[Row]:
    """Simulated rows for an L4 that know their parts."""
    made = synthetic.sweep(device="simulated", simulated_gpu="l4-24gb", **({"lengths": LENGTHS, "repeats": 1} | over))
    for row in made:
        row.update(NOT_TIMED)
        if row["outcome"] == "ok":
            parts = dict.fromkeys(OF_PEAK, 0) | {"parameters": GIB, "optimizer_state": GIB}
            parts |= {"activations": row["peak_allocated_bytes"] - 2 * GIB}
            row.update({OF_PEAK[part]: size for part, size in parts.items()})
    return made


def view(rows: list[Row], **over: Any) -> View:
    table = synthetic.table(rows)
    return View(table, groups(table), **over)


def seen(figure: Figure, **what: Any) -> list[Any]:
    """The traces that are there before anybody chose."""
    return [
        trace
        for trace in figure.plot.data
        if trace.visible is not False and all(getattr(trace, key) == value for key, value in what.items())
    ]


def test_the_parts_are_stacked_up_to_what_is_reserved() -> None:
    rows = predicted(batches=(1,), allocators=("default",))
    (figure,) = composition(view(rows, predicted=True))
    bars = seen(figure, type="bar")
    assert [bar.name for bar in bars] == ["parameters", "optimizer state", "activations", "reserved, unused"]
    assert list(bars[0].x) == [f"{length:,}" for length in LENGTHS] and figure.plot.layout.barmode == "stack"
    total = sum(np.asarray(bar.y, dtype=float) for bar in bars) * GIB
    assert np.allclose(total, [row["peak_reserved_bytes"] for row in rows]) and "reserved_beyond_bytes" in figure.data
    assert "The peak is in the optimizer phase; from 1,024 on, in the backward phase." in figure.caption
    (line,) = [shape for shape in figure.plot.layout.shapes if shape.line.dash == "dash"]  # the GPU that was asked for
    assert GIB / 2 < rows[0]["device_total_bytes"] - line.y0 * GIB < GIB  # less the CUDA context
    earlier = [row | {LATER: None} for row in rows]
    for made in (earlier, [*earlier[:2], *rows[2:]]):  # rows of earlier versions are drawn too
        (old,) = composition(view(made, predicted=True))
        assert [list(bar.y) for bar in seen(old, type="bar")] == [list(bar.y) for bar in bars]
        assert list(old.data[LATER].isna()) == [row in earlier for row in made] and old.caption == figure.caption


def test_many_lengths_are_some_bars() -> None:
    lengths = range(64, 64 * 101, 64)
    (figure,) = composition(view(predicted(batches=(1,), allocators=("default",), lengths=lengths), predicted=True))
    bars = seen(figure, type="bar")[0]
    assert len(bars.x) <= 20 and (bars.x[0], bars.x[-1]) == ("64", "6,400") and " of 100 predicted" in figure.caption


def test_one_configuration_is_shown_and_the_others_wait_to_be_chosen() -> None:
    known = view(predicted(batches=(1, 2)), predicted=True)
    first = known.groups[2]
    (figure,) = composition(View(known.table, [first, *known.groups[:2]], predicted=True))
    shown, every = ({json.dumps(t.meta["settings"]) for t in some if t.type == "bar"}
                    for some in (seen(figure), figure.plot.data))  # fmt: skip
    assert shown == {json.dumps({key: str(value) for key, value in first.settings.items()})} and len(every) == 3
    assert f"Shown: {first.label}, one of 3 configurations." in figure.caption


@pytest.mark.slow
def test_measured_peaks_are_points_over_the_predicted_stack() -> None:
    simulated = predicted(batches=(1,), allocators=("default",))
    ran = synthetic.curve(LENGTHS, repeats=2, gpu_name="NVIDIA L4", flags=[])
    table = from_frame(pd.DataFrame([*simulated, *ran]), "test")
    content = collect(table)
    figure = content.figures[0]  # the main one, though more rows were measured
    assert figure.name.startswith("composition")
    points = {trace.name: trace for trace in figure.plot.data if str(trace.name).startswith("measured")}
    for name in ("allocated", "reserved"):
        drawn = points[f"measured {name}"]
        assert sorted(np.asarray(drawn.y, dtype=float) * GIB) == sorted(row[f"peak_{name}_bytes"] for row in ran)
    assert "Points: 8 measured rows" in figure.caption
    assert figure.source.startswith("Measured and predicted on")
    tile = content.card.dominates
    assert tile.basis == "predicted" and tile.value.startswith("Activations") and "measured: " in tile.about


def test_without_parts_nothing_is_divided_and_the_phases_lead() -> None:
    rows = synthetic.curve(LENGTHS)
    known = view(rows)
    assert composition(known, Beside(known.table)) == []
    assert figure_table.draw([("measured", known)])[0].name == "memory_by_phase"


@pytest.mark.slow
def test_a_card_s_limit_is_a_line_and_what_ran_out_of_memory_crosses_on_it() -> None:
    rows = predicted(batches=(4,), allocators=("default",), lengths=(512, 1024, 2048, 3072, 4096))
    (figure,) = composition(view(rows, predicted=True))
    (cross,) = seen(figure, name="out of memory")
    assert list(cross.x) == ["4,096"]
    names = [note.text for note in figure.plot.layout.annotations if note.name == "limit"]
    assert "l4-24gb" in names

    table = synthetic.table(rows)
    found = groups(table)
    (figure,) = by_length(View(table, found, fits=fit_table(table, found=found)[0], predicted=True))
    (cross,) = seen(figure, name="out of memory")
    assert list(cross.x) == [4096] and "Crosses: 1 ran out of memory, the shortest at 4,096 tokens." in figure.caption
    strip = [trace for trace in seen(figure, yaxis="y2") if trace.mode == "markers"]
    assert strip and figure.plot.layout.yaxis2.tickvals[1] == 0  # residuals, around zero


def test_allocators_have_memory_speed_and_ratios_of_the_default() -> None:
    known = view(rows := synthetic.sweep(LENGTHS, (1,), repeats=3))
    last_first = sorted(known.groups, key=lambda group: group.settings["allocator"] == "default")
    against_length, against_speed = compared(View(known.table, last_first))
    ok = pd.DataFrame([row for row in rows if row["outcome"] == "ok"]).set_index("allocator")
    columns = {"y": "peak_reserved_bytes", "y2": "tokens_per_s"}
    middle = {name: ok.loc[name].groupby("seq_len")[list(columns.values())].median() for name in ok.index.unique()}
    drawn = {(t.name, t.yaxis or "y"): t for t in against_length.plot.data if t.mode != "text"}
    assert list(drawn)[:2] == [("default", "y"), ("default", "y2")]
    for name, of_name in middle.items():
        for axis, column in columns.items():
            trace, unit = drawn[name, axis], 2**30 if axis == "y" else 1
            assert np.asarray(trace.y, dtype=float) * unit == pytest.approx(of_name[column].to_numpy(float))
            low = ok.loc[name].groupby("seq_len")[column].min().to_numpy(float)
            minus = 0.0 if axis == "y" else np.asarray(trace.error_y.arrayminus, dtype=float)  # memory repeats exactly
            assert (np.asarray(trace.y, dtype=float) - minus) * unit == pytest.approx(low)
    ratios = (middle["expandable"] / middle["default"]).dropna()
    assert np.asarray(drawn["reserved, expandable", "y3"].y) == pytest.approx(ratios["peak_reserved_bytes"].to_numpy())
    assert np.asarray(drawn["speed, expandable", "y3"].y) == pytest.approx(ratios["tokens_per_s"].to_numpy())
    assert f"expandable reserves {ratios['peak_reserved_bytes'].median():.3f} times" in against_length.caption
    (line,) = (t for t in against_speed.plot.data if t.name == "default")
    assert np.asarray(line.x, dtype=float) == pytest.approx(middle["default"]["tokens_per_s"].to_numpy(float))
    assert list(line.customdata) == [f"{length:,}" for length in middle["default"].index]


@pytest.mark.parametrize(("batches", "axes"), [((1, 4), "iterations/s, samples/s"), ((1,), "iterations/s = samples/s")])
def test_samples_per_second_have_a_panel_unless_a_step_has_one(batches: tuple[int, ...], axes: str) -> None:
    rows = synthetic.sweep(LENGTHS, batches, allocators=("default",), repeats=1)
    expected = {row["trial_id"]: row.get("samples_per_s") for row in rows}
    unknown = [row | {"samples_per_s": None} for row in rows]  # as of a file that has it/s alone
    for known in (rows, unknown):
        (figure,) = iterations(view(known))
        for plot in (figure.plot, layout.column(layout.static(figure))):
            assert ", ".join(axis.title.text.replace("<br>", " ") for axis in plot.select_yaxes()) == axes
        data = figure.data.set_index("trial_id")["samples_per_s"]
        assert data.to_dict() == pytest.approx({one: expected[one] for one in data.index})
        below = [y for trace in seen(figure, yaxis="y2") for y in trace.y]
        assert below == (pytest.approx(data.tolist()) if len(batches) > 1 else [])


@pytest.mark.parametrize(("measured", "drawn"), [(4, False), (5, True)])
def test_a_plateau_is_seen_from_five_steps_on(measured: int, drawn: bool) -> None:
    rows = synthetic.curve(LENGTHS)
    for row in rows:
        row["step_peak_reserved_bytes"] = (row["step_peak_reserved_bytes"] or [])[:measured]
    assert ("plateau" in [figure.name for figure in steps(view(rows))]) is drawn


@pytest.mark.slow
def test_every_figure_says_what_it_is_of_wherever_it_stands() -> None:
    rows = [*predicted(batches=(1, 2)), *synthetic.sweep(LENGTHS, (1, 2), repeats=1, gpu_name="NVIDIA L4")]
    for figure in collect(synthetic.table(rows)).figures:
        assert " rows" in figure.source and "torch 0.0" in figure.source, figure.name
        json.dumps(layout.on_phone(figure))  # plain data, for the page
        for alone in (layout.page(figure), layout.column(figure)):
            small = [note for note in alone.layout.annotations if note.name == "source"]
            told = " ".join(str(small[0].text).replace("<br>", " ").split())
            assert told == " ".join(figure.source.split()), figure.name
            words = "".join(str(alone.layout.title.text).replace("<br>", "").split())
            assert "".join(figure.title.replace("&", "&amp;").split()) in words, figure.name


@pytest.mark.parametrize(("low", "high"), [(100, 900), (1, 1024), (0, 0.07), (500, 1500), (-3, 3), (8190, 8192)])
def test_an_axis_has_three_ticks_at_least(low: float, high: float) -> None:
    step = layout.tick_step(low, high)
    ticks = [step * k for k in range(int(low / step) - 2, int(high / step) + 2) if low <= step * k <= high]
    assert 3 <= len(ticks) <= 7
