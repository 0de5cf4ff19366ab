"""What a finished sweep leaves behind: report.html, rows.csv, figures and README.txt. paper.py has the paper's folder.

In: a table. Out: files; harness/files/outputs.py decides which files of a folder may be replaced or deleted.
"""

import shlex
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vramsweep.analysis.answers.answer_table import Answered
from vramsweep.analysis.data.export import guarded_frame, write_csv
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.figures import drawing
from vramsweep.analysis.model import fit_wording
from vramsweep.analysis.report import latex, page, summary
from vramsweep.analysis.report.content import ALL_ROWS, Content, Fitting, collect
from vramsweep.analysis.report.summary import Summary
from vramsweep.harness.files import outputs
from vramsweep.harness.files.bounded_reads import error_reason
from vramsweep.harness.files.sweep_folder import OWN, sweep_of
from vramsweep.harness.messages.console import Console
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.terminal import escape_text
from vramsweep.harness.rows import journal

NOTES = 3  # most notes that the end of a sweep shows; the report has all


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
    files = [folder / "answer.csv", folder / "answer.md"]
    guarded_frame(answer.frame).to_csv(files[0], index=False)
    files[1].write_text(answer.markdown(), encoding="utf-8")
    return {"answer": files[1]}


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
