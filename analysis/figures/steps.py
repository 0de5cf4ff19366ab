"""Figures of a run step by step: how long a step takes, and whether reserved memory has stopped rising."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import Group
from vramsweep.analysis.data.metrics import GIB
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.line_chart import having
from vramsweep.analysis.figures.plots import End, Figure, finish, new_plot
from vramsweep.analysis.figures.style import MOST, View

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
            data.append(
                pd.DataFrame({"seq_len": row["seq_len"], "step": x, column: row[column], "trial_id": row["trial_id"]})
            )
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
    return "#" + "".join(
        f"{round(a + share * (b - a)):02x}" for a, b in zip((150, 180, 205), (20, 50, 90), strict=True)
    )
