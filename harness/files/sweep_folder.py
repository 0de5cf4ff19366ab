"""A sweep's folder: report.html, rows.csv, figures/ and README.txt for people, and `trials` with the tool's own files.

Its own files are journals, plans, logs, recordings and traces. That a verb's source of rows exists is checked here too,
before the import of what reads rows, which takes seconds. Known limit: a sweep of version 0.1 that is named
`trials` and has no report yet is taken for such a folder of own files.
"""

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vramsweep.harness.files import file_names, plain_json
from vramsweep.harness.files.bounded_reads import read_content, replaced
from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError

OWN = "trials"
CLUSTER = "cluster"  # among the own files: submitit's scripts and pickles, the jobs' logs, and `JOBS`
JOBS = "jobs.json"  # the shard of each job that was ever submitted
INFERRED = "inferred.jsonl"  # among the own files: values of points that were not measured, never in the journal
MOST_LISTED = 8  # sweeps that a message names
FOREIGN = "; CSV and Parquet files can be read, too"
_NAME_ONE = "name a folder under results/, as `vramsweep status` lists them"


def own_files(folder: Path) -> Path:
    """Return the folder of a sweep's own files: `trials`, or the folder itself if an earlier version began it."""
    return folder if any(_marks(folder)) and not any(_marks(folder / OWN)) else folder / OWN


def kept_traces(folder: Path) -> Path:
    """Return the folder of a sweep's traces. Raises UserError if a link leads out of the sweep's folder."""
    traces = own_files(folder) / "traces"
    if file_names.is_inside(folder, str(traces.relative_to(folder))) is None:
        raise UserError(f"{traces} leads out of {folder} by a link; remove the link, or name the trial by settings")
    return traces


def sweep_of(place: Path) -> Path:
    """Return the sweep's folder, given a file in it, the folder itself or that of its own files."""
    folder = place if place.is_dir() else place.parent
    of_trials = folder.name == OWN and any(_marks(folder)) and not (folder / "report.html").exists()
    return folder.parent if of_trials else folder


def find_sweeps(place: Path, levels: int = 2) -> list[Path]:
    """Return the folders of sweeps at most `levels` below a folder, the one that was written last first."""
    newest: dict[Path, float] = {}
    for level in range(1, levels + 2):
        for mark in _marks(place, "*/" * level):
            folder = sweep_of(mark.parent.parent if mark.name == JOBS else mark.parent)
            if len(folder.relative_to(place).parts) in range(1, levels + 1):
                with contextlib.suppress(OSError):  # a link to nowhere
                    newest[folder] = max(newest.get(folder, 0.0), mark.stat().st_mtime)
    return sorted(newest, key=lambda folder: (-newest[folder], folder))


def _marks(place: Path, below: str = "") -> Iterator[Path]:
    """Yield the files that only a sweep's own folder has, in a folder or in those `below` it."""
    for pattern in ("journal*.jsonl", f"{CLUSTER}/{JOBS}"):
        yield from place.glob(below + pattern)


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


def write_inferred(folder: Path, lines: Iterable[Mapping[str, Any]], asked: Collection[str]) -> None:
    """Replace the lines of the trials in `asked` (ids), because the old ones depend on fewer points; keep those of
    other trials, which another command has inferred.

    A line a point: `trial_id`, `seq_len`, `micro_batch`, `fits` (null: unknown), and `configuration` (the trial id of a
    measured point that differs only in length and batch). Each known column has its value, `_low` and `_high` (the ends
    of a 95 % interval, bytes) and `_basis`: prediction+residual or curve.
    """
    others = [line for line in read_inferred(folder) if line.get("trial_id") not in asked]
    with replaced(own_files(folder) / INFERRED) as aside:
        aside.write_text("".join(json.dumps(line) + "\n" for line in (*others, *lines)), encoding="utf-8")


def read_inferred(folder: Path) -> list[dict[str, Any]]:
    """Return the lines; an empty list if nothing was inferred. A line that is no JSON object is left out."""
    with contextlib.suppress(OSError):
        return list(plain_json.read_objects(read_content(own_files(folder) / INFERRED)))
    return []
