"""The tidy table as CSV and Parquet.

A spreadsheet takes a cell of a CSV that begins with =, +, - or @ for a formula, whoever wrote it: an apostrophe before
it says that it is text, and `as_it_was` takes it away again. Parquet says of itself what is text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

_LIKE_FORMULAS = r"^'*[=@\t\r+-]"  # and those that were guarded, so that each can be told
_FORMULA = re.compile(r"'*(?:[=@\t\r]|[+-](?!\d[\d.,]*(?:e[+-]?\d+)?(?: ?[\w%/]+)?\Z))")


def guarded(text: str) -> str:
    """A cell's text as no spreadsheet takes it for a formula; a number with its unit is none."""
    return f"'{text}" if _FORMULA.match(text) else text


def as_it_was(text: str) -> str:
    """The text that `guarded` made this of."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def guarded_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with every text `guarded`."""

    def one(value: Any) -> Any:
        return guarded(value) if isinstance(value, str) else value

    texts = [name for name in frame.columns if pd.api.types.is_string_dtype(frame[name].dtype)]
    return frame.assign(**{name: frame[name].map(one, na_action="ignore") for name in texts})


def each(column: Any, change: Any) -> Any:
    """An Arrow column of texts with those changed that look like formulas."""
    found = pc.match_substring_regex(column, pattern=_LIKE_FORMULAS)
    if not pc.any(found).as_py():
        return column
    changed = [change(text) if hit else text for text, hit in zip(column.to_pylist(), found.to_pylist(), strict=True)]
    return pa.array(changed, column.type)


def flat(frame: pd.DataFrame) -> pa.Table:
    """The table with lists as JSON text, so that any reader takes it."""
    columns: dict[str, Any] = {}
    for name, column in frame.items():
        array = pa.array(column, from_pandas=True)
        if pa.types.is_list(array.type):
            texts = [None if v is None else json.dumps(v) for v in array.to_pylist()]
            array = pa.array(texts, pa.string())
        columns[str(name)] = array
    return pa.table(columns)


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """All rows and columns as CSV."""
    table = flat(frame)
    for at, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            table = table.set_column(at, field, each(table.column(at), guarded))
    pa.csv.write_csv(table, path)


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    """All rows and columns as Parquet; lists stay lists."""
    columns = {str(n): pa.array(frame[n], from_pandas=True) for n in frame.columns}
    pa.parquet.write_table(pa.table(columns), path, compression="zstd")
