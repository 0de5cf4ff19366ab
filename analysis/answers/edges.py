"""What each configuration's curve says: the largest length, or batch, that fits, and what is reserved there."""

from __future__ import annotations

import pandas as pd

from vramsweep.analysis.answers.alike import Rows, alike, folded, gib, is_, kinds, label
from vramsweep.analysis.data.load import Table

_SWEPT = {"seq_len": "tokens", "micro_batch": "batch"}


def make(table: Table) -> tuple[pd.DataFrame, list[str]]:
    """One line per curve: rows that differ in nothing but length, or nothing but batch."""
    lines = []
    for rows in kinds(table):
        for axis, unit in _SWEPT.items():
            for part in (part for part in alike(rows.frame, axis) if part[axis].nunique() > 1):
                lines.append(_line(part, axis, unit) | {"card": Rows(part, rows.measured).basis})
    frame, notes = folded(pd.DataFrame(lines), "card")
    if lines:
        notes.append(
            "Fits to: the largest tried that fits, every smaller one tried too. "
            "GiB: reserved at the smallest and there. "
            "Not: the smallest that does not fit, or before it one without an answer, and how it ended."
        )
    return frame, notes


def _line(part: pd.DataFrame, axis: str, unit: str) -> dict[str, str]:
    out = part[is_(part, "outcome", "oom", "host_oom")][axis].dropna()
    fitted = part[is_(part, "outcome", "ok")]
    gaps = part[~part[axis].isin([*out, *fitted[axis]])].dropna(subset=[axis]).sort_values(axis)
    ends = [*out, *gaps[axis]]
    if ends:
        fitted = fitted[fitted[axis] < min(ends)]
    reserved = fitted.groupby(axis)["peak_reserved_bytes"].max()
    line = {"configuration": label(part.iloc[0], axis), "by": unit}
    line["fits to"] = f"{reserved.index[-1]:,}" if len(reserved) else "none"
    line["GiB"] = f"{gib(reserved.iloc[0])} to {gib(reserved.iloc[-1])}" if reserved.notna().any() else "–"
    line["not"] = f"{min(ends):,}" if ends else "–"
    if len(gaps) and gaps[axis].iloc[0] == min(ends):
        line["not"] += f" ({gaps['outcome'].iloc[0]})"
    return line
