"""inferred.jsonl: inferred values of a sweep's points that were not measured, next to the journal and never in it.

A line a point: `trial_id`, `seq_len`, `micro_batch`, `fits` (null: unknown), and `configuration` (the trial id of a
measured point that differs only in length and batch). Each known column has its value, `_low` and `_high` (the ends of
a 95 % interval, bytes) and `_basis`: prediction+residual or curve.
"""

import contextlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from vramsweep.harness.files import plain_json
from vramsweep.harness.files.bounded_reads import read_content, replaced
from vramsweep.harness.files.sweep_folder import own_files

NAME = "inferred.jsonl"


def write(folder: Path, lines: Iterable[Mapping[str, Any]], asked: Collection[str]) -> None:
    """Replace the lines of the trials in `asked` (ids), because the old ones depend on fewer points; keep those of
    other trials, which another command has inferred."""
    others = [line for line in read(folder) if line.get("trial_id") not in asked]
    with replaced(own_files(folder) / NAME) as aside:
        aside.write_text("".join(json.dumps(line) + "\n" for line in (*others, *lines)), encoding="utf-8")


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the lines; an empty list if nothing was inferred. A line that is no JSON object is left out."""
    with contextlib.suppress(OSError):
        return list(plain_json.read_objects(read_content(own_files(folder) / NAME)))
    return []
