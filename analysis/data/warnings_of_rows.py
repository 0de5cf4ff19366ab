"""Warnings about rows before anybody reads them: several systems, flags, trials whose memory did not repeat."""

from collections import Counter
from typing import Any

import pandas as pd

from vramsweep.harness.rows import repeats
from vramsweep.harness.rows.quality_flags import BY_NAME
from vramsweep.harness.rows.schema import SYSTEM
from vramsweep.harness.spec.runner_table import STARTING

NAMED = ("model", "runner", "precision", "allocator", "sharding", "checkpointing", "seq_len", "micro_batch", "repeat")


def system_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """Return each row's trial and the system that measured it, as defined by `schema.system_of`."""
    found = frame[["trial_id", *SYSTEM]].copy()
    for name, device in (("gpu_name", "cuda"), ("cpu_name", "cpu")):
        found[name] = found[name].where(frame["device"].eq(device).fillna(False))
    found["deepspeed_version"] = found["deepspeed_version"].mask(frame["runner"].isin(STARTING))
    return found


def systems(frame: pd.DataFrame) -> list[str]:
    """Warn if rows were measured on several systems, which no fit mixes."""
    own = frame[frame["foreign"].isna() & frame["outcome"].eq("ok").fillna(False)]
    found = system_columns(own)[list(SYSTEM)]
    varying = [name for name in SYSTEM if found[name].nunique() > 1]  # null: not part of that row's system
    if not varying:
        return []
    found = found[varying].drop_duplicates()
    rows = found.itertuples(index=False)
    names = sorted(" · ".join(str(v) for v in row if not pd.isna(v)) or "the rest" for row in rows)
    return [f"rows of {len(found)} systems, which are never fitted together: {'; '.join(names[:4])}"]


def flagged(frame: pd.DataFrame) -> list[str]:
    """Return a note for each flag of rows (harness/rows/quality_flags.py); they stay in every fit and figure."""
    flags = frame["flags"].dropna()
    found: dict[str, list[Any]] = {}
    for at, of_row in flags.items():
        for name in of_row:
            found.setdefault(str(name), []).append(at)
    order = [*BY_NAME, *(name for name in found if name not in BY_NAME)]
    notes = []
    for name in (name for name in order if name in found):
        rows = frame.loc[found[name]]
        are = f"{len(rows):,} rows are" if len(rows) != 1 else "1 row is"
        words = f" ({BY_NAME[name].meaning})" if name in BY_NAME else ""
        notes.append(f"{are} flagged {name}{words}: {name_rows(rows, frame)}; see vramsweep check")
    return notes


def left_out(frame: pd.DataFrame) -> dict[str, int]:
    """Return the codes of what the predictions of these rows do not cover, each with its number of rows."""
    return dict(Counter(str(code) for of_row in frame["not_covered"].dropna() for code in of_row))


def name_rows(rows: pd.DataFrame, frame: pd.DataFrame, most: int = 3) -> str:
    """Return a few rows by those settings that vary in `frame`, as words of a command, and how many more there are."""
    varying = [name for name in NAMED if frame[name].nunique() > 1] or ["trial_id"]
    told = list(dict.fromkeys(" ".join(f"{n}={row[n]}" for n in varying if not pd.isna(row[n])) for _, row in
                              rows.iterrows()))  # fmt: skip
    return ", ".join(told[:most]) + (f" and {len(told) - most:,} more" if len(told) > most else "")


def measured_again(frame: pd.DataFrame) -> list[str]:
    """Report trials that one system measured more than once, with memory that was not byte-identical."""
    frame = frame[frame["outcome"].eq("ok").fillna(False) & frame["device"].isin(["cuda", "cpu"]).fillna(False)]
    frame = frame[frame["trial_id"].duplicated(keep=False) & frame["trial_id"].notna()]
    if frame.empty:
        return []
    where = system_columns(frame)
    columns = ["trial_id", "memory_source", *repeats.COLUMNS]
    runs = [part for _, part in frame[columns].groupby([where[name] for name in where], dropna=False)]
    return repeats.sentences([one for part in runs for one in repeats.find_apart(records(part))])


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as plain values, None where there is none."""
    found = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in found]
