"""report.html: one self-contained page. Everything from rows is escaped; nothing is fetched, the page forbids it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path

import pandas as pd

from vramsweep.analysis.answers.registry import Answered
from vramsweep.analysis.data import markup
from vramsweep.analysis.data.load import Table, trials
from vramsweep.analysis.figures import files
from vramsweep.analysis.figures.plots import Figure
from vramsweep.analysis.report.content import Content
from vramsweep.analysis.report.findings import COMMAND, reproduce
from vramsweep.harness.row import BY_NAME
from vramsweep.harness.terminal import shown

MOST_ROWS = 400
_ADDRESS = re.compile(r"https://[\w./:#?=&;%~+-]*\w")
HOLDS = "What holds the peak"
_POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
_SECTIONS = (
    ("findings", "Findings"), ("warnings", "Warnings"), ("figures", "Figures"), ("tables", "Tables"),
    ("fits", "Fits in words"), ("asked", "What was asked"), ("machine", "Machine and versions"), ("methods", "Methods"),
    ("rows", "Rows and how to reproduce them"),
)  # fmt: skip


def escape(text: str) -> str:
    """Text for HTML; what would turn the direction of writing is written out too."""
    return html.escape(shown(text))


def render(content: Content) -> str:
    """The whole page as text."""
    bodies = {
        "findings": _list(content.findings) or "<p>No finding: no row holds measured values.</p>",
        "warnings": _list(content.warnings, "warnings") or "<p>None.</p>",
        "figures": "".join(_figure(f, i) for i, f in enumerate(content.figures))
        or "<p>No row holds what a figure shows.</p>",
        "tables": "".join(_table(frame, name) for name, _, frame in content.tables if len(frame)),
        "fits": f"<pre>{escape(content.fit_text)}</pre>" if content.fit_text else "<p>No curve could be fitted.</p>",
        "asked": _definitions(content.asked),
        "machine": _definitions(content.machine) or "<p>Not recorded in the rows.</p>",
        "methods": f"<p>{escape(content.methods)}</p>",
        "rows": _rows(content.table),
    }
    title = escape(content.title)
    coverage = "".join(f"<li><strong>{n:,}</strong> {escape(o)}</li>" for o, n in content.coverage.items())
    named: tuple[tuple[str, str], ...] = _SECTIONS
    if content.answer is not None:
        bodies["answer"] = _answer(content.answer)
        named = (("answer", content.answer.title), *_SECTIONS)
    links = "".join(f'<li><a href="#{key}">{escape(name)}</a></li>' for key, name in named)
    sections = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{escape(name)}</h2>'
        f"{bodies[key]}</section>"
        for key, name in named
    )
    header = (
        f'<a class="skip" href="#findings">Skip to the findings</a><main><h1>{title}</h1>'
        f'<p class="soft">{escape(content.subtitle)}</p><ul class="counts" aria-label="coverage">{coverage}</ul>'
        f'<nav aria-label="sections"><ul>{links}</ul></nav>'
    )
    return _document(title, f"{header}{sections}</main>", bool(content.figures))


def of_figures(title: str, parts: Sequence[tuple[Figure, pd.DataFrame]]) -> str:
    """A page of figures alone, each with its table below."""
    bodies = (_figure(figure, i, kept=False) + _table(frame, HOLDS) for i, (figure, frame) in enumerate(parts))
    return _document(escape(title), f"<main><h1>{escape(title)}</h1>{''.join(bodies)}</main>", True)


def _document(title: str, body: str, with_plots: bool) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{_resource('report.css')}</style>"
        f"<script>{files.plotly_script() if with_plots else ''}</script></head><body>{body}"
        f"<script>{_resource('report.js')}</script></body></html>\n"
    )


def _resource(name: str) -> str:
    return resources.files("vramsweep.analysis.report").joinpath(name).read_text(encoding="utf-8")


def _list(items: Sequence[str], kind: str = "") -> str:
    if not items:
        return ""
    return f'<ul class="{kind}">' + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _definitions(items: Mapping[str, str]) -> str:
    if not items:
        return ""
    said = {k: f"<code>{escape(v)}</code>" if k == COMMAND else escape(v) for k, v in items.items()}
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{v}</dd>" for k, v in said.items()) + "</dl>"


def _figure(figure: Figure, number: int, kept: bool = True) -> str:
    data = f" Data: figures/{figure.name}.csv" if kept else ""
    return (
        f'<figure id="{escape(figure.name)}"><h3>{escape(figure.title)}</h3>'
        f'<div role="img" aria-label="{escape(figure.title)}">{files.as_div(figure, number)}</div>'
        f"<figcaption>{escape(figure.caption + data)}</figcaption></figure>"
    )


def _answer(answer: Answered) -> str:
    """Its table, or a card for each line where that is too wide, and its notes."""
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in answer.notes)
    if answer.frame.empty:
        return f"<p>No row answers this.</p>{notes}"
    if not answer.wide:
        return _grid(answer.frame, answer.title) + notes
    cards = ""
    for title, verdict, cells in answer.cards():
        said = "".join(f"<dt>{escape(name)}</dt><dd>{_linked(cell)}</dd>" for name, cell in cells.items())
        strong = f"<p><strong>{escape(verdict)}</strong></p>" if verdict else ""
        cards += f'<article class="card"><h3>{escape(title)}</h3>{strong}<dl>{said}</dl></article>'
    return cards + notes


def _linked(text: str) -> str:
    """Escaped, with addresses as links."""
    return _ADDRESS.sub(lambda found: f'<a href="{found[0]}">{found[0]}</a>', escape(text))


def _table(frame: pd.DataFrame, name: str) -> str:
    return f"<h3>{escape(name)}</h3>{_grid(frame, name)}"


def _grid(frame: pd.DataFrame, name: str) -> str:
    """The table itself, which a reader's software calls by its name."""
    number = {str(column): markup.numeric(frame[column]) for column in frame.columns}

    def cells(tag: str, row: Iterable[object]) -> str:
        kinds = (' class="number"' if number[str(column)] else "" for column in frame.columns)
        return "".join(f"<{tag}{kind}>{escape(str(v))}</{tag}>" for kind, v in zip(kinds, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in frame.to_numpy())
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table>'
        f"<thead><tr>{cells('th', frame.columns)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _rows(table: Table) -> str:
    frame = table.frame
    shown = frame.head(MOST_ROWS)
    known = trials(Path(table.source), set(shown["trial_id"].dropna()))
    lines = []
    for _, row in shown.iterrows():
        speed = "–" if pd.isna(row["tokens_per_s"]) else f"{float(row['tokens_per_s']):,.0f}"
        memory = "–" if pd.isna(row["peak_reserved_bytes"]) else f"{int(row['peak_reserved_bytes']) / 2**30:,.2f}"
        what = str(row["outcome"]) + ("" if pd.isna(row["reason"]) else f": {row['reason']}")
        lines.append(
            f"<tr><td><code>{escape(str(row['trial_id']))}</code></td><td>{escape(what)}</td>"
            f'<td class="number">{memory}</td><td class="number">{speed}</td>'
            f"<td><code>{escape(reproduce(row, known.get(row['trial_id'])))}</code></td></tr>"
        )
    more = f"<p>{len(frame) - len(shown):,} more rows are in rows.csv.</p>" if len(frame) > len(shown) else ""
    unit = escape(BY_NAME["tokens_per_s"].unit)
    return (
        "<p>A trial runs again with its command; its id stays the same if every setting does.</p>"
        '<div class="scroll rows" tabindex="0" role="region" aria-label="rows"><table><thead><tr>'
        "<th>trial</th><th>outcome</th>"
        f'<th class="number">reserved (GiB)</th><th class="number">{unit}</th><th>command</th></tr></thead>'
        "<tbody>" + "".join(lines) + f"</tbody></table></div>{more}"
    )
