"""A figure laid out for where it stands: alone as a file, in one column of a paper, on a narrow screen.

A file says what it is of by itself: its title above, and below, in small print, card, versions and source. Sizes are
those of CSS: 96 px are an inch, 4/3 px a point.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from vramsweep.analysis.figures.plots import BLOG, DIRECT, INK, WORLD, Figure, apart, escape

POINT = 96 / 72
COLUMN = (336, 250)  # px: 3.5 in x 2.6 in; taller where a legend has many lines
TEXT, SMALL = 8 * POINT, 7 * POINT  # px: of a column's text, and the least that can be read there
AROUND = 110  # px of a column above and below its plot, without a legend
PHONE = (360, 390)  # px, of a figure on a phone
PHONE_TEXT = 12.0  # px
TICK = 18  # characters of a line of what stands at a row
LONGEST = 18  # characters of labels that stand beside a narrow plot; longer ones make a legend
_PAPER, _DARK = "#fff", "#000"


def page(figure: Figure) -> go.Figure:
    """The figure as wide as a page, by itself."""
    plot: Any = go.Figure(figure.plot)
    height = (plot.layout.height or BLOG[1]) + 40
    return _by_itself(plot, figure, (BLOG[0], int(height)), 15, 11, 8 + (plot.layout.margin.b or 52), _DARK)


def column(figure: Figure) -> go.Figure:
    """The figure for one column of a paper, 3.5 in wide, in 8 pt: labels or a legend that fit, the small print in 7."""
    plot: Any = go.Figure(figure.plot)
    change = narrow(plot, COLUMN[0], COLUMN[1] - AROUND, TEXT)
    apply_narrow(plot, change)
    plot.update_layout(font={"color": _DARK})
    for note in plot.layout.annotations:
        note.font.size = SMALL if note.name in ("card", "limit") else max(SMALL, min(note.font.size or TEXT, TEXT))
    for trace in plot.select_traces(selector={"type": "scatter", "mode": "text"}):
        trace.textfont.size = SMALL
    return _by_itself(plot, figure, (COLUMN[0], change["height"]), TEXT + 0.5, SMALL, plot.layout.margin.b, _DARK)


def on_phone(figure: Figure) -> dict[str, Any]:
    """What changes on a screen as narrow as a phone's: as of `narrow`."""
    return narrow(figure.plot, PHONE[0], PHONE[1] - AROUND, PHONE_TEXT)


def narrow(plot: Any, width: int, inner: int, text: float) -> dict[str, Any]:
    """What changes where a plot of so many px has little room, in letters of so many px, `inner` high without axis and
    legend: `layout`, by trace number `traces`, the `height` in all; whether labels stay `beside` their lines.

    Short labels stay there, moved apart; instead of long ones there is a legend below.
    """
    if plot.layout.height is not None:  # of rows: as many as there are
        inner = max(70, int(0.62 * plot.layout.height * text / TEXT) - 10)
    labels = [(i, t) for i, t in enumerate(plot.data) if t.meta and t.meta.get(DIRECT)]
    shown = [(i, t) for i, t in labels if t.visible is not False]
    size = 0.55 * text
    fit = bool(labels) and max(len(str(t.text[0]).strip()) for _, t in labels) <= LONGEST
    fit = fit and len(shown) * text < 0.9 * inner
    beside = [str(t.text[0]).strip() for _, t in (labels if fit else [])]
    traces: dict[int, dict[str, Any]] = {i: {} for i in range(len(plot.data))}
    for i, trace in enumerate(plot.data):
        if trace.name in beside:
            traces[i]["showlegend"] = False  # its name stands beside it
        if trace.type == "scatter" and isinstance(trace.marker.size, int | float):
            traces[i]["marker"] = {
                "size": trace.marker.size * (0.5 if str(trace.marker.symbol)[:4] == "line" else 0.75)
            }
    if fit:
        low, high = plot.layout.yaxis.range
        places = apart([float(t.y[0]) for _, t in shown], 1.15 * text * (high - low) / inner, low, high)
        for (i, _), y in zip(shown, places, strict=True):
            traces[i] |= {"y": [y], "textposition": "middle right"}
    else:
        for i, _ in labels:
            traces[i]["visible"] = False
    right = 14 + size * max(map(len, beside)) if fit else 10
    axes: dict[str, Any] = {
        "xaxis": {"title": {"font": {"size": text}, "standoff": 4}},
        "yaxis": _wrapped(plot.layout.yaxis, inner, text),
    }
    if "yaxis2" in plot.layout and plot.layout.yaxis2.title.text:
        axes["yaxis2"] = _wrapped(plot.layout.yaxis2, inner, text)
    ticks = [x for t in plot.data if t.type == "bar" and t.orientation == "h" for x in t.y if isinstance(x, str)]
    if plot.layout.yaxis.ticktext:
        ticks = ["<br>".join(textwrap.wrap(told, TICK)) for told in plot.layout.yaxis.ticktext]
        axes["yaxis"] |= {"ticktext": ticks, "tickfont": {"size": 0.85 * text}}
    left = max(60, 8 + size * max((len(line) for one in ticks for line in one.split("<br>")), default=0))
    wanted = bool(plot.layout.showlegend) or (bool(labels) and not fit)
    lines = _legend_lines(plot, width - 12, beside, text) if wanted else 0
    below = round((1.75 * text * lines + 12) * bool(lines))
    world = any(a.name == WORLD for a in plot.layout.annotations)
    across = width - left - right
    if plot.layout.xaxis.type == "category":
        told = {str(x) for trace in plot.data if trace.x is not None for x in trace.x}
        axes["xaxis"]["tickangle"] = 0 if 0.6 * text * (sum(map(len, told)) + len(told)) < across else -90
    else:
        axes["xaxis"] |= {"tickangle": 0, "nticks": max(3, min(5, int(across / (5 * text))))}
    if (reach := _reach(plot, across, text)) is not None:
        axes["xaxis"]["range"] = [plot.layout.xaxis.range[0], reach]
    layout: dict[str, Any] = {
        "font": {"size": text},
        "showlegend": bool(lines),
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0.01, "xref": "container",
                   "itemwidth": 30, "font": {"size": text}},
        "margin": {"l": 44, "r": round(right), "t": 22 if world else 8, "b": 42 + below},
        **axes,
    }  # fmt: skip
    if any(note.name == "card" for note in plot.layout.annotations):  # headings begin where the names of rows do
        layout["annotations"] = [
            note.to_plotly_json() | ({"xshift": 6 - left} if note.name == "card" else {})
            for note in plot.layout.annotations
        ]
    changed = {number: change for number, change in traces.items() if change}
    return {"layout": layout, "traces": changed, "height": inner + AROUND + below, "beside": fit}


def _wrapped(axis: Any, height: float, text: float) -> dict[str, Any]:
    """Fewer ticks, and the title in as many lines as it needs."""
    low, high = axis.domain or (0.0, 1.0)
    words = str(axis.title.text or "").replace("<br>", " ")
    told = "<br>".join(textwrap.wrap(words, max(9, int(height * (high - low) / (0.56 * text)))))
    few = 5 if high - low > 0.5 else 3
    return {"title": {"text": told, "font": {"size": text}, "standoff": 4}} | (
        {"nticks": few} if axis.tickvals is None else {}
    )


def _reach(plot: Any, across: float, text: float) -> float | None:
    """Where the x axis must end for the words behind its points to have room; None where there are none."""
    ends = [
        float(x) / (1 - min(0.8, 0.5 * text * len(html.unescape(str(word))) / across))
        for trace in plot.select_traces(selector={"type": "scatter"})
        if trace.mode == "text" and trace.textposition == "middle right" and not trace.meta.get(DIRECT)
        for x, word in zip(trace.x, trace.text, strict=True)
    ] if plot.layout.xaxis.range else []  # fmt: skip
    return max(ends, default=None)


def apply_narrow(plot: Any, change: dict[str, Any]) -> None:
    """Make a plot what `narrow` says."""
    plot.update_layout(change["layout"])
    for number, update in change["traces"].items():
        plot.data[number].update(update)


def _by_itself(
    plot: Any, figure: Figure, size: tuple[int, int], text: float, small: float, below: float, colour: str
) -> Any:  # fmt: skip
    """With its title above and its small print below what is there; `below` px are of axis and legend."""
    width, height = size
    plot.layout.annotations = [note for note in plot.layout.annotations if note.name != WORLD]
    beside = {str(t.text[0]).strip() for t in plot.data if t.meta and t.meta.get(DIRECT) and t.visible is not False}
    for trace in plot.data:
        if trace.name in beside:
            trace.showlegend = False  # its name stands beside it
    title = textwrap.wrap(figure.title, max(12, int(width / (0.56 * text))))
    told = textwrap.wrap(figure.source, max(12, int((width - 12) / (0.5 * small))))
    legend = plot.layout.legend.yref == "paper" and plot.layout.showlegend
    top = 8 + 1.25 * text * len(title) + (26 * _legend_lines(plot, width) if legend else 4)
    bottom = 1.3 * small * len(told) + 4
    if plot.layout.showlegend and plot.layout.legend.yref == "container":
        plot.update_layout(legend={"y": bottom / height})
    plot.update_layout(
        width=width, height=height, paper_bgcolor=_PAPER,
        margin={"t": math.ceil(top), "b": math.ceil(below + bottom)},
        title={"text": "<b>" + "<br>".join(map(escape, title)) + "</b>", "x": 6 / width, "xanchor": "left",
               "y": 1 - 6 / height, "yanchor": "top", "font": {"size": text, "color": colour}},
    )  # fmt: skip
    if told:
        plot.add_annotation(
            text="<br>".join(map(escape, told)), showarrow=False, xref="paper", yref="paper", x=1, y=0, align="right",
            xanchor="right", yanchor="bottom", xshift=(plot.layout.margin.r or 16) - 6, yshift=-(below + bottom) + 2,
            font={"size": small, "color": INK}, name="source",
        )  # fmt: skip
    return plot


def _legend_lines(plot: Any, width: float, beside: Sequence[str] = (), text: float = TEXT) -> int:
    """How many lines a legend takes below a plot so wide: its columns are as wide as its longest entry."""
    named = dict.fromkeys(
        str(trace.legendgroup or trace.name)
        for trace in plot.data
        if trace.name and trace.showlegend is not False and trace.visible is not False and trace.name not in beside
    )
    if not named:
        return 0
    widest = 44 + 0.58 * text * max(map(len, named))
    return math.ceil(len(named) / max(1, int(width // widest)))
