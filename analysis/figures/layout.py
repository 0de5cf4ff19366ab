"""A figure laid out for where it stands: alone as a file, in one column of a paper, on a narrow screen.

A file says what it is of by itself: its title above, and below, in small print, card, versions and source. Sizes are
those of CSS: 96 px are an inch, 4/3 px a point.
"""

from __future__ import annotations

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
LONGEST = 18  # characters of labels that stand beside a narrow plot; longer ones make a legend
_PAPER, _DARK = "#fff", "#000"
# Widths of letters in em, of DejaVu Sans, which is what is drawn where the fonts that are asked for are not there, and
# wider than they are.
_WIDTHS = {**dict.fromkeys("ijl'|", 0.29), **dict.fromkeys("frtI .,·:;()[]!/-", 0.37), **dict.fromkeys("mwMW%@", 0.92)}
_LETTER, _CAPITAL, _BOLD = 0.61, 0.69, 1.12
ROWS = 0.56  # of a column's width is at most for names of rows
BAR = 56  # px beside a plot for a colour bar


def page(figure: Figure) -> go.Figure:
    """The figure as wide as a page, by itself."""
    plot: Any = go.Figure(figure.plot)
    height = (plot.layout.height or BLOG[1]) + 40
    return _by_itself(plot, figure, (BLOG[0], int(height)), 15, 11, 8 + (plot.layout.margin.b or 52), _DARK)


def column(figure: Figure) -> go.Figure:
    """The figure for one column of a paper, 3.5 in wide, in 8 pt: labels or a legend that fit, the small print in 7."""
    plot: Any = go.Figure(figure.plot)
    inner = COLUMN[1] - AROUND
    if plot.layout.height is not None:  # of rows: as many as there are
        tall = max((1 + text.count("<br>") for _, text in _ticks(plot)), default=1)
        inner = max(70, int((0.62 if tall == 1 else 0.97) * plot.layout.height) - 10)
    change = narrow(plot, COLUMN[0], inner)
    apply_narrow(plot, change)
    height = inner + AROUND + change["legend"]
    plot.update_layout(font={"size": TEXT, "color": _DARK})
    for axis in (*plot.select_xaxes(), *plot.select_yaxes()):
        axis.title.update(standoff=4, font={"size": TEXT})
    _clear_names(plot, change["across"])
    for note in plot.layout.annotations:
        note.font.size = SMALL if note.name in ("card", "limit") else max(SMALL, min(note.font.size or TEXT, TEXT))
    for trace in plot.select_traces(selector={"type": "scatter"}):
        if trace.mode == "text":
            trace.textfont.size = SMALL
        elif isinstance(trace.marker.size, int | float):
            trace.marker.size *= 0.5 if str(trace.marker.symbol).startswith("line") else 0.75
    return _by_itself(plot, figure, (COLUMN[0], height), TEXT + 0.5, SMALL, plot.layout.margin.b, _DARK)


def narrow(plot: Any, width: int, height: int) -> dict[str, Any]:
    """What changes where a plot of so many px has little room: `layout`, and by trace number `traces`; and how many px
    the `legend` takes below, and there are `across` the plot.

    Short labels stay beside their lines, moved apart; instead of long ones there is a legend below.
    """
    labels = [(i, t) for i, t in enumerate(plot.data) if t.meta and t.meta.get(DIRECT) and t.visible is not False]
    texts = [str(t.text[0]).strip() for _, t in labels]
    size = 0.55 * TEXT
    fit = bool(labels) and max(map(len, texts)) <= LONGEST and len(labels) * TEXT < 0.9 * height
    traces: dict[int, dict[str, Any]] = {}
    if fit:
        low, high = plot.layout.yaxis.range
        places = apart([float(t.y[0]) for _, t in labels], 1.15 * TEXT * (high - low) / height, low, high)
        for (i, _), y in zip(labels, places, strict=True):
            traces[i] = {"y": [y], "textposition": "middle right"}
    else:
        traces |= {i: {"visible": False} for i, t in enumerate(plot.data) if t.meta and t.meta.get(DIRECT)}
    beside = texts if fit else []
    legend = bool(plot.layout.showlegend) or (bool(labels) and not fit)
    world = any(a.name == WORLD for a in plot.layout.annotations)
    bar = any(t.type == "heatmap" and t.showscale is not False for t in plot.data)
    right = 14 + size * max(map(len, texts)) if fit else BAR if bar else 10
    ticks = _ticks(plot)
    left = max([60, *(8 + TEXT * wide(line) for _, text in ticks for line in text.split("<br>"))])
    lines = _legend_lines(plot, int(width - left - right), beside) if legend else 0
    below = 20 * lines + 12 * bool(lines)
    layout: dict[str, Any] = {
        "showlegend": legend,
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0.01, "xref": "container",
                   "itemwidth": 30, "font": {"size": TEXT}},
        "margin": {"l": 44, "r": round(right), "t": 22 if world else 8, "b": 42 + below},
        "xaxis": {"tickangle": 0},
        "yaxis": _wrapped(plot.layout.yaxis, height),
    }  # fmt: skip
    if ticks:
        layout["yaxis"] |= {"tickvals": [at for at, _ in ticks], "ticktext": [text for _, text in ticks]}
        layout["yaxis"]["tickfont"] = {"size": SMALL if any("<br>" in text for _, text in ticks) else TEXT}
    if "yaxis2" in plot.layout and plot.layout.yaxis2.title.text:
        layout["yaxis2"] = _wrapped(plot.layout.yaxis2, height)
    across = width - left - right
    layout["xaxis"]["nticks"] = max(3, min(5, int(across / 55)))
    if (reach := _reach(plot, across)) is not None:
        layout["xaxis"]["range"] = [plot.layout.xaxis.range[0], reach]
    return {"layout": layout, "traces": traces, "legend": below, "across": across}


def _ticks(plot: Any) -> list[tuple[Any, str]]:
    """Where rows of a plot stand and what they are called, in two lines where the name is long."""
    bars = dict.fromkeys(x for t in plot.data if t.type == "bar" and t.orientation == "h" for x in t.y)
    axis = plot.layout.yaxis
    named = list(zip(axis.tickvals, axis.ticktext, strict=True)) if axis.ticktext else [(x, x) for x in bars]
    found = []
    for at, text in named:
        lines = _lines(str(text), ROWS * COLUMN[0] / TEXT)
        found.append((at, "<br>".join(lines[:2]) + "…" * (len(lines) > 2)))
    return found


def _wrapped(axis: Any, height: float) -> dict[str, Any]:
    """Fewer ticks, and the title in as many lines as it needs."""
    low, high = axis.domain or (0.0, 1.0)
    words = str(axis.title.text or "").replace("<br>", " ")
    told = "<br>".join(textwrap.wrap(words, max(9, int(height * (high - low) / (0.56 * TEXT)))))
    few = 5 if high - low > 0.5 else 3
    return {"title": {"text": told}} | ({"nticks": few} if axis.tickvals is None else {})


def _reach(plot: Any, across: float) -> float | None:
    """Where the x axis must end for the words behind its points to have room; None where there are none."""
    ends = [
        float(x) / (1 - min(0.8, 0.56 * SMALL * len(str(text)) / across))
        for trace in plot.select_traces(selector={"type": "scatter"})
        if trace.mode == "text" and trace.textposition == "middle right" and not trace.meta.get(DIRECT)
        for x, text in zip(trace.x, trace.text, strict=True)
    ] if plot.layout.xaxis.range else []  # fmt: skip
    return max(ends, default=None)


def apply_narrow(plot: Any, change: dict[str, Any]) -> None:
    """Make a plot what `narrow` says."""
    plot.update_layout(change["layout"])
    for number, update in change["traces"].items():
        plot.data[number].update(update)


def _by_itself(
    plot: Any, figure: Figure, size: tuple[int, int], text: float, small: float, below: float, colour: str
) -> go.Figure:  # fmt: skip
    """With its title above and its small print below what is there; `below` px are of axis and legend."""
    width, height = size
    plot.layout.annotations = [note for note in plot.layout.annotations if note.name != WORLD]
    beside = {str(t.text[0]).strip() for t in plot.data if t.meta and t.meta.get(DIRECT) and t.visible is not False}
    for trace in plot.data:
        if trace.name in beside:
            trace.showlegend = False  # its name stands beside it
    title = _lines(figure.title, (width - 12) / (text * _BOLD))
    told = _lines(figure.source, (width - 12) / small)
    first = 6 + 0.7 * text * (len(title) > 1)  # px from the top: of several lines it is where the first one stands
    legend = plot.layout.legend.yref == "paper" and plot.layout.showlegend
    top = 8 + 1.25 * text * len(title) + (26 * _legend_lines(plot, width) if legend else 4)
    bottom = 1.3 * small * len(told) + 4
    if plot.layout.showlegend and plot.layout.legend.yref == "container":
        plot.update_layout(legend={"y": bottom / height})
    plot.update_layout(
        width=width, height=height, paper_bgcolor=_PAPER,
        margin={"t": math.ceil(top), "b": math.ceil(below + bottom)},
        title={"text": "<b>" + "<br>".join(map(escape, title)) + "</b>", "x": 6 / width, "xanchor": "left",
               "y": 1 - first / height, "yanchor": "top", "font": {"size": text, "color": colour}},
    )  # fmt: skip
    if told:
        plot.add_annotation(
            text="<br>".join(map(escape, told)), showarrow=False, xref="paper", yref="paper", x=1, y=0, align="right",
            xanchor="right", yanchor="bottom", xshift=(plot.layout.margin.r or 16) - 6, yshift=-(below + bottom) + 2,
            font={"size": small, "color": INK}, name="source",
        )  # fmt: skip
    drawn: go.Figure = plot
    return drawn


def _legend_lines(plot: Any, width: int, beside: Sequence[str] = ()) -> int:
    """How many lines a legend takes below a plot so wide: its columns are as wide as its longest entry."""
    named = dict.fromkeys(
        str(trace.legendgroup or trace.name)
        for trace in plot.data
        if trace.name and trace.showlegend is not False and trace.visible is not False and trace.name not in beside
    )
    if not named:
        return 0
    widest = 45 + TEXT * max(map(wide, named))
    return math.ceil(len(named) / max(1, int(width // widest)))


def wide(text: str) -> float:
    """How wide a line of text is set, in em."""
    return sum(_WIDTHS.get(sign, _CAPITAL if sign.isupper() else _LETTER) for sign in text)


def _lines(text: str, room: float) -> list[str]:
    """The text in lines of at most so many em."""
    lines: list[str] = []
    for word in text.split():
        if lines and wide(f"{lines[-1]} {word}") <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _clear_names(plot: Any, across: float) -> None:
    """Names that have no room in a narrow plot: a card's heading ends at the right, where the left is too far in; of
    the lines that stand, those that come first keep their names."""
    taken: list[tuple[float, float]] = []
    kept = []
    for note in plot.layout.annotations:
        if note.name == "card" and SMALL * wide(note.text or "") > across:
            note.update(x=1, xanchor="right")
        if note.name == "limit" and note.yref == "paper":
            low, high = plot.layout.xaxis.range
            end = (note.x - low) / (high - low) * across
            begin = end - SMALL * wide(note.text or "")
            if any(begin < other[1] and other[0] < end for other in taken):
                continue
            taken.append((begin, end))
        kept.append(note)
    plot.layout.annotations = kept
