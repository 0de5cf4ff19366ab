"""What fits on a card: each model by each common way of training it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from vramsweep.analysis.answers.alike import DEFAULTS, FOUND, alike, folded, gib, is_, kinds, reasons, text
from vramsweep.analysis.data.groups import ASKED
from vramsweep.analysis.data.load import Table


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


# What else may tell runs apart, by column.
_APART = tuple(name for name in (*ASKED, *FOUND) if name not in {*_PLAIN, "device", "model", "micro_batch", "gpu_name"})
_WAYS = (
    "GiB that a step reserves. fp32, bf16: AdamW, all weights, bf16 by autocast. checkpt: and full checkpointing. "
    "8-bit: and 8-bit AdamW. yes, no: whether it fits on the card, of 24 GB or not; rows of other settings are left "
    "out. LoRA: rank 16 on all linear layers, frozen weights in bf16, checkpointing. QLoRA: these in NF4, double "
    "quantisation."
)
_NONE = "A row has to be of one of these ways, all else at its default: " + "; ".join(
    " ".join([f"{way.name}:", *(f"{k}={v}" for k, v in way.has.items() if k == "precision" or v != _PLAIN[k])])
    for way in WAYS
)
_VARIED = tuple(name for name, value in _PLAIN.items() if any(way.has[name] != value for way in WAYS))


def make(table: Table) -> tuple[pd.DataFrame, list[str]]:
    """One line per model (and length, batch, card and what else tells runs apart, where there are several), one column
    per way."""
    lines, notes = [], []
    for rows in kinds(table):
        frame = rows.frame.assign(card=rows.card).sort_values(["parameters", "model", "seq_len", "micro_batch"])
        of = {way.name: _of(frame, way) for way in WAYS}
        frame = frame[pd.DataFrame(of).any(axis=1)]
        for part in alike(frame, *_VARIED):
            row = part.iloc[0]
            length = row["seq_len"]
            lines.append(
                {
                    "model": text(row["model"]),
                    "tokens": "–" if pd.isna(length) else f"{length:,}",
                    "batch": text(row["micro_batch"]),
                    "card": str(row["card"]),
                    **{name: text(row[name]) for name in _APART},
                    **{name: _cell(part[mask.loc[part.index]]) for name, mask in of.items()},
                }
            )
        said = reasons(frame[~is_(frame, "outcome", "ok", "oom")])
        notes += [f"{rows.basis}: {said}"] if said else []
    if not lines:
        return pd.DataFrame(), [_NONE, *notes]
    frame = pd.DataFrame(lines)
    same = frame.groupby(["model", "tokens", "batch", "card"])
    frame = frame.drop(columns=[name for name in _APART if not (same[name].nunique() > 1).any()])
    frame, said_once = folded(frame, "tokens", "batch", "card")
    return frame, [*([", ".join(said_once)] if said_once else []), _WAYS, *notes]


def _of(frame: pd.DataFrame, way: Way) -> pd.Series[bool]:
    """Which rows are of this way."""
    return pd.DataFrame({name: is_(frame, name, value) for name, value in way.has.items()}).all(axis=1)


def _cell(own: pd.DataFrame) -> str:
    """`yes 12.3`, `no 31.0`: whether it fits, and what a step reserves, or would without a limit."""
    if own.empty:
        return "–"
    if not is_(own, "outcome", "ok", "oom").all():
        return text(own["outcome"].iloc[0])
    fits = bool(is_(own, "outcome", "ok").all())
    needed = own["peak_reserved_bytes" if fits else "unlimited_peak_reserved_bytes"].max()
    return ("yes" if fits else "no") + ("" if pd.isna(needed) else f" {gib(needed)}")
