"""Every figure of the report, in one look: plotly, colour-blind safe, markers too, labels at the lines.

A builder takes rows or fits and returns a Figure, or None where the rows do not hold what it shows. With each figure
goes the data that it shows, with the trial ids of its source rows. Colours are Okabe and Ito's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from vramsweep.analysis.data.groups import Group, label, others_equal
from vramsweep.analysis.data.metrics import GIB, MIB
from vramsweep.analysis.model.bases import BASES
from vramsweep.analysis.model.curves import FEWEST, Array
from vramsweep.analysis.model.fit import FEWEST_TIMES, Fit
from vramsweep.harness.terminal import shown

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
GREY = "#7f7f7f"
MOST = len(COLOURS)
WORLD = "world"  # the annotation that says what kind of rows a figure shows
Box = tuple[float, float, float, float]
POINTS = 1500  # more points in one trace than this cannot be told apart, and make a browser slow
BLOG = (800, 460)
COLUMN = (420, 280)  # 3.5 in wide at 120 px/in, so that 11 px text prints at 6.6 pt; and the legend below


@dataclass(frozen=True)
class Figure:
    """A drawn figure: file name, title, what it shows in a sentence, the plot and the data behind it."""

    name: str
    title: str
    caption: str
    plot: go.Figure = field(repr=False)
    data: pd.DataFrame = field(repr=False)


@dataclass(frozen=True)
class End:
    """Where a line ends, for its label: position on the axes, name, colour."""

    x: float
    y: float
    name: str
    colour: str


def baseline(groups: Sequence[Group], prefer: Sequence[str] = ()) -> tuple[list[Group], str]:
    """At most six groups that can be read in one figure, and which these are when there are more.

    With too many, the largest group and those that differ from it in one setting of `prefer` only (else in any one).
    """
    if len(groups) <= MOST:
        return list(groups), ""
    base = groups[0]

    def differs(group: Group) -> list[str]:
        return [key for key, value in group.settings.items() if value != base.settings.get(key)]

    near = [g for g in groups[1:] if len(differs(g)) == 1]
    near.sort(key=lambda g: (differs(g)[0] not in prefer, -len(g.rows)))
    shown = [base, *near[: MOST - 1]]
    return (
        shown,
        f"{len(shown)} of {len(groups):,} groups: {base.label}, and groups that differ from it in one setting.",
    )


def names(groups: Sequence[Group]) -> list[str]:
    """Labels of groups that stand in one figure: only what differs between these."""
    shared = _shared(groups)
    found = [label({k: v for k, v in group.settings.items() if k not in shared}) for group in groups]
    return [name + f" ({found[:i].count(name) + 1})" * (found.count(name) > 1) for i, name in enumerate(found)]


def _shared(groups: Sequence[Group]) -> dict[str, Any]:
    first = groups[0].settings
    return {k: v for k, v in first.items() if all(g.settings.get(k) == v for g in groups)}


def memory_by_length(fits: Sequence[Fit], groups: Sequence[Group]) -> Figure | None:
    """Peak allocated (else active) and reserved memory against length, with the fit and its band."""
    fitted = {fit.group for fit in fits if fit.metric.memory}
    known = [g for g in groups if g.id in fitted]
    shown = known if len(known) <= 3 else others_equal(known, ("micro_batch",))[:4]
    if not shown:
        return None
    note = ""
    if len(shown) < len(known):
        note = f"{len(shown)} of {len(known):,} groups, all with {label(_shared(shown))}; others are in rows.csv."
    unit, called = axis_unit(_largest(fits, shown))
    plot = new_plot("sequence length (tokens)", f"peak memory ({called})")
    data: list[pd.DataFrame] = []
    ends: list[End] = []
    reach: list[float] = []
    drawn: list[Fit] = []
    for number, (group, which) in enumerate(zip(shown, names(shown), strict=True)):
        own = {fit.metric.column: fit for fit in fits if fit.group == group.id}
        first = own.get("peak_allocated_bytes") or own.get("peak_active_bytes")
        reserved = None if group.resident else own.get("peak_reserved_bytes")
        for fit, solid in ((first, True), (reserved, False)):
            if fit is None:
                continue
            drawn.append(fit)
            name = fit.metric.label.removeprefix("peak ")
            name = f"{name}, {which}" if len(shown) > 1 else name
            colour = number if solid or len(shown) > 1 else number + 1  # alone, the two curves get a colour each
            data.append(_fitted(plot, fit, colour, name, solid, unit, band=len(shown) <= 3))
            ends.append(End(fit.range[1], _end(fit) / unit, name, COLOURS[colour]))
            reach += [float(fit.points.y.min()) / unit, float(fit.points.y.max()) / unit]
    if not data:
        return None
    finish(plot, ends, reach)
    what = "Open markers and dashes: reserved." if any(fit.metric.limited for fit in drawn) else ""
    if all(group.resident for group in shown):
        what = "Live tensor bytes on a CPU."
    caption = sentence(_lines_are(drawn, len(shown) <= 3), what, note)
    title = "Peak memory against sequence length"
    return Figure("memory_by_length", title, caption, plot, pd.concat(data, ignore_index=True))


def _lines_are(fits: Sequence[Fit], bands: bool) -> str:
    """What points, lines and bands are, and what the lines rest on; of each quantity, where that is not the same."""
    of: dict[str, list[str]] = {}
    for fit in fits:
        of.setdefault(fit.basis, []).append(fit.metric.label)
    rest = [f"{BASES[basis]} ({' and '.join(dict.fromkeys(labels))})" for basis, labels in of.items()]
    if len(of) == 1:
        rest = [BASES[basis] for basis in of]
    band = "; bands: 95 % interval of the curve" if bands else ""
    return f"Points: rows; lines: the fit, which rests {', or '.join(rest)}{band}."


def allocators(fits: Sequence[Fit], groups: Sequence[Group]) -> Figure | None:
    """Peak reserved memory against length, one line per allocator, everything else equal."""
    having = {fit.group: fit for fit in fits if fit.metric.column == "peak_reserved_bytes"}
    shown = [group for group in others_equal(groups, ("allocator",))[:MOST] if group.id in having]
    if len(shown) < 2:
        return None
    unit, called = axis_unit(_largest(fits, shown))
    plot = new_plot("sequence length (tokens)", f"peak reserved memory ({called})")
    data, ends, reach = [], [], []
    for number, (group, name) in enumerate(zip(shown, names(shown), strict=True)):
        fit = having[group.id]
        data.append(_fitted(plot, fit, number, name, True, unit, band=len(shown) <= 3))
        ends.append(End(fit.range[1], _end(fit) / unit, name, COLOURS[number]))
        reach += [float(fit.points.y.min()) / unit, float(fit.points.y.max()) / unit]
    finish(plot, ends, reach)
    fitted = _lines_are([having[group.id] for group in shown], len(shown) <= 3)
    caption = sentence(fitted, _without(shown[0], "allocator"))
    return Figure("allocators", "Allocators compared", caption, plot, pd.concat(data, ignore_index=True))


def _without(group: Group, axis: str) -> str:
    rest = {k: v for k, v in group.settings.items() if not k.removeprefix("trial.").startswith(axis)}
    return f"All with {label(rest)}." if rest else ""


def throughput(fits: Sequence[Fit], groups: Sequence[Group]) -> Figure | None:
    """Tokens per second against length; the curve is tokens per step over the fitted step time."""
    having = {fit.group: fit for fit in fits if fit.metric.column == "step_median_s" and fit.samples_per_step}
    shown, note = baseline([g for g in groups if g.id in having], ("precision", "micro_batch"))
    if not shown:
        return _throughput_alone(groups)
    if not shown:
        return None
    plot = new_plot("sequence length (tokens)", "throughput (tokens/s)")
    data, ends, reach = [], [], [0.0]
    for number, (group, name) in enumerate(zip(shown, names(shown), strict=True)):
        fit, colour, symbol = having[group.id], COLOURS[number], MARKERS[number]
        rows = _missed(fit, group).assign(group=group.label, name=name)
        for part in _parts(fit):
            predicted, tokens = fit.predict(part), part * (fit.samples_per_step or 1)
            if len(shown) <= 3:
                with np.errstate(divide="ignore"):
                    low, high = tokens / np.maximum(predicted.high, 0), tokens / np.maximum(predicted.low, 0)
                add_band(plot, part, low, high, colour)
            _add_curve(plot, part, tokens / predicted.value, colour, "solid", name)
        x, y = rows["seq_len"].to_numpy(float), rows["tokens_per_s"].to_numpy(float)
        at = thin(x, y)
        ids, out = rows["trial_id"].to_numpy()[at], rows["outside"].to_numpy(bool)[at]
        if not out.all():
            add_points(plot, x[at][~out], y[at][~out], ids[~out], colour, symbol, name)
        if out.any():
            add_points(plot, x[at][out], y[at][out], ids[out], colour, f"{symbol}-open", name, bool(out.all()))
        end = np.array([fit.range[1]])
        ends.append(End(end[0], float((end * (fit.samples_per_step or 1) / fit.value(end))[0]), name, colour))
        reach += [float(y.max())]
        data.append(rows)
    finish(plot, ends if len(shown) > 1 else [], reach)
    every = pd.concat(data, ignore_index=True)
    band = "; bands: its 95 % interval" if len(shown) <= 3 else ""
    caption = sentence(f"Points: rows; lines: tokens per step over the fitted step time{band}.", _misses(every), note)
    shown_data = every[["group", "seq_len", "tokens_per_s", "over_fit", "outside", "trial_id"]]
    return Figure("throughput", "Throughput against sequence length", caption, plot, shown_data)


def _throughput_alone(groups: Sequence[Group]) -> Figure | None:
    """The rows without a line, where there are fewer lengths than a line of step times takes."""
    known = [(g, g.ok("tokens_per_s", "seq_len").sort_values("seq_len")) for g in groups if not g.varies]
    of = {group.id: rows for group, rows in known if FEWEST <= rows["seq_len"].nunique() < FEWEST_TIMES}
    shown, note = baseline([group for group, _ in known if group.id in of], ("precision", "micro_batch"))
    if not shown:
        return None
    plot = new_plot("sequence length (tokens)", "throughput (tokens/s)")
    data, ends, reach = [], [], [0.0]
    for number, (group, name) in enumerate(zip(shown, names(shown), strict=True)):
        rows, colour = of[group.id], COLOURS[number]
        x, y = rows["seq_len"].to_numpy(float), rows["tokens_per_s"].to_numpy(float)
        add_points(plot, x, y, rows["trial_id"].to_numpy(), colour, MARKERS[number], name)
        ends.append(End(float(x[-1]), float(y[-1]), name, colour))
        reach.append(float(y.max()))
        data.append(rows.assign(group=group.label)[["group", "seq_len", "tokens_per_s", "trial_id"]])
    finish(plot, ends if len(shown) > 1 else [], reach)
    caption = sentence("Points: rows; their lengths are too few for a line.", note)
    every = pd.concat(data, ignore_index=True)
    return Figure("throughput", "Throughput against sequence length", caption, plot, every)


def _missed(fit: Fit, group: Group) -> pd.DataFrame:
    """The rows, how far each one's step time lies over the fitted one (a share), and whether it is outside the interval
    for a new run."""
    rows = group.ok("tokens_per_s", "seq_len", "step_median_s").sort_values("seq_len")
    length, step = (rows[name].to_numpy(float) for name in ("seq_len", "step_median_s"))
    x, at = np.unique(length, return_inverse=True)
    fitted = fit.predict(x)
    outside = (step < fitted.new_low[at]) | (step > fitted.new_high[at])
    return pd.DataFrame(
        {
            "seq_len": rows["seq_len"].to_numpy(),
            "tokens_per_s": rows["tokens_per_s"].to_numpy(),
            "over_fit": step / fitted.value[at] - 1,
            "outside": outside,
            "trial_id": rows["trial_id"].astype(str).to_numpy(),
        }
    )


def _misses(rows: pd.DataFrame, most: int = 6) -> str:
    """How many rows the fit misses, the worst of them and where they are."""
    missed = rows[rows["outside"]]
    if missed.empty:
        return "All lie inside the fit's 95 % interval for a new run."
    worst = missed.iloc[int(np.argmax(missed["over_fit"].abs()))]
    lengths = sorted({int(x) for x in missed["seq_len"]})
    others = [f"{x:,}" for x in lengths if x != worst["seq_len"]]
    also = f"; others at {', '.join(others[:most])}" if others else ""
    also += f" and {len(others) - most:,} more lengths" if len(others) > most else ""
    chance = round(0.05 * len(rows))
    by_chance = f", of which about {chance:,} may by chance" if chance else ""
    way = "slower" if worst["over_fit"] > 0 else "faster"
    who = f", {worst['name']}" if rows["name"].nunique() > 1 else ""
    return (
        f"Open markers: {len(missed):,} of {len(rows):,} lie outside the fit's 95 % interval for a new run{by_chance}; "
        f"worst: a step {100 * abs(worst['over_fit']):.1f} % {way} than fitted, at {int(worst['seq_len']):,} "
        f"tokens{who}{also}."
    )


def _parts(fit: Fit) -> list[Array]:
    """The x at which a fit is drawn: a line for the lengths that are not aligned, and one for those that are, instead
    of a comb."""
    x = np.linspace(max(fit.range[0], 1), fit.range[1], 160)
    modulus = fit.chosen.model.modulus if fit.basis == "points" else None
    if not modulus:
        return [x]
    x = np.unique(np.floor(x))
    return [x[x % modulus != 0], np.unique(x - x % modulus)[1:]]


def _fitted(plot: Any, fit: Fit, number: int, name: str, solid: bool, unit: int, band: bool) -> pd.DataFrame:
    """Draw one fit of memory: points, line and band; return what was drawn."""
    colour, points = COLOURS[number], fit.points
    at = thin(points.x, points.y)
    ids = np.array(points.ids, dtype=object)[at]
    for part in _parts(fit):
        predicted = fit.predict(part)
        if band:
            add_band(plot, part, predicted.low / unit, predicted.high / unit, colour)
        _add_curve(plot, part, predicted.value / unit, colour, "solid" if solid else "dash", name)
    add_points(plot, points.x[at], points.y[at] / unit, ids, colour, MARKERS[number] + "-open" * (not solid), name)
    return pd.DataFrame(
        {
            "group": fit.label,
            "metric": fit.metric.column,
            "seq_len": points.x[at],
            "value": points.y[at],
            "fitted": fit.value(points.x[at]),
            "model": fit.chosen.model.name,
            "rests_on": fit.basis,
            "trial_id": ids,
        }
    )


def add_band(plot: Any, x: Array, low: Array, high: Array, colour: str) -> None:
    """An area, whose ends may be infinite or unknown: `finish` clips them."""
    low, high = np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
    plot.add_scatter(
        x=[*x, *x[::-1]], y=[*high, *low[::-1]], fill="toself", mode="lines", line={"width": 0}, hoverinfo="skip",
        fillcolor=faint(colour), showlegend=False,
    )  # fmt: skip


def add_points(
    plot: Any, x: Array, y: Array, ids: Any, colour: str, symbol: str, name: str, legend: bool = True
) -> None:
    many = len(x) > 100 and legend
    plot.add_scatter(
        x=x, y=y, mode="markers", name=escape(name), customdata=[escape(str(one)) for one in ids], legendgroup=name,
        showlegend=legend,
        marker={"color": colour, "symbol": symbol, "size": 4 if many else 7, "opacity": 0.55 if many else 1.0},
        hovertemplate="%{x:,} tokens: %{y:,.4~g}<br>trial %{customdata}<extra>" + escape(name) + "</extra>",
    )  # fmt: skip


def _add_curve(plot: Any, x: Array, y: Array, colour: str, dash: str, name: str) -> None:
    plot.add_scatter(
        x=x, y=y, mode="lines", name=escape(name), legendgroup=name, hoverinfo="skip", showlegend=False,
        line={"color": colour, "width": 2, "dash": dash},
    )  # fmt: skip


def axis_unit(largest: float) -> tuple[int, str]:
    """The unit in which sizes up to `largest` bytes are drawn: its bytes and its name."""
    return (GIB, "GiB") if largest >= GIB else (MIB, "MiB")


def _largest(fits: Sequence[Fit], groups: Sequence[Group]) -> float:
    """The largest memory that any of the groups was measured at."""
    ids = {group.id for group in groups}
    return max(float(fit.points.y.max()) for fit in fits if fit.group in ids and fit.metric.memory)


def _end(fit: Fit) -> float:
    """Where the fitted line ends."""
    return float(fit.predict(np.array([fit.range[1]])).value[0])


def thin(x: Array, y: Array, most: int = POINTS) -> Any:
    """Indices of at most about `most` points that keep the picture: evenly spaced, and each stretch's extremes."""
    if len(x) <= most:
        return np.arange(len(x))
    keep = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), most // 3):
        keep |= {int(part[0]), int(part[np.argmin(y[part])]), int(part[np.argmax(y[part])])}
    return np.array(sorted(keep))


def escape(text: str) -> str:
    """Text for plotly, which reads a subset of HTML, links among it."""
    return shown(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"


def sentence(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def new_plot(x_title: str, y_title: str) -> go.Figure:
    axis = {"showline": True, "linecolor": GREY, "gridcolor": "rgba(127,127,127,0.25)", "zeroline": False,
            "ticks": "outside", "tickcolor": GREY, "automargin": True}  # fmt: skip
    return go.Figure(
        layout={
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#555"},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "margin": {"l": 64, "r": 16, "t": 16, "b": 52},
            "xaxis": {**axis, "title": {"text": x_title}, "tickformat": ",~d"},
            "yaxis": {**axis, "title": {"text": y_title}, "tickformat": ",~g"},
            "showlegend": False,
            "legend": {
                "orientation": "h",
                "yref": "container",
                "y": 0,
                "yanchor": "bottom",
                "x": 0,
                "tracegroupgap": 0,
            },
            "hovermode": "closest",
        }
    )


def finish(plot: Any, ends: Sequence[End], reach: Sequence[float]) -> None:
    """Set the y range (from zero unless that wastes half of it) and put each label at the end of its line."""
    low, high = min(reach), max(reach)
    low = 0.0 if low < 0.5 * high else low - 0.08 * (high - low)
    high += 0.06 * (high - low) or 1.0
    plot.update_yaxes(range=[low, high])
    for band in plot.data:
        if band.fill == "toself":  # its end may be infinite
            band.y = np.clip(np.asarray(band.y, dtype=float), 2 * low - high, 2 * high - low)
    if not ends:
        return
    drawn = [x for x, _ in _numbers(plot)] or [end.x for end in ends]
    first, last = min(drawn), max(drawn)
    span = (last - first) or 1.0
    widths = [7.0 * len(short(end.name)) for end in ends]
    rooms = [(last - end.x) / span * 460 for end in ends]
    right = min(260.0, max(16.0, *(24 + width - room for width, room in zip(widths, rooms, strict=True))))
    across, up = (BLOG[0] - 64 - right) / (1.06 * span), (BLOG[1] - 68) / (high - low)
    points = np.array(_numbers(plot)).reshape(-1, 2) * [across, up]
    taken = np.hstack([points - 4, points + 4])
    for end, width in sorted(zip(ends, widths, strict=True), key=lambda pair: -pair[0].y):
        x, y = end.x * across, min(end.y * up, high * up - 9)
        places = [(x + 8, y + 16 * k) for k in (0, -1, 1, -2, 2, -3, 3, -4, -5, -6)] + [(x - width - 8, y)]
        boxes = [(left, at - 7, left + width, at + 7) for left, at in places if low * up + 8 < at < high * up]
        free = [box for box in boxes if not _overlaps(box, taken)]
        box = (free or boxes)[0]
        taken = np.vstack([taken, box])
        plot.add_annotation(
            x=end.x, y=(box[1] + 7) / up, text=escape(short(end.name)), font={"color": end.colour}, showarrow=False,
            xanchor="left", yanchor="middle", name="direct", align="left", xshift=round(box[0] - x),
        )  # fmt: skip
    if any(isinstance(x, float | int | np.number) for trace in plot.data for x in trace.x[:1]):
        plot.update_xaxes(range=[first - 0.03 * span, last + 0.03 * span])
    plot.update_layout(margin={"r": round(right)})


def _numbers(plot: Any, most: int = 200) -> list[tuple[float, float]]:
    """Positions of what is drawn, thinned; categories count from 0."""
    found = []
    for trace in plot.data:
        x = trace.x if not isinstance(trace.x[0], str) else range(len(trace.x))
        keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), most)).astype(int))
        found += [(float(x[i]), float(trace.y[i])) for i in keep]
    return found


def _overlaps(box: Box, others: Array) -> bool:
    """Whether a box (left, bottom, right, top) overlaps any of the others, shape (n, 4)."""
    left, bottom, right, top = others.T
    return bool(np.any((box[0] < right) & (left < box[2]) & (box[1] < top) & (bottom < box[3])))


def short(name: str, most: int = 34) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def of_world(figure: Figure, world: str, alone: bool) -> Figure:
    """The figure with what kind its rows are of (predicted, measured on cuda, from a foreign file) written on it.

    The file's name says it too unless there are no others.
    """
    name = re.sub(r"[^a-z0-9]+", "_", f"{figure.name} {world}".lower()).strip("_")[:120]
    plot = go.Figure(figure.plot)
    plot.add_annotation(
        text=escape(world), showarrow=False, xref="paper", yref="paper", x=0, y=1, xanchor="left", yanchor="bottom",
        font={"size": 12, "color": GREY}, name=WORLD,
    )  # fmt: skip
    plot.update_layout(margin={"t": 28})
    return replace(
        figure,
        name=figure.name if alone else name,
        title=f"{figure.title} ({world})" if figure.title.endswith("?") else f"{figure.title}, {world}",
        plot=plot,
    )


def column_width(plot: go.Figure) -> go.Figure:
    """The figure for one column of a paper: a legend below instead of labels at the side, dark text."""
    small = go.Figure(plot)
    labels = [a for a in small.layout.annotations if a.name == "direct"]
    small.layout.annotations = [a for a in small.layout.annotations if a.name != "direct"]
    small.update_layout(
        showlegend=bool(labels) or bool(plot.layout.showlegend),
        legend={"yref": "container", "y": 0, "yanchor": "bottom"},
        margin={"l": 50, "r": 10, "t": 24 if any(a.name == WORLD for a in small.layout.annotations) else 10, "b": 44},
        font={"size": 11, "color": "#000"},
    )
    return small


def of_fits(fits: Sequence[Fit], groups: Sequence[Group]) -> list[Figure]:
    """The figures that show fits, in reading order."""
    drawn = [memory_by_length(fits, groups), allocators(fits, groups), throughput(fits, groups)]
    return [figure for figure in drawn if figure is not None]
