"""Folders that a finished sweep leaves behind: its report, and a paper's folder.

A report's folder has report.html, rows.csv, figures and README.txt. A paper's has tables and figures for LaTeX, the
methods, the rows, and what makes it all again. Its lock.txt is a requirements file of the exact versions that rows were
measured with and tables were made with. A version does not identify a source build (flash-attn).

In: a table. Out: files; harness/files/outputs.py decides which files of a folder may be replaced or deleted. Traces and
recordings beyond those that a paper's table shows stay in the sweep's folder.
"""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd

from vramsweep.analysis.answers.answer_table import RECORDINGS, Answered
from vramsweep.analysis.data import export
from vramsweep.analysis.data.export import guarded_frame, write_csv, write_parquet
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.figures import drawing
from vramsweep.analysis.figures.plots import Figure
from vramsweep.analysis.model import fit_wording
from vramsweep.analysis.report import findings, latex, page, paper_tables, summary
from vramsweep.analysis.report.content import ALL_ROWS, Content, Fitting, collect, split_worlds
from vramsweep.analysis.report.findings import values
from vramsweep.analysis.report.summary import Summary
from vramsweep.harness.files import file_names, outputs, sweep_folder
from vramsweep.harness.files.bounded_reads import error_reason
from vramsweep.harness.files.sweep_folder import OWN, own_files, sweep_of
from vramsweep.harness.messages.console import Console
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.terminal import escape_text
from vramsweep.harness.rows import journal
from vramsweep.version import __version__

NOTES = 3  # most notes that the end of a sweep shows; the report has all
DIGESTS = "SHA256SUMS"  # in the format of sha256sum


@dataclass(frozen=True)
class Written:
    """The paths of what was written by name, the fitted models in words, notes, and what is shown on a screen."""

    places: dict[str, Path]
    summary: str
    notes: tuple[str, ...]
    answer: Answered | None = None
    screen: Summary | None = None

    def text(self, said: Collection[str] = (), width: int | None = None) -> str:
        """Return the text for a terminal of `width` columns (None: its own width), without the notes `said`, shown
        before.

        The answer to a preset's question replaces the table. Fits are in the report.
        """
        wide = width or (Console().width if Console().is_terminal else summary.WIDTH)
        parts = [self.answer.text() if self.answer else summary.text(self.screen, wide) if self.screen else ""]
        notes = [note for note in self.notes if note not in said]
        wrap = partial(textwrap.fill, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        shown = [wrap(f"note: {note}", max(wide, 40)) for note in notes[:NOTES]]
        whole = "the report" if "report" in self.places else self.places.get("machine", "")
        more = [f"and {len(notes) - NOTES} more in {whole}"] if len(notes) > NOTES else []
        return "\n\n".join(filter(None, [*parts, "\n".join([*shown, *more]), self.list_places()]))

    def list_places(self) -> str:
        """Return the paths, a line each."""
        places = {name: str(path) for name, path in self.places.items()}
        if "report" in places:
            places = {"report": places["report"]} | places
            folder = self.places["report"].parent
            rows = folder if any(one.is_file() for one in journal.files(folder)) else self.places["rows"]
            places |= {"fits": shlex.join(["vramsweep", "fit", str(rows)])} if self.summary else {}
        return "\n".join(f"{name:<9} {place}" for name, place in places.items())

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data for programs."""
        places = {name: str(path) for name, path in self.places.items()}
        own: dict[str, Any] = {"answer_table": self.answer.frame.to_dict("records")} if self.answer else {}
        if self.screen:
            own |= {"configurations": [asdict(line) for line in self.screen.lines], "findings": self.screen.findings}
        return {**places, **own, "summary": self.summary.splitlines(), "notes": list(self.notes)}


def write_report(
    table: Table,
    folder: Path,
    formats: Sequence[str],
    answer: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    fitting: Fitting = ALL_ROWS,
) -> Written:
    """Write report.html, rows.csv, figures/, README.txt and the answer of that name into `folder`.

    `say` hears the progress. Raises UserError if a file cannot be written, or there is no such answer.
    """
    content, source = collect(table, answer, fitting), Path(table.source)
    beside = folder.resolve() in (source.resolve(), source.resolve().parent, sweep_of(source.resolve()))
    places = {"rows": folder / "rows.csv", "figures": folder / "figures", "report": folder / "report.html"}
    try:
        same = "rows.csv" if places["rows"].resolve() == source.resolve() else ""
        with outputs.into_folder(folder, "report", beside, same) as (draft, kept):
            if not same:
                write_csv(table.frame, draft / "rows.csv")
            (draft / "figures").mkdir()
            if content.fits:
                guarded_frame(fit_wording.frame(content.fits)).to_csv(draft / "figures" / "fits.csv", index=False)
            others = write_residuals(content, draft / "figures") | _write_answer(content.answer, draft / "figures")
            places |= {name: folder / "figures" / file.name for name, file in others.items()}
            (draft / "report.html").write_text(page.render(content), encoding="utf-8")
            if not beside or any(one.exists() for one in journal.files(folder)):  # else it is a folder of the user's
                (draft / "README.txt").write_text(_read_me(content, folder), "utf-8", "backslashreplace")
            notes = drawing.write(content.figures, draft / "figures", formats, say)
    except OSError as error:
        raise unwritable(error, folder) from None
    return Written(places, content.summary, (*kept, *notes, *content.warnings), content.answer, content.screen)


def write_residuals(content: Content, folder: Path) -> dict[str, Path]:
    """Write residuals.csv if a prediction could be compared with a measurement; return its path by name."""
    path = folder / "residuals.csv"
    if content.residuals.empty:
        return {}
    write_csv(content.residuals, path)
    return {"residuals": path}


def _write_answer(answer: Answered | None, folder: Path) -> dict[str, Path]:
    """Write answer.csv and answer.md; return the path of the latter by name."""
    if answer is None:
        return {}
    guarded_frame(answer.frame).to_csv(folder / "answer.csv", index=False)
    (folder / "answer.md").write_text(answer.markdown(), encoding="utf-8")
    return {"answer": folder / "answer.md"}


def _read_me(content: Content, folder: Path) -> str:
    """Return README.txt: what lies in the folder, and the commands that continue or repeat the work."""
    planned = [one["command"] for one in journal.plans(folder)[-1:] if isinstance(one.get("command"), list)]
    words = [str(word) for one in planned for word in one]
    verb = [] if words and words[0].isalpha() else ["sweep"]  # plans of earlier versions do not name it
    repeat = shlex.join(["vramsweep", *verb, *words]) if words else ""
    again = content.again or shlex.join(["vramsweep", "report", str(folder)])
    told = {"title": content.title, "subtitle": content.subtitle, "repeat": repeat, "again": again}
    shown = {name: escape_text(one).replace("\n", "\\n") for name, one in told.items()}
    return latex.markdown("README.txt.j2", own=OWN if (folder / OWN).is_dir() else "", **shown)


def unwritable(error: OSError, folder: Path) -> UserError:
    """Return the error for a file that could not be written."""
    return UserError(f"cannot write {error.filename or folder}: {error_reason(error)}; choose a folder with --out")


def write_paper(
    table: Table, folder: Path, answer: str | None = None, given: Sequence[str] = (), fitting: Fitting = ALL_ROWS
) -> Written:
    """Write the paper's folder. To make it again, keep `given`: the arguments that tell how to read the rows (--ranks,
    --set, ...). Raises UserError if the folder cannot be written."""
    content = collect(table, answer, fitting)
    prefix = latex.slug(findings.values(table.frame, "sweep", 1) or Path(table.source).stem)
    figures, tables = _named(content.figures), paper_tables.tables(content)
    try:
        with outputs.into_folder(folder, "paper") as (draft, kept):
            for name in ("figures", "tables", "rows"):
                (draft / name).mkdir()
            command = _copy_rows(table, draft / "rows", given)
            drawn, notes = _write_figures(figures, content, draft / "figures", prefix)
            for one in tables:
                _write_table(one, draft / "tables", prefix)
            residuals = {name: folder / file.name for name, file in write_residuals(content, draft).items()}
            write_csv(table.frame, draft / "rows.csv")
            captions = "\n".join(f"{figure.name}: {figure.title}. {figure.caption}" for figure in figures)
            (draft / "methods.txt").write_text(f"{content.methods}\n\nFigures\n{captions}\n", encoding="utf-8")
            said = {"prefix": prefix, "tables": tables, "figures": drawn,
                    "methods": content.methods, "version": __version__, "title": content.title}  # fmt: skip
            for name in ("methods.tex", "results.tex", "example.tex"):
                (draft / name).write_text(latex.render(f"{name}.j2", **said), encoding="utf-8")
            line = shlex.join(["vramsweep", "paper", *command])
            readme = {"title": export.prose(content.title),
                      "command": line if line.isprintable() and "`" not in line else "vramsweep ...",
                      "tables": [(one.name, export.cell(one.caption)) for one in tables],
                      "figures": [(one.name, export.cell(one.title), one.name in drawn) for one in figures],
                      "residuals": bool(residuals)}  # fmt: skip
            (draft / "README.md").write_text(latex.markdown("README.md.j2", **(said | readme)), encoding="utf-8")
            (draft / "lock.txt").write_text(lock_text(table.frame), encoding="utf-8")
            _write_environment(content, draft, command)
            _write_digests(draft)
    except OSError as error:
        raise unwritable(error, folder) from None
    places = {"read me": folder / "README.md", "tables": folder / "tables", "figures": folder / "figures",
              "methods": folder / "methods.txt", "machine": folder / "environment.json", "lock": folder / "lock.txt",
              "rows": folder / "rows.csv", "digests": folder / DIGESTS} | residuals  # fmt: skip
    return Written(places, content.summary, (*kept, *content.warnings, *notes))


def _named(figures: Sequence[Figure]) -> list[Figure]:
    """Return the figures by names that LaTeX takes, each different."""
    found: dict[str, Figure] = {}
    for figure in figures:
        name = first = latex.slug(figure.name)
        while name in found:
            name = f"{first}-{len(found)}"
        found[name] = replace(figure, name=name)
    return list(found.values())


def _write_figures(
    figures: Sequence[Figure], content: Content, folder: Path, prefix: str
) -> tuple[list[str], list[str]]:
    """Write each figure's data, and its PDF and LaTeX if it can be drawn. Return the names of these, and notes."""
    for figure in figures:
        guarded_frame(figure.data).to_csv(folder / f"{figure.name}.csv", index=False)
    notes = drawing.images(figures, folder, ["pdf"]) if figures else []
    worlds = [(world, paper_tables.context(world, rows)) for world, rows in split_worlds(content.table)]
    drawn = [figure for figure in figures if (folder / f"{figure.name}.pdf").is_file()]
    for figure in drawn:
        mine = [about for world, about in worlds if figure.title.endswith(f"({world})")]
        about = " ".join(mine or [about for _, about in worlds])
        caption = f"{paper_tables.sentence(figure.title, figure.caption)} {about}"
        text = latex.render("figure.tex.j2", name=latex.Tex(figure.name), caption=caption, prefix=latex.Tex(prefix))
        (folder / f"{figure.name}.tex").write_text(text, encoding="utf-8")
    return [figure.name for figure in drawn], notes


def _write_table(table: latex.Table, folder: Path, prefix: str) -> None:
    (folder / f"{table.name}.tex").write_text(latex.latex(table, f"tab:{prefix}:{table.name}"), encoding="utf-8")
    (folder / f"{table.name}.md").write_text(export.markdown(table.frame), encoding="utf-8")
    guarded_frame(table.frame).to_csv(folder / f"{table.name}.csv", index=False)


def _copy_rows(table: Table, folder: Path, given: Sequence[str]) -> list[str]:
    """Copy the rows as read, and what a report reads next to them. Return the command that makes a paper of the copies.

    Links out of the sweep's folder are not copied, because they may come from elsewhere and the copy is to be shared.
    """
    source, words = Path(table.source), list(given)
    journals = [file for file in journal.files(source) if file.is_file()] if source.is_dir() else []
    if journals and all(file_names.is_inside(source, os.path.relpath(file, source)) for file in journals):
        for file in (*journals, *_other_files(table, source)):
            name = os.path.relpath(file, source)  # a row may name any path
            if file_names.is_inside(source, name) and file.is_file():
                _copy(file, folder, Path(name))
        own = folder / own_files(source).relative_to(source)
        if (own / "timelines").is_dir():
            (own / "traces").mkdir(exist_ok=True)
            (own / "traces" / "README").write_text("Left out for their size; timelines/ has the data read from them.\n")
        return ["rows", *words]
    if not source.is_file():  # a folder whose journals are links out of it
        write_parquet(table.frame, folder / "rows.parquet")
        return ["rows/rows.parquet", *(word for word in words if word.startswith(("--from", "--to", "--curves")))]
    _copy(source, folder, Path(source.name))
    return [f"rows/{source.name}", *words]


def _other_files(table: Table, source: Path) -> Iterator[Path]:
    """Yield what a report of the sweep in this folder reads besides its journals."""
    own = own_files(source)
    yield from sorted((*source.glob("plan*.json"), *source.glob(f"{OWN}/plan*.json")))
    yield own / sweep_folder.INFERRED
    yield from (own / str(name) for name in table.frame["recording"].dropna().head(RECORDINGS))
    if (own / "traces").is_dir():
        yield from sorted((own / "timelines").glob("*.json"))


def _copy(file: Path, folder: Path, name: Path) -> None:
    to = folder / name
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)


def _write_environment(content: Content, folder: Path, command: Sequence[str]) -> None:
    """Write what the rows say of their machine, what made the folder, and the command that makes it again."""
    said = {"vramsweep": __version__, "command": ["paper", *command]}
    said |= {name: getattr(content, name) for name in ("machine", "asked", "coverage", "warnings")}
    (folder / "environment.json").write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_digests(folder: Path) -> None:
    """Write the digests of what is byte-identical when the folder is made again. PDFs are left out because they hold
    their date. From an imported CSV the figures' data differ too, because its rows' ids come from its path."""
    texts = ("methods.tex", "results.tex", "methods.txt")
    whole = [*map(folder.joinpath, texts), *(folder / "figures").glob("*.csv")]
    whole += [file for name in ("rows", "tables") for file in (folder / name).rglob("*") if file.is_file()]
    of = {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in whole}
    (folder / DIGESTS).write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(of.items())), "utf-8")


OF_ROWS = {"torch": "torch_version", "transformers": "transformers_version", "deepspeed": "deepspeed_version"}
SAID = ("python_version", *OF_ROWS.values(), "cuda_version", "driver_version", "vramsweep_version", "git_commit")
ANALYSIS = (
    "numpy", "pandas", "pyarrow", "scipy", "plotly", "mini-racer", "vl-convert-python", "jinja2", "rich", "packaging",
)  # fmt: skip
_NAME, _VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*"), re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]*")


def installed() -> dict[str, str]:
    """Return the version of each package in this environment, by the name that the index writes."""
    found = {}
    for one in metadata.distributions():
        name, version = str(one.metadata["Name"] or ""), str(one.version or "")
        if _NAME.fullmatch(name) and _VERSION.fullmatch(version):
            found[re.sub(r"[-_.]+", "-", name).lower()] = version
    return dict(sorted(found.items()))


def lock_text(frame: pd.DataFrame) -> str:
    """Return the file: all of this environment if the rows name it, else the rows' versions and the analysis's.

    Versions of rows come from outside. One that is no version becomes a comment, never a line that pip would read.
    """
    here = installed()
    of_rows = {name: sorted(set(frame[column].dropna().astype(str))) for name, column in OF_ROWS.items()}
    pythons = sorted(set(frame["python_version"].dropna().astype(str)))
    same = bool(of_rows["torch"]) and pythons == [platform.python_version()]
    same = same and all(versions in ([], [here.get(name)]) for name, versions in of_rows.items())
    pins = {name: here[name] for name in (here if same else ANALYSIS) if name in here and name != "vramsweep"}
    several = {}
    for name, versions in () if same else of_rows.items():
        if len(versions) == 1 and _VERSION.fullmatch(versions[0]):
            pins[name] = versions[0]
        elif versions:
            several[name] = _comment(", ".join(versions))
    return latex.markdown(
        "lock.txt.j2", version=__version__, python=platform.python_version(), same=same, several=several,
        named={name: said for name in SAID if (said := _comment(values(frame, name)))}, pins=sorted(pins.items()),
    )  # fmt: skip


def _comment(said: str) -> str:
    return re.sub(r"\s+", " ", escape_text(said))
