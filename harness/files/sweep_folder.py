"""A sweep's folder: report.html, rows.csv, figures/ and README.txt for a person, and `trials` with what is the tool's
own: journals, plans, logs, recordings, traces. Not covered: what these files say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

OWN = "trials"
CLUSTER = "cluster"  # in it: jobs.json, and what submitit keeps


def own_files(folder: Path) -> Path:
    """Find where a sweep's own files lie: in `trials`, or in the folder itself where an earlier version began it."""
    return folder if any(_marks(folder)) else folder / OWN


def sweep_of(place: Path) -> Path:
    """Find the sweep's folder of a file in it, or of the folder itself or that of its own files."""
    folder = place if place.is_dir() else place.parent
    of_trials = folder.name == OWN and any(_marks(folder)) and not (folder / "report.html").exists()
    return folder.parent if of_trials else folder


def find_sweeps(place: Path, levels: int = 2) -> list[Path]:
    """The folders of sweeps below a folder, so many levels down, the one that was written last first."""
    newest: dict[Path, float] = {}
    for level in range(1, levels + 2):
        for mark in _marks(place, "*/" * level):
            folder = sweep_of(mark)
            if len(folder.relative_to(place).parts) in range(1, levels + 1):
                newest[folder] = max(newest.get(folder, 0.0), mark.stat().st_mtime)
    return sorted(newest, key=lambda folder: (-newest[folder], folder))


def _marks(place: Path, below: str = "") -> Iterator[Path]:
    """What only a sweep's own folder has, in a folder or those `below` it."""
    for pattern in ("journal*.jsonl", CLUSTER):
        yield from place.glob(below + pattern)
