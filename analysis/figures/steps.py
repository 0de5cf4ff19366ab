"""Figures of a run step by step: how long a step takes, whether reserved memory has stopped rising, and, if lengths
vary, reserved memory under each allocator setting."""

from dataclasses import replace

import numpy as np
import pandas as pd

from vramsweep.analysis.compare.lengths import Held, Runs
from vramsweep.analysis.data.groups import Group
from vramsweep.analysis.data.metrics import GIB
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.plots import GREY, MOST, End, Figure, escape, finish, new_plot
from vramsweep.analysis.figures.style import Look, View, having

PLATEAU = 5  # measured steps; fewer cannot show that memory has stopped rising


def steps(view: View) -> list[Figure]:
    """Draw step times and peak reserved, step by step: is the run steady, has memory stopped rising."""
    found = []
    rising = ("Has memory stopped rising?", "peak reserved of the step (GiB)")
    for name, column, scale, (title, axis), least in (
        ("step_times", "step_times_s", 1e-3, ("Step times", "step time (ms)"), 2),
        ("plateau", "step_peak_reserved_bytes", GIB, rising, PLATEAU),
    ):
        among = [*view.groups, *(view.varied if name == "step_times" else ())]
        known = ((g, _long(g, column, least)) for g in having(among, column))
        group, rows = next(((g, rows) for g, rows in known if len(rows)), (None, pd.DataFrame()))
        if group is None:
            continue
        rows = rows.iloc[plots.spread(rows["seq_len"].to_numpy(float), MOST)]
        plot = new_plot("measured step", axis)
        ends, reach, data = [], [0.0], []
        for number, (_, row) in enumerate(rows.iterrows()):
            y = np.array(row[column], dtype=float) / scale
            label = f"{'at most ' * group.varies}{int(row['seq_len']):,} tokens"
            x = np.arange(1, len(y) + 1, dtype=float)
            look = replace(view.look(group).numbered(number), colour=_shade(number, len(rows)))
            plots.add_line(plot, x, y, look, label)
            ends.append(End(float(x[-1]), float(y[-1]), label, look))
            reach += [float(y.min()), float(y.max())]
            own = {"seq_len": row["seq_len"], "step": x, column: row[column], "trial_id": row["trial_id"]}
            data.append(pd.DataFrame(own))
        finish(plot, ends, reach)
        plot.update_xaxes(tick0=1, dtick=max(1, round(max(end.x for end in ends) / 10)))
        caption = f"Configuration: {group.label}. Up to six lengths, one row each, without warm-up steps."
        found.append(Figure(name, title, caption, plot, pd.concat(data, ignore_index=True)))
    return found


def _long(group: Group, column: str, least: int) -> pd.DataFrame:
    """Return one row a length, of those that counted at least so many steps."""
    rows = group.ok(column, "seq_len").sort_values("seq_len").drop_duplicates("seq_len")
    return rows[rows[column].map(len) >= least]


def _shade(number: int, count: int) -> str:
    """Return one hue from light to dark as lengths grow, because colours stand for configurations."""
    share = number / max(count - 1, 1)
    ends = zip((150, 180, 205), (20, 50, 90), strict=True)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in ends)


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
    known = {"allocator": one.allocator, "seed": one.seed, "step": steps, "step_reserved_bytes": one.reserved}
    return pd.DataFrame(known | {"step_peak_allocated_bytes": one.allocated, "trial_id": one.trial_id})
