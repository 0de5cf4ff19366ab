"""Figures as files and as parts of a page: CSV, HTML and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vramsweep.analysis.data.export import guarded_frame
from vramsweep.analysis.figures.drawing import NotDrawn, Picture, draw, draw_one
from vramsweep.analysis.figures.layout import column, page, static
from vramsweep.analysis.figures.plots import Figure

# No button leads out of a page, and they are few because each is a stop of the keyboard.
CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtons": [["toImage", "resetScale2d"]]}


def write(
    figures: Sequence[Figure], folder: Path, formats: Sequence[str] = (), say: Callable[[str], None] | None = None
) -> list[str]:
    """Write `<name>.html`, `<name>.csv` and the static formats; the HTML files share one plotly.min.js.

    `say` hears the progress. Returns notes: one line saying which static formats are missing, and why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, figure in enumerate(figures, 1):
        if say is not None:
            say(f"writing figure {number} of {len(figures)}")
        plot = page(figure).update_layout(width=None)
        guarded_frame(figure.data).to_csv(folder / f"{figure.name}.csv", index=False)
        place = folder / f"{figure.name}.html"
        plot.write_html(place, include_plotlyjs="directory", config=CONFIG)
    if not formats or not figures:
        return []
    if say is not None:
        say(f"drawing {len(figures)} figures")
    return images(figures, folder, formats)


def images(figures: Sequence[Figure], folder: Path, formats: Sequence[str]) -> list[str]:
    """Write PDF for one column of a paper, SVG for a page, PNG for both (`<name>.png`, `<name>.column.png`: 300 dpi).
    Return notes."""
    pictures: list[Picture] = []
    for figure in map(static, figures):
        for kind in formats:
            if kind != "pdf":
                pictures.append(
                    Picture(page(figure), folder / f"{figure.name}.{kind}", scale=2 if kind == "png" else 1)
                )
            if kind != "svg":
                name = f"{figure.name}.pdf" if kind == "pdf" else f"{figure.name}.column.{kind}"
                pictures.append(Picture(column(figure), folder / name, scale=300 / 96 if kind == "png" else 1))
    try:
        draw(pictures)
    except NotDrawn as why:
        return [f"not all {'/'.join(formats)} figures were drawn: {str(why)[:300]}"]
    return []


def write_one(figure: Figure, out: Path) -> None:
    """Write a figure to a file that a user named: PDF for one column of a paper, other formats for a page. Raises
    UserError if it cannot be drawn."""
    if out.suffix == ".html":
        draw_one(Picture(page(figure).update_layout(width=None), out))
    else:
        lay_out = column if out.suffix == ".pdf" else page
        draw_one(Picture(lay_out(static(figure)), out, scale=2 if out.suffix == ".png" else 1))


def plotly_script() -> str:
    """Return the whole plotly.js, to be embedded once in a page."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())
