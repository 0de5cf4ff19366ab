"""Figures as files and as parts of a page: CSV, HTML, and what a browser makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io

from vramsweep.analysis.data.export import guarded_frame
from vramsweep.analysis.figures.browser import NoBrowser, NotDrawn, Picture, draw
from vramsweep.analysis.figures.plots import BLOG, COLUMN, Figure, column_width, escape


def write(figures: Sequence[Figure], folder: Path, formats: Sequence[str] = ()) -> list[str]:
    """Write `<name>.html`, `<name>.csv` and the static formats; the HTML files share one plotly.min.js.

    Returns notes: one line saying what to install when there is no browser for the static formats.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        guarded_frame(figure.data).to_csv(folder / f"{figure.name}.csv", index=False)
        page = go.Figure(figure.plot).update_layout(
            title={"text": escape(figure.title)}, margin={"t": 56}, paper_bgcolor="#fff"
        )
        page.write_html(folder / f"{figure.name}.html", include_plotlyjs="directory", config={"displaylogo": False})
    return images(figures, folder, formats) if formats and figures else []


def images(figures: Sequence[Figure], folder: Path, formats: Sequence[str]) -> list[str]:
    """PNG and SVG at blog width, PDF at column width, all in one browser session; returns notes."""
    pictures: list[Picture] = []
    for figure in figures:
        for kind in formats:
            small = kind == "pdf"
            plot: Any = (
                column_width(figure.plot) if small else go.Figure(figure.plot).update_layout(paper_bgcolor="#fff")
            )
            names = [str(trace.name) for trace in plot.data if plot.layout.showlegend and trace.showlegend is not False]
            lines = len(names) if any(len(name) > 22 for name in names) else (len(names) + 1) // 2
            size = (COLUMN[0], COLUMN[1] + 17 * lines) if small else BLOG
            pictures.append(Picture(plot, folder / f"{figure.name}.{kind}", *size, scale=2 if kind == "png" else 1))
    try:
        draw(pictures)
    except NoBrowser as why:
        how = "install Chromium, for example apt-get install chromium"
        return [f"no {'/'.join(formats)} figures ({str(why)[:120]}): {how}"]
    except NotDrawn as why:
        return [f"not all {'/'.join(formats)} figures were drawn: {str(why)[:300]}"]
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
