"""Export of the tidy table as CSV and Parquet, and of text cells as Markdown; whatever a name holds stays text.

A spreadsheet reads a CSV cell that begins with =, +, - or @ as a formula, whoever wrote it. We mark such a cell as text
by an apostrophe before it, which `as_it_was` removes. Parquet marks text itself.
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

from vramsweep.harness.messages.terminal import escape_text

_LIKE_FORMULAS = r"^'*[=@\t\r+-]"  # and guarded ones, to tell them apart
_FORMULA = re.compile(r"'*(?:[=@\t\r]|[+-](?!\d[\d.,]*(?:e[+-]?\d+)?(?: ?[\w%/]+)?\Z))")
_MARKDOWN = re.compile(r"[\\|`<\[]")  # ends a cell; begins code, HTML, a link or an image
_LINE_ENDS = re.compile(r"[\n\r\t]")


def guarded(text: str) -> str:
    """Return a cell's text so that no spreadsheet reads it as a formula; a number with its unit is no formula."""
    return f"'{text}" if _FORMULA.match(text) else text


def as_it_was(text: str) -> str:
    """Return the text from which `guarded` made this one."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def guarded_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with every text `guarded`."""

    def one(value: Any) -> Any:
        return guarded(value) if isinstance(value, str) else value

    texts = [name for name in frame.columns if pd.api.types.is_string_dtype(frame[name].dtype)]
    return frame.assign(**{name: frame[name].map(one, na_action="ignore") for name in texts})


def each(column: Any, change: Any) -> Any:
    """Return an Arrow column of texts, with `change` applied to those that look like formulas."""
    found = pc.match_substring_regex(column, pattern=_LIKE_FORMULAS)
    if not pc.any(found).as_py():
        return column
    changed = [change(text) if hit else text for text, hit in zip(column.to_pylist(), found.to_pylist(), strict=True)]
    return pa.array(changed, column.type)


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """Write all rows and columns as CSV, with lists as JSON text, so that any reader accepts it."""
    columns: dict[str, Any] = {}
    for name, column in frame.items():
        array = pa.array(column, from_pandas=True)
        if pa.types.is_list(array.type):
            texts = [None if v is None else json.dumps(v) for v in array.to_pylist()]
            array = pa.array(texts, pa.string())
        text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
        columns[str(name)] = each(array, guarded) if text else array
    pa.csv.write_csv(pa.table(columns), path)


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    """Write all rows and columns as Parquet; lists stay lists."""
    columns = {str(n): pa.array(frame[n], from_pandas=True) for n in frame.columns}
    pa.parquet.write_table(pa.table(columns), path, compression="zstd")


def markdown(frame: pd.DataFrame) -> str:
    """Return a Markdown table, numbers to the right."""
    names = [cell(str(name)) for name in frame.columns]
    right = [numeric(frame[name]) for name in frame.columns]
    rows = [[cell(str(one)) for one in row] for row in frame.to_numpy()]
    lines = [names, ["---:" if r else "---" for r in right], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def prose(text: str) -> str:
    """Return a sentence in Markdown: its code stays code, HTML, links and images in names become text."""
    return re.sub(r"[<\[]", r"\\\g<0>", escape_text(_LINE_ENDS.sub(" ", text)))


def numeric(column: pd.Series[str]) -> bool:
    """Return whether a column holds numbers, which stand to the right."""
    cells = [str(cell) for cell in column if str(cell) != "–"]
    return bool(cells) and all(cell[:1].isdigit() or cell[:1] in "+-−" for cell in cells)


def cell(text: str) -> str:
    """Return a text as a cell of a Markdown table, or as a word in one."""
    return _MARKDOWN.sub(r"\\\g<0>", escape_text(_LINE_ENDS.sub(" ", text)))
