"""What a finished sweep leaves behind: rows.csv, figures and report.html; and the folder for a paper.

A link where something is to be written stops it, wherever it leads: the folder may have come from elsewhere. Not
covered: links that are made meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramsweep.analysis.answers.registry import Answered
from vramsweep.analysis.data import markup
from vramsweep.analysis.data.export import guarded_frame, write_csv
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.figures import files
from vramsweep.analysis.report import page
from vramsweep.analysis.report.content import Content, collect
from vramsweep.harness import journal
from vramsweep.harness.errors import UserError

# Files and folders of files.
WRITTEN = (
    "rows.csv", "report.html", "residuals.csv", "answer.csv", "answer.md", "methods.txt", "environment.json", "figures",
    "tables",
)  # fmt: skip


@dataclass(frozen=True)
class Written:
    """Where things are (name to path), the fitted models in words, and notes."""

    places: dict[str, Path]
    summary: str
    notes: tuple[str, ...]
    answer: Answered | None = None

    def text(self, said: Collection[str] = ()) -> str:
        """For a terminal, without the notes that were `said` there before."""
        lines = [self.summary or "no curve could be fitted", ""]
        lines += [f"note: {note}" for note in self.notes if note not in said]
        lines += ["", self.answer.text(), ""] if self.answer else []
        lines += [f"{name:<8} {path}" for name, path in self.places.items()]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        places = {name: str(path) for name, path in self.places.items()}
        own = {"answer_table": self.answer.frame.to_dict("records")} if self.answer else {}
        return {**places, **own, "summary": self.summary.splitlines(), "notes": list(self.notes)}


def write_report(table: Table, folder: Path, formats: Sequence[str], answer: str | None = None) -> Written:
    """Write rows.csv, figures/, report.html and the answer of that name into `folder`. Raises UserError when it cannot
    be written, or there is no such answer."""
    _no_links(folder)
    content = collect(table, answer)
    places = {"rows": folder / "rows.csv", "figures": folder / "figures", "report": folder / "report.html"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(table.frame, places["rows"])
        places |= _write_residuals(content, folder) | _write_answer(content.answer, folder)
        _whole(places["report"], page.render(content))
        notes = files.write(content.figures, places["figures"], formats)
    except OSError as error:
        raise _unwritable(error, folder) from None
    return Written(places, content.summary, (*content.warnings, *notes), content.answer)


def write_paper(table: Table, folder: Path, answer: str | None = None) -> Written:
    """Write the paper folder: PDF figures, .tex and .md tables, CSV, methods, environment. Raises UserError."""
    _no_links(folder)
    content = collect(table, answer)
    places = {"figures": folder / "figures", "tables": folder / "tables", "methods": folder / "methods.txt",
              "machine": folder / "environment.json", "rows": folder / "rows.csv"}  # fmt: skip
    try:
        for name in ("figures", "tables"):
            places[name].mkdir(parents=True, exist_ok=True)
        for figure in content.figures:
            guarded_frame(figure.data).to_csv(places["figures"] / f"{figure.name}.csv", index=False)
        notes = files.images(content.figures, places["figures"], ["pdf"])
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


def _whole(path: Path, text: str) -> None:
    """Write a file aside and rename it: whoever reads it, also after a kill, finds the one before or this one."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _no_links(folder: Path) -> None:
    """Raises UserError where anything that would be written in the folder is a link."""
    written = [folder / name for name in WRITTEN]
    within = [one for place in written if place.is_dir() and not place.is_symlink() for one in place.iterdir()]
    if links := [place for place in (*written, *within) if place.is_symlink()]:
        raise UserError(
            f"{links[0]} is a link to {links[0].readlink()}, which a report does not write through; remove it, or "
            "choose a folder with --out"
        )


def _remove(*files: Path) -> None:
    """An earlier report's, which would no longer be true; out of a sweep's folder they may be someone else's."""
    for file in files:
        if any((place / name).exists() for place in file.parents[:2] for name in (journal.NAME, journal.PLAN)):
            file.unlink(missing_ok=True)


def _write_residuals(content: Content, folder: Path) -> dict[str, Path]:
    """residuals.csv, where anything predicted could be compared with a measurement; where it is."""
    path = folder / "residuals.csv"
    if content.residuals.empty:
        _remove(path)
        return {}
    write_csv(content.residuals, path)
    return {"residuals": path}


def _write_answer(answer: Answered | None, folder: Path) -> dict[str, Path]:
    """answer.csv and answer.md; where the latter is."""
    files = [folder / "answer.csv", folder / "answer.md"]
    if answer is None:
        _remove(*files)
        return {}
    guarded_frame(answer.frame).to_csv(files[0], index=False)
    files[1].write_text(answer.markdown(), encoding="utf-8")
    return {"answer": files[1]}


def _write_tables(content: Content, folder: Path) -> None:
    answer = content.answer
    for title, name, frame in [*([(answer.title, "answer", answer.frame)] if answer else []), *content.tables]:
        if len(frame):
            (folder / f"{name}.tex").write_text(markup.latex(frame, title, name), encoding="utf-8")
            (folder / f"{name}.md").write_text(markup.markdown(frame), encoding="utf-8")
            guarded_frame(frame).to_csv(folder / f"{name}.csv", index=False)


def _unwritable(error: OSError, folder: Path) -> UserError:
    return UserError(f"cannot write {error.filename or folder}: {error.strerror}; choose a folder with --out")
