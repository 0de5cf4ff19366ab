"""What a finished sweep leaves behind: rows.csv, figures and report.html; and the folder for a paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramsweep.analysis import figures, page, tables
from vramsweep.analysis.content import Content, collect
from vramsweep.analysis.export import write_csv
from vramsweep.analysis.load import Table
from vramsweep.harness.errors import UserError


@dataclass(frozen=True)
class Written:
    """Where things are (name to path), the fitted models in words, and notes."""

    places: dict[str, Path]
    summary: str
    notes: tuple[str, ...]

    def text(self) -> str:
        """For a terminal."""
        lines = [self.summary or "no curve could be fitted", ""]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"{name:<8} {path}" for name, path in self.places.items()]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        places = {name: str(path) for name, path in self.places.items()}
        return {**places, "summary": self.summary.splitlines(), "notes": list(self.notes)}


def write_report(table: Table, folder: Path, formats: Sequence[str]) -> Written:
    """Write rows.csv, figures/ and report.html into `folder`. Raises UserError when it cannot be written."""
    content = collect(table)
    places = {"rows": folder / "rows.csv", "figures": folder / "figures", "report": folder / "report.html"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(table.frame, places["rows"])
        places |= _write_residuals(content, folder)
        places["report"].write_text(page.render(content), encoding="utf-8")
        notes = figures.write(content.figures, places["figures"], formats)
    except OSError as error:
        raise _unwritable(error, folder) from None
    return Written(places, content.summary, (*content.warnings, *notes))


def write_paper(table: Table, folder: Path) -> Written:
    """Write the paper folder: PDF figures, .tex and .md tables, CSV, methods, environment. Raises UserError."""
    content = collect(table)
    places = {"figures": folder / "figures", "tables": folder / "tables", "methods": folder / "methods.txt",
              "machine": folder / "environment.json", "rows": folder / "rows.csv"}  # fmt: skip
    try:
        for name in ("figures", "tables"):
            places[name].mkdir(parents=True, exist_ok=True)
        for figure in content.figures:
            figure.data.to_csv(places["figures"] / f"{figure.name}.csv", index=False)
        notes = figures.images(content.figures, places["figures"], ["pdf"])
        _write_tables(content, places["tables"])
        captions = "\n".join(f"{f.name}: {f.title}. {f.caption}" for f in content.figures)
        places["methods"].write_text(f"{content.methods}\n\nFigures\n{captions}\n", encoding="utf-8")
        environment = {"machine": content.machine, "asked": content.asked, "coverage": content.coverage,
                       "warnings": content.warnings}  # fmt: skip
        places["machine"].write_text(json.dumps(environment, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        write_csv(table.frame, places["rows"])
        places |= _write_residuals(content, folder)
    except OSError as error:
        raise _unwritable(error, folder) from None
    return Written(places, content.summary, (*content.warnings, *notes))


def _write_residuals(content: Content, folder: Path) -> dict[str, Path]:
    """residuals.csv, where anything predicted could be compared with a measurement; where it is."""
    path = folder / "residuals.csv"
    if content.residuals.empty:
        path.unlink(missing_ok=True)  # an earlier report's would no longer be true
        return {}
    write_csv(content.residuals, path)
    return {"residuals": path}


def _write_tables(content: Content, folder: Path) -> None:
    for title, name, frame in content.tables:
        if len(frame):
            (folder / f"{name}.tex").write_text(tables.latex(frame, title, name), encoding="utf-8")
            (folder / f"{name}.md").write_text(tables.markdown(frame), encoding="utf-8")
            frame.to_csv(folder / f"{name}.csv", index=False)


def _unwritable(error: OSError, folder: Path) -> UserError:
    return UserError(f"cannot write {error.filename or folder}: {error.strerror}; choose a folder with --out")
