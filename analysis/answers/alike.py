"""Rows that differ in nothing but chosen axes, and what to call them: what every answer compares.

Rows of a GPU where there are any, else predicted ones; never both together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from vramsweep.analysis.data.groups import ASKED
from vramsweep.analysis.data.load import EXTRA, Table
from vramsweep.harness.row import SYSTEM
from vramsweep.harness.techniques import AXES

DEFAULTS = {axis.name: axis.default for axis in AXES} | {"precision": "bf16"}  # its default depends on the runner
_SETTINGS = (*ASKED, "seq_len", "simulated_gpu")
# Found, not asked for: null where a worker died early, then as in the rows of equal settings if these agree.
_FOUND = (*SYSTEM, "memory_limit_bytes", "host_ranks", "estimated_link")
_FOLLOWS = {"allocator": ("allocator_conf", f"{EXTRA}allocator.name", f"{EXTRA}allocator.conf")}


@dataclass(frozen=True)
class Rows:
    """Rows of one kind: measured on a GPU, or predicted. `frame` has `step_s`: measured, or estimated if predicted."""

    frame: pd.DataFrame
    measured: bool

    @property
    def basis(self) -> str:
        """`predicted for h100-80gb`, `measured on NVIDIA L4`."""
        cards = self.frame["gpu_name" if self.measured else "simulated_gpu"].dropna().unique()
        return f"{'measured on' if self.measured else 'predicted for'} {', '.join(sorted(map(str, cards))) or 'a GPU'}"

    def where(self, mask: pd.Series[bool]) -> Rows:
        """Fewer of them."""
        return Rows(self.frame[mask.fillna(False).astype(bool)], self.measured)

    def ok(self, *columns: str) -> pd.DataFrame:
        """Those that finished and have these columns."""
        finished = self.frame[self.frame["outcome"].eq("ok").fillna(False).astype(bool)]
        return finished.dropna(subset=list(columns))


def kinds(table: Table) -> list[Rows]:
    """Our own rows of a GPU, then predicted ones; without the kind that is not there."""
    frame = table.frame[table.frame["foreign"].isna()]
    found = []
    for device in ("cuda", "simulated"):
        own = frame[frame["device"].eq(device).fillna(False)]
        seconds = own["step_median_s"]
        if device == "simulated":
            seconds = own["calibrated_step_s"].fillna(own["estimated_step_s"])
        if len(own):
            found.append(Rows(own.assign(step_s=seconds), device == "cuda"))
    return found


def alike(frame: pd.DataFrame, *axes: str) -> Iterator[pd.DataFrame]:
    """The rows in parts within which only `axes`, and what follows from these, differ; repeats are in one part."""
    varied = {name for axis in axes for name in (axis, EXTRA + axis, *_FOLLOWS.get(axis, ()))}
    extras = [str(name) for name in frame.columns if str(name).startswith(EXTRA)]
    keys = [name for name in (*_SETTINGS, *extras) if name not in varied]
    if len(frame):
        asked = _joined(frame[keys])
        found = frame[list(_FOUND)].astype("string")
        same = found.groupby(asked)
        agreed = same.transform("first").where(same.transform("nunique") == 1)
        found = found.where(frame["outcome"].eq("ok").fillna(False).astype(bool), found.fillna(agreed))
        yield from (part for _, part in frame.groupby(asked + "|" + _joined(found), sort=False))


def _joined(frame: pd.DataFrame) -> pd.Series[Any]:
    return frame.astype("string").fillna("").agg("|".join, axis=1)


def label(row: pd.Series[Any], *without: str) -> str:
    """`gpt2, 1,024 tokens, batch 4, checkpointing=full`: what is known of the settings and not the default, without
    some."""
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
    return ", ".join(parts + ([str(known["allocator"])] if known.get("allocator", "default") != "default" else []))
