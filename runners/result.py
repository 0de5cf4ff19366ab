"""The file that a worker leaves for its parent: what was measured, or the error that ended the attempt.

It is written aside and renamed, so whoever reads it finds a whole one, and may be written again with more in it:
`complete` is false from the end of the measured steps until the worker has had its last word.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vramsweep.harness.attempt import RESULT

# Exit status of a rank that failed after the measured steps: the other ranks are to be ended, the result stands.
ENDED_EARLY = 80


class EndedEarly(Exception):
    """Training failed after the measured steps, whose result is published; the text is a note for the row."""


def write(folder: Path, result: Mapping[str, Any]) -> None:
    """Make `result` the attempt's: {"values": columns, "complete": bool} or {"error": {"type", "message"}}."""
    aside = folder / f"{RESULT}.{os.getpid()}"
    with aside.open("w") as file:
        json.dump(result, file)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(folder / RESULT)


def values(folder: Path, columns: Mapping[str, Any], complete: bool) -> None:
    """Publish the row's columns as far as they are known."""
    write(folder, {"values": columns, "complete": complete})


def note(folder: Path, text: str) -> None:
    """Add a note to the published columns, and let that be the last word."""
    columns = json.loads((folder / RESULT).read_bytes())["values"]
    values(folder, columns | {"notes": [*(columns.get("notes") or ()), text]}, complete=True)
