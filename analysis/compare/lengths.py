"""Runs whose lengths vary (data=lengths:...), under several allocator settings: what each holds after so many steps.

Not covered: the figure (analysis/figures/lengths.py). All sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vramsweep.analysis.data.groups import Group, label, others_equal
from vramsweep.analysis.data.metrics import show_bytes

NEEDED = ("step_reserved_bytes", "step_peak_allocated_bytes", "step_tokens", "seq_len", "seed", "allocator")
ALSO = ("peak_allocated_bytes", "peak_reserved_bytes", "alloc_retries", "allocator_conf")
SAME = 0.005  # a smaller share of reserved is no difference worth words


@dataclass(frozen=True)
class Held:
    """One run: reserved at the end of each measured step, the most allocated in each.

    `waste` is the share of peak reserved that was beyond the most that was ever allocated; `retries` is None where it
    is not known.
    """

    allocator: str
    trial_id: str
    reserved: NDArray[np.float64] = field(repr=False)
    allocated: NDArray[np.float64] = field(repr=False)
    waste: float | None
    retries: int | None


@dataclass(frozen=True)
class Runs:
    """Runs on the same lengths that differ in the allocator's setting, the default first; `full` are the settings that
    ran out of memory, with the row's phase. `seq_len` is where samples were cut; `label` what tells them from others.
    """

    label: str
    seq_len: int
    held: tuple[Held, ...]
    full: tuple[tuple[str, str], ...]


def runs(groups: Sequence[Group]) -> list[Runs]:
    """What there is to compare, one for each setting of everything but the allocator: of its longest seq_len and its
    first seed, with the last of several rows."""
    left = [g for g in groups if g.take("data")["data"].astype("string").str.startswith("lengths:").any()]
    found = []
    while left:
        alike = others_equal(left, ("allocator", "allocator_conf"))
        left = [group for group in left if group not in alike]
        rows = [group.ok(*NEEDED, also=ALSO) for group in alike]
        known = pd.concat(rows) if rows else pd.DataFrame()
        if known.empty:
            continue
        seq_len = known["seq_len"].max()
        seed = known[known["seq_len"] == seq_len]["seed"].min()
        same = known[(known["seq_len"] == seq_len) & (known["seed"] == seed)]
        held = [_held(row) for _, row in same.drop_duplicates("allocator", keep="last").iterrows()]
        held.sort(key=lambda one: one.allocator != "default")
        rest = {k: v for group in alike for k, v in group.settings.items() if k not in ("allocator", "allocator_conf")}
        found.append(Runs(label(rest) if rest else "", int(seq_len), tuple(held), _full(alike, seq_len, seed)))
    return found


def _held(row: pd.Series) -> Held:
    allocated, reserved = row["peak_allocated_bytes"], row["peak_reserved_bytes"]
    return Held(
        str(row["allocator"]),
        str(row["trial_id"]),
        np.array(row["step_reserved_bytes"], dtype=float),
        np.array(row["step_peak_allocated_bytes"], dtype=float),
        None if pd.isna(allocated) or pd.isna(reserved) or not reserved else 1 - float(allocated) / float(reserved),
        None if pd.isna(row["alloc_retries"]) else int(row["alloc_retries"]),
    )


def _full(groups: Sequence[Group], seq_len: int, seed: int) -> tuple[tuple[str, str], ...]:
    rows = pd.concat([g.take("outcome", "allocator", "phase", "seq_len", "seed") for g in groups])
    rows = rows[rows["outcome"].eq("oom") & (rows["seq_len"] == seq_len) & (rows["seed"] == seed)]
    return tuple(
        (str(row["allocator"]), "" if pd.isna(row["phase"]) else str(row["phase"])) for _, row in rows.iterrows()
    )


def sentences(every: Sequence[Runs]) -> list[str]:
    """What the settings hold in the end, each against the first."""
    return [text for one in every for text in _of(one)]


def _of(found: Runs) -> list[str]:
    first, *others = found.held
    steps, where = len(first.reserved), f" ({found.label})" if found.label else ""
    said = [_against(first, other, steps, where) for other in others if len(other.reserved) == steps]
    if not others:
        grown = first.reserved[-1] - first.reserved[0]
        said = [
            f"Lengths that vary{where}: {first.allocator} holds {show_bytes(first.reserved[-1])} after {steps:,} steps,"
            f" {show_bytes(grown)} more than after the first of them{_wasted(first)}."
        ]
    for allocator, phase in found.full:
        at = f" at {phase}" if phase else ""
        said.append(f"Lengths that vary{where}: with {allocator} memory runs out{at}; {first.allocator} goes on.")
    return said


def _against(first: Held, other: Held, steps: int, where: str) -> str:
    change = other.reserved[-1] / first.reserved[-1] - 1
    sizes = f"{show_bytes(other.reserved[-1])} against {show_bytes(first.reserved[-1])} of {first.allocator}"
    how = (
        f"{abs(change):.0%} {'less' if change < 0 else 'more'} reserved" if abs(change) >= SAME else "as much reserved"
    )
    text = f"Lengths that vary{where}: {other.allocator} holds {how} after {steps:,} steps ({sizes})"
    if other.waste is not None and first.waste is not None:
        text += f"; {other.waste:.0%} of its peak is more than was ever allocated, against {first.waste:.0%}"
    if other.retries is not None and first.retries is not None and other.retries + first.retries:
        text += f"; retries {other.retries:,} against {first.retries:,}"
    return f"{text}."


def _wasted(one: Held) -> str:
    retries = f", with {one.retries:,} retries" if one.retries else ""
    return ("" if one.waste is None else f"; {one.waste:.0%} of its peak is more than was ever allocated") + retries
