"""Pictures without a browser: where data stand in them, and that a browser draws the same."""

import asyncio
import ctypes
import html
import json
import os
import re
import signal
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import py_mini_racer
import pytest
import synthetic
from conftest import ROOT, refusal, source, wait_for
from plotly.offline import get_plotlyjs
from synthetic import table

from vramsweep.analysis.figures import drawing, layout
from vramsweep.analysis.figures.drawing import NotDrawn, Picture, draw, draw_one
from vramsweep.analysis.report.content import collect
from vramsweep.harness.messages.errors import UserError

FONT = "Helvetica, Arial, Liberation Sans, sans-serif"
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
MADE_UP = re.compile(r"url\(.*?\)|(?<=trace)[0-9a-f]{6}|(?<=cb)[0-9a-f]{6}|['\"]")  # names, and how they are quoted
LAYOUTS = (layout.page, layout.column)
HINTED = 2.5  # px: Chromium sets small letters on whole pixels, and margins are as wide as texts
MANY = source("many_figures.txt")


def drawn(plot: go.Figure, folder: Path) -> ET.Element:
    file = folder / "drawn.svg"
    draw([Picture(plot, file)])
    return ET.parse(file).getroot()


def places(root: ET.Element, wanted: str) -> list[tuple[float, float]]:
    """Return the positions of the paths of a class, in pixels of the picture."""
    found = []

    def visit(element: ET.Element, x: float, y: float) -> None:
        move = re.match(r"translate\((.*?),(.*?)\)", element.get("transform", ""))
        x, y = (x + float(move[1]), y + float(move[2])) if move else (x, y)
        if element.get("class") == wanted:
            found.append((x, y))
        for child in element:
            visit(child, x, y)

    visit(root, 0, 0)
    return found


def test_points_bars_and_cells_are_where_the_axes_say(tmp_path: Path) -> None:
    around = {"l": 50, "r": 30, "t": 20, "b": 80}
    plot = go.Figure(go.Scatter(x=[1, 4, 10], y=[-2, 0, 3], mode="markers"))
    plot.update_layout(width=680, height=400, margin=around, showlegend=False)
    plot.update_xaxes(range=[0, 20], automargin=False).update_yaxes(range=[-5, 5], automargin=False)
    expected = [(50 + x * 600 / 20, 20 + (5 - y) * 300 / 10) for x, y in ((1, -2), (4, 0), (10, 3))]
    assert places(drawn(plot, tmp_path), "point") == [pytest.approx(one, abs=0.01) for one in expected]

    plot.data = []
    plot.add_bar(x=[5, 15], y=[2, -4], width=2, marker_line_width=0)
    (first, second) = (one.get("d", "") for one in drawn(plot, tmp_path).iter() if "M" in one.get("d", "")[:1] and
                       one.get("d", "").count("V") == 2)  # fmt: skip
    assert [float(one) for one in NUMBER.findall(first)] == pytest.approx([120, 150, 90, 180, 150], abs=0.01)
    assert [float(one) for one in NUMBER.findall(second)] == pytest.approx([420, 150, 270, 480, 150], abs=0.01)


def test_the_formats_and_their_sizes(tmp_path: Path) -> None:
    plot = go.Figure(go.Scatter(y=[1, 2])).update_layout(width=1000, height=900)
    draw([Picture(plot, tmp_path / f"b c{suffix}", scale=2) for suffix in (".png", ".svg", ".pdf", ".jpg")])
    content = {path.suffix: path.read_bytes() for path in tmp_path.iterdir()}
    assert {suffix: one[:4] for suffix, one in content.items()} == {
        ".png": b"\x89PNG", ".svg": b"<svg", ".pdf": b"%PDF", ".jpg": b"\xff\xd8\xff\xe0",
    }  # fmt: skip
    assert struct.unpack(">II", content[".png"][16:24]) == (2000, 1800)
    assert b"/MediaBox [0 0 750 675]" in content[".pdf"]  # points; 96 px are an inch
    draw([Picture(plot, tmp_path / "again.svg", scale=2)])
    assert (tmp_path / "again.svg").read_bytes() == content[".svg"]


def test_a_notebook_draws_too(tmp_path: Path) -> None:
    async def cell() -> None:
        draw([Picture(go.Figure(), tmp_path / "a.svg")])

    asyncio.run(cell())
    assert (tmp_path / "a.svg").exists()


def test_what_is_not_written_is_said_and_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plot = go.Figure(go.Scatter(y=[1, 2]))
    names = ("none/a.png", "a.gif", "b.png")
    said = refusal(NotDrawn, draw, [Picture(plot, tmp_path / name) for name in names])
    assert said == f"{tmp_path / 'none/a.png'}: No such file or directory; a.gif: allowed: .png, .svg, .pdf, .jpg"
    assert [one.name for one in tmp_path.rglob("*")] == ["b.png"]
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    said = refusal(NotDrawn, draw, [Picture(plot, tmp_path / "c.png")])
    assert re.search(r"vl_convert is not installed; .*\[png\]", said)
    said = refusal(UserError, draw_one, Picture(plot, tmp_path / "c.png"))
    assert said.startswith(f"{tmp_path / 'c.png'} was not drawn: vl_convert is not installed; ")
    assert not (tmp_path / "c.png").exists()
    monkeypatch.undo()
    monkeypatch.setattr("py_mini_racer.MiniRacer", partial(ctypes.CDLL, str(tmp_path / "b.png")))  # no library
    assert "the JavaScript engine V8 did not start: " in refusal(NotDrawn, draw, [Picture(plot, tmp_path / "d.png")])


def test_any_text_is_text_of_the_picture(tmp_path: Path) -> None:
    text = 'a\x00\x1b[31m &amp; < > "q" \' 语言 <script>x</script>'
    plot = go.Figure(go.Scatter(x=[1], y=[1], text=[html.escape(text, quote=False)], mode="text", name="a"))
    draw([Picture(plot, tmp_path / "a.png"), Picture(plot, tmp_path / "a.pdf")])
    told = ["".join(one.itertext()) for one in drawn(plot, tmp_path).iter() if one.tag.endswith("}text")]
    assert text.replace("\x00", "\ufffd").replace("\x1b", "\ufffd") in told


@pytest.mark.slow
def test_ctrl_c_while_it_draws_ends_it_and_leaves_whole_files(tmp_path: Path) -> None:
    how: dict[str, Any] = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", MANY], start_new_session=True, text=True, **how) as drawing_many:
        wait_for(lambda: len(list(tmp_path.glob("*.png"))) > 3)
        os.killpg(drawing_many.pid, signal.SIGINT)
        _, said = drawing_many.communicate(timeout=30)
    assert drawing_many.returncode == -signal.SIGINT
    assert said.count("Traceback") == 1 and said.rstrip().endswith("KeyboardInterrupt")
    files = list(tmp_path.iterdir())
    assert len(files) < 2000 and {one.suffix for one in files} == {".png"}
    assert all(one.read_bytes().endswith(b"IEND\xaeB\x60\x82") for one in files)


@pytest.fixture(scope="module")
def browser(chromium: Any) -> Any:
    """A page of Chromium that has plotly's script, in a font as wide as Arial."""
    page = chromium.new_page()
    page.set_content("<div id='place'></div>")
    page.add_script_tag(content=get_plotlyjs())
    if abs(measured(page, "normal", ["W"])[0] - 0.944) > 0.001:
        pytest.skip("no font here is as wide as Arial (apt-get install fonts-liberation)")
    return page


def measured(page: Any, weight: str, letters: list[str]) -> list[float]:
    """How wide Chromium sets each letter, in em."""
    return page.evaluate(source("widths_of_letters.js"), [weight, FONT, letters])


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["normal", "bold"])
def test_letters_are_as_wide_as_a_browser_sets_them(browser: Any, weight: str) -> None:
    letters = [chr(code) for code in (*range(32, 127), *range(192, 256), *map(ord, "·×°±µ≈≤≥−–—…•→"))]
    with py_mini_racer.MiniRacer() as engine:
        engine.eval(Path(drawing.__file__).with_name("dom.js").read_text(encoding="utf-8"))
        widths = engine.eval(f"JSON.stringify({json.dumps(letters)}.map((one) => textWidth(one, '{weight}')))")
    for letter, own, other in zip(letters, json.loads(widths), measured(browser, weight, letters), strict=True):
        assert own == pytest.approx(other, abs=0.001), letter


def described(svg: str) -> list[tuple[str, str, dict[str, str], dict[str, list[float]]]]:
    """Each element: its name, its text, its attributes without numbers and names made up, and their numbers."""
    found = []
    for element in ET.fromstring(svg).iter():
        own = {key.rpartition("}")[2]: value for key, value in element.attrib.items() if value}
        own = {key: value for key, value in own.items() if key not in ("id", "space", "href", "clip-path")}
        own = {key: MADE_UP.sub("", value) for key, value in own.items()}
        texts = {key: re.sub(r"\s", "", NUMBER.sub("#", value)) for key, value in own.items()}
        numbers = {key: [float(one) for one in NUMBER.findall(value)] for key, value in own.items()}
        found.append((element.tag.rpartition("}")[2], element.text or "", texts, numbers))
    return found


@pytest.mark.slow
def test_every_figure_is_the_one_that_a_browser_draws(browser: Any, tmp_path: Path) -> None:
    rows = [*synthetic.sweep(), *synthetic.sweep((128, 1024), (1,), device="simulated", simulated_gpu="l4-24gb")]
    figures = collect(table(rows)).figures
    assert len(figures) >= 8
    plots = {f"{figure.name} {made.__name__}": made(figure) for figure in figures for made in LAYOUTS}
    told = "of <b>two</b> lines,<br>2<sup>10</sup> · <i>x</i>"
    plots["arrow"] = go.Figure(go.Scatter(x=[1, 2], y=[1, 2], text=["a", told], mode="lines+text"))
    plots["arrow"].add_annotation(x=1.5, y=1.5, ax=-60, ay=-40, text=told, arrowhead=2, standoff=5, textangle=30)
    plots["arrow"].update_layout(width=600, height=400)
    for plot in plots.values():
        plot.update_layout(font_family=FONT)
        plot.update_traces(line_simplify=False, selector={"type": "scatter"})  # by parts of a pixel
    draw([Picture(plot, tmp_path / f"{name}.svg") for name, plot in plots.items()])
    for name, plot in plots.items():
        svg = browser.evaluate(source("figure_as_svg.js"), [plot.to_json()])
        own = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        for one, other in zip_longest(described(own), described(svg)):
            assert one[:3] == other[:3], name
            for key, numbers in one[3].items():
                assert numbers == pytest.approx(other[3][key], abs=HINTED), (name, one)
