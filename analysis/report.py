"""What a finished sweep leaves behind: rows.csv, figures and report.html."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import figures, words
from analysis.fit import fit_table
from analysis.load import Table, groups
from harness.errors import UserError


@dataclass(frozen=True)
class Written:
    """Where things are, and the fitted models in words."""

    rows: Path
    figures: Path
    report: Path
    summary: str
    notes: tuple[str, ...]

    def text(self) -> str:
        """For a terminal."""
        return "\n".join(
            [
                self.summary or "no curve could be fitted",
                "",
                *(f"note: {note}" for note in self.notes),
                f"rows     {self.rows}",
                f"figures  {self.figures}",
                f"report   {self.report}",
            ]
        )

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"rows": str(self.rows), "figures": str(self.figures), "report": str(self.report),
                "summary": self.summary.splitlines(), "notes": list(self.notes)}  # fmt: skip


def write_report(table: Table, folder: Path, formats: list[str]) -> Written:
    """Write everything into `folder`. Raises UserError when it cannot be written."""
    fits, notes = fit_table(table)
    drawn = figures.standard(fits, groups(table))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rows = folder / "rows.csv"
        write_csv(table.frame, rows)
        notes += figures.write(drawn, folder / "figures", formats)
        page = folder / "report.html"
        page.write_text(_page(table, drawn, words.summary(fits), notes), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or folder}: {error.strerror}; choose a folder with --out"
        ) from None
    return Written(rows, folder / "figures", page, words.summary(fits), tuple(notes))


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """The tidy table as CSV; lists as JSON."""
    flat = frame.copy(deep=False)
    for name in flat.columns:
        if flat[name].dtype == object:
            flat[name] = flat[name].map(lambda v: json.dumps(v) if isinstance(v, list) else None)
    flat.to_csv(path, index=False)


def _page(table: Table, drawn: list[figures.Figure], summary: str, notes: list[str]) -> str:
    shown = "".join(
        f"<h2>{html.escape(f.title)}</h2>{figures.as_div(f, i)}<p>{html.escape(f.caption)}</p>"
        for i, f in enumerate(drawn)
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(table.source)}</title>"
        f"<script>{figures.plotly_script()}</script><h1>{html.escape(table.source)}</h1>"
        f"<pre>{html.escape(summary)}</pre><p>{html.escape('; '.join(notes))}</p>{shown}"
    )
