"""Charts of one or two columns of the rows against length, a line a configuration: several figures are such charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from vramsweep.analysis.data.groups import Group
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.plots import LENGTH, End, Figure, finish, new_panels, sentence
from vramsweep.analysis.figures.style import View, baseline, names

PANELS = (((0.0, 1.0),), ((0.54, 1.0), (0.0, 0.46)))  # of the height: for one column, for two


def having(groups: Sequence[Group], *columns: str) -> Sequence[Group]:
    """Return the groups, or none if their table knows nothing of one of these columns."""
    return groups if groups and all(groups[0].source[column].notna().any() for column in columns) else []


def groups_with(groups: Sequence[Group], column: str, *also: str) -> list[tuple[Group, pd.DataFrame]]:
    """Return the groups that know a column at more than one length, with their rows of it and of columns `also`."""
    found = [(g, g.ok(column, "seq_len", also=also)) for g in having(groups, column)]
    return [(g, rows) for g, rows in found if rows["seq_len"].nunique() > 1]


def lines(
    view: View, found: Sequence[tuple[Group, pd.DataFrame]], columns: Mapping[str, str], scale: float, name: str,
    title: str, caption: str, prefer: Sequence[str],
) -> list[Figure]:  # fmt: skip
    """Draw these groups' rows as medians of repeats; no figure if there are none. The first axis begins at zero.

    `columns` maps columns to the titles of their panels, two at most. One without a title is not drawn, but is in the
    data.
    """
    of = {group.id: rows for group, rows in found}
    shown, note = baseline([group for group, _ in found], prefer)
    if not shown:
        return []
    drawn = [column for column, axis in columns.items() if axis]
    domains = PANELS[len(drawn) - 1]
    panels = {columns[one]: domain for one, domain in zip(drawn, domains, strict=True)}
    plot = new_panels(LENGTH, panels, height=560 if len(drawn) > 1 else None)
    data, ends, reach = [], [], [0.0]
    for group, label in zip(shown, names(shown), strict=True):
        rows, look = of[group.id], view.look(group)
        middle = rows.groupby("seq_len")[drawn].median().astype(float) / scale
        x = middle.index.to_numpy(float)
        for axis, column in zip(("y", "y2"), drawn, strict=False):
            y = middle[column].to_numpy(float)
            at = plots.thin(x, y)
            plots.add_line(plot, x[at], y[at], look, label, yaxis=axis, legendgroup=label, showlegend=axis == "y")
        first = middle[drawn[0]]
        ends.append(End(float(x[-1]), float(first.iloc[-1]), label, look))
        reach += [float(first.min()), float(first.max())]
        data.append(rows.assign(group=group.label)[["group", "seq_len", *columns, "trial_id"]])
    finish(plot, ends if len(shown) > 1 else [], reach, share=domains[0][1] - domains[0][0])
    plot.update_layout({"yaxis2": {"rangemode": "tozero"}} if len(drawn) > 1 else {})
    return [Figure(name, title, sentence(caption, note), plot, pd.concat(data, ignore_index=True))]
