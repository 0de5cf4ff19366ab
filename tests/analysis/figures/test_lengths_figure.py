"""The figure, the table and the sentences of runs whose lengths vary, from rows whose numbers are known."""

from collections.abc import Sequence
from typing import Any

import pytest
import synthetic

from vramsweep.analysis.compare import lengths
from vramsweep.analysis.data.groups import groups
from vramsweep.analysis.data.load import DRAWN, Table
from vramsweep.analysis.data.metrics import GIB, MIB
from vramsweep.analysis.figures.plots import Figure
from vramsweep.analysis.figures.steps import of_lengths
from vramsweep.analysis.figures.style import View
from vramsweep.analysis.model.fit import fit_table
from vramsweep.analysis.model.memory_frontier import frontier
from vramsweep.analysis.report.content import collect
from vramsweep.harness.rows.schema import Row, complete_row
from vramsweep.harness.spec.length_distribution import PREFIX

pytestmark = pytest.mark.deterministic

UNKNOWN = dict.fromkeys(("step_reserved_bytes", "step_peak_allocated_bytes", "step_tokens"))


def row(allocator: str, reserved: Sequence[float], **over: Any) -> Row:
    """A run on varying lengths that holds so many GiB at the end of its steps."""
    (one,) = synthetic.sweep(lengths=(512,), batches=(1,), allocators=(allocator,), repeats=1)
    sizes = [int(size * GIB) for size in reserved]
    known = {
        "data": "lengths:lognormal(99,1)", "padding_to": "longest", "packing": "none", "alloc_retries": 0,
        "step_reserved_bytes": sizes, "step_allocated_bytes": [GIB] * len(sizes), "warmup_steps": 3,
        "step_peak_allocated_bytes": [4 * GIB, 6 * GIB, *[5 * GIB] * len(sizes)][: len(sizes)],
        "step_tokens": [100] * len(sizes), "peak_allocated_bytes": 6 * GIB, "peak_reserved_bytes": max(sizes),
    }  # fmt: skip
    marks = "-".join(f"{value}" for value in over.values() if isinstance(value, int | str))
    return complete_row(one | known | {"trial_id": f"{allocator}-{marks}"} | over)


def full(allocator: str, phase: str = "step 37: forward", **over: Any) -> Row:
    """A run that ran out of memory."""
    return row(allocator, [8], **(UNKNOWN | {"warmup_steps": None} | over), outcome="oom", phase=phase)


def table(*rows: Row) -> Table:
    return synthetic.table(rows)


def figures(*rows: Row) -> list[Figure]:
    known = table(*rows)
    return of_lengths(View(known, [], runs=lengths.runs(groups(known))))


def said(*rows: Row) -> list[str]:
    return lengths.sentences(lengths.runs(groups(table(*rows))))


def test_what_each_setting_holds_is_said_against_the_default() -> None:
    found = said(row("expandable", [7, 7, 8, 8]), row("default", [8, 9, 9, 10], alloc_retries=3))
    assert found == [
        "With varying lengths (samples of at most 512 tokens · seed 0), compared with default, expandable reserves 20 "
        "% less after 4 steps (8.0 GiB against 10.0 GiB); 25 % of its peak reserved was above its peak "
        "allocated, against 40 % of default's; retries 0 against 3."
    ]


@pytest.mark.slow
def test_a_setting_alone_is_told_from_its_first_step_on() -> None:
    (more,) = said(row("default", [8, 9, 9, 10], alloc_retries=1))
    assert "default reserves 10.0 GiB after 4 steps, 2.0 GiB more than after the first of them" in more
    assert "with 1 retry." in more
    (less,) = said(row("default", [8, 5]))
    assert "3.0 GiB less than after the first" in less and "retr" not in less
    (same,) = said(row("default", [8, 8]))
    assert "after 2 steps, as much as after the first" in same


def test_every_seed_counts_and_the_range_over_them_is_said() -> None:
    (text,) = said(
        row("default", [8, 10], seed=0), row("expandable", [8, 8.8], seed=0),
        row("default", [8, 10], seed=1), row("expandable", [8, 15], seed=1),
        row("default", [8, 10], seed=2), row("expandable", [8, 11], seed=2),
    )  # fmt: skip
    assert "3 seeds" in text
    assert "from 12 % less to 50 % more over 3 seeds after 2 steps" in text
    assert "(8.8 GiB against 10.0 GiB with seed 0, 15.0 GiB against 10.0 GiB with seed 1)" in text


@pytest.mark.slow
def test_seeds_that_only_one_setting_has_do_not_hinder_the_others() -> None:
    rows = [row("expandable", [7, 7], seed=0), row("default", [8, 10], seed=1), row("expandable", [8, 9], seed=1)]
    (text,) = said(*rows)
    assert "expandable reserves 10 % less after 2 steps (9.0 GiB against 10.0 GiB)" in text
    (figure,) = figures(*rows)
    assert set(figure.data["seed"]) == {1} and "seed 1" in figure.caption
    (apart,) = said(row("expandable", [7, 7], seed=0), row("default", [8, 10], seed=1))
    assert "expandable and default have no seed in common" in apart


def test_the_longest_cut_and_the_last_repeat_count() -> None:
    (text,) = said(
        row("default", [2, 2], seq_len=256), row("expandable", [1, 1], seq_len=256),
        row("default", [8, 9], repeat=0), row("default", [8, 10], repeat=1), row("expandable", [8, 8]),
    )  # fmt: skip
    assert "at most 512 tokens" in text and "20 % less after 2 steps (8.0 GiB against 10.0 GiB)" in text


def test_runs_of_other_step_counts_are_not_compared_and_that_is_said() -> None:
    rows = [row("default", [8, 9, 9, 10]), row("expandable", [7, 7])]
    (text,) = said(*rows)
    assert text.endswith("expandable and default have 2 and 4 measured steps, so they are not compared.")
    (one,) = said(*rows, row("default", [8, 10], seed=1), row("expandable", [5, 5], seed=1))
    assert "50 % less after 2 steps" in one  # of seed 1, where both have as many


def test_settings_of_one_name_are_told_apart() -> None:
    confs = ("max_split_size_mb:64", "max_split_size_mb:128")
    first, second = (row("custom", [size, size], allocator_conf=conf) for size, conf in zip((8, 6), confs, strict=True))
    (text,) = said(first, second)
    assert f"compared with custom {confs[0]}, custom {confs[1]} reserves 25 % less" in text
    (figure,) = figures(first, second)
    assert {f"custom {conf}" for conf in confs} <= {trace.name for trace in figure.plot.data}


@pytest.mark.slow
def test_one_that_runs_out_of_memory_is_named_with_its_measured_step() -> None:
    text, *more = [text for text in said(row("expandable", [7, 8]), full("default")) if "out of memory" in text]
    assert text.endswith("default runs out of memory at measured step 34 (forward); expandable does not.") and not more
    for phase, place in (("step 3: backward", "the probe step (backward)"), ("step 0", "warm-up step 1"),
                         ("load", "load")):  # fmt: skip
        found = said(row("expandable", [7, 8]), full("default", phase))
        assert any(f"out of memory at {place};" in one for one in found)


@pytest.mark.slow
def test_repeats_and_seeds_that_run_out_of_memory_are_counted() -> None:
    both = said(row("expandable", [7, 8]), full("default", repeat=0), full("default", repeat=1))
    assert sum("out of memory" in text for text in both) == 1
    mixed = said(row("default", [7, 8], seed=0), full("default", seed=1), row("expandable", [7, 8], seed=0))
    (text,) = [text for text in mixed if "out of memory" in text]
    assert "default runs out of memory in 1 of 2 runs, at measured step 34 (forward); expandable does not" in text
    none = said(full("default"), full("expandable", warmup_steps=3))
    assert len(none) == 2 and all("runs out of memory at measured step 34" in one and "not" not in one for one in none)
    shorter = said(row("default", [7, 8]), row("expandable", [7, 8]), full("default", seq_len=256))
    assert not any("out of memory" in text for text in shorter)


@pytest.mark.slow
def test_other_lengths_are_another_comparison_and_one_length_is_none() -> None:
    other = [row(a, [5, 5], padding_to="64") for a in ("default", "expandable")]
    every = lengths.runs(groups(table(row("default", [8, 9]), row("expandable", [7, 8]), *other)))
    names = [tuple(held.allocator for held in one.drawn()) for one in every]
    assert names == [("default", "expandable")] * 2
    assert lengths.runs(groups(table(*synthetic.sweep()))) == []


def test_the_figure_has_a_line_a_setting_and_the_rows_numbers() -> None:
    rows = [row("default", [8, 9, 9, 10]), row("expandable", [7, 7, 8, 8])]
    (figure,) = figures(*rows)
    lines = [trace for trace in figure.plot.data if trace.mode == "lines"]
    drawn = {trace.name: list(trace.y) for trace in lines}
    assert drawn == {"peak allocated of the step": [4, 6, 5, 5], "default": [8, 9, 9, 10], "expandable": [7, 7, 8, 8]}
    assert [list(trace.x) for trace in lines] == [[1, 2, 3, 4]] * 3
    assert set(figure.data["trial_id"]) == {one["trial_id"] for one in rows}


def test_equal_lines_are_one_with_both_names_and_labels_stand_at_the_ends() -> None:
    rows = [row("default", [8, 9, 9, 10]), row("gc", [8, 9, 9, 10]), row("expandable", [7, 7, 8, 8])]
    (figure,) = figures(*rows)
    assert [trace.name for trace in figure.plot.data if trace.mode == "lines"][1:] == ["default, gc", "expandable"]
    assert set(figure.data["allocator"]) == {"default", "gc", "expandable"}
    at = {trace.text[0].strip(): trace.y[0] for trace in figure.plot.data if trace.mode == "text"}
    assert abs(at["peak allocated"] - 5) < 0.6 and abs(at["default, gc"] - 10) < 0.6


@pytest.mark.slow
def test_a_cut_is_no_length_of_a_fit_a_figure_or_what_fits() -> None:
    rows = [
        row(a, [size / 128, size / 100], seq_len=size, seed=seed, peak_allocated_bytes=size * (MIB + seed))
        for a in ("default", "expandable")
        for size in (128, 256, 512)
        for seed in (0, 1)
    ]
    varied = table(*rows)
    fits, notes = fit_table(varied)
    assert fits == [] and "4 groups of varying lengths not fitted" in notes[0]
    assert frontier(varied) == []
    content = collect(varied)
    assert [figure.name for figure in content.figures] == ["lengths", "step_times"]
    assert not any("should repeat exactly" in text or "rests on" in text for text in content.warnings)
    shown = {name: frame for _, name, frame in content.tables}
    assert shown["frontier"].empty and shown["settings"].empty
    assert list(shown["lengths"]["samples cut at (tokens)"]) == ["128", "256", "512"] * 4
    assert all("seed" in text for text in shown["lengths"]["settings"])
    packed = [one | {"packing": "wrapped"} for one in rows]  # full samples, so that length is one
    assert {fit.metric.column for fit in fit_table(table(*packed))[0]} >= {"peak_allocated_bytes"}


@pytest.mark.slow
def test_rows_beside_them_are_fitted_as_ever() -> None:
    fixed = synthetic.sweep(batches=(1,), repeats=1)
    alone, both = (fit_table(table(*rows))[0] for rows in (fixed, [*fixed, row("default", [8, 9], seq_len=700)]))
    assert [list(fit.points.x) for fit in alone] == [list(fit.points.x) for fit in both]
    speed = max(one["tokens_per_s"] or 0 for one in fixed)
    fast = row("default", [8, 9], seq_len=700, tokens_per_s=10 * speed)
    assert collect(table(*fixed, fast)).card.speed.value == f"{speed:,.0f} tokens/s"


def test_on_a_cpu_the_steps_themselves_are_told() -> None:
    nothing = {"step_reserved_bytes": None, "device": "cpu", "memory_source": "cpu_tensors_and_rss"}
    documents = {"shortest_document": 3, "mean_document": 40.0, "longest_document": 200, "padding_fraction": 0.25}
    rows = [row("default", [1, 1], seed=s, step_tokens=[80 + s, 120], **nothing, **documents) for s in (0, 1)]
    (text,) = said(*rows)
    assert text == (
        "With varying lengths (samples of at most 512 tokens · 2 seeds), a step has 80 to 120 tokens, 100 on average, "
        "25 % of it padding; documents have 3 to 200, 40 on average; peak allocated 6.0 GiB."
    )
    line = lengths.table(groups(table(*rows))).iloc[0]
    assert (line["tokens of a step"], line["padding"], line["documents (tokens)"]) == ("80 to 120", "25 %", "3 to 200")


@pytest.mark.slow
def test_the_report_tells_predicted_from_measured() -> None:
    measured = [row("default", [8, 9]), row("expandable", [7, 8])]
    simulated = [
        complete_row(one | {"device": "simulated", "memory_source": "simulator", "trial_id": f"s{one['trial_id']}"})
        for one in measured
    ]
    content = collect(table(*measured, *simulated))
    about = [text for text in content.findings if "varying lengths" in text]
    assert [text.startswith("Predicted: With varying") for text in about] in ([True, False], [False, True])
    assert content.summary.splitlines()[:2] == about  # which is what the terminal begins with
    assert len([figure for figure in content.figures if figure.name.startswith("lengths")]) == 2
    assert not any("peak reserved SMALLER" in text for text in content.findings)  # it is said once


def test_the_harness_names_such_data_alike() -> None:
    assert DRAWN == PREFIX
