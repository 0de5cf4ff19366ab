"""Every figure of a report, in reading order. A new one is a module with a function of a View, and an entry here.

Figures of a folder's other files (timeline.py, inferred.py) and of comparisons (overlay.py, residuals.py) are not here.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from vramsweep.analysis.data.pairing import Beside
from vramsweep.analysis.data.warnings_of_rows import left_out
from vramsweep.analysis.figures.composition import composition
from vramsweep.analysis.figures.phases import NAME as PHASES
from vramsweep.analysis.figures.plots import Figure, of_world
from vramsweep.analysis.figures.style import View, looks

# Modules of this folder, each with its function of a View. It returns no figures if the rows do not allow any.
FIGURES = (
    "frontier.frontier_chart", "memory.by_length", "allocators.compared", "phases.phases",
    "tradeoffs.heat_map", "steps.of_lengths", "phases.of_jobs", "throughput.throughput", "throughput.iterations",
    "throughput.mfu", "throughput.estimated", "tradeoffs.pareto", "steps.steps",
)  # fmt: skip


def draw(worlds: Sequence[tuple[str, View]], beside: Beside | None = None) -> list[Figure]:
    """Return all figures that these rows allow, the main one first; `worlds` are the rows of each kind, by its name.

    The kinds are measured, predicted and imported. A configuration has one colour in all figures.
    """
    alike = looks([group for _, view in worlds for group in (*view.groups, *view.varied)])
    alone = len(worlds) == 1
    measured = [group for _, view in worlds if not view.predicted for group in view.groups]
    parts = (entry.split(".") for entry in FIGURES)
    builders = [getattr(importlib.import_module(f"{__package__}.{module}"), name) for module, name in parts]
    main: list[Figure] = []
    others: list[Figure] = []
    for name, view in worlds:
        known = replace(view, looks=alike)

        def shown(figure: Figure, *of: View, name: str = name, known: View = known) -> Figure:
            drawn = figure if alone and not known.predicted else of_world(figure, name, alone)
            rows = [rows_of(figure, one.table.frame) for one in of]
            return replace(drawn, source=source(pd.concat(rows) if len(rows) > 1 else rows[0]))

        for figure in composition(known, beside, measured):
            ids = _ids(figure)
            ran = [view for _, view in worlds if not view.predicted and ids & set(view.table.frame["trial_id"])]
            main.append(shown(figure, known, *ran))
        others += [shown(figure, known) for build in builders for figure in build(known)]
    if not main:  # if no parts are known, the phases come first
        others.sort(key=lambda figure: not figure.name.startswith(PHASES))
    return [*main, *others]


def with_source(figures: Sequence[Figure], frame: pd.DataFrame) -> list[Figure]:
    """Return the figures, in which each now says of which of these rows it is."""
    return [one if one.source else replace(one, source=source(rows_of(one, frame))) for one in figures]


def rows_of(figure: Figure, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that a figure shows, by the ids in its data; all rows if it names none."""
    found = frame[frame["trial_id"].isin(_ids(figure))]
    return found if len(found) else frame


def _ids(figure: Figure) -> set[str]:
    """Return the trials that a figure shows before its reader chooses others."""
    if "trial_id" not in figure.data:
        return set()
    shown = figure.data[figure.data["shown"]] if "shown" in figure.data else figure.data
    return {one for text in shown["trial_id"].dropna() for one in str(text).split()}


def source(frame: pd.DataFrame) -> str:
    """Return the small print of rows: measured or predicted, GPU, model, precision, batch, versions, sweep, count."""
    predicted = frame["device"].eq("simulated").fillna(False)
    sweep = f"{'sweep ' * (1 <= frame['sweep'].nunique() <= 3)}{_few('sweeps', frame['sweep'])}"
    foreign = frame["foreign"].dropna().unique()
    kinds = ["measured"] * bool((~predicted).any()) + ["predicted"] * bool(predicted.any())
    cards = _few("GPUs", frame["simulated_gpu"].fillna(frame["gpu_name"]).fillna(frame["cpu_name"]))
    on = ("for " if kinds == ["predicted"] else "on ") + cards if cards else "on an unknown GPU"
    versions = [
        f"{name} {told}"
        for name in ("torch", "transformers", "deepspeed", "vramsweep")
        if (told := _few("versions", frame[f"{name}_version"], 2))
    ]
    of = f"from {_few('files', frame['foreign'])}" if len(foreign) else sweep
    rows = ", ".join(filter(None, (of, f"{len(frame):,} row{'s' * (len(frame) != 1)}")))
    batches = _few("batches", frame["micro_batch"])
    what = (_few("models", frame["model"]), _few("precisions", frame["precision"]), f"batch {batches}" * bool(batches))
    codes = left_out(frame)
    first = f"{' and '.join(kinds).capitalize()} {on}" + f" (not covered: {', '.join(codes)})" * bool(codes)
    parts = (first, ", ".join(filter(None, what)), ", ".join(versions) or "versions unknown", rows)
    return " · ".join(filter(None, parts))


def _few(what: str, column: pd.Series[str], most: int = 3) -> str:
    """Return the column's values, or how many there are if they are more than `most`."""
    found = [str(one) for one in column.dropna().unique()]
    return ", ".join(found) if len(found) <= most else f"{len(found)} {what}"
