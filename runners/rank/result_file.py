"""The file that a worker leaves for its parent: what was measured, or the error that ended the attempt.

It is written aside and renamed, so readers find a whole one. It may be written again with more in it: `complete` is
false from the end of the measured steps until the worker's last write. Secrets that an error quotes, or a library's
configuration holds, are left out (harness/files/redaction.py).
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vramsweep.harness.files import redaction
from vramsweep.harness.files.bounded_reads import replaced
from vramsweep.harness.process import worker_environment
from vramsweep.harness.process.worker_files import ANSWER, PROGRESS, RESULT

# Exit status of a rank that failed after the measured steps: the other ranks are killed, the result stands.
ENDED_EARLY = 80
FAILED = 1  # of a rank that raised before that, and has written its error
TOLD = (FAILED, ENDED_EARLY)  # of a rank that has reported why
DONE = 81  # of one of several ranks that ran to its end; 0 is no proof, as of os._exit(0) in the middle


class EndedEarly(Exception):
    """Training failed after the measured steps, whose result is published; the text is a note for the row."""


def write(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the attempt's result: {"values": columns, "complete": bool} or {"error": {"type", "message"}}."""
    _aside(folder, result).rename(folder / RESULT)


def answer(folder: Path, found: Any) -> None:
    """Write `found` as the answer of an attempt that answers a question about trials."""
    with replaced(folder / ANSWER) as aside:
        aside.write_text(json.dumps(found))


def progress(folder: Path, text: str, **numbers: int | None) -> None:
    """Report what this process does from now on (attempt.read_progress). Ignore a full disk: others will notice it."""
    with contextlib.suppress(OSError), (folder / PROGRESS).open("a") as records:
        records.write(json.dumps({"text": text} | numbers) + "\n")


def _aside(folder: Path, result: Mapping[str, Any]) -> Path:
    """Write a temporary file, not synced, because the parent reads it at once and syncs the row, which has to last."""
    known, found = worker_environment.secrets(os.environ), dict(result)
    if "error" in found:
        found["error"] = redaction.redact(found["error"], known)
    if "values" in found:
        told = {name: redaction.redact(found["values"].get(name), known) for name in ("notes", "runner_config")}
        found["values"] = {**found["values"], **{name: text for name, text in told.items() if text is not None}}
    aside = folder / f"{RESULT}.{os.getpid()}"
    aside.write_text(json.dumps(found))
    return aside


def error(folder: Path, told: Mapping[str, Any]) -> None:
    """Write the error that ended the attempt, unless a result is there already.

    A published result stands. Of several ranks the first to fail reports why, because the others fail as a consequence.
    """
    aside = _aside(folder, told)
    try:
        os.link(aside, folder / RESULT)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not (folder / RESULT).exists():
            aside.rename(folder / RESULT)
    aside.unlink(missing_ok=True)


def values(folder: Path, columns: Mapping[str, Any], complete: bool) -> None:
    """Publish the row's columns as far as they are known, unless a complete result is there."""
    if not _settled(folder):
        write(folder, {"values": columns, "complete": complete})


def note(folder: Path, text: str) -> None:
    """Add a note to the published columns and mark them complete; of several ranks, only the first does so."""
    if _settled(folder):
        return
    columns = json.loads((folder / RESULT).read_bytes())["values"]
    values(folder, columns | {"notes": [*(columns.get("notes") or ()), text]}, complete=True)


def _settled(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return bool(json.loads((folder / RESULT).read_bytes()).get("complete"))
    return False
