"""The figure of runs whose lengths vary: what the allocator holds, step by step, under each setting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from vramsweep.analysis.compare.lengths import Held, Runs
from vramsweep.analysis.data.metrics import GIB
from vramsweep.analysis.figures.plots import COLOURS, GREY, MOST, End, Figure, escape, finish, new_plot, sentence

FIGURES = 4  # at most


def of_lengths(every: Sequence[Runs]) -> list[Figure]:
    """One figure for each comparison: a line a setting of reserved, and the peak allocated of each step."""
    return [_figure(one, number) for number, one in enumerate(every[:FIGURES])]


def _figure(runs: Runs, number: int) -> Figure:
    shown, plot = runs.held[:MOST], new_plot("measured step", "memory (GiB)")
    ends, reach, data = [], [0.0], []
    first = shown[0].allocated / GIB
    steps = np.arange(1, len(first) + 1, dtype=float)
    plot.add_scatter(
        x=steps, y=first, mode="lines", name="peak allocated of the step", line={"color": GREY, "width": 1},
        hovertemplate="step %{x:,}: %{y:,.4~g}<extra>peak allocated</extra>",
    )  # fmt: skip
    ends.append(End(float(steps[-1]), float(first.mean()), "peak allocated", GREY))
    for at, one in enumerate(shown):
        x, y = np.arange(1, len(one.reserved) + 1, dtype=float), one.reserved / GIB
        plot.add_scatter(
            x=x, y=y, mode="lines", name=escape(one.allocator), line={"color": COLOURS[at], "width": 2, "shape": "hv"},
            hovertemplate="step %{x:,}: %{y:,.4~g}<extra>" + escape(one.allocator) + "</extra>",
        )  # fmt: skip
        ends.append(End(float(x[-1]), float(y[-1]), one.allocator, COLOURS[at]))
        reach += [float(y.max()), float(first.max())]
        data.append(_data(one, x))
    finish(plot, ends, reach)
    caption = sentence(
        f"Reserved at the end of each measured step, a line for each allocator setting, above the most that"
        f" {shown[0].allocator} had allocated in it; samples (at most {runs.seq_len:,} tokens) are the same for all.",
        runs.label and f"Of {runs.label}.",
        f"{len(runs.held) - MOST} more settings are left out." if len(runs.held) > MOST else "",
    )
    name = "lengths" if number == 0 else f"lengths_{number + 1}"
    return Figure(name, "What is held where lengths vary", caption, plot, pd.concat(data, ignore_index=True))


def _data(one: Held, steps: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "allocator": one.allocator,
            "step": steps,
            "step_reserved_bytes": one.reserved,
            "step_peak_allocated_bytes": one.allocated,
            "trial_id": one.trial_id,
        }
    )
