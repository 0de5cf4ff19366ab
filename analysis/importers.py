"""Rows from elsewhere: a bare CSV with named columns. Foreign rows keep their origin and are marked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.load import Table, from_frame, load
from analysis.metrics import GIB, METRICS, MIB
from harness.errors import UserError
from harness.row import BY_NAME

# Names with another unit than the registry's: column and factor.
_UNITS: dict[str, tuple[str, float]] = {
    name.removesuffix("_bytes") + suffix: (name, factor)
    for name in BY_NAME
    if name.endswith("_bytes")
    for suffix, factor in (("_mib", MIB), ("_gib", GIB), ("_kib", 1024.0), ("_mb", 1e6), ("_gb", 1e9))
}
_BARE = ("seq_len", "peak_active_mib", "peak_reserved_mib", "iterations_per_s")


def open_rows(path: Path, columns: Sequence[str] | None = None) -> tuple[Table, list[str]]:
    """A table from our own files or from a bare CSV, and what was assumed.

    A CSV without header needs `columns`; four numbers a line are read as length, active MiB, reserved MiB,
    iterations/s, and that is said. Raises UserError.
    """
    if path.suffix != ".csv" or not path.is_file():
        return load(path), []
    with path.open(encoding="utf-8", errors="replace") as stream:
        first = [cell.strip() for cell in stream.readline().split(",")]
    if {"trial_id", "outcome"} <= set(first):
        return load(path), []
    return read_csv(path, columns, first)


def read_csv(path: Path, columns: Sequence[str] | None, first: Sequence[str]) -> tuple[Table, list[str]]:
    """A foreign CSV, with or without header, as a table."""
    notes = []
    header = not any(_number(cell) for cell in first)
    if columns is None and not header:
        if len(first) != len(_BARE):
            raise UserError(
                f"{path} has no header; name its {len(first)} columns with --columns seq_len,peak_allocated_mib,..."
            )
        columns = _BARE
        notes.append(
            f"{path.name} has no header; its columns were read as {', '.join(_BARE)} (name others with --columns)"
        )
    names = list(columns or first)
    if len(names) != len(first):
        raise UserError(f"{path} has {len(first)} columns, --columns names {len(names)}: {', '.join(names)}")
    frame = pd.read_csv(path, header=0 if header else None, names=names, dtype="string", skipinitialspace=True)
    return from_columns(frame, str(path), notes), notes


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def from_columns(frame: pd.DataFrame, origin: str, notes: list[str]) -> Table:
    """A table of foreign rows from columns with our names, or our names with another unit (`_mib`, `_gib`, ...).

    Without an outcome column, a row with any measured value is ok. Raises UserError if no column is known.
    """
    known: dict[str, Any] = {}
    unknown = []
    for name in map(str, frame.columns):
        if name in BY_NAME:
            known[name] = frame[name]
        elif name in _UNITS:
            column, factor = _UNITS[name]
            known[column] = (pd.to_numeric(frame[name], errors="coerce") * factor).round()
        elif name == "iterations_per_s":
            known["step_median_s"] = 1.0 / pd.to_numeric(frame[name], errors="coerce").replace(0, np.nan)
        else:
            unknown.append(name)
    if "seq_len" not in known:
        raise UserError(
            f"{origin}: no column seq_len among {', '.join(map(str, frame.columns))}; name the columns with --columns "
            "(our column names, memory also as ..._mib or ..._gib)"
        )
    if unknown:
        notes.append(f"columns left out because their names are not known: {', '.join(unknown)}")
    rows = pd.DataFrame(known)
    if "tokens_per_s" not in rows and "step_median_s" in rows:
        batch = pd.to_numeric(rows["micro_batch"], errors="coerce") if "micro_batch" in rows else 1
        rows["tokens_per_s"] = pd.to_numeric(rows["seq_len"], errors="coerce") * batch / rows["step_median_s"]
    measured = [name for name in (*METRICS, "tokens_per_s") if name in rows]
    if "outcome" not in rows:
        any_value = pd.concat([pd.to_numeric(rows[n], errors="coerce") for n in measured], axis=1).notna().any(axis=1)
        rows["outcome"] = np.where(any_value, "ok", "bad_result")
    digest = hashlib.sha256(origin.encode()).hexdigest()[:8]
    rows["trial_id"] = [f"{digest}-{line}" for line in range(1, len(rows) + 1)]
    rows["foreign"] = rows["foreign"] if "foreign" in rows else Path(origin).name
    return from_frame(rows, origin, None)
