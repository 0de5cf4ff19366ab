"""The figure and the sentence of runs whose lengths vary, from rows whose numbers are known."""

from __future__ import annotations

from typing import Any

import pandas as pd
import synthetic

from vramsweep.analysis.compare import lengths
from vramsweep.analysis.data.groups import groups
from vramsweep.analysis.data.load import Table, from_frame
from vramsweep.analysis.data.metrics import GIB
from vramsweep.analysis.figures.lengths import of_lengths
from vramsweep.analysis.report.content import collect
from vramsweep.harness.row import Row, complete


def row(allocator: str, reserved: list[float], **over: Any) -> Row:
    """A run on varying lengths that holds so many GiB at the end of its steps."""
    (one,) = synthetic.sweep(lengths=(512,), batches=(1,), allocators=(allocator,), repeats=1)
    sizes = [int(size * GIB) for size in reserved]
    known = {
        "data": "lengths:lognormal(99,1)",
        "padding_to": "longest",
        "step_reserved_bytes": sizes,
        "step_allocated_bytes": [GIB] * len(sizes),
        "step_peak_allocated_bytes": [4 * GIB, 6 * GIB] + [5 * GIB] * (len(sizes) - 2),
        "step_tokens": [100] * len(sizes),
        "peak_allocated_bytes": 6 * GIB,
        "peak_reserved_bytes": max(sizes),
        "alloc_retries": 0,
    }
    return complete(one | known | over)


def table(*rows: Row) -> Table:
    return from_frame(pd.DataFrame(list(rows)), "here")


def said(*rows: Row) -> list[str]:
    return lengths.sentences(lengths.runs(groups(table(*rows))))


def test_what_each_setting_holds_is_said_against_the_default() -> None:
    found = said(row("expandable", [7, 7, 8, 8]), row("default", [8, 9, 9, 10], alloc_retries=3))
    assert found == [
        "Lengths that vary: expandable holds 20% less reserved after 4 steps (8.00 GiB against 10.00 GiB of default); "
        "25% of its peak is more than was ever allocated, against 40%; retries 0 against 3."
    ]
    (alone,) = said(row("default", [8, 9, 9, 10]))
    assert "default holds 10.00 GiB after 4 steps, 2.00 GiB more than after the first of them" in alone


def test_one_that_runs_out_of_memory_is_named_with_its_step() -> None:
    nothing = dict.fromkeys(("step_reserved_bytes", "step_peak_allocated_bytes", "step_tokens"))
    full = row("default", [8], **nothing, outcome="oom", phase="step 37: forward")
    (text,) = [text for text in said(row("expandable", [7, 8]), full) if "runs out" in text]
    assert text == "Lengths that vary: with default memory runs out at step 37: forward; expandable goes on."


def test_other_lengths_are_another_comparison_and_one_length_is_none() -> None:
    other = [row(a, [5, 5], padding_to="64", trial_id=f"64{a}") for a in ("default", "expandable")]
    every = lengths.runs(groups(table(row("default", [8, 9]), row("expandable", [7, 8]), *other)))
    assert sorted(tuple(one.allocator for one in runs.held) for runs in every) == [("default", "expandable")] * 2
    assert lengths.runs(groups(table(*synthetic.sweep()))) == []


def test_the_figure_has_a_line_a_setting_and_the_rows_numbers() -> None:
    rows = [row("default", [8, 9, 9, 10]), row("expandable", [7, 7, 8, 8])]
    (figure,) = of_lengths(lengths.runs(groups(table(*rows))))
    drawn = {trace.name: list(trace.y) for trace in figure.plot.data}
    assert drawn == {"peak allocated of the step": [4, 6, 5, 5], "default": [8, 9, 9, 10], "expandable": [7, 7, 8, 8]}
    assert set(figure.data["trial_id"]) == {one["trial_id"] for one in rows}


def test_the_report_tells_predicted_from_measured() -> None:
    measured = [row("default", [8, 9]), row("expandable", [7, 8])]
    simulated = [
        complete(one | {"device": "simulated", "memory_source": "simulator", "trial_id": f"s{one['trial_id']}"})
        for one in measured
    ]
    content = collect(table(*measured, *simulated))
    about = [text for text in content.findings if "Lengths that vary" in text]
    assert [text.startswith("Predicted: ") for text in about] in ([True, False], [False, True])
    assert content.summary.splitlines()[:2] == about  # which is what the terminal begins with
    assert len([figure for figure in content.figures if figure.name.startswith("lengths")]) == 2
