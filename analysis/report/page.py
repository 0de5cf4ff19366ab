"""Self-contained pages: report.html, index.html of the sweeps below a folder (two folders down at most), figures.

Everything from rows is escaped. Nothing is fetched; the page forbids it.
Texts of rows that repeat are stored once; rows beyond `MOST` are only in rows.csv.

In: a report's content, or a folder. Out: the page's text. Large parts (plotly, figures, rows) are deflated and in
base64, so that a page of 20,000 rows stays a few megabytes. To unpack them, report.js needs a browser of 2023 or later
(DecompressionStream).
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from vramsweep.analysis.data import export
from vramsweep.analysis.data.load import Table, load, trials
from vramsweep.analysis.figures import drawing, layout
from vramsweep.analysis.figures.plots import Figure
from vramsweep.analysis.figures.timeline import holders, of_replay, of_timeline, recorded_holders
from vramsweep.analysis.report import summary
from vramsweep.analysis.report.content import Content
from vramsweep.analysis.report.findings import COMMAND, reproduce, values
from vramsweep.analysis.report.picker import KIND, Picker, claim_of, forbidding, in_words
from vramsweep.analysis.report.tiles import kinds
from vramsweep.harness.files import outputs
from vramsweep.harness.files.bounded_reads import error_reason, read_content
from vramsweep.harness.files.sweep_folder import describe_missing, find_sweeps
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.terminal import escape_text
from vramsweep.harness.rows.quality_flags import BY_NAME
from vramsweep.harness.sweep import sweep_status

COLUMN = (1064, 460)  # px of a figure on a wide screen
BEHIND = 40  # rows shown of the data behind a figure; its CSV has all
HOLDS = "Largest allocations at the peak"
_ADDRESS = re.compile(r"https://[\w./:#?=&;%~+-]*\w")
INDEX = "index.html"
NO_CHOICES: dict[str, Any] = {"axes": [], "groups": [], "kind": KIND}


def render(content: Content) -> str:
    """Return the whole page of a report as text."""
    picker = content.picker
    kinds = list(dict.fromkeys(own[KIND] for own in picker.settings if KIND in own))
    choices = {"axes": [axis.key for axis in picker.axes], "groups": picker.settings, "kind": KIND}

    def kind(figure: Figure) -> str:
        ends = {name: re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") for name in kinds}
        return next((name for name, end in ends.items() if figure.name.endswith(f"_{end}")), "")

    return page(
        "report", content.figures, title=content.title, content=content, picker=picker, code=(COMMAND,), kind=kind,
        file=lambda figure: f"figures/{figure.name}.csv", drawn=bool(content.figures),
        rows=packed(json.dumps(row_data(content.table, picker), separators=(",", ":"))),
        more=max(0, len(content.table.frame) - MOST), choices=choices,
    )  # fmt: skip


def of_figures(title: str, parts: Sequence[tuple[Figure, pd.DataFrame]]) -> str:
    """Return a page of figures alone, each with its table below."""
    drawn = [figure for figure, _ in parts]
    return page("figures", drawn, title=title, parts=parts, holds=HOLDS, drawn=bool(parts), choices=NO_CHOICES)


def page(template: str, figures: Sequence[Figure], **values: Any) -> str:
    """Fill a template of templates/, with a picture behind each of its figures, for print and where no script runs."""
    drawn = drawing.draw_pngs([layout.static(figure).plot for figure in figures], COLUMN) if figures else []
    pictures = {one.name: base64.b64encode(png).decode() for one, png in zip(figures, drawn, strict=True) if png}
    return _environment().get_template(f"{template}.html.j2").render(values | {"pictures": pictures})


def packed(text: str) -> Markup:
    """Return the text deflated and in base64: none of its characters is markup."""
    return Markup(base64.b64encode(zlib.compress(text.encode(), 9)).decode())


def grid(frame: pd.DataFrame, picker: Picker | None = None) -> dict[str, Any]:
    """Return a frame as a template needs it: its columns (those of numbers stand to the right) and its lines.

    A line has the number of its group if its index names a group of the picker. The first number of each kind (memory,
    speed) then carries in words the group's flags against that kind.
    """
    columns = [{"name": str(name), "number": export.numeric(frame[name])} for name in frame.columns]
    first: dict[str, int] = {}
    for at, column in enumerate(columns):
        if column["number"] and (claim := claim_of(str(column["name"]))) is not None:
            first.setdefault(claim, at)
    lines = []
    for group, row in zip(frame.index, frame.to_numpy(), strict=True):
        number = picker.number(group) if picker else None
        own = picker.flags[number] if picker and number is not None else {}
        flags = {at: in_words(of) for claim, at in first.items() if (of := forbidding(own, claim))}
        cells = [{"text": str(value), "flags": flags.get(at, "")} for at, value in enumerate(row)]
        lines.append({"group": number, "cells": cells})
    return {"columns": columns, "rows": lines}


@cache
def _environment() -> Environment:
    """Return the templates' environment: it escapes all values, and characters that change the writing direction."""
    made = Environment(
        loader=FunctionLoader(lambda name: _read(f"templates/{name}")), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else escape_text(str(value)), trim_blocks=True,
    )  # fmt: skip
    made.globals |= {
        "resource": lambda name: Markup(_read(name)), "library": cache(lambda: packed(drawing.plotly_script())),
        "spec": _spec, "grid": grid, "beginning": _beginning, "json": _json, "count": lambda number: f"{number:,}",
    }  # fmt: skip
    made.filters["links"] = _links
    return made


def _read(name: str) -> str:
    return resources.files("vramsweep.analysis.report").joinpath(name).read_text(encoding="utf-8")


def _spec(figure: Figure) -> Markup:
    """Return the plot and its changes on a narrow screen, packed."""
    narrow = json.dumps(layout.on_phone(figure), separators=(",", ":"))
    return packed(f'{{"plot":{figure.plot.to_json()},"narrow":{narrow}}}')


def _json(value: Any) -> Markup:
    """Return JSON for a script element. It escapes `<`, because `</script>` would end the element."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", r"\u003c"))


def _links(text: str) -> Markup:
    """Return the escaped text, with addresses as links."""
    return Markup(_ADDRESS.sub(lambda found: f'<a href="{found[0]}">{found[0]}</a>', str(escape(escape_text(text)))))


def _beginning(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the first rows (at most BEHIND) of the data behind a figure, as text."""
    return frame.head(BEHIND).astype(object).map(_cell).reset_index(drop=True)


def _cell(value: Any) -> str:
    if isinstance(value, float | np.floating) and np.isfinite(value):
        number = float(value)
        return f"{number:,.0f}" if number == round(number) and abs(number) < 1e15 else f"{number:,.6g}"
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return f"{value:,}"
    missing = value is None or (not isinstance(value, list | tuple | dict | np.ndarray) and pd.isna(value))
    return "–" if missing else str(value)


def draw(data: Path, out: Path) -> None:
    """Draw timelines, or the what-if table of a recording (WhatIf.to_json), into a self-contained page.

    Raises UserError if the data cannot be read, or is something else.
    """
    try:
        found = json.loads(read_content(data))
        if isinstance(found, list):
            text = of_figures("Memory over a step", [(of_timeline(one), holders(one)) for one in found])
        else:
            text = of_figures("Replay of a recording", [(of_replay(found), recorded_holders(found))])
    except OSError as error:
        raise UserError(f"cannot read {data}: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise UserError(
            f"{data} is not the output of vramsweep timeline --json; for a recording use replay FILE --figure OUT.html"
        ) from None
    outputs.write(out, text)


MOST = 20_000


def row_data(table: Table, picker: Picker) -> dict[str, Any]:
    """Return columns of equal length by name; other columns point into `texts`, and `flags` say what each forbids.

    Numbers are in bytes and tokens/s, null if unknown. A command is a list of its words, as indices into `words`.
    """
    frame = table.frame.head(MOST)
    known = trials(Path(table.source), set(frame["trial_id"].dropna()))
    names = sorted({str(name) for of_row in frame["flags"].dropna() for name in of_row})
    at = {name: number for number, name in enumerate(names)}
    words: dict[str, int] = {}
    commands = []
    for _, row in frame[["trial_id", "foreign"]].iterrows():
        command = escape_text(reproduce(row, known.get(row["trial_id"])))
        commands.append([words.setdefault(word, len(words)) for word in command.split(" ")])
    ends = frame["outcome"].fillna("unknown").astype(str)
    both = zip(ends, frame["reason"], strict=True)
    reasons = [end if pd.isna(reason) else f"{end}: {reason}" for end, reason in both]
    return {
        "trial": [escape_text(str(one)) for one in frame["trial_id"].fillna("–")],
        "group": [int(one) for one in picker.of_row[: len(frame)]],
        "labels": [escape_text(label) for label in picker.labels],
        "axis": "length" if table.axis == "seq_len" else table.axis,
        "rate": "tokens/s" if table.tokens else "samples/s",
        "length": _numbers(frame["seq_len"]),
        "batch": _numbers(frame["micro_batch"]),
        "allocated": _numbers(frame["peak_allocated_bytes"]),
        "reserved": _numbers(frame["peak_reserved_bytes"]),
        "speed": _numbers(frame["tokens_per_s"], 2),
        "outcome": _coded(escape_text(text) for text in reasons),
        "kind": _coded(kinds(frame)),
        "flagged": [[at[str(name)] for name in _listed(of_row)] for of_row in frame["flags"]],
        "flags": [_flag(name) for name in names],
        "unproven": _coded(escape_text(", ".join(map(str, _listed(of_row)))) for of_row in frame["unproven"]),
        "words": list(words),
        "command": commands,
    }  # fmt: skip


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | np.ndarray) else ()


def _numbers(column: pd.Series[Any], digits: int = 0) -> list[float | None]:
    return [None if pd.isna(v) else round(float(v), digits) if digits else int(v) for v in column]


def _coded(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Return the different texts, and each text as an index into them."""
    at: dict[str, int] = {}
    places = [at.setdefault(text, len(at)) for text in texts]
    return {"texts": list(at), "at": places}


def _flag(name: str) -> dict[str, Any]:
    flag = BY_NAME.get(name)
    meaning, forbids = (flag.meaning, list(flag.forbids)) if flag else ("", [])
    return {"name": escape_text(name), "meaning": meaning, "forbids": forbids}


@dataclass(frozen=True)
class Entry:
    """A sweep of the index: `about` describes it, `state` is running, waiting, stopped or finished, and `last` is when
    its last attempt began. Without readable rows these two are null, and `about` says why. `report` is the address of
    its page, relative to the index; null if there is none yet."""

    folder: str
    about: str
    state: str | None = None
    last: str | None = None
    findings: tuple[str, ...] = ()
    report: str | None = None

    @property
    def command(self) -> str:
        """Return the command that makes the sweep's report."""
        return shlex.join(["vramsweep", "report", self.folder])


def read_index(place: Path, folder: Path, say: Callable[[str], None]) -> list[Entry]:
    """Return the sweeps below `place`, the last one first, for an index in `folder`; `say` hears which one is read.

    Raises UserError if there is none.
    """
    if not (sweeps := find_sweeps(place)):
        raise UserError(describe_missing(place))
    found = []
    for number, sweep in enumerate(sweeps, 1):
        say(f"reading {sweep} ({number} of {len(sweeps)})")
        found.append(_read_entry(sweep, folder))
    return found


def write_index(found: Sequence[Entry], place: Path, folder: Path) -> None:
    """Write the index of sweeps below `place` into `folder`. Raises UserError if it cannot be written."""
    shown = {"title": f"Sweeps in {place}", "entries": found, "drawn": False, "choices": NO_CHOICES}
    try:
        with outputs.into_folder(folder, "index", folder.resolve() == place.resolve()) as (draft, _):
            (draft / INDEX).write_text(page("index", [], **shown), "utf-8", "backslashreplace")
    except OSError as error:
        raise UserError(f"cannot write {folder / INDEX}: {error_reason(error)}; choose a folder with --out") from None


def describe_entry(of: Entry) -> str:
    """Return an entry as text for a terminal."""
    state = ", ".join(filter(None, [of.state, of.last and of.last[:10]]))
    return "\n".join([f"{of.folder}  {state}".rstrip(), *(f"  {line}" for line in (of.about, *of.findings))])


def _read_entry(sweep: Path, index: Path) -> Entry:
    report = sweep / "report.html"
    link = quote(os.fsencode(os.path.relpath(report, index))) if report.is_file() else None
    try:
        status = sweep_status.read_status(sweep)
        if not status.done:
            return Entry(str(sweep), sweep_status.progress(status), status.state, status.last_row_at, report=link)
        table = load(sweep)
        found = summary.summary(table)
    except UserError as error:
        return Entry(str(sweep), str(error), report=link)
    of = [f"{name} {told}" for name in ("model", "seq_len", "precision") if (told := values(table.frame, name, 3))]
    about = "; ".join([*found.title.partition(": ")[2].splitlines(), ", ".join(of).replace("seq_len", "lengths")])
    return Entry(str(sweep), about, status.state, status.last_row_at, found.findings[:2], link)
