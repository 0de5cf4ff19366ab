"""The figure of a replayed recording: reserved memory under each setting."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from vramsweep.analysis.data.metrics import MIB
from vramsweep.analysis.figures.plots import Figure, escape

_GIB = 1 << 30
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")  # Okabe-Ito
_DASHES = ("solid", "dash", "dot", "dashdot")


def allocator_timelines(table: Mapping[str, Any]) -> go.Figure:
    """Reserved memory over the events of a recording, one line for each setting, above what was allocated.

    `table` is the what-if table as plain data (harness.allocator.replay.WhatIf); sizes there are in bytes. Allocated
    is drawn once, from the recorded settings: other settings change it only by rounding.
    """
    figure = go.Figure()
    rows = table["rows"]
    recorded = rows[0]["timeline"]
    figure.add_scatter(
        x=[p["event"] for p in recorded],
        y=[p["allocated"] / _GIB for p in recorded],
        name="allocated (recorded settings)",
        line={"width": 0},
        fill="tozeroy",
        fillcolor="rgba(120,120,120,0.35)",
        hovertemplate="%{y:.3f} GiB",
    )
    for index, row in enumerate(rows):
        points = row["timeline"]
        figure.add_scatter(
            x=[p["event"] for p in points],
            y=[p["reserved"] / _GIB for p in points],
            name=escape(_label(row)),
            mode="lines",
            line={
                "shape": "hv",
                "width": 3 if index == 0 else 2,
                "color": _COLOURS[index % len(_COLOURS)],
                "dash": _DASHES[index // len(_COLOURS) % len(_DASHES)],
            },
            hovertemplate="%{y:.3f} GiB",
        )
        if row["out_of_memory"] is not None:
            figure.add_scatter(
                x=[points[-1]["event"]],
                y=[points[-1]["reserved"] / _GIB],
                mode="markers",
                marker={"symbol": "x", "size": 12, "color": _COLOURS[index % len(_COLOURS)]},
                showlegend=False,
                hovertemplate="out of memory",
            )
    if table["memory_limit"] is not None:
        figure.add_hline(
            y=table["memory_limit"] / _GIB, line={"dash": "dot", "color": "#666"}, annotation_text="memory limit"
        )
    figure.update_layout(
        title={"text": escape(f"Reserved memory by allocator setting: {table['recording']}")},
        xaxis_title="event of the recording",
        yaxis_title="GiB",
        yaxis_rangemode="tozero",
        template="plotly_white",
        hovermode="x unified",
        legend={"orientation": "h", "yanchor": "top", "y": -0.15},
        margin={"t": 60, "r": 30},
    )
    return figure


def holders(table: Mapping[str, Any]) -> pd.DataFrame:
    """What holds the recorded peak, as text cells; the recording says who asked, not what for."""
    peak = table["rows"][0]["holders"]
    rows = [
        {
            "MiB in all": f"{one['bytes'] * one['count'] / MIB:,.1f}",
            "blocks": f"{one['count']:,} × {one['bytes'] / MIB:,.1f}" if one["count"] > 1 else "1",
            "asked for by": one["where"] or "unknown",
        }
        for one in peak["largest"]
    ]
    rows.append(
        {"MiB in all": f"{peak['rest'] / MIB:,.1f}", "blocks": f"{peak['rest_count']:,} others", "asked for by": ""}
    )
    rows.append({"MiB in all": f"{peak['rounding'] / MIB:,.1f}", "blocks": "rounding", "asked for by": ""})
    return pd.DataFrame(rows)


def as_figure(table: Mapping[str, Any]) -> Figure:
    """`allocator_timelines` with what to know of it, and with the recorded peak named."""
    plot, peak = allocator_timelines(table), table["rows"][0]["holders"]
    word = "final" if table.get("history") == "none" else "peak"
    right = peak["event"] > table["events"] / 2
    plot.add_annotation(
        x=peak["event"], y=peak["allocated"] / _GIB, text=f"<b>{word} {peak['allocated'] / MIB:,.0f} MiB</b> allocated",
        ax=-20 if right else 20, ay=28, xanchor="right" if right else "left", arrowhead=0, name="peak",
        bgcolor="rgba(255,255,255,0.7)",
    )  # fmt: skip
    plot.update_layout(title=None, margin={"t": 30})
    unknown = f"; of {peak['unknown'] / MIB:,.1f} MiB no line is known" if peak["unknown"] else ""
    caption = (
        f"Replayed from a recording of {table['events']:,} events. It says which line asked for a block, not what the "
        f"block is for, so what was allocated has one colour{unknown}."
    )
    title = f"Reserved memory by allocator setting: {table['recording']}"
    return Figure("replay", title, caption, plot, holders(table))


def _label(row: Mapping[str, Any]) -> str:
    start = "as recorded" if row["start"] == "recorded" else "rebuilt"
    return f"{row['settings'] or 'defaults'}, {start}"
