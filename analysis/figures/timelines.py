"""The timelines of a sweep's largest predicted rows, as the harness makes them from the traces that the sweep kept."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from vramsweep.analysis.data.load import Table
from vramsweep.analysis.figures.plots import Figure
from vramsweep.analysis.figures.timeline import held, label, of_timeline
from vramsweep.harness import names
from vramsweep.harness.interpreter import build_command

SECONDS = 120  # replays take a second, the first ones the time to start torch


def of_table(table: Table) -> tuple[list[Figure], list[tuple[str, str, pd.DataFrame]], list[str]]:
    """Figures, the tables of what holds their peaks (title, file name, text cells) and notes; nothing where the rows
    are not predicted or their traces are gone."""
    folder = Path(table.source)
    if not (folder / "traces").is_dir() or not (table.frame["device"] == "simulated").any():
        return [], [], []
    records, notes = _asked(folder)
    try:
        return [of_timeline(record) for record in records], _tables(records), notes
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return [], [], [f"no timeline of a step: what is kept under {folder / 'timelines'} is none; delete it"]


def _tables(records: Sequence[dict[str, Any]]) -> list[tuple[str, str, pd.DataFrame]]:
    return [
        (
            f"What holds the peak of a step: {label(record['about'])}",
            names.safe(f"peak_{record['trial_id']}"),
            held(record),
        )
        for record in records
    ]


def _asked(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    command = build_command("vramsweep", "timeline", str(folder), "--kept", "--json")
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], [f"no timeline of a step: {error}"]
    if done.returncode != 0:
        return [], [f"no timeline of a step: {next(reversed(done.stderr.strip().splitlines()), 'no reason given')}"]
    return json.loads(done.stdout), []
