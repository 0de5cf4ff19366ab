"""Sweeps without lengths: a number of the user's own, or the batch of samples, takes the place of the length.

Curves, answers and tables read the column `seq_len`. `swap` puts the values of another axis there, and `reword` names
that axis in what they say, by the patterns of own_axis.json.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from vramsweep.analysis.data.groups import FREE, OPTIONS
from vramsweep.analysis.data.load import EXTRA, Table, is_
from vramsweep.analysis.data.warnings_of_rows import records
from vramsweep.harness.messages import suggestions
from vramsweep.harness.sweep.result_table import choose_axis, has_tokens, is_number, name_one

SAMPLES = "samples"  # the axis of a table whose samples have no tokens
LENGTHS = "lengths"  # the rows' own lengths
_RULES = json.loads(Path(__file__).with_name("own_axis.json").read_text("utf-8"))


def swap(table: Table, name: str | None = None) -> Table:
    """Return the table with the values of its axis as `seq_len`: of the option `name`, else of the answer's axis.

    A table whose answer is over lengths, or over batches of tokens, is returned as it is. Raises UserError if no option
    of that name has whole numbers.
    """
    frame = table.frame.rename(columns=lambda column: column.removeprefix(EXTRA) if OPTIONS in column else column)
    ran = frame[~is_(frame, "outcome", "invalid")]  # an invalid row has the default length, also of a command
    rows = records(ran[["seq_len", "micro_batch", *(column for column in frame if str(column).startswith(OPTIONS))]])
    axis = OPTIONS + name if name else choose_axis(rows)
    tokens = has_tokens(rows) or bool(ran["tokens_per_s"][ran["seq_len"].isna()].notna().any())
    if not rows or axis == "seq_len" or (axis == "micro_batch" and tokens):
        return table
    options = [column for column in rows[0] if column.startswith(OPTIONS)]
    numbers = [column.removeprefix(OPTIONS) for column in options if all(is_number(row[column]) for row in rows)]
    suggestions.check_listed(f"--axis {name}", "axis", axis.removeprefix(OPTIONS), [*FREE, *numbers])
    values = pd.to_numeric(frame[axis], errors="coerce").astype("Int64")
    moved: dict[str, Any] = {"seq_len": values, LENGTHS: frame["seq_len"]}
    apart = frame.groupby(values)[["seq_len", "micro_batch"]].nunique().max() > 1  # these tell configurations apart
    moved |= {EXTRA + "seq_len": frame["seq_len"]} if apart["seq_len"] else {}
    moved |= {} if apart["micro_batch"] else {"micro_batch": pd.array([None] * len(frame), dtype="Int64")}
    moved |= {} if tokens else {"tokens_per_s": frame["samples_per_s"].fillna(frame["tokens_per_s"])}
    left = table.frame.assign(**moved).drop(columns=EXTRA + axis, errors="ignore")
    called = axis.removeprefix(OPTIONS)
    called = SAMPLES if axis == "micro_batch" else f"{{{called}}}" if called in (*FREE, SAMPLES) else called
    return replace(table, frame=left, axis=called, tokens=tokens)


def reword(value: Any, table: Table, kept: Sequence[str] = ()) -> Any:
    """Return texts, and what holds texts, with the words of the table's axis instead of those of lengths in tokens.

    Of an object's fields, its name and those of `kept` are returned as they are.
    """
    if table.axis == "seq_len":
        return value
    if isinstance(value, str):
        axis, own = "\0", table.axis != SAMPLES  # its name comes last, because it may be one of the words, as in length
        words = {"axis": axis, "one": "\1", "title": axis if own else "micro-batch (samples)"}
        words["count"] = rf"{axis}=\1" if own else r"\1 samples"
        words["value"], words["values"] = (f"value of {axis}", f"values of {axis}") if own else ("batch", "batches")
        verb = "run" if own or table.frame["runner"].eq("script").any() else "predict"  # which predicts no command
        words["search"] = f"{verb} --largest {axis if own else 'micro_batch'}"
        for pattern, new in [*_RULES, *([] if table.tokens else [[r"\btokens(/s|_per_s| over)\b", r"samples\1"]])]:
            value = re.sub(pattern, new.format(**words), value)
        return value.replace("\1", name_one(table.axis)).replace("\0", table.axis)
    if isinstance(value, pd.DataFrame):
        named = value.rename(columns=lambda column: reword(column, table))
        return named.map(lambda cell: reword(cell, table) if isinstance(cell, str) else cell)
    if hasattr(value, "to_plotly_json"):
        return type(value)(reword(value.to_plotly_json(), table))
    if isinstance(value, dict):
        return {key: one if key == "meta" else reword(one, table) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(reword(one, table) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        texts = {one.name: getattr(value, one.name) for one in fields(value) if one.name not in ("name", *kept)}
        return replace(value, **reword(texts, table))
    return value
