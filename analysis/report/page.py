"""report.html: one self-contained page. Everything from rows is escaped; nothing is fetched, the page forbids it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from vramsweep.analysis.data import markup
from vramsweep.analysis.data.load import Table, trials
from vramsweep.analysis.figures import files
from vramsweep.analysis.figures.plots import Figure
from vramsweep.analysis.report.content import Content
from vramsweep.analysis.report.findings import COMMAND, reproduce
from vramsweep.harness.terminal import shown

MOST_ROWS = 400
_ADDRESS = re.compile(r"https://[\w./:#?=&;%~+-]*\w")
HOLDS = "What holds the peak"
_SECTIONS = (
    ("findings", "Findings"), ("warnings", "Warnings"), ("figures", "Figures"), ("tables", "Tables"),
    ("fits", "Fits in words"), ("asked", "What was asked"), ("machine", "Machine and versions"), ("methods", "Methods"),
    ("rows", "Rows and how to reproduce them"),
)  # fmt: skip


def render(content: Content) -> str:
    """The whole page as text."""
    named = (("answer", content.answer.title), *_SECTIONS) if content.answer else _SECTIONS
    rows, more = _rows(content.table)
    return page(
        "report", title=content.title, content=content, sections=named, rows=rows, more=more, code=(COMMAND,),
        plotly=_plotly(bool(content.figures)),
    )  # fmt: skip


def of_figures(title: str, parts: Sequence[tuple[Figure, pd.DataFrame]]) -> str:
    """A page of figures alone, each with its table below."""
    return page("figures", title=title, parts=parts, holds=HOLDS, plotly=_plotly(True))


def page(template: str, **values: Any) -> str:
    """A template of templates/, filled."""
    return _environment().get_template(f"{template}.html.j2").render(values)


def part(macro: str, *values: Any) -> str:
    """A macro of templates/macros.html.j2, filled."""
    return str(getattr(_environment().get_template("macros.html.j2").module, macro)(*values))


@cache
def _environment() -> Environment:
    """Whatever a template shows is text, and what would turn the direction of writing is written out in it."""
    made = Environment(
        loader=FunctionLoader(lambda name: _read(f"templates/{name}")), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else shown(str(value)), trim_blocks=True,
    )  # fmt: skip
    made.globals |= {"resource": lambda name: Markup(_read(name)), "numeric": markup.numeric, "as_div": _as_div}
    made.filters["links"] = _links
    return made


def _read(name: str) -> str:
    return resources.files("vramsweep.analysis.report").joinpath(name).read_text(encoding="utf-8")


def _plotly(wanted: bool) -> Markup:
    return Markup(files.plotly_script() if wanted else "")


def _as_div(figure: Figure, number: int) -> Markup:
    return Markup(files.as_div(figure, number))


def _links(text: str) -> Markup:
    """Escaped, with addresses as links."""
    return Markup(_ADDRESS.sub(lambda found: f'<a href="{found[0]}">{found[0]}</a>', str(escape(shown(text)))))


def _rows(table: Table) -> tuple[list[dict[str, str]], int]:
    frame = table.frame
    first = frame.head(MOST_ROWS)
    known = trials(Path(table.source), set(first["trial_id"].dropna()))
    lines = []
    for _, row in first.iterrows():
        speed = "–" if pd.isna(row["tokens_per_s"]) else f"{float(row['tokens_per_s']):,.0f}"
        memory = "–" if pd.isna(row["peak_reserved_bytes"]) else f"{int(row['peak_reserved_bytes']) / 2**30:,.2f}"
        what = str(row["outcome"]) + ("" if pd.isna(row["reason"]) else f": {row['reason']}")
        line = {"trial": str(row["trial_id"]), "outcome": what, "reserved": memory, "speed": speed}
        lines.append(line | {"command": reproduce(row, known.get(row["trial_id"]))})
    return lines, len(frame) - len(first)
