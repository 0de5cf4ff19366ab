"""The folder for a paper: tables and figures for LaTeX, the methods, the rows, and what makes it all again.

lock.txt is a requirements file of the exact versions that rows were measured with and tables were made with. A version
does not identify a source build (flash-attn).

In: rows. Out: the folder; harness/files/outputs.py decides which of its files may be replaced or deleted. Traces and
recordings beyond those that a table shows stay in the sweep's folder.
"""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pandas as pd

from vramsweep.analysis.answers.what_if import MOST as RECORDINGS
from vramsweep.analysis.data import markup
from vramsweep.analysis.data.export import guarded_frame, write_csv, write_parquet
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.figures import drawing
from vramsweep.analysis.figures.plots import Figure
from vramsweep.analysis.report import findings, latex, paper_tables
from vramsweep.analysis.report.content import ALL_ROWS, Content, Fitting, collect, split_worlds
from vramsweep.analysis.report.findings import values
from vramsweep.analysis.report.write import Written, unwritable, write_residuals
from vramsweep.harness.files import file_names, inferred_points, outputs
from vramsweep.harness.files.sweep_folder import OWN, own_files
from vramsweep.harness.messages.terminal import escape_text
from vramsweep.harness.rows import journal
from vramsweep.version import __version__

DIGESTS = "SHA256SUMS"  # in the format of sha256sum


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
            readme = {"title": markup.prose(content.title),
                      "command": line if line.isprintable() and "`" not in line else "vramsweep ...",
                      "tables": [(one.name, markup.cell(one.caption)) for one in tables],
                      "figures": [(one.name, markup.cell(one.title), one.name in drawn) for one in figures],
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
    (folder / f"{table.name}.md").write_text(markup.markdown(table.frame), encoding="utf-8")
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
    if "--mapping" in words:
        at = words.index("--mapping") + 1
        copied = Path(f"mapping-{Path(words[at]).name.removeprefix('mapping-')}")
        _copy(Path(words[at]), folder, copied)
        words[at] = f"rows/{copied}"
    return [f"rows/{source.name}", *words]


def _other_files(table: Table, source: Path) -> Iterator[Path]:
    """Yield what a report of the sweep in this folder reads besides its journals."""
    own = own_files(source)
    yield from sorted((*source.glob("plan*.json"), *source.glob(f"{OWN}/plan*.json")))
    yield own / inferred_points.NAME
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
