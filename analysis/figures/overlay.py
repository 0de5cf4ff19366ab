"""Both sides of a comparison in one chart: memory and speed against an axis, and their differences below.

The panels share their axis, so that all of them show where a difference begins.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from scipy import ndimage

from vramsweep.analysis.compare import format_difference
from vramsweep.analysis.compare.trends import SPEED, Along, Level, lines, position
from vramsweep.analysis.compare.verdicts import Comparison, Pair, Single
from vramsweep.analysis.compare.verdicts_text import TITLES, place_of
from vramsweep.analysis.data.export import guarded_frame
from vramsweep.analysis.data.groups import FREE, label
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import METRICS
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.drawing import Picture, draw_one
from vramsweep.analysis.figures.figure_table import source
from vramsweep.analysis.figures.layout import SMALL, TEXT
from vramsweep.analysis.figures.plots import COLOURS, GREY, INK, MARKERS, Figure, escape
from vramsweep.analysis.model.curves import Array
from vramsweep.harness.files import outputs
from vramsweep.harness.files.bounded_reads import read_content
from vramsweep.harness.messages.errors import UserError

OWN = {"out_of_memory", "trial_ids"}  # columns by which a CSV is recognized as a figure's data
BETWEEN = COLOURS[2]
BLOG, COLUMN = (800, 250, 150), (336, 120, 85)  # pixels: width, height of an upper panel, of a lower one
DENSE = 100  # points; more are smaller, and their difference has a running median


def figure(comparison: Comparison, along: Along, sides: Sequence[Table] = ()) -> Figure:
    """Draw the longest line of pairs in as many panels as the rows allow; `sides` are both sets, for its small print.

    Raises UserError if there is nothing to draw.
    """
    if along.axis is None:
        raise UserError("nothing to draw, because all pairs have one length and one batch; compare two of either")
    every = lines(comparison.pairs, along.axis)
    settings = every[0][0]
    data = _data(comparison, along.axis, settings)
    memory = [metric for metric in METRICS if f"{metric}_a" in data]
    memory.sort(key=lambda metric: metric != "peak_reserved_bytes")  # it comes first where it is known
    if not (kinds := [kind for kind, there in (("memory", memory), ("speed", f"{SPEED}_a" in data)) if there]):
        raise UserError("nothing to draw, because no pair has a memory size or a speed on both sides")
    plot: Any = make_subplots(
        rows=2 * len(kinds), cols=1, shared_xaxes=True, vertical_spacing=0.035, row_heights=[5, 3] * len(kinds)
    )
    _style(plot, along.axis)
    names, x = _names(comparison), data[along.axis].to_numpy(float)
    for number, kind in enumerate(kinds):
        row = 2 * number + 1
        if kind == "memory":
            _memory(plot, row, data, x, memory[:2], names)
        else:
            _speed(plot, row, data, x, names)
        for turn in along.levels:
            if turn.quantity == (memory[0] if kind == "memory" else SPEED) and turn.settings == settings:
                _turn(plot, row + 1, turn, along)
    parts = [f"{'; '.join(names)}."]
    if memory:
        what = [METRICS[metric].label.removeprefix("peak ") for metric in memory]
        thinner = f". Plain lines: {what[1]} memory, its difference in grey" if len(memory) > 1 else ""
        parts.append(f"Points: {what[0]} memory{thinner}. All are medians of repeats.")
    if any(turn.settings == settings for turn in along.levels):
        parts.append("Band: the difference changes here (95 % interval).")
    if len(every) > 1:
        parts.append(f"Shown: {label(settings)}, one of {len(every):,} combinations that were compared.")
    return Figure("overlay", " compared with ".join(names[::-1]), plots.sentence(*parts), plot, data, _sources(sides))


def _sources(sides: Sequence[Table]) -> str:
    told = [source(table.frame) for table in sides]
    if len(told) == len(set(told)):
        return ". ".join(f"{side}: {one}" for side, one in zip("AB", told, strict=False))
    return f"A and B: {told[0]} each"


def write(drawn: Figure, out: Path) -> None:
    """Write the figure in the format of its suffix, and the drawn data as CSV next to it.

    HTML, PNG and SVG are at blog width with their caption, PDF is at column width without; the small print is in all.
    Raises UserError if the CSV would replace another file, or nothing can be drawn.
    """
    small = out.suffix == ".pdf"
    plot, width, height = _sized(_captioned(drawn, small), COLUMN if small else BLOG)
    data = out.with_suffix(".csv")
    try:
        other = data.exists() and not set(read_content(data).partition(b"\n")[0].decode().strip().split(",")) >= OWN
    except (OSError, ValueError):
        other = True
    if other:
        raise UserError(f"--figure {out} would overwrite {data}, which is not a figure's data; choose another name")
    outputs.write(data, lambda place: guarded_frame(drawn.data).to_csv(place, index=False))
    draw_one(Picture(plot, out, width, height, scale=2 if out.suffix == ".png" else 1))


def _data(comparison: Comparison, axis: str, settings: Mapping[str, Any]) -> pd.DataFrame:
    """Return a line a combination, sorted along the axis: sizes of both sides (bytes, tokens/s), null if unknown.

    `out_of_memory` names the side that ran out of it.
    """
    found = []
    combinations: list[Pair | Single] = [*comparison.pairs, *comparison.unpaired]
    for one in combinations:
        rest = {key: value for key, value in one.settings.items() if key not in FREE[axis]}
        if rest != settings or np.isnan(x := position(one, axis)):
            continue
        row: dict[str, Any] = {"seq_len": one.seq_len, "micro_batch": one.micro_batch, axis: x, "out_of_memory": ""}
        if isinstance(one, Single):
            row |= {f"{metric}_{one.side}": value for metric, value in one.memory.items()}
            row |= {f"{SPEED}_{one.side}": one.tokens_per_s, "out_of_memory": "" if one.memory else one.side}
        else:
            for m in one.memory:
                row |= {f"{m.metric}_a": m.a, f"{m.metric}_b": m.b}
                row["out_of_memory"] = "a" if m.a is None else "b" if m.b is None else ""
            row |= {f"{SPEED}_a": one.speed.a, f"{SPEED}_b": one.speed.b}
        found.append({**row, "trial_ids": " ".join(one.trial_ids)})
    frame = pd.DataFrame(found).sort_values(axis, kind="stable").reset_index(drop=True)
    for name in (*METRICS, SPEED):  # a quantity that both sides never know together is not drawn
        sides = [f"{name}_{side}" for side in "ab"]
        if not (set(sides) <= set(frame) and frame[sides].notna().all(axis=1).any()):
            frame = frame.drop(columns=sides, errors="ignore")
    return frame


def _memory(plot: Any, row: int, data: pd.DataFrame, x: Array, metrics: Sequence[str], names: Sequence[str]) -> None:
    sides = {metric: [data[f"{metric}_{s}"].to_numpy(float, na_value=np.nan) for s in "ab"] for metric in metrics}
    unit, called = plots.axis_unit(float(np.nanmax(np.concatenate(sides[metrics[0]]))))
    gaps = {metric: b - a for metric, (a, b) in sides.items()}
    small, called_small = plots.axis_unit(float(np.nanmax(np.abs(gaps[metrics[0]]), initial=0)))
    for metric in metrics[1:]:
        for number, dash in enumerate(("solid", "dash")):
            _line(plot, row, x, sides[metric][number] / unit, COLOURS[number], dash, 3 - number)
        name = METRICS[metric].label.removeprefix("peak ")
        _line(plot, row + 1, x, gaps[metric] / small, GREY, "solid", 2, f"{name} (plain lines)")
    for number, name in enumerate(names):
        _points(plot, row, x, sides[metrics[0]][number] / unit, number, name, called)
    _gap(plot, row + 1, x, gaps[metrics[0]] / small, called_small, *(gaps[metric] / small for metric in metrics[1:]))
    _crosses(plot, row, data, x, max(float(np.nanmax(y)) for y in sides[metrics[0]]) / unit)
    plot.update_yaxes(title_text=f"peak memory ({called})", row=row)
    plot.update_yaxes(title_text=f"B − A ({called_small})", row=row + 1)
    gap = gaps[metrics[0]]
    most = int(np.nanargmax(np.abs(gap)))
    share = format_difference.size(gap[most] / sides[metrics[0]][0][most])
    text = f"{format_difference.in_bytes(gap[most])[0]} ({share})"
    drawn = x[np.isfinite(sides[metrics[0]]).any(axis=0)]
    left, up = x[most] < (drawn[0] + drawn[-1]) / 2, gap[most] > 0
    plot.add_annotation(
        x=x[most], y=gap[most] / small, text=escape(text), showarrow=False, xanchor="left" if left else "right",
        yanchor="bottom" if up else "top", yshift=4 if up else -4, font={"color": BETWEEN, "size": 12}, row=row + 1,
        col=1,
    )  # fmt: skip


def _speed(plot: Any, row: int, data: pd.DataFrame, x: Array, names: Sequence[str]) -> None:
    a, b = (data[f"{SPEED}_{side}"].to_numpy(float, na_value=np.nan) for side in "ab")
    for number, y in enumerate((a, b)):
        _points(plot, row, x, y, number, names[number], "tokens/s", legend=row == 1)
    _gap(plot, row + 1, x, 100 * (b / a - 1), "B/A − 1 (%)")
    plot.update_yaxes(title_text="tokens/s", rangemode="tozero", row=row)
    plot.update_yaxes(title_text="B/A − 1 (%)", row=row + 1)


def _points(plot: Any, row: int, x: Array, y: Array, number: int, name: str, unit: str, legend: bool = True) -> None:
    known = np.flatnonzero(np.isfinite(y))
    at = known[plots.thin(x[known], y[known])]
    dense = len(at) > DENSE
    plot.add_scatter(
        x=x[at], y=y[at], mode="markers" if dense or _twice(x[at]) else "lines+markers",
        name=escape(name), showlegend=legend, legendgroup=str(number), line={"color": COLOURS[number], "width": 2},
        marker={"color": COLOURS[number], "symbol": MARKERS[number], "size": 3 if dense else 7,
                "opacity": 0.5 if dense else 1},
        hovertemplate="%{x:,}: %{y:,.4~g} " + unit + "<extra>" + escape(name) + "</extra>", row=row, col=1,
    )  # fmt: skip


def _twice(x: Array) -> bool:
    """Check whether some places have several points, as where equal tokens are of other lengths: no line joins them."""
    return len(np.unique(x)) < len(x)


def _line(
    plot: Any, row: int, x: Array, y: Array, colour: str, dash: str, width: float, name: str | None = None
) -> None:
    """Draw a line without points; it is in the legend if it has a name."""
    known = np.flatnonzero(np.isfinite(y))
    at = known[plots.thin(x[known], y[known])]
    plot.add_scatter(
        x=x[at], y=y[at], mode="markers" if _twice(x[at]) else "lines", marker={"color": colour, "size": 3},
        line={"color": colour, "width": width, "dash": dash}, hoverinfo="skip",
        name=name, showlegend=name is not None, legendrank=2000, row=row, col=1,
    )  # fmt: skip


def _gap(plot: Any, row: int, x: Array, y: Array, unit: str, *others: Array) -> None:
    """Draw the difference between the sides: points, and their running median if they are dense.

    The panel reaches as far as these (without outliers, if dense) and `others`, with room for a note.
    """
    known = np.flatnonzero(np.isfinite(y))
    x, y = x[known], y[known]
    at = plots.thin(x, y)
    dense = len(at) > DENSE
    colour = plots.faint(BETWEEN, 0.45) if dense else BETWEEN
    plot.add_hline(y=0, line={"color": GREY, "width": 1}, row=row, col=1)
    plot.add_scatter(
        x=x[at], y=y[at], mode="markers" if dense or _twice(x[at]) else "lines+markers", showlegend=False,
        line={"color": BETWEEN, "width": 2}, marker={"color": colour, "symbol": MARKERS[2], "size": 3 if dense else 6},
        hovertemplate="%{x:,}: %{y:+,.3~f}<extra>" + unit + "</extra>", row=row, col=1,
    )  # fmt: skip
    low, high = float(y.min()), float(y.max())
    if dense:
        smooth: Array = ndimage.median_filter(y, 2 * (len(y) // 40) + 1, mode="reflect")
        _line(plot, row, x, smooth, BETWEEN, "solid", 2)
        low, high = (float(v) for v in np.percentile(y, [0.2, 99.8]))
    reach = np.concatenate([[low, high, 0.0], *others])
    low, high = float(np.nanmin(reach)), float(np.nanmax(reach))
    room = 0.4 * (high - low) or 1.0
    plot.update_yaxes(range=[low - room * (low < 0 or high == 0), high + room * (high > 0)], row=row)


def _turn(plot: Any, row: int, turn: Level, along: Along) -> None:
    """Draw where a difference changes: a line and the interval, in this panel and the one above it."""
    for panel in (row - 1, row):
        plot.add_vrect(x0=turn.low, x1=turn.high, fillcolor=GREY, opacity=0.18, line_width=0, row=panel, col=1)
        plot.add_vline(x=turn.at, line={"color": "#444", "width": 1.2, "dash": "dot"}, row=panel, col=1)
    words = f"{100 * turn.after:+.1f} % from about {place_of(turn, along)} on"
    plot.add_annotation(
        x=turn.high, xref=f"x{row}", y=1, yref=f"y{row} domain", text=words, showarrow=False, xanchor="left",
        yanchor="top", xshift=4, font={"color": "#444", "size": 12}, bgcolor="rgba(255,255,255,0.7)",
    )  # fmt: skip


def _crosses(plot: Any, row: int, data: pd.DataFrame, x: Array, top: float) -> None:
    for number, side in enumerate("ab"):
        if (at := data["out_of_memory"].eq(side).to_numpy(bool)).any():
            plot.add_scatter(
                x=x[at], y=np.full(int(at.sum()), top * (1.13 - 0.06 * number)), mode="markers", hoverinfo="skip",
                name=f"{'AB'[number]} out of memory", row=row, col=1,
                marker={"color": COLOURS[number], "symbol": "x", "size": 9},
            )  # fmt: skip


def _style(plot: Any, axis: str) -> None:
    """Give every panel the look of the other figures."""
    look = plots.new_plot("", "").layout
    plain = {name: value for name, value in look.xaxis.to_plotly_json().items() if name not in ("title", "anchor")}
    plot.update_layout(font=look.font, paper_bgcolor="#fff", plot_bgcolor=look.plot_bgcolor, hovermode="closest")
    plot.update_xaxes(**plain)
    plot.update_yaxes(**{**plain, "tickformat": ",~g"})
    per = {"seq_len": " (tokens)", "micro_batch": " (samples)"}.get(axis, "")
    plot.update_layout({f"xaxis{len(list(plot.select_xaxes()))}": {"title": {"text": TITLES[axis] + per}}})


def _sized(plot: Any, size: tuple[int, int, int]) -> tuple[Any, int, int]:
    """Return the figure at a width, its legend above and room for its caption below; and its width and height."""
    width, upper, lower = size
    small = width < BLOG[0]
    panels = len(list(plot.select_yaxes())) // 2
    caption = max((a.text.count("<br>") + 1 for a in plot.layout.annotations if a.name == "caption"), default=0)
    bottom = (40 if small else 56) + (14 if small else 17) * caption
    used, rows = 0, 1  # of the legend, as plotly breaks it
    for trace in plot.data:
        if trace.name and trace.showlegend is not False:
            wide = 50 + (6 if small else 7) * len(trace.name)
            used, rows = (used + wide, rows) if used + wide < width - 64 else (wide, rows + 1)
    top = 20 * rows + 12
    height = panels * (upper + lower) + top + bottom
    plot = go.Figure(plot)
    plot.update_layout(
        width=width, height=height, margin={"l": 52 if small else 68, "r": 12, "t": top, "b": bottom}, showlegend=True,
        legend={"orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0, "tracegroupgap": 0},
    )  # fmt: skip
    if small:
        plot.update_layout(font={"size": TEXT, "color": "#000"})
        for axis in (*plot.select_xaxes(), *plot.select_yaxes()):
            axis.title.update(standoff=4, font={"size": TEXT})
        plot.update_annotations(font_size=SMALL)
    return plot, width, height


def _captioned(drawn: Figure, small: bool) -> Any:
    plot: Any = go.Figure(drawn.plot)
    wide = 54 if small else 104  # letters of a line
    told = ([] if small else [drawn.caption]) + ([drawn.source] if drawn.source else [])
    text = "<br>".join(escape(line) for one in told for line in textwrap.wrap(one, wide))
    plot.add_annotation(
        text=text, showarrow=False, xref="paper", yref="paper", x=0, y=0, yshift=-42 if small else -54, xanchor="left",
        xshift=-46 if small else 0, yanchor="top", align="left", font={"size": 12, "color": INK}, name="caption",
    )  # fmt: skip
    return plot


def _names(comparison: Comparison) -> list[str]:
    """Return the sides' names in the legend: a file by the end of its path that tells it from the other."""
    a, b = (Path(name).parts for name in (comparison.a, comparison.b))
    parts = 1 + next((i for i, (x, y) in enumerate(zip(a[::-1], b[::-1], strict=False)) if x != y), 0)
    return [f"{side} {plots.short('/'.join(name[-parts:]), 46)}" for side, name in (("A", a), ("B", b))]
