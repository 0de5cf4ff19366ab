"""What the allocator may use of a GPU, as lines in a figure: the rows' own GPU, and others that are near."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import Group
from vramsweep.analysis.data.pairing import CARD, card
from vramsweep.analysis.figures.plots import GREY, INK, escape
from vramsweep.analysis.model.memory_frontier import SIZES
from vramsweep.analysis.model.observations import allocator_limits
from vramsweep.harness.hardware.gpu_lookup import lowest_limit_gpu, memory_limit
from vramsweep.harness.messages.units import format_size

NEAR = 1.35  # times the largest peak: a limit up to here is still in the figure
OTHERS = 3
APART = 0.09  # of the axis, between two lines


@dataclass(frozen=True)
class CardLimit:
    """A limit as a line: its name, bytes, whether it is of the rows' own GPU, and whether the figure reaches it."""

    name: str
    size: float
    own: bool
    near: bool

    def told(self) -> str:
        """Return what a caption says of a line that is not drawn; "" if it is drawn."""
        return "" if self.near else f"The limit of {self.name}, {format_size(self.size)}, is above the figure."


def card_limit(group: Group, most: float) -> CardLimit | None:
    """Return the limit of these rows' GPU, whose largest peak is `most`; None if unknown, or for resident sets."""
    frame = group.take("device_total_bytes", "memory_limit_bytes", *CARD)
    limits = allocator_limits(frame)
    if group.resident or not np.isfinite(limits).any():
        return None
    names = [*card(frame).dropna(), *frame["gpu_name"].dropna(), "the GPU"]
    size = float(np.nanmax(limits))
    return CardLimit(str(names[0]), size, True, size <= NEAR * most)


def all_limits(own: CardLimit | None, top: float, frame: pd.DataFrame) -> list[CardLimit]:
    """Return this limit, then those of other GPUs within a figure that reaches to `top` bytes, not too close together.
    GPUs of the rows come first, then the largest few of other sizes."""
    mine = frame.assign(card=card(frame), limit=allocator_limits(frame)).dropna(subset=["card"])
    limits = mine.groupby("card")["limit"].max().dropna()
    swept = [CardLimit(str(name), float(size), False, True) for name, size in limits.items()]
    sizes = [CardLimit(f"{size:g} GiB GPU", float(memory_limit(gpu)), False, True)
             for size in SIZES if (gpu := lowest_limit_gpu(size)) is not None]  # fmt: skip
    kept = [own] if own is not None else []
    most = len(kept) + max(OTHERS, len(swept))
    for one in (*sorted(swept, key=lambda one: -one.size), *sorted(sizes, key=lambda one: -one.size)):
        apart = all(abs(one.size - other.size) > APART * top for other in kept)
        if 0.15 * top < one.size < 0.97 * top and apart and len(kept) < most:
            kept.append(one)
    return kept


def add_card_limit(plot: Any, limit: CardLimit, unit: int, upright: bool = False) -> None:
    """Draw a line across the plot, with its name above it at the left; `upright`: across lying bars."""
    colour, width, dash = (INK, 1.6, "dash") if limit.own else (GREY, 1, "dot")
    line = {"color": colour, "width": width, "dash": dash}
    words = {"text": escape(limit.name), "showarrow": False, "font": {"size": 11, "color": INK}, "name": "limit"}
    at = limit.size / unit
    if upright:
        plot.add_vline(x=at, line=line)
        plot.add_annotation(x=at, y=1, yref="paper", xanchor="right", yanchor="bottom", **words)
    else:
        plot.add_hline(y=at, line=line)
        plot.add_annotation(x=0, xref="paper", xanchor="left", y=at, yanchor="bottom", **words)
