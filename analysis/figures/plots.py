"""The look of all figures, and what they are drawn with: plotly, colour-blind safe, markers too, labels at the lines.

Each figure carries the data that it shows with the trial ids of its source rows, and a line on what these rows are.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from vramsweep.analysis.data.metrics import GIB, MIB
from vramsweep.analysis.figures.style import COLOURS, GREY, LOOKS, MARKERS, MOST, Look
from vramsweep.analysis.model.curves import Array
from vramsweep.harness.messages.terminal import escape_text

__all__ = ["COLOURS", "GREY", "MARKERS", "MOST", "Look"]

LENGTH = "sequence length (tokens)"
INK = "#555"  # of text; a dark page brightens it
WORLD = "world"  # name of the annotation that tells a figure's kind of rows
DIRECT = "direct"  # marks the traces that are labels, in their meta
Box = tuple[float, float, float, float]
MANY = 100  # points; if there are more, they are small
POINTS = 1500  # more points in one trace than this cannot be told apart, and make a browser slow
BLOG = (800, 460)


@dataclass(frozen=True)
class Figure:
    """A drawn figure: file name, title, caption, plot, and the data behind it. `source` gives the GPU and versions of
    its rows, and whether they were measured."""

    name: str
    title: str
    caption: str
    plot: go.Figure = field(repr=False)
    data: pd.DataFrame = field(repr=False)
    source: str = ""


@dataclass(frozen=True)
class End:
    """The end of a line, for its label: position on the axes, name, look."""

    x: float
    y: float
    name: str
    look: Look


def add_band(plot: Any, x: Array, low: Array, high: Array, look: Look, **more: Any) -> None:
    """Draw an area. Its ends may be infinite or unknown, because `finish` clips them."""
    low, high = np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
    plot.add_scatter(
        x=np.array([*x, *x[::-1]]), y=np.array([*high, *low[::-1]]), fill="toself", mode="lines", line={"width": 0},
        hoverinfo="skip", fillcolor=faint(look.colour), showlegend=False, **look.trace, **more,
    )  # fmt: skip


def add_points(
    plot: Any, x: Array, y: Array, ids: Any, look: Look, name: str, legend: bool = True, hollow: bool = False,
    faded: float = 1.0, **more: Any,
) -> None:  # fmt: skip
    """Draw rows as markers; `faded` is their opacity if a line matters more."""
    many = len(x) > MANY
    plot.add_scatter(
        x=x, y=y, mode="markers", name=escape(name), customdata=[escape(str(one)) for one in ids], legendgroup=name,
        showlegend=legend, marker={"color": look.colour, "symbol": look.symbol + "-open" * (hollow and not many),
        "size": 3 if many else 7, "opacity": min(faded, 0.4) if many else faded},
        hovertemplate="%{x:,} tokens: %{y:,.4~g}<br>trial %{customdata}<extra>" + escape(name) + "</extra>",
        **look.trace, **more,
    )  # fmt: skip


def add_curve(plot: Any, x: Array, y: Array, look: Look, name: str, dash: str = "") -> None:
    """Draw a line without points. It is not in the legend, because its points are."""
    plot.add_scatter(
        x=x, y=y, mode="lines", name=escape(name), legendgroup=name, hoverinfo="skip", showlegend=False,
        line={"color": look.colour, "width": 2, "dash": dash or look.dash, "simplify": False}, **look.trace,
    )  # fmt: skip


def add_line(
    plot: Any, x: Array, y: Array, look: Look, name: str, line: Mapping[str, Any] = MappingProxyType({}), **more: Any
) -> None:
    """Draw points joined by a line; markers only if there are few points."""
    plot.add_scatter(
        x=x, y=y, mode="lines+markers" if len(x) <= 60 else "lines", name=escape(name),
        line={"color": look.colour, "width": 2, "dash": look.dash} | dict(line),
        marker={"symbol": look.symbol, "size": 7},
        hovertemplate="%{x:,}: %{y:,.4~g}<extra>" + escape(name) + "</extra>", **look.trace, **more,
    )  # fmt: skip


def add_text(
    plot: Any, x: Any, y: Any, text: Sequence[str], look: Look, place: str, size: int = 12, direct: bool = False,
    **more: Any,
) -> None:  # fmt: skip
    """Write words at points of the axes, shown with their configuration's traces; `direct` marks the name of a line."""
    meta = {"settings": dict(look.settings)} | ({DIRECT: True} if direct else {})
    plot.add_scatter(
        x=list(x), y=list(y), text=[escape(one) for one in text], mode="text", textposition=place, showlegend=False,
        hoverinfo="skip", cliponaxis=False, textfont={"color": ink(look.colour), "size": size},
        **look.trace | {"meta": meta}, **more,
    )  # fmt: skip


def axis_unit(largest: float) -> tuple[int, str]:
    """Return the unit in which sizes up to `largest` bytes are drawn: its bytes and its name."""
    return (GIB, "GiB") if largest >= GIB else (MIB, "MiB")


def thin(x: Array, y: Array, most: int = POINTS) -> Any:
    """Return at most about `most` indices that keep the picture: evenly spaced ones, and each stretch's extremes."""
    if len(x) <= most:
        return np.arange(len(x))
    keep = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), most // 3):
        keep |= {int(part[0]), int(part[np.argmin(y[part])]), int(part[np.argmax(y[part])])}
    return np.array(sorted(keep))


def spread(x: Array, most: int) -> Any:
    """Return indices of at most `most` of these, evenly spaced, including both ends."""
    return np.unique(np.linspace(0, len(x) - 1, min(len(x), most)).round().astype(int))


def escape(text: str) -> str:
    """Escape text for plotly, which reads a subset of HTML, including links."""
    return escape_text(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def faint(colour: str, opacity: float = 0.18) -> str:
    red, green, blue = _rgb(colour)
    return f"rgba({red},{green},{blue},{opacity})"


def ink(colour: str) -> str:
    """Return the colour, dark enough for text on white: a contrast of about 4.5."""
    if len(colour) != 7:
        return colour
    linear = [(v / 255) ** 2.2 for v in _rgb(colour)]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return shade(colour, min(1.0, (0.18 / light) ** (1 / 2.2)) if light else 1.0)


def shade(colour: str, share: float) -> str:
    """Return the colour with this share of its light."""
    return "#" + "".join(f"{round(v * share):02x}" for v in _rgb(colour))


def sentence(*parts: str) -> str:
    return " ".join(part for part in parts if part)


AXIS, ABOVE = LOOKS["axis"], LOOKS["above"]  # the latter is a legend over the plot


def new_plot(x_title: str, y_title: str) -> go.Figure:
    x = {**AXIS, "title": {"text": x_title}, "tickformat": ",~d"}
    y = {**AXIS, "title": {"text": y_title}, "tickformat": ",~g"}
    return go.Figure(layout={**LOOKS["layout"], "xaxis": x, "yaxis": y})


def new_panels(x_title: str, panels: Mapping[str, tuple[float, float]], **layout: Any) -> Any:
    """Return an empty plot with panels over each other along one axis, by title and part of the height."""
    plot = new_plot(x_title, "")
    for number, (title, domain) in enumerate(panels.items(), 1):
        own = {**AXIS, "domain": domain, "anchor": "x", "title": {"text": title}, "tickformat": ",~g"}
        plot.update_layout({f"yaxis{number}": own})
    return plot.update_layout(xaxis={"anchor": f"y{len(panels)}"}, **layout)


def finish(plot: Any, ends: Sequence[End], reach: Sequence[float], zero: bool = False, share: float = 1.0) -> None:
    """Set the y range (from zero unless that wastes half of it, or if `zero`) and label the end of each line.

    `share` is the share of the plot's height that the axis has.
    """
    low, high = min(reach), max(reach)
    low = 0.0 if zero or low < 0.5 * high else low - 0.08 * (high - low)
    high += 0.06 * (high - low) or 1.0
    plot.update_layout(yaxis={"range": [low, high]})
    for band in plot.data:
        if band.fill == "toself" and band.yaxis in (None, "y"):  # its end may be infinite
            band.y = np.clip(np.asarray(band.y, dtype=float), 2 * low - high, 2 * high - low)
    if not (ends := [end for end in ends if not end.look.hidden]):
        return
    drawn = [x for x, _ in _numbers(plot)] or [end.x for end in ends]
    first, last = min(drawn), max(drawn)
    span = (last - first) or 1.0
    widths = [7.0 * len(short(end.name)) for end in ends]
    rooms = [(last - end.x) / span * 460 for end in ends]
    right = min(260.0, max(16.0, *(24 + width - room for width, room in zip(widths, rooms, strict=True))))
    across, up = (BLOG[0] - 64 - right) / (1.06 * span), share * (BLOG[1] - 68) / (high - low)
    plot.update_layout(margin={"r": round(right)})
    if any(isinstance(x, float | int | np.number) for trace in plot.data for x in trace.x[:1]):
        plot.update_xaxes(range=[first - 0.03 * span, last + 0.03 * span])
    if len({end.x for end in ends}) == 1 and ends[0].x == last:  # to the right of all that is drawn: keep their order
        for end, y in zip(ends, apart([end.y for end in ends], 16 / up, low, high), strict=True):
            add_text(plot, [end.x], [y], [f" {short(end.name)} "], end.look, "middle right", direct=True)
        return
    points = np.array(_numbers(plot)).reshape(-1, 2) * [across, up]
    taken = np.hstack([points - 4, points + 4])
    for end, width in sorted(zip(ends, widths, strict=True), key=lambda pair: -pair[0].y):
        x, y = end.x * across, min(end.y * up, high * up - 9)
        places = [(x + 8, y + 16 * k) for k in (0, -1, 1, -2, 2, -3, 3, -4, -5, -6)] + [(x - width - 8, y)]
        boxes = [(left, at - 7, left + width, at + 7) for left, at in places if low * up + 8 < at < high * up]
        box = next((box for box in boxes if not _overlaps(box, taken)), boxes[0])
        taken = np.vstack([taken, box])
        side = "middle left" if box[0] < x else "middle right"
        add_text(plot, [end.x], [(box[1] + 7) / up], [f" {short(end.name)} "], end.look, side, direct=True)


def apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move the places as little as needed, so that each is `gap` from the next and all are within the range."""
    order = np.argsort(places, kind="stable")
    found = np.array(places, dtype=float)
    at = low + gap / 2
    for i in order:
        found[i] = at = max(found[i], at)
        at += gap
    at = high - gap / 2
    for i in order[::-1]:
        found[i] = at = min(found[i], at)
        at -= gap
    return [float(one) for one in found]


def _numbers(plot: Any, most: int = 200) -> list[tuple[float, float]]:
    """Return positions of what is drawn, thinned; categories count from 0."""
    found = []
    for trace in plot.data:
        if trace.visible is False or trace.mode == "text" or trace.yaxis not in (None, "y") or not len(trace.x):
            continue
        x = trace.x if not isinstance(trace.x[0], str) else range(len(trace.x))
        keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), most)).astype(int))
        found += [(float(x[i]), float(trace.y[i])) for i in keep]
    return found


def _overlaps(box: Box, others: Array) -> bool:
    """Check whether a box (left, bottom, right, top) overlaps any of the others, shape (n, 4)."""
    left, bottom, right, top = others.T
    return bool(np.any((box[0] < right) & (left < box[2]) & (box[1] < top) & (bottom < box[3])))


def short(name: str, most: int = 34) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def of_world(figure: Figure, world: str, alone: bool) -> Figure:
    """Return the figure marked with the kind of its rows (predicted, measured on cuda, imported from a file).

    The file's name says it too, unless it is `alone`: there are no figures of other rows.
    """
    plot = go.Figure(figure.plot)
    plot.add_annotation(
        text=escape(world), showarrow=False, xref="paper", yref="paper", x=1, y=1, xanchor="right", yanchor="bottom",
        font={"size": 12, "color": GREY}, name=WORLD,
    )  # fmt: skip
    plot.update_layout(margin={"t": 28})
    if plot.layout.legend.yref == "paper":  # move it above the annotation
        height = (plot.layout.height or BLOG[1]) - 80
        plot.update_layout(legend={"y": max(plot.layout.legend.y, 1 + 20 / height)}, margin={"t": 48})
    named = re.sub(r"[^a-z0-9]+", "_", f"{figure.name} {world}".lower()).strip("_")[:120]
    name = figure.name if alone else named
    return replace(figure, name=name, title=f"{figure.title} ({world})", plot=plot)
