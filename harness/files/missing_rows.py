"""Whether there is what a verb is to read rows from: asked before anything is imported that reads them, which takes
seconds. Not covered: what a file says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError


def refuse_missing(words: Sequence[str], foreign: bool) -> None:
    """Raise UserError where the first of a verb's words names no file or folder; `foreign`: it may be another tool's.

    What begins with a dash, or is a setting, is left to whoever knows the verb.
    """
    if not words or words[0].startswith("-") or "=" in words[0]:
        return
    place = Path(words[0])
    try:
        there = place.exists()
    except (OSError, ValueError):
        return
    if not there:
        near = suggestions.did_you_mean_path(place)
        more = "; a CSV or a Parquet file can be read, too" if foreign else ""
        raise UserError(
            f"there is no file or folder {place}; name a folder under results/, as `vramsweep status` lists them"
            f"{near}{more}"
        )
    if foreign and place.suffix == ".json" and place.is_file():
        raise UserError(
            f"{place}: rows are read from a results folder, a journal (.jsonl), CSV or Parquet; write a line per run "
            "of this file as a CSV"
        )
