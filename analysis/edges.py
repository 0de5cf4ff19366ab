"""What each configuration's curve says: the largest length, or batch, that fits, and what is reserved there."""

from __future__ import annotations

import pandas as pd

from vramsweep.analysis.alike import alike, kinds, label
from vramsweep.analysis.load import Table
from vramsweep.analysis.metrics import GIB

_SWEPT = {"seq_len": "tokens", "micro_batch": "batch"}


def make(table: Table) -> tuple[pd.DataFrame, list[str]]:
    """One line per curve: rows that differ in nothing but length, or nothing but batch."""
    lines, notes = [], []
    for rows in kinds(table):
        for axis, unit in _SWEPT.items():
            lines += [_line(part, axis, unit) for part in alike(rows.frame, axis) if part[axis].nunique() > 1]
        notes.append(f"{rows.basis}.")
    if lines:
        notes.append(
            "Fits to: the largest tried that fits, every smaller one too. GiB: reserved at the smallest and there. "
            "Not: the smallest that does not fit."
        )
    return pd.DataFrame(lines), notes


def _line(part: pd.DataFrame, axis: str, unit: str) -> dict[str, str]:
    out = part[part["outcome"].isin(["oom", "host_oom"]).fillna(False).astype(bool)][axis]
    fitted = part[part["outcome"].eq("ok").fillna(False).astype(bool)]
    if len(out):
        fitted = fitted[fitted[axis] < out.min()]
    reserved = fitted.groupby(axis)["peak_reserved_bytes"].max()
    line = {"configuration": label(part.iloc[0], axis), "by": unit}
    line["fits to"] = f"{reserved.index[-1]:,}" if len(reserved) else "none"
    line["GiB"] = f"{reserved.iloc[0] / GIB:.1f} to {reserved.iloc[-1] / GIB:.1f}" if len(reserved) else "–"
    line["not"] = f"{out.min():,}" if len(out) else "–"
    return line
