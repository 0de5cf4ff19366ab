"""Groups of rows that differ only in chosen axes, and names for them: every answer compares within such groups.

Rows of a GPU and predicted ones come apart (`kinds`), so no comparison mixes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import ASKED
from vramsweep.analysis.data.load import EXTRA, Table, extras, is_
from vramsweep.harness.rows.schema import SYSTEM
from vramsweep.harness.spec.techniques.catalog import AXES

# Precision's depends on the runner. Only a long protocol changes what is held, so the others are not named.
DEFAULTS = {axis.name: axis.default for axis in AXES} | {"precision": "bf16"}
_OTHERS = {"runner": ("torch",), "zero_init": (True,), "versions": (), "protocol": ("brief", "quick")}
_SETTINGS = (*ASKED, "seq_len", "simulated_gpu")
# Observed, not set: null if a worker died early, then as in the rows of equal settings if these agree.
FOUND = (*SYSTEM, "memory_limit_bytes", "host_ranks", "estimated_link")
_FOLLOWS = {"allocator": ("allocator_conf", f"{EXTRA}allocator.name", f"{EXTRA}allocator.conf")}


@dataclass(frozen=True)
class Rows:
    """Rows of one kind: measured on a GPU, or predicted."""

    frame: pd.DataFrame
    measured: bool

    @property
    def card(self) -> pd.Series[str]:
        """GPU of each row: `predicted: h100-80gb`, `measured: NVIDIA L4`."""
        named = self.frame["gpu_name" if self.measured else "simulated_gpu"].fillna("unknown").astype("string")
        return ("measured: " if self.measured else "predicted: ") + named

    @property
    def basis(self) -> str:
        """GPUs of all rows."""
        return ", ".join(sorted(self.card.unique()))

    @property
    def seconds(self) -> tuple[str, ...]:
        """Columns of a step's time, the best first; two rows are compared in one column (`shared`)."""
        return ("step_median_s",) if self.measured else ("calibrated_step_s", "estimated_step_s")

    def where(self, mask: pd.Series[bool]) -> Rows:
        """Return only the rows that the mask selects."""
        return Rows(self.frame[mask.fillna(False).astype(bool)], self.measured)

    def ok(self, *columns: str) -> pd.DataFrame:
        """Return the rows that finished and have these columns."""
        return self.frame[is_(self.frame, "outcome", "ok")].dropna(subset=list(columns))


def kinds(table: Table) -> list[Rows]:
    """Return rows measured on a GPU, then predicted ones, without imported rows; a kind without rows is left out."""
    frame = table.frame[table.frame["foreign"].isna()]
    found = [Rows(frame[is_(frame, "device", device)], device == "cuda") for device in ("cuda", "simulated")]
    return [rows for rows in found if len(rows.frame)]


def shared(one: pd.Series[Any], other: pd.Series[Any], columns: Sequence[str]) -> str | None:
    """Return the first of these columns that both have, because estimates of two kinds are not compared; else None."""
    return next((name for name in columns if not pd.isna(one[name]) and not pd.isna(other[name])), None)


def group_alike(frame: pd.DataFrame, *axes: str) -> Iterator[pd.DataFrame]:
    """Yield parts of the rows within which only `axes`, and what follows from them, differ; repeats are in one part."""
    varied = {name for axis in axes for name in (axis, EXTRA + axis, *_FOLLOWS.get(axis, ()))}
    keys = [name for name in (*_SETTINGS, *extras(frame)) if name not in varied]
    if len(frame):
        asked = _joined(frame[keys])
        found = frame[list(FOUND)].astype("string")
        same = found.groupby(asked)
        agreed = same.transform("first").where(same.transform("nunique") == 1)
        found = found.where(is_(frame, "outcome", "ok"), found.fillna(agreed))
        yield from (part for _, part in frame.groupby(asked + "|" + _joined(found), sort=False))


def trial_keys(frame: pd.DataFrame) -> pd.Series[Any]:
    """Return what tells trials apart, whichever GPU they are on, measured or predicted."""
    return _joined(frame[[name for name in (*ASKED, "seq_len") if name != "device"]])


def _joined(frame: pd.DataFrame) -> pd.Series[Any]:
    return frame.astype("string").fillna("").agg("|".join, axis=1)


def label(row: pd.Series[Any], *without: str) -> str:
    """Return `gpt2, 1,024 tokens, batch 4, checkpointing=full`: known settings that are not the default, but for
    `without`."""
    known = {name: value for name, value in row.dropna().items() if name not in without}
    parts = [str(known.get("model", "unknown"))]
    parts += [f"{known['seq_len']:,} tokens"] if "seq_len" in known else []
    parts += [f"batch {known['micro_batch']}"] if "micro_batch" in known else []
    if known.get("world_size", 1) != 1 or known.get("sharding", "none") != "none":
        parts.append(f"{known.get('sharding')} x {known.get('world_size')}")
    parts += [name.replace("_", " ") for name in ("offload_optimizer", "offload_param") if known.get(name)]
    parts += [
        str(known[axis.name]) if axis.name == "precision" else f"{axis.name}={known[axis.name]}"
        for axis in AXES
        if axis.name in known and known[axis.name] != DEFAULTS[axis.name]
    ]
    parts += [
        f"{name}={text(known[name])}" for name, usual in _OTHERS.items() if name in known and known[name] not in usual
    ]
    return ", ".join(parts + ([str(known["allocator"])] if known.get("allocator", "default") != "default" else []))


def text(value: Any) -> str:
    """Return the value as it is typed, a dash if it is not known."""
    return "–" if pd.isna(value) else str(value).lower() if isinstance(value, bool | np.bool_) else str(value)


def reasons(frame: pd.DataFrame, most: int = 3) -> str:
    """Return why these rows ended as they did, each reason once, and how many more there are."""
    found = list(map(str, frame["reason"].dropna().unique()))
    return "; ".join([*found[:most], *([f"and {len(found) - most} more reasons"] if len(found) > most else [])])
