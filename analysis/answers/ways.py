"""What fits on a card: each model by each common way of training it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from vramsweep.analysis.answers.alike import DEFAULTS, Rows, kinds
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import GIB


@dataclass(frozen=True)
class Way:
    """A way of training: its name, and what its rows have; every other technique is at its default."""

    name: str
    has: Mapping[str, Any]


_PLAIN = DEFAULTS | {
    "allocator": "default", "sharding": "none", "world_size": 1, "grad_accum": 1, "offload_optimizer": False,
    "offload_param": False,
}  # fmt: skip
WAYS = (
    Way("fp32", {**_PLAIN, "precision": "fp32"}),
    Way("bf16", _PLAIN),
    Way("checkpt", {**_PLAIN, "checkpointing": "full"}),
    Way("8-bit", {**_PLAIN, "checkpointing": "full", "optimizer": "adamw_bnb_8bit"}),
    Way("LoRA", {**_PLAIN, "precision": "bf16_pure", "checkpointing": "full", "adapter": "lora"}),
    Way("QLoRA", {**_PLAIN, "checkpointing": "full", "adapter": "lora", "quantization": "nf4_double"}),
)


def make(table: Table) -> tuple[pd.DataFrame, list[str]]:
    """One line per model (and length, batch and card, where there are several), one column per way."""
    lines, notes = [], []
    for rows in kinds(table):
        frame = rows.frame.sort_values(["parameters", "model", "seq_len", "micro_batch"])
        cards = frame["gpu_name" if rows.measured else "simulated_gpu"].fillna("unknown")
        lengths = frame["seq_len"].map("{:,}".format, na_action="ignore")
        keys = [frame["model"], lengths, frame["micro_batch"], cards]
        for (model, length, batch, card), part in frame.groupby(keys, sort=False, dropna=False):
            line = {"model": str(model), "tokens": str(length), "batch": str(batch)}
            line["card"] = f"{'measured' if rows.measured else 'predicted'}: {card}"
            cells = {way.name: _cell(part, way) for way in WAYS}
            if any(cells.values()):
                lines.append(line | {name: cell or "–" for name, cell in cells.items()})
        notes += [f"{rows.basis}: {_reasons(rows)}"] if _reasons(rows) else []
    frame = pd.DataFrame(lines)
    said = []
    for name in ("tokens", "batch", "card"):
        if len(frame) and frame[name].nunique() == 1:
            said.append(f"{name} {frame.pop(name).iloc[0]}")
    head = [", ".join(said)] if said else []
    ways = (
        "GiB that a step reserves. fp32, bf16: AdamW, all weights, bf16 by autocast. checkpt: and full checkpointing. "
        "8-bit: and 8-bit AdamW. yes, no: whether it fits on the card named here, of 24 GB or not; rows of other "
        "settings "
        "are left out. LoRA: rank 16 on all linear layers, frozen weights in bf16, checkpointing. QLoRA: "
        "these in NF4, double quantisation."
    )
    return frame, [*head, *([ways] if len(frame) else []), *notes]


def _cell(rows: pd.DataFrame, way: Way) -> str:
    """`yes 12.3`, `no 31.0`: whether it fits, and what a step reserves, or would without a limit; "" for no row."""
    own = rows
    for name, value in way.has.items():
        own = own[own[name].eq(value).fillna(False).astype(bool)]
    if own.empty:
        return ""
    outcomes = set(own["outcome"])
    if outcomes <= {"ok", "oom"}:
        fits = outcomes == {"ok"}
        needed = own["peak_reserved_bytes" if fits else "unlimited_peak_reserved_bytes"].max()
        return ("yes" if fits else "no") + ("" if pd.isna(needed) else f" {needed / GIB:,.1f}")
    return str(own["outcome"].iloc[0])


def _reasons(rows: Rows) -> str:
    other = rows.frame[~rows.frame["outcome"].isin(["ok", "oom"]).fillna(False).astype(bool)]
    return "; ".join(map(str, other["reason"].dropna().unique()[:3]))
