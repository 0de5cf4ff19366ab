"""The tidy table as CSV and Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet


def flat(frame: pd.DataFrame) -> pa.Table:
    """The table with lists as JSON text, so that any reader takes it."""
    columns: dict[str, Any] = {}
    for name in frame.columns:
        column = frame[name]
        array = pa.array(column, from_pandas=True)
        if pa.types.is_list(array.type):
            texts = [None if v is None else json.dumps(v) for v in array.to_pylist()]
            array = pa.array(texts, pa.string())
        columns[str(name)] = array
    return pa.table(columns)


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """All rows and columns as CSV."""
    pa.csv.write_csv(flat(frame), path)


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    """All rows and columns as Parquet; lists stay lists."""
    columns = {str(n): pa.array(frame[n], from_pandas=True) for n in frame.columns}
    pa.parquet.write_table(pa.table(columns), path, compression="zstd")
