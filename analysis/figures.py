"""Every figure of the report, in one look: plotly, colour-blind safe, markers too, labels at the lines.

A builder takes rows or fits and returns a Figure, or None where the rows do not hold what it shows. With each figure
goes the data that it shows, with the trial ids of its source rows. Colours are Okabe and Ito's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io

from analysis.curves import Array
from analysis.fit import Fit
from analysis.load import Group
from analysis.metrics import GIB

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
GREY = "#7f7f7f"
MOST = len(COLOURS)
POINTS = 1500  # more points in one trace than this cannot be told apart, and make a browser slow
BLOG = (800, 460)
COLUMN = (420, 330)  # 3.5 in wide at 120 px/in, so that 11 px text prints at 6.6 pt


@dataclass(frozen=True)
class Figure:
    """A drawn figure: file name, title, what it shows in a sentence, the plot and the data behind it."""

    name: str
    title: str
    caption: str
    plot: go.Figure = field(repr=False)
    data: pd.DataFrame = field(repr=False)


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
    near.sort(key=lambda g: (differs(g)[0] not in prefer, -len(g.frame)))
    shown = [base, *near[: MOST - 1]]
    return (
        shown,
        f"{len(shown)} of {len(groups):,} groups: {base.label}, and groups that differ from it in one setting.",
    )


def memory_by_length(fits: Sequence[Fit], groups: Sequence[Group]) -> Figure | None:
    """Peak allocated (else active) and reserved memory against length, with the chosen fit and its band."""
    shown, note = baseline(
        [g for g in groups if any(f.label == g.label and f.metric.memory for f in fits)], ("micro_batch",)
    )
    plot = _plot("sequence length (tokens)", "peak memory (GiB)")
    data: list[pd.DataFrame] = []
    ends: list[tuple[float, str, str]] = []
    reach: list[float] = []
    for number, group in enumerate(shown):
        own = {fit.metric.column: fit for fit in fits if fit.label == group.label}
        first = own.get("peak_allocated_bytes") or own.get("peak_active_bytes")
        for fit, solid in ((first, True), (own.get("peak_reserved_bytes"), False)):
            if fit is None:
                continue
            name = (
                f"{fit.metric.label.removeprefix('peak ')}, {group.label}"
                if group.label != "all rows"
                else fit.metric.label
            )
            colour = number if solid or len(shown) > 1 else number + 1  # alone, the two curves get a colour each
            data.append(_fitted(plot, fit, colour, name, solid, GIB, band=len(shown) <= 3))
            ends.append((_end(fit) / GIB, name, COLOURS[colour]))
            reach += [float(fit.points.y.min()) / GIB, float(fit.points.y.max()) / GIB]
    if not data:
        return None
    _finish(plot, ends, reach)
    return Figure(
        "memory_by_length",
        "Peak memory against sequence length",
        _sentence(
            "Points: rows; lines: chosen fit; bands: 95 % interval of the curve. Open markers and dashes: reserved.",
            note,
        ),
        plot,
        pd.concat(data, ignore_index=True),
    )


def throughput(fits: Sequence[Fit], groups: Sequence[Group]) -> Figure | None:
    """Tokens per second against length, with the chosen fit."""
    having = {fit.label: fit for fit in fits if fit.metric.column == "tokens_per_s"}
    shown, note = baseline([g for g in groups if g.label in having], ("precision", "micro_batch"))
    if not shown:
        return None
    plot = _plot("sequence length (tokens)", "throughput (tokens/s)")
    data, ends, reach = [], [], []
    for number, group in enumerate(shown):
        fit = having[group.label]
        data.append(_fitted(plot, fit, number, group.label, True, 1.0, band=len(shown) <= 3))
        ends.append((_end(fit), group.label, COLOURS[number]))
        reach += [float(fit.points.y.min()), float(fit.points.y.max())]
    _finish(plot, ends if len(shown) > 1 else [], [0.0, *reach])
    return Figure(
        "throughput",
        "Throughput against sequence length",
        _sentence("Points: rows; lines: chosen fit; bands: 95 % interval of the curve.", note),
        plot,
        pd.concat(data, ignore_index=True),
    )


def _fitted(plot: go.Figure, fit: Fit, number: int, name: str, solid: bool, scale: float, band: bool) -> pd.DataFrame:
    """Draw one fit: points, line and band; return what was drawn."""
    colour, points = COLOURS[number], fit.points
    at = thin(points.x, points.y)
    classes = fit.chosen.model.modulus
    x = (
        np.unique(np.concatenate([np.linspace(*fit.range, 160), points.x[at]]))
        if classes is None
        else np.unique(points.x[at])
    )
    if classes:  # one line through each class, instead of a comb between them
        x = np.unique(np.floor(np.linspace(*fit.range, 160)))
        x = x[x % classes != 0]
    predicted = fit.predict(x)
    if band:
        plot.add_scatter(
            x=[*x, *x[::-1]], y=[*predicted.high / scale, *predicted.low[::-1] / scale], fill="toself", mode="lines",
            line={"width": 0}, fillcolor=_faint(colour), hoverinfo="skip", showlegend=False,
        )  # fmt: skip
    ids: Any = [points.ids[i] for i in at]
    size, opacity = (7, 1.0) if len(at) <= 100 else (4, 0.55)
    symbol = MARKERS[number] + ("" if solid else "-open")
    plot.add_scatter(
        x=points.x[at], y=points.y[at] / scale, mode="markers", name=name, legendgroup=name, showlegend=False,
        marker={"color": colour, "symbol": symbol, "size": size, "opacity": opacity},
        customdata=ids,
        hovertemplate="%{x:,} tokens: %{y:,.4~f}<br>trial %{customdata}<extra>" + escape(name) + "</extra>",
    )  # fmt: skip
    plot.add_scatter(
        x=x, y=predicted.value / scale, mode="lines", name=escape(name), legendgroup=name, hoverinfo="skip",
        line={"color": colour, "width": 2, "dash": "solid" if solid else "dash"},
    )  # fmt: skip
    fitted = fit.chosen.model.predict(points.x[at])
    return pd.DataFrame(
        {
            "group": fit.label,
            "metric": fit.metric.column,
            "seq_len": points.x[at],
            "value": points.y[at],
            "fitted": fitted,
            "model": fit.chosen.model.name,
            "trial_id": ids,
        }
    )


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
    """Text for plotly, which reads a subset of HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"


def _sentence(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _plot(x_title: str, y_title: str) -> go.Figure:
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
            "legend": {"orientation": "h", "y": -0.25, "yanchor": "top", "x": 0},
            "hovermode": "closest",
        }
    )


def _finish(plot: go.Figure, ends: Sequence[tuple[float, str, str]], reach: Sequence[float]) -> None:
    """Set the y range (from zero unless that wastes half of it) and put each label at the end of its line."""
    low, high = min(reach), max(reach)
    low = 0.0 if low < 0.5 * high else low - 0.08 * (high - low)
    high += 0.06 * (high - low) or 1.0
    plot.update_yaxes(range=[low, high])
    if not ends:
        return
    step = (high - low) * 17 / (BLOG[1] - 68)
    place: list[float] = []
    for value, _, _ in sorted(ends):
        place.append(max(value, place[-1] + step) if place else value)
    excess = max(0.0, place[-1] - high)
    for i in reversed(range(len(place))):  # push down again what was pushed over the top
        place[i] = min(place[i], (place[i + 1] - step) if i + 1 < len(place) else place[i] - excess)
    for y, (_, name, colour) in zip(place, sorted(ends), strict=True):
        plot.add_annotation(
            x=1.01, xref="paper", y=y, text=escape(_short(name)), font={"color": colour}, showarrow=False,
            xanchor="left", yanchor="middle", name="direct", align="left",
        )  # fmt: skip
    plot.update_layout(margin={"r": min(260, 24 + int(7.2 * max(len(_short(name)) for _, name, _ in ends)))})


def _short(name: str, most: int = 34) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def column_width(plot: go.Figure) -> go.Figure:
    """The figure for one column of a paper: a legend below instead of labels at the side, dark text."""
    small = go.Figure(plot)
    labels = [a for a in small.layout.annotations if a.name == "direct"]
    small.layout.annotations = [a for a in small.layout.annotations if a.name != "direct"]
    small.update_layout(
        showlegend=bool(labels), margin={"l": 50, "r": 10, "t": 10, "b": 44}, font={"size": 11, "color": "#000"}
    )
    return small


def write(figures: Sequence[Figure], folder: Path, formats: Sequence[str] = ()) -> list[str]:
    """Write `<name>.html`, `<name>.csv` and the static formats; the HTML files share one plotly.min.js.

    Returns notes: one line saying what to install when there is no browser for the static formats.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        figure.data.to_csv(folder / f"{figure.name}.csv", index=False)
        page = go.Figure(figure.plot).update_layout(
            title={"text": figure.title}, margin={"t": 56}, paper_bgcolor="#fff"
        )
        page.write_html(folder / f"{figure.name}.html", include_plotlyjs="directory", config={"displaylogo": False})
    return images(figures, folder, formats) if formats and figures else []


def images(figures: Sequence[Figure], folder: Path, formats: Sequence[str]) -> list[str]:
    """PNG and SVG at blog width, PDF at column width, all in one browser session; returns notes."""
    plots: list[go.Figure] = []
    files: list[Path] = []
    sizes: list[tuple[int, int]] = []
    for figure in figures:
        for kind in formats:
            small = kind == "pdf"
            plots.append(
                column_width(figure.plot) if small else go.Figure(figure.plot).update_layout(paper_bgcolor="#fff")
            )
            files.append(folder / f"{figure.name}.{kind}")
            sizes.append(COLUMN if small else BLOG)
    try:
        write_images: Any = getattr(plotly.io, "write_images")  # noqa: B009 (not in the stubs yet)
        write_images(
            plots, files, width=[w for w, _ in sizes], height=[h for _, h in sizes],
            scale=[2 if file.suffix == ".png" else 1 for file in files],
        )  # fmt: skip
    except (RuntimeError, OSError) as error:  # no browser, or one that does not start
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return [
            f"no {'/'.join(formats)} figures ({reason[:120]}): install Chromium, for example apt-get install chromium"
        ]
    return []


def plotly_script() -> str:
    """The whole plotly.js, to be embedded once in a page."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def as_div(figure: Figure, number: int) -> str:
    """The figure as an HTML fragment without the plotly script."""
    return str(
        plotly.io.to_html(
            figure.plot,
            include_plotlyjs=False,
            full_html=False,
            div_id=f"figure-{number}",
            default_height=f"{BLOG[1]}px",
            config={"displaylogo": False, "responsive": True},
        )
    )


def standard(fits: Sequence[Fit], groups: Sequence[Group]) -> list[Figure]:
    """All figures that these rows allow, in reading order."""
    drawn = [memory_by_length(fits, groups), throughput(fits, groups)]
    return [figure for figure in drawn if figure is not None]
