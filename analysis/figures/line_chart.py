"""One column of the rows against length, a line a configuration: what several figures are."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from vramsweep.analysis.data.groups import Group
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.plots import LENGTH, End, Figure, finish, new_plot, sentence
from vramsweep.analysis.figures.style import View, baseline, names


def having(groups: Sequence[Group], *columns: str) -> Sequence[Group]:
    """The groups, or none if their table knows nothing of one of these columns."""
    return groups if groups and all(groups[0].source[column].notna().any() for column in columns) else []


def groups_with(groups: Sequence[Group], column: str) -> list[tuple[Group, pd.DataFrame]]:
    """Groups that know a column at more than one length, with its rows."""
    found = [(g, g.ok(column, "seq_len")) for g in having(groups, column)]
    return [(g, rows) for g, rows in found if rows["seq_len"].nunique() > 1]


def lines(
    view: View, found: Sequence[tuple[Group, pd.DataFrame]], column: str, scale: float, name: str, title: str,
    axis: str, caption: str, prefer: Sequence[str],
) -> list[Figure]:  # fmt: skip
    """The figure of these groups' rows, medians of repeats; none where there are none. The axis begins at zero."""
    of = {group.id: rows for group, rows in found}
    shown, note = baseline([group for group, _ in found], prefer)
    if not shown:
        return []
    plot = new_plot(LENGTH, axis)
    data, ends, reach = [], [], [0.0]
    for group, label in zip(shown, names(shown), strict=True):
        rows, look = of[group.id], view.look(group)
        middle = rows.groupby("seq_len")[column].median()
        x, y = middle.index.to_numpy(float), middle.to_numpy(float) / scale
        at = plots.thin(x, y)
        plots.add_line(plot, x[at], y[at], look, label)
        ends.append(End(float(x[-1]), float(y[-1]), label, look))
        reach += [float(y.min()), float(y.max())]
        data.append(rows.assign(group=group.label)[["group", "seq_len", column, "trial_id"]])
    finish(plot, ends if len(shown) > 1 else [], reach)
    return [Figure(name, title, sentence(caption, note), plot, pd.concat(data, ignore_index=True))]
