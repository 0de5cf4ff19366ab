"""Figures as files: CSV, HTML, and PNG, JPEG, SVG and PDF without a browser.

Plotly's own script draws an SVG, by an engine in this process (V8) on the document of dom.js. vl-convert, which brings
the font, makes the other formats of it.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from vramsweep.analysis.data.export import guarded_frame
from vramsweep.analysis.figures.layout import column, page, static
from vramsweep.analysis.figures.plots import Figure
from vramsweep.harness.files import outputs
from vramsweep.harness.files.bounded_reads import error_reason, replaced
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.suggestions import missing_package

if TYPE_CHECKING:
    from py_mini_racer import MiniRacer

SIZE = (700, 500)  # px, as in plotly
POINT = 72 / 96  # points of a CSS pixel


@dataclass(frozen=True)
class Picture:
    """A plot as a file, whose suffix gives the format. Width and height are in pixels (None: the plot's own). It is
    drawn `scale` times as fine."""

    plot: go.Figure
    file: Path
    width: int | None = None
    height: int | None = None
    scale: float = 1


class NotDrawn(RuntimeError):
    """The error that some pictures were not drawn; it says why in one line."""


def draw(pictures: Sequence[Picture]) -> None:
    """Write as many of the files as possible. Raises NotDrawn if some could not be written."""
    # Use another thread, so that Ctrl-C takes effect after the current picture, not between the engine and its caller.
    # Also, the engine would otherwise wait for the event loop of a notebook, which waits for us.
    with ThreadPoolExecutor(1) as thread:
        try:
            formats, engine = _formats(), thread.submit(_engine).result()
        except ImportError as error:
            raise NotDrawn(missing_package(error.name or str(error))) from None
        except Exception as error:  # its library may raise anything if it cannot be loaded
            raise NotDrawn(f"the JavaScript engine V8 did not start: {' '.join(str(error).split())[:150]}") from None
        try:
            problems = list(filter(None, thread.map(partial(_write, engine, formats), pictures)))
        finally:
            thread.submit(engine.close)
    if problems:
        raise NotDrawn("; ".join(problems))


def draw_pngs(plots: Sequence[go.Figure], size: tuple[int, int]) -> list[bytes]:
    """Return each plot as a PNG of this width and height in px (its own height comes first); empty if it cannot be
    drawn."""
    with tempfile.TemporaryDirectory() as place:
        pictures = [
            Picture(plot, Path(place) / f"{at}.png", size[0], round(plot.layout.height or size[1]))
            for at, plot in enumerate(plots)
        ]
        with contextlib.suppress(NotDrawn):
            draw(pictures)
        return [one.file.read_bytes() if one.file.exists() else b"" for one in pictures]


def draw_one(picture: Picture) -> None:
    """Write one file that a user named, a picture or a page. Raises UserError if it cannot be drawn."""
    out = picture.file
    if out.suffix == ".html":
        return outputs.write(out, lambda place: picture.plot.write_html(place, config={"displaylogo": False}))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draw([picture])
    except (NotDrawn, OSError) as error:
        raise UserError(f"{out} was not drawn: {str(error)[:200]}") from None


def _engine() -> MiniRacer:
    """Start an engine that has plotly's script. Raises ImportError if its package is missing."""
    from py_mini_racer import MiniRacer

    engine = MiniRacer()
    engine.eval((Path(__file__).parent / "dom.js").read_text(encoding="utf-8"))
    engine.eval(get_plotlyjs())
    return engine


def _formats() -> dict[str, Callable[[str], bytes]]:
    """Return the function for each suffix that makes the file from an SVG. Raises ImportError without vl-convert."""
    import vl_convert as made

    return {".png": made.svg_to_png, ".svg": str.encode, ".pdf": made.svg_to_pdf, ".jpg": made.svg_to_jpeg}


def _write(engine: MiniRacer, formats: Mapping[str, Callable[[str], bytes]], picture: Picture) -> str:
    """Write a file; return what is wrong if it cannot be written, else an empty text."""
    try:
        if picture.file.suffix not in formats:
            return f"{picture.file.name}: allowed: {', '.join(formats)}"
        with replaced(picture.file) as part:
            part.write_bytes(formats[picture.file.suffix](_svg(engine, picture)))
    except OSError as error:
        return f"{picture.file}: {error_reason(error)}"
    except Exception as error:  # of plotly's script or its SVG; other pictures are still drawn
        return f"{picture.file.name}: {next(iter(str(error).splitlines()), type(error).__name__)}"
    return ""


def _svg(engine: MiniRacer, picture: Picture) -> str:
    """Draw the plot by plotly's script. Raises RuntimeError with the script's reason."""
    own, asked = picture.plot.layout, (picture.width, picture.height)
    width, height = (a or b or c for a, b, c in zip(asked, (own.width, own.height), SIZE, strict=True))
    scale = POINT if picture.file.suffix == ".pdf" else picture.scale  # a pixel of an SVG is a point of a PDF
    engine.eval(f"globalThis.drawn = draw({json.dumps(picture.plot.to_json())}, {width}, {height}, {scale}); 0")
    drawn = json.loads(str(engine.eval("JSON.stringify(drawn)")))
    if "svg" not in drawn:
        raise RuntimeError(f"plotly.js: {drawn.get('error', 'it did not finish')}")
    return str(drawn["svg"])


# No button leads out of a page, and they are few because each is a stop of the keyboard.
CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtons": [["toImage", "resetScale2d"]]}


def write(
    figures: Sequence[Figure], folder: Path, formats: Sequence[str] = (), say: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Write `<name>.html`, `<name>.csv` and the static formats; the HTML files share one plotly.min.js.

    `say` hears the progress. Returns notes: one line saying which static formats are missing, and why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, figure in enumerate(figures, 1):
        say(f"writing figure {number} of {len(figures)}")
        plot = page(figure).update_layout(width=None)
        guarded_frame(figure.data).to_csv(folder / f"{figure.name}.csv", index=False)
        place = folder / f"{figure.name}.html"
        plot.write_html(place, include_plotlyjs="directory", config=CONFIG)
    if not formats or not figures:
        return []
    say(f"drawing {len(figures)} figures")
    return images(figures, folder, formats)


def images(figures: Sequence[Figure], folder: Path, formats: Sequence[str]) -> list[str]:
    """Write PDF for one column of a paper, SVG for a page, PNG for both (`<name>.png`, `<name>.column.png`: 300 dpi).
    Return notes."""
    pictures: list[Picture] = []
    for figure in map(static, figures):
        for kind in formats:
            pictures.append(_lay_out(figure, folder / f"{figure.name}.{kind}"))
            if kind == "png":
                pictures.append(Picture(column(figure), folder / f"{figure.name}.column.png", scale=300 / 96))
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
        draw_one(_lay_out(static(figure), out))


def _lay_out(figure: Figure, out: Path) -> Picture:
    lay_out = column if out.suffix == ".pdf" else page
    return Picture(lay_out(figure), out, scale=2 if out.suffix == ".png" else 1)


def plotly_script() -> str:
    """Return the whole plotly.js, to be embedded once in a page."""
    return str(get_plotlyjs())
