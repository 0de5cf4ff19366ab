"""The figure of a replayed recording: reserved memory under each setting."""

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

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
            name=_label(row),
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
        title={"text": f"Reserved memory by allocator setting: {table['recording']}"},
        xaxis_title="event of the recording",
        yaxis_title="GiB",
        yaxis_rangemode="tozero",
        template="plotly_white",
        hovermode="x unified",
        legend={"orientation": "h", "yanchor": "top", "y": -0.15},
        margin={"t": 60, "r": 30},
    )
    return figure


def _label(row: Mapping[str, Any]) -> str:
    start = "as recorded" if row["start"] == "recorded" else "rebuilt"
    return f"{row['settings'] or 'defaults'}, {start}"
