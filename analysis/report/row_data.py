"""The rows of a page's table as columns. Texts that repeat are stored once, so that thousands of rows stay small.

In: a table and its picker. Out: plain data for rows.js. Rows beyond `MOST` are only in rows.csv.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.load import Table, trials
from vramsweep.analysis.report.findings import reproduce
from vramsweep.analysis.report.picker import Picker
from vramsweep.analysis.report.tiles import kinds
from vramsweep.harness.messages.terminal import escape_text
from vramsweep.harness.rows.quality_flags import BY_NAME

MOST = 20_000


def row_data(table: Table, picker: Picker) -> dict[str, Any]:
    """Return columns of equal length by name; other columns point into `texts`, and `flags` say what each forbids.

    Numbers are in bytes and tokens/s, null if unknown. A command is a list of its words, as indices into `words`.
    """
    frame = table.frame.head(MOST)
    known = trials(Path(table.source), set(frame["trial_id"].dropna()))
    names = sorted({str(name) for of_row in frame["flags"].dropna() for name in of_row})
    at = {name: number for number, name in enumerate(names)}
    words: dict[str, int] = {}
    commands = []
    for _, row in frame[["trial_id", "foreign"]].iterrows():
        command = escape_text(reproduce(row, known.get(row["trial_id"])))
        commands.append([words.setdefault(word, len(words)) for word in command.split(" ")])
    ends = frame["outcome"].fillna("unknown").astype(str)
    reasons = [
        end if pd.isna(reason) else f"{end}: {reason}" for end, reason in zip(ends, frame["reason"], strict=True)
    ]
    return {
        "trial": [escape_text(str(one)) for one in frame["trial_id"].fillna("–")],
        "group": [int(one) for one in picker.of_row[: len(frame)]],
        "labels": [escape_text(label) for label in picker.labels],
        "length": _numbers(frame["seq_len"]),
        "batch": _numbers(frame["micro_batch"]),
        "allocated": _numbers(frame["peak_allocated_bytes"]),
        "reserved": _numbers(frame["peak_reserved_bytes"]),
        "speed": _numbers(frame["tokens_per_s"], 2),
        "outcome": _coded(escape_text(text) for text in reasons),
        "kind": _coded(kinds(frame)),
        "flagged": [[] if _missing(of_row) else [at[str(name)] for name in of_row] for of_row in frame["flags"]],
        "flags": [_flag(name) for name in names],
        "unproven": _coded(
            escape_text("" if _missing(of_row) else ", ".join(map(str, of_row))) for of_row in frame["unproven"]
        ),
        "words": list(words),
        "command": commands,
    }  # fmt: skip


def _missing(value: Any) -> bool:
    return not isinstance(value, list | np.ndarray)


def _numbers(column: pd.Series[Any], digits: int = 0) -> list[float | None]:
    return [None if pd.isna(v) else round(float(v), digits) if digits else int(v) for v in column]


def _coded(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Return the different texts, and each text as an index into them."""
    at: dict[str, int] = {}
    places = [at.setdefault(text, len(at)) for text in texts]
    return {"texts": list(at), "at": places}


def _flag(name: str) -> dict[str, Any]:
    flag = BY_NAME.get(name)
    return {
        "name": escape_text(name),
        "meaning": flag.meaning if flag else "",
        "forbids": list(flag.forbids) if flag else [],
    }
