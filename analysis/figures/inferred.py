"""Figures of measured points and of what hydra/sweeper=adaptive inferred of the others, drawn in different ways.

Measured points are markers. Inferred ones are a thin line with the band in which a run lies with 95 %; the legend names
both. They are read from inferred.jsonl, next to the journal.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from vramsweep.analysis.data.load import Table, extras
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.composition import AXES
from vramsweep.analysis.figures.plots import COLOURS, End, Figure, escape
from vramsweep.analysis.figures.style import Look
from vramsweep.harness.files.sweep_folder import read_inferred

FIGURES = 4  # most figures
COLUMNS = {"peak_allocated_bytes": "allocated", "peak_reserved_bytes": "reserved"}


def of_inferred(table: Table) -> list[Figure]:
    """Draw a figure for each configuration of which something was inferred, along length, else along batch."""
    ran = set(table.frame.loc[table.frame["outcome"].isin(["ok", "oom"]), "trial_id"])  # run by another command since
    lines = pd.DataFrame([line for line in read_inferred(Path(table.source)) if line.get("trial_id") not in ran])
    if not {"configuration", "seq_len", "micro_batch", *list(COLUMNS)[:1]} <= set(lines):
        return []
    for name in map(str, lines):
        if name.startswith((*AXES, *COLUMNS)) and not name.endswith("_basis"):
            lines[name] = pd.to_numeric(lines[name], errors="coerce")
    found: list[Figure] = []
    for which, own in lines.groupby("configuration"):
        if (measured := _measured(table, str(which))) is not None:
            found.append(_figure(own, measured, len(found)))
    return found[:FIGURES]


def _measured(table: Table, trial_id: str) -> pd.DataFrame | None:
    """Return the rows that differ from this trial only in length and batch; None if it is not in the table."""
    frame = table.frame
    if (first := frame[frame["trial_id"] == trial_id]).empty:
        return None
    asked = ("model", "runner", "precision", "allocator", "device", "protocol", "sharding", "world_size")
    same = frame["outcome"].eq("ok").fillna(False)
    for name in (*asked, *extras(frame)):
        same &= frame[name].eq(first[name].iloc[0]).fillna(frame[name].isna())
    return frame[same]


def _figure(lines: pd.DataFrame, measured: pd.DataFrame, number: int) -> Figure:
    axis = "seq_len" if lines["seq_len"].nunique() > 1 else "micro_batch"
    other = next(name for name in AXES if name != axis)
    most = lines[other].mode().iloc[0]  # one line of a grid
    lines = lines[lines[other] == most].sort_values(axis)
    measured = measured[measured[other] == most].sort_values(axis)
    unit, called = plots.axis_unit(max(float(lines[name].max()) for name in COLUMNS if name in lines))
    plot = plots.new_plot(AXES[axis], f"peak memory ({called})")
    plot.update_layout(showlegend=True)
    data, ends, reach = [], [], []
    for curve, (column, name) in enumerate(COLUMNS.items()):
        look = Look(COLOURS[0]).numbered(curve)
        known = lines.dropna(subset=[c for c in (column, f"{column}_low", f"{column}_high") if c in lines])
        if column not in lines or known.empty:
            continue
        x, y, low, high = (known[c].to_numpy(float) for c in (axis, column, f"{column}_low", f"{column}_high"))
        at = plots.thin(x, y)
        plots.add_band(plot, x[at], low[at] / unit, high[at] / unit, look)
        plot.add_scatter(
            x=x[at], y=y[at] / unit, mode="lines", name=escape(f"{name}, inferred"), hoverinfo="skip",
            line={"color": look.colour, "width": 1, "dash": "dot"}, showlegend=True,
        )  # fmt: skip
        rows = measured.dropna(subset=[column])
        sizes = rows[column].to_numpy(float) / unit
        plots.add_points(plot, rows[axis].to_numpy(float), sizes, rows["trial_id"], look, f"{name}, measured")
        ends.append(End(float(x[-1]), float(y[-1]) / unit, name, look))
        reach += [float(np.nanmin(y)) / unit, float(np.nanmax(y)) / unit, *map(float, sizes)]
        kept = known[["trial_id", *AXES]].assign(column=column, inferred=y, low=low, high=high)
        kept["basis"] = known.get(f"{column}_basis")
        data += [kept, rows[["trial_id", *AXES]].assign(column=column, measured=rows[column].to_numpy(float))]
    plots.finish(plot, ends, reach)
    caption = plots.sentence(
        f"Markers: {len(measured):,} measured points. Dotted lines: {len(lines):,} inferred points. Bands: 95 %"
        " interval of a run, according to the model.",
        f"At {other}={most:g}." if other == "micro_batch" or axis == "micro_batch" else "",
    )
    name = "inferred" if number == 0 else f"inferred_{number + 1}"
    return Figure(name, "Measured and inferred memory", caption, plot, pd.concat(data, ignore_index=True))
