"""The tidy table as CSV and Parquet."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet


def flat(frame: pd.DataFrame) -> pa.Table:
    """The table with lists as JSON text, so that any reader takes it."""
    columns = {}
    for name in frame.columns:
        column = frame[name]
        if column.dtype == object:
            texts = [json.dumps(v) if isinstance(v, list) else None for v in column]
            columns[str(name)] = pa.array(texts, pa.string())
        else:
            columns[str(name)] = pa.array(column, from_pandas=True)
    return pa.table(columns)


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """All rows and columns as CSV."""
    pa.csv.write_csv(flat(frame), path)


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    """All rows and columns as Parquet; lists stay lists."""
    columns = {str(n): pa.array(frame[n], from_pandas=True) for n in frame.columns}
    pa.parquet.write_table(pa.table(columns), path, compression="zstd")
