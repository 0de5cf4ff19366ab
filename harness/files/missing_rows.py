"""The check that a verb's source of rows exists, made before the import of what reads rows, which takes seconds."""

from collections.abc import Sequence
from pathlib import Path

from vramsweep.harness.files.sweep_folder import OWN, find_sweeps
from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError

MOST_LISTED = 8  # sweeps that a message names
FOREIGN = "; CSV and Parquet files can be read, too"
_NAME_ONE = "name a folder under results/, as `vramsweep status` lists them"


def refuse_missing(words: Sequence[str], foreign: bool, several: bool = False) -> None:
    """Raise UserError if the first of a verb's words names nothing to read rows from.

    `foreign`: it may be another tool's file; `several`: it may be a folder with sweeps below it. A word that begins
    with a dash, or is a setting, is left to the verb.
    """
    if not words or words[0].startswith("-") or "=" in words[0]:
        return
    place = Path(words[0])
    try:
        there = place.exists()
    except (OSError, ValueError):
        return
    if not there:
        raise UserError(describe_missing(place) + (FOREIGN if foreign else ""))
    sweep = not place.is_dir() or any(one for own in (place, place / OWN) for one in own.glob("journal*.jsonl"))
    if foreign and not sweep and not (several and find_sweeps(place)):
        raise UserError(describe_missing(place) + FOREIGN)
    if foreign and place.suffix == ".json" and place.is_file():
        raise UserError(
            f"{place}: rows are read from a results folder, a journal (.jsonl), CSV or Parquet; make this file a CSV "
            "with one line per run"
        )


def describe_missing(place: Path) -> str:
    """Return a message that `place` is no sweep. It lists the sweeps below, the newest first, or says what to name."""
    if not place.exists():
        return f"there is no file or folder {place}; {_NAME_ONE}{suggestions.did_you_mean_path(place)}"
    if not (names := [str(folder.relative_to(place)) for folder in find_sweeps(place)]):
        return f"{place} holds no sweep; {_NAME_ONE}"
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    listed = f"{', '.join(names[:MOST_LISTED])}{more}"
    several = f"{len(names)} sweeps, the newest first" if len(names) > 1 else "1 sweep"
    return f"{place} is not a sweep; it contains {several}: {listed}; name one, such as {place / names[0]}"
