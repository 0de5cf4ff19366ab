"""index.html: the sweeps below a folder, each with its findings, its progress and its report.

In: a folder. Out: the page. Sweeps more than two folders down are not found.
"""

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from vramsweep.analysis.data.load import load
from vramsweep.analysis.report import page, summary
from vramsweep.analysis.report.findings import values
from vramsweep.harness.files import outputs
from vramsweep.harness.files.bounded_reads import error_reason
from vramsweep.harness.files.sweep_folder import describe_missing, find_sweeps
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.sweep import sweep_status

NAME = "index.html"


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


def read(place: Path, folder: Path, say: Callable[[str], None]) -> list[Entry]:
    """Return the sweeps below `place`, the last one first, for an index in `folder`; `say` hears which one is read.

    Raises UserError if there is none.
    """
    if not (sweeps := find_sweeps(place)):
        raise UserError(describe_missing(place))
    found = []
    for number, sweep in enumerate(sweeps, 1):
        say(f"reading {sweep} ({number} of {len(sweeps)})")
        found.append(_read(sweep, folder))
    return found


def write(found: Sequence[Entry], place: Path, folder: Path) -> None:
    """Write the index of sweeps below `place` into `folder`. Raises UserError if it cannot be written."""
    values = {"title": f"Sweeps in {place}", "entries": found, "drawn": False, "choices": page.NO_CHOICES}
    try:
        with outputs.into_folder(folder, "index", folder.resolve() == place.resolve()) as (draft, _):
            (draft / NAME).write_text(page.page("index", [], **values), "utf-8", "backslashreplace")
    except OSError as error:
        raise UserError(f"cannot write {folder / NAME}: {error_reason(error)}; choose a folder with --out") from None


def text(of: Entry) -> str:
    """Return an entry as text for a terminal."""
    state = ", ".join(filter(None, [of.state, of.last and of.last[:10]]))
    return "\n".join([f"{of.folder}  {state}".rstrip(), *(f"  {line}" for line in (of.about, *of.findings))])


def _read(sweep: Path, index: Path) -> Entry:
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
