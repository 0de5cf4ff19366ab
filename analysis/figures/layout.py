"""A figure laid out for its place: alone as a file, in one column of a paper, on a narrow screen.

A file explains itself: its title is above; GPU, versions and source are below in small print. Sizes are those of CSS:
96 px are an inch, 4/3 px a point.
"""

import html
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from vramsweep.analysis.figures.plots import ABOVE, BLOG, DIRECT, INK, WORLD, Figure, apart, escape

POINT = 96 / 72
COLUMN = (336, 250)  # px: 3.5 in x 2.6 in; taller where a legend has many lines
TEXT, SMALL = 8 * POINT, 7 * POINT  # px: of a column's text, and the smallest text that can be read there
AROUND = 110  # px of a column above and below its plot, without a legend
PHONE = (360, 390)  # px, of a figure on a phone
PHONE_TEXT = 12.0  # px
LONGEST = 18  # most characters of a label next to a narrow plot; longer ones make a legend
_PAPER, _DARK, _VEIL = "#fff", "#000", "rgba(255,255,255,0.75)"
# Widths of letters in em, of DejaVu Sans: it is drawn if the requested fonts are missing, and is wider than they are.
_WIDTHS = {**dict.fromkeys("ijl'|", 0.29), **dict.fromkeys("frtI .,·:;()[]!/-", 0.37), **dict.fromkeys("mwMW%@", 0.92)}
_LETTER, _CAPITAL, _BOLD = 0.61, 0.69, 1.12
LINE = 19  # px of a line of a legend, in plotly
LINES = 3  # most lines of a row's name
ROWS = 0.56  # share of a column's width that names of rows take at most
BAR = 56  # px beside a plot for a colour bar


def page(figure: Figure) -> go.Figure:
    """Return the figure as wide as a page, with its title and small print."""
    plot: Any = go.Figure(figure.plot)
    below = 8 + (plot.layout.margin.b or 52)
    if plot.layout.showlegend and plot.layout.legend.yref == "container":
        below += 26 * _legend(plot, BLOG[0] - 80, text=13)[0]
    height = (plot.layout.height or BLOG[1]) + 40
    return _by_itself(plot, figure, (BLOG[0], int(height)), 15, 11, below)


def static(figure: Figure) -> Figure:
    """Return the figure without what only a click would show, and without places where nothing else stands."""
    plot: Any = go.Figure(figure.plot)
    plot.data = [trace for trace in plot.data if trace["visible"] in (None, True)]
    plot.update_annotations(bgcolor=_PAPER, selector={"name": "limit"})  # it may stand on an area or a grid line
    if (places := plot.layout.xaxis.categoryarray) is not None:
        told = {str(x) for trace in plot.data for x in trace.x}
        plot.layout.xaxis.categoryarray = [place for place in places if place in told]
    return replace(figure, plot=plot)


def column(figure: Figure) -> go.Figure:
    """Return the figure for one column of a paper, 3.5 in wide: text in 8 pt, labels or a fitting legend, small print
    in 7."""
    plot: Any = go.Figure(figure.plot)
    change = narrow(plot, COLUMN[0], COLUMN[1] - AROUND, TEXT)
    apply_narrow(plot, change)
    plot.update_layout(font={"color": _DARK})
    for note in plot.layout.annotations:
        note.font.size = SMALL if note.name in ("card", "limit") else max(SMALL, min(note.font.size or TEXT, TEXT))
    for trace in plot.select_traces(selector={"type": "scatter", "mode": "text"}):
        trace.textfont.size = SMALL
    return _by_itself(plot, figure, (COLUMN[0], change["height"]), TEXT + 0.5, SMALL, plot.layout.margin.b)


def on_phone(figure: Figure) -> dict[str, Any]:
    """Return what changes on a screen as narrow as a phone's, in the form of `narrow`."""
    return narrow(figure.plot, PHONE[0], PHONE[1] - AROUND, PHONE_TEXT)


def narrow(plot: Any, width: int, inner: int, text: float) -> dict[str, Any]:
    """Return what changes where a plot has little room: `width` px, letters of `text` px, `inner` px high without axis
    and legend. Keys: `layout`, `traces` by number, the whole `height`, and whether labels stay `beside` their lines.

    Short labels stay there, moved apart; a legend below replaces long ones.
    """
    ticks = _ticks(plot, ROWS * width / text)
    if plot.layout.height is not None:  # a plot of rows has a height of its own
        lines = max((name.count("<br>") for _, name in ticks), default=0)
        inner = max(70, int((0.62 + 0.35 * lines) * plot.layout.height * text / TEXT) - 10)
    labels = [(i, t) for i, t in enumerate(plot.data) if t.meta and t.meta.get(DIRECT)]
    shown = [(i, t) for i, t in labels if t.visible is not False]
    fit = bool(labels) and max(len(str(t.text[0]).strip()) for _, t in labels) <= LONGEST
    fit = fit and len(shown) * text < 0.9 * inner
    beside = [str(t.text[0]).strip() for _, t in (labels if fit else [])]
    bar = any(t.type == "heatmap" and t.showscale is not False for t in plot.data)
    right = 14 + text * max(map(text_width, beside)) if fit else BAR if bar else 10
    left = max([60, *(8 + text * text_width(line) for _, name in ticks for line in name.split("<br>"))])
    across = width - left - right
    wanted = bool(plot.layout.showlegend) or (bool(labels) and not fit)
    small = text * SMALL / TEXT
    lines, abreast = _legend(plot, across, beside, small) if wanted else (0, 1)
    below = round((LINE * lines + 12) * bool(lines))
    world = any(a.name == WORLD for a in plot.layout.annotations)
    axes = _axes(plot, across, inner, text, ticks)
    upright = axes["xaxis"].get("tickangle") == -90
    down = math.ceil(text * (max(map(text_width, _places(plot))) - 1)) if upright else 0  # px that these labels add
    layout: dict[str, Any] = {
        "font": {"size": text},
        "showlegend": bool(lines),
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0.01, "xref": "container",
                   "itemwidth": 30, "font": {"size": small}, "entrywidthmode": "fraction",
                   "entrywidth": 1 / abreast - 0.02},
        "margin": {"l": math.ceil(left) if ticks else 44, "r": round(right), "t": 22 if world else 8,
                   "b": 42 + down + below},
        **axes,
        "annotations": _notes(plot, axes["xaxis"].get("range") or plot.layout.xaxis.range, across, left, text),
    }  # fmt: skip
    traces = {i: change for i, trace in enumerate(plot.data) if (change := _smaller(trace, beside))}
    if fit:
        low, high = plot.layout.yaxis.range
        places = apart([float(t.y[0]) for _, t in shown], 1.15 * text * (high - low) / inner, low, high)
        for (i, _), y in zip(shown, places, strict=True):
            traces[i] = {"y": [y], "textposition": "middle right"}
    else:
        traces |= {i: {"visible": False} for i, _ in labels}
    return {"layout": layout, "traces": traces, "height": inner + AROUND + down + below, "beside": fit}


def _smaller(trace: Any, beside: Sequence[str]) -> dict[str, Any]:
    """Return a trace's smaller marker, and leave it out of the legend if its name stands next to it."""
    found: dict[str, Any] = {"showlegend": False} if trace.name in beside else {}
    if trace.type == "scatter" and isinstance(trace.marker.size, int | float):
        found["marker"] = {"size": trace.marker.size * (0.5 if str(trace.marker.symbol)[:4] == "line" else 0.75)}
    return found


def _axes(plot: Any, across: float, inner: float, text: float, ticks: Sequence[tuple[Any, str]]) -> dict[str, Any]:
    """Return the axes of a plot `across` px wide and `inner` px high, with the names of its rows."""
    x: dict[str, Any] = {"title": {"font": {"size": text}, "standoff": 4}}
    if (reach := _reach(plot, across, text)) is not None:
        x["range"] = [plot.layout.xaxis.range[0], reach]
    if plot.layout.xaxis.type == "category":
        x["tickangle"] = 0 if text * sum(text_width(one) + 0.6 for one in _places(plot)) < across else -90
    else:
        most = max(4, min(5, int(across / (5 * text))))
        x |= {"tickangle": 0} | _ticks_of(plot, plot.layout.xaxis, most, x.get("range"))
        lengths = plot.layout.xaxis.tickformat == ",~d"
        x |= {"tickformat": "~s"} if lengths and across < 5 * text * most else {}  # as 5k
    found = {"xaxis": x, "yaxis": _wrapped(plot, plot.layout.yaxis, inner, text)}
    if ticks:
        size = 0.88 * text if any("<br>" in name for _, name in ticks) else text
        found["yaxis"] |= {"tickvals": [at for at, _ in ticks], "ticktext": [name for _, name in ticks],
                           "tickfont": {"size": size}, "automargin": False}  # fmt: skip
    for name in ("yaxis2", "yaxis3"):
        if name in plot.layout and plot.layout[name].title.text:
            found[name] = _wrapped(plot, plot.layout[name], inner, text)
    return found


def _places(plot: Any) -> set[str]:
    """Return the places on a plot's x axis, as text."""
    return {str(one) for trace in plot.data if trace.x is not None for one in trace.x}


def _ticks(plot: Any, room: float) -> list[tuple[Any, str]]:
    """Return where rows of a plot stand and their names; a name wider than `room` em takes several lines."""
    bars = [t for t in plot.data if t.type == "bar" and t.orientation == "h"]
    axis = plot.layout.yaxis
    every = dict.fromkeys(x for t in bars for x in t.y)
    named = list(zip(axis.tickvals, axis.ticktext, strict=True)) if axis.ticktext else [(x, x) for x in every]
    found = []
    for at, text in named:
        lines = break_lines(str(text).replace("<br>", " "), room)
        found.append((at, "<br>".join(lines[:LINES]) + "…" * (len(lines) > LINES)))
    return found


def _notes(plot: Any, reach: Sequence[float] | None, across: float, left: float, text: float) -> list[dict[str, Any]]:
    """Return the notes that have room in a narrow plot. A GPU's heading begins where the names of rows do. Of upright
    lines whose names would overlap, the first keep theirs."""
    taken: list[tuple[float, float]] = []
    kept = []
    for note in plot.layout.annotations:
        if note.name == "beside":  # it has no room
            continue
        if note.name == "limit" and note.yref == "paper" and reach:
            low, high = reach
            end = (note.x - low) / (high - low) * across
            begin = end - text * text_width(note.text or "")
            if any(begin < other[1] and other[0] < end for other in taken):
                continue
            taken.append((begin, end))
        kept.append(note.to_plotly_json() | ({"xshift": 14 - left} if note.name == "card" else {}))
    return kept


def tick_step(low: float, high: float) -> float:
    """Return the largest round step of which an axis from `low` to `high` has three ticks."""
    power = 10.0 ** math.floor(math.log10(high - low))
    steps = [power * factor for factor in (5, 2, 1, 0.5, 0.2, 0.1)]
    return next(step for step in steps if math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9) >= 2)


def _ticks_of(plot: Any, axis: Any, most: int, ends: Sequence[float] | None = None) -> dict[str, Any]:
    """Return at least three ticks for an axis of numbers whose ends are known, else at most `most`."""
    name = axis.plotly_name.replace("axis", "")
    if axis.tickvals is not None or axis.type not in (None, "linear"):
        return {}
    if (ends := ends or axis.range) is None:
        mine = [t for t in plot.data if t.type == "scatter" and (t[f"{name[0]}axis"] or name[0]) == name]
        each = [np.asarray(t[name[0]]) for t in mine if t.visible is not False and t[name[0]] is not None]
        numbers = [one for one in each if one.dtype.kind in "fiu"]
        known = np.concatenate([[0.0] * (axis.rangemode == "tozero"), *numbers])
        known = known[np.isfinite(known)]
        ends = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    low, high = float(ends[0]), float(ends[1])
    return {"tick0": 0, "dtick": tick_step(low, high)} if high > low else {"nticks": most}


def _wrapped(plot: Any, axis: Any, height: float, text: float) -> dict[str, Any]:
    """Return the axis with fewer ticks, and its title in as many lines as it needs."""
    low, high = axis.domain or (0.0, 1.0)
    words = str(axis.title.text or "").replace("<br>", " ")
    told = "<br>".join(textwrap.wrap(words, max(9, int(height * (high - low) / (0.56 * text)))))
    ticks = _ticks_of(plot, axis, 5 if high - low > 0.5 else 3)
    return {"title": {"text": told, "font": {"size": text}, "standoff": 4}} | ticks


def _reach(plot: Any, across: float, text: float) -> float | None:
    """Return where the x axis must end, so that the words behind its points have room; None if there are no words."""
    ends = [
        float(x) / (1 - min(0.8, 0.5 * text * len(html.unescape(str(word))) / across))
        for trace in plot.select_traces(selector={"type": "scatter"})
        if trace.mode == "text" and trace.textposition == "middle right" and not trace.meta.get(DIRECT)
        for x, word in zip(trace.x, trace.text, strict=True)
    ] if plot.layout.xaxis.range else []  # fmt: skip
    return max(ends, default=None)


def apply_narrow(plot: Any, change: dict[str, Any]) -> None:
    """Change a plot as `narrow` says."""
    plot.layout.annotations = change["layout"]["annotations"]
    plot.update_layout({name: value for name, value in change["layout"].items() if name != "annotations"})
    for number, update in change["traces"].items():
        plot.data[number].update(update)


def _by_itself(plot: Any, figure: Figure, size: tuple[int, int], text: float, small: float, below: float) -> go.Figure:
    """Return the plot with its title above and its small print below; `below` px are taken by axis and legend."""
    width, height = size
    plot.layout.annotations = [note for note in plot.layout.annotations if note.name != WORLD]
    beside = [str(t.text[0]).strip() for t in plot.data if t.meta and t.meta.get(DIRECT) and t.visible is not False]
    for trace in plot.data:
        if trace.name and any(told == trace.name or told.startswith(f"{trace.name}, ") for told in beside):
            trace.showlegend = False  # its name stands next to it
    plot.update_annotations(bgcolor=_VEIL, selector={"name": "limit"})
    title = break_lines(figure.title, (width - 12) / (text * _BOLD))
    told = break_lines(figure.source, (width - 12) / small)
    first = 6 + 0.7 * text * (len(title) > 1)  # px from the top to the first line
    legend = plot.layout.legend.yref == "paper" and plot.layout.showlegend
    if legend:
        plot.layout.legend.y = ABOVE["y"]  # no note lies between
    top = 8 + 1.25 * text * len(title) + (26 * _legend(plot, width - 80, text=13)[0] if legend else 4)
    bottom = 1.3 * small * len(told) + 4
    if plot.layout.showlegend and plot.layout.legend.yref == "container":
        plot.update_layout(legend={"y": bottom / height})
    plot.update_layout(
        width=width, height=height, paper_bgcolor=_PAPER,
        margin={"t": math.ceil(top), "b": math.ceil(below + bottom)},
        title={"text": "<b>" + "<br>".join(map(escape, title)) + "</b>", "x": 6 / width, "xanchor": "left",
               "y": 1 - first / height, "yanchor": "top", "font": {"size": text, "color": _DARK}},
    )  # fmt: skip
    if told:
        plot.add_annotation(
            text="<br>".join(map(escape, told)), showarrow=False, xref="paper", yref="paper", x=1, y=0, align="right",
            xanchor="right", yanchor="bottom", xshift=(plot.layout.margin.r or 16) - 6, yshift=-(below + bottom) + 2,
            font={"size": small, "color": INK}, name="source",
        )  # fmt: skip
    drawn: go.Figure = plot
    return drawn


def _legend(plot: Any, room: float, beside: Sequence[str] = (), text: float = TEXT) -> tuple[int, int]:
    """Return a legend's lines in `room` px, and the entries of a line; columns are as wide as the longest entry."""
    named = {
        str(trace.legendgroup or trace.name)
        for trace in plot.data
        if trace.name and trace.showlegend is not False and trace.visible is not False and trace.name not in beside
    }
    abreast = max(1, int(room // (45 + 0.9 * text * max(map(text_width, named), default=0.0))))
    return math.ceil(len(named) / abreast), abreast


def text_width(text: str) -> float:
    """Return how wide a line of text is set, in em."""
    return sum(_WIDTHS.get(sign, _CAPITAL if sign.isupper() else _LETTER) for sign in text)


def break_lines(text: str, room: float, width: Callable[[str], float] = text_width) -> list[str]:
    """Return the text in lines of at most `room` em, or of the unit in which `width` measures."""
    lines: list[str] = []
    for word in text.split():
        if lines and width(f"{lines[-1]} {word}") <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
