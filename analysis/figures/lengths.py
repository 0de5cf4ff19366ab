"""The figure of runs whose lengths vary: reserved memory, step by step, under each allocator setting."""

from __future__ import annotations

import numpy as np
import pandas as pd

from vramsweep.analysis.compare.lengths import Held, Runs
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.plots import GREY, MOST, End, Figure, escape
from vramsweep.analysis.figures.style import Look, View

FIGURES = 4  # most figures


def of_lengths(view: View) -> list[Figure]:
    """Draw a figure for each comparison: reserved as a line a setting, and the peak allocated of each step."""
    known = [one for one in view.runs if one.drawn()]
    return [_figure(view, one, number) for number, one in enumerate(known[:FIGURES])]


def _figure(view: View, runs: Runs, number: int) -> Figure:
    held = runs.drawn()
    unit, called = plots.axis_unit(max(float(max(one.reserved.max(), one.allocated.max())) for one in held))
    plot = plots.new_plot("measured step", f"memory ({called})")
    lines: dict[bytes, list[Held]] = {}  # equal ones would cover each other
    for one in held:
        lines.setdefault(one.reserved.tobytes(), []).append(one)
    shown = list(lines.values())[:MOST]
    first = held[0].allocated / unit
    ends, reach, data = [], [0.0, float(first.max())], []
    steps = np.arange(1, len(first) + 1, dtype=float)
    plot.add_scatter(
        x=steps, y=first, mode="lines", name="peak allocated of the step", line={"color": GREY, "width": 1},
        hovertemplate="step %{x:,}: %{y:,.4~g}<extra>peak allocated</extra>",
    )  # fmt: skip
    ends.append(End(float(steps[-1]), float(first[-1]), "peak allocated", Look(GREY)))
    for same in shown:
        look = view.of_trial(same[0].trial_id)
        name = ", ".join(one.allocator for one in same)
        x, y = np.arange(1, len(same[0].reserved) + 1, dtype=float), same[0].reserved / unit
        plot.add_scatter(
            x=x, y=y, mode="lines", name=escape(name),
            line={"color": look.colour, "width": 2, "shape": "hv", "dash": look.dash},
            hovertemplate="step %{x:,}: %{y:,.4~g}<extra>" + escape(name) + "</extra>",
            **look.trace,
        )  # fmt: skip
        ends.append(End(float(x[-1]), float(y[-1]), name, look))
        reach.append(float(y.max()))
        data += [_data(one, x) for one in same]
    plots.finish(plot, ends, reach)
    caption = plots.sentence(
        "Reserved memory at the end of each measured step, a line for each allocator setting. Grey: peak allocated of"
        f" each step with {held[0].allocator}. All have the same samples (at most {runs.seq_len:,} tokens, seed"
        f" {held[0].seed}).",
        "Settings that share a line are equal in every step." if any(len(same) > 1 for same in shown) else "",
        runs.label and f"Configuration: {runs.label}.",
        f"{len(lines) - MOST} more lines are left out." if len(lines) > MOST else "",
    )
    name = "lengths" if number == 0 else f"lengths_{number + 1}"
    return Figure(name, "Reserved memory where lengths vary", caption, plot, pd.concat(data, ignore_index=True))


def _data(one: Held, steps: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "allocator": one.allocator,
            "seed": one.seed,
            "step": steps,
            "step_reserved_bytes": one.reserved,
            "step_peak_allocated_bytes": one.allocated,
            "trial_id": one.trial_id,
        }
    )
