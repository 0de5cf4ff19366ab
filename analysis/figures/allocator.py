"""The figure of a replayed recording: reserved memory under each setting."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from vramsweep.analysis.figures.plots import COLOURS, GREY, INK, Figure, axis_unit, escape, new_plot
from vramsweep.harness.messages.units import format_gib, format_size

_DASHES = ("solid", "dash", "dot", "dashdot")


def as_figure(table: Mapping[str, Any]) -> Figure:
    """Draw reserved memory over the events of a recording, a line for each setting, above allocated; name the peak.

    `table` is the what-if table as plain data (harness.allocator.replay.WhatIf), with sizes in bytes. Allocated is
    drawn once, from the recorded settings, because other settings change it only by rounding.
    """
    rows, limit, peak = table["rows"], table["memory_limit"], table["rows"][0]["holders"]
    unit, called = axis_unit(max(point["reserved"] for row in rows for point in row["timeline"]))
    plot: Any = new_plot("event of the recording", f"memory ({called})")
    recorded, said = rows[0]["timeline"], "%{y:,.4~g} " + called
    plot.add_scatter(
        x=[p["event"] for p in recorded], y=[p["allocated"] / unit for p in recorded],
        name="allocated (recorded settings)", line={"width": 0}, fill="tozeroy", fillcolor="rgba(120,120,120,0.35)",
        hovertemplate=said,
    )  # fmt: skip
    for index, row in enumerate(rows):
        points, colour = row["timeline"], COLOURS[index % len(COLOURS)]
        name = f"{row['settings'] or 'defaults'}, {'as recorded' if row['start'] == 'recorded' else 'rebuilt'}"
        line = {"shape": "hv", "width": 3 if index == 0 else 2, "color": colour,
                "dash": _DASHES[index // len(COLOURS) % len(_DASHES)]}  # fmt: skip
        plot.add_scatter(
            x=[p["event"] for p in points], y=[p["reserved"] / unit for p in points], name=escape(name),
            mode="lines", line=line, hovertemplate=said,
        )  # fmt: skip
        if row["out_of_memory"] is not None:
            plot.add_scatter(
                x=[points[-1]["event"]], y=[points[-1]["reserved"] / unit], mode="markers", showlegend=False,
                marker={"symbol": "x", "size": 12, "color": colour}, hovertemplate="out of memory",
            )  # fmt: skip
    if limit is not None:
        plot.add_hline(y=limit / unit, line={"dash": "dot", "color": GREY}, annotation_text="memory limit")
    word, right = "final" if table.get("history") == "none" else "peak", peak["event"] > table["events"] / 2
    plot.add_annotation(
        x=peak["event"], y=peak["allocated"] / unit, text=f"<b>{word} {format_size(peak['allocated'])}</b> allocated",
        ax=-20 if right else 20, ay=28, xanchor="right" if right else "left", arrowhead=0, name="peak",
        font={"color": INK}, bgcolor="rgba(255,255,255,0.7)",
    )  # fmt: skip
    plot.update_yaxes(rangemode="tozero")
    plot.update_layout(showlegend=True, hovermode="x unified")
    unknown = f"; for {format_size(peak['unknown'])} that line is unknown" if peak["unknown"] else ""
    caption = (
        f"Replayed from a recording of {table['events']:,} events. A recording names the line of code that allocated a "
        f"block, not the block's purpose, so allocated memory has one colour{unknown}."
    )
    title = f"Reserved memory by allocator setting: {table['recording']}"
    return Figure("replay", title, caption, plot, holders(table))


def holders(table: Mapping[str, Any]) -> pd.DataFrame:
    """Return what holds the recorded peak, as text cells; the recording says who asked, not what for."""
    peak = table["rows"][0]["holders"]
    rows = [
        {
            "GiB in all": format_gib(one["bytes"] * one["count"]),
            "blocks": f"{one['count']:,} × {format_size(one['bytes'])}" if one["count"] > 1 else "1",
            "allocated by": one["where"] or "unknown",
        }
        for one in peak["largest"]
    ]
    others = {"rest": f"{peak['rest_count']:,} others", "rounding": "rounding"}
    rows += [{"GiB in all": format_gib(peak[of]), "blocks": what, "allocated by": ""} for of, what in others.items()]
    return pd.DataFrame(rows)
