"""Allocators compared: peak reserved of each, a bar for each length, from zero; what was allocated is marked.

Not covered: lines of reserved over the events of a recording (allocator.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import Group, label, others_equal
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.plots import LENGTH, Figure, escape, faint, new_plot, sentence
from vramsweep.analysis.figures.style import MOST, Look, View, names, shared
from vramsweep.harness.messages.units import format_size

LENGTHS = 12  # at most
SETS = 6  # of allocators with all else equal, of which the page's reader chooses one
_PATTERNS = ("", "/", "\\", ".", "x", "-")  # readable without colour


def compared(view: View) -> list[Figure]:
    """The bars of the largest group and those that differ from it in the allocator; of other settings when chosen."""
    sets: list[list[Group]] = []
    left = list(view.groups)
    while left and len(sets) < SETS:
        own = others_equal(left, ("allocator",))
        left = [group for group in left if all(group is not one for one in own)]
        own.sort(key=lambda group: group.settings.get("allocator") != "default")  # what others are held against
        known = [group for group in own[:MOST] if not group.resident and len(_peaks(group))]
        sets += [known] if len(known) > 1 and _lengths(known) else []
    if not sets:
        return []
    tables = [_table(own) for own in sets]
    shown, first = sets[0], tables[0]
    unit, called = plots.axis_unit(max(float(np.nanmax(t.to_numpy(float))) for t in tables))
    plot = new_plot(LENGTH, f"peak reserved memory ({called})")
    for number, (own, table) in enumerate(zip(sets, tables, strict=True)):
        _bars(plot, own, table, [view.look(group, hidden=number > 0) for group in own], unit)
    plot.update_layout(barmode="group", showlegend=True, legend=plots.ABOVE, bargap=0.25, bargroupgap=0.05)
    plot.update_xaxes(type="category", categoryorder="array", categoryarray=[f"{int(x):,}" for x in first.index])
    plot.update_yaxes(rangemode="tozero")
    caption = sentence(
        _differs(first, names(shown)), "Lines on the bars: peak allocated.",
        f"All with {label(rest)}." if (rest := shared(shown)) else "",
        f"{len(first):,} of {len(_lengths(shown)):,} lengths." if len(first) < len(_lengths(shown)) else "",
    )  # fmt: skip
    data = pd.concat([_peaks(group).assign(group=group.label) for group in shown], ignore_index=True)
    return [Figure("allocators", "Allocators compared", caption, plot, data)]


def _peaks(group: Group) -> pd.DataFrame:
    return group.ok("peak_reserved_bytes", "seq_len", also=["peak_allocated_bytes"]).sort_values("seq_len")


def _lengths(groups: Sequence[Group]) -> list[int]:
    """Those that at least two of them have."""
    counts = pd.concat([_peaks(group)["seq_len"].drop_duplicates() for group in groups]).value_counts()
    return sorted(int(x) for x in counts[counts > 1].index)


def _table(groups: Sequence[Group]) -> pd.DataFrame:
    """Reserved, bytes: a line a length, a column a group; NaN where it has none there."""
    lengths = np.array(_lengths(groups))
    lengths = lengths[plots.spread(lengths, LENGTHS)] if len(lengths) else lengths
    found = {
        number: _peaks(group).groupby("seq_len")["peak_reserved_bytes"].median().reindex(lengths)
        for number, group in enumerate(groups)
    }
    return pd.DataFrame(found, index=lengths).astype(float)


def _bars(plot: Any, groups: Sequence[Group], table: pd.DataFrame, looks: Sequence[Look], unit: int) -> None:
    x = [f"{int(length):,}" for length in table.index]
    thin = float(np.nanmax(table.to_numpy(float))) / unit / 100 if len(table) else 0.0
    for number, (group, name, look) in enumerate(zip(groups, names(groups), looks, strict=True)):
        allocated = _peaks(group).groupby("seq_len")["peak_allocated_bytes"].median().reindex(table.index)
        sizes = allocated.to_numpy(float, na_value=np.nan) / unit
        plot.add_bar(
            x=x, y=table[number].to_numpy(float) / unit, name=escape(name), offsetgroup=str(number),
            customdata=[f"{size:,.4g}" for size in sizes],
            marker={"color": faint(look.colour, 0.75), "line": {"color": look.colour, "width": 1},
                    "pattern": {"shape": _PATTERNS[number], "fgcolor": "#fff", "solidity": 0.25}},
            hovertemplate="%{x} tokens: %{y:,.4~g} reserved, %{customdata} allocated<extra>" + escape(name)
            + "</extra>",
            **look.trace,
        )  # fmt: skip
        if np.isfinite(sizes).any():  # a line as wide as its bar, on any screen
            plot.add_bar(
                x=x, y=np.where(np.isfinite(sizes), thin, np.nan), base=sizes - thin / 2, offsetgroup=str(number),
                name="allocated", legendgroup="allocated", showlegend=number == 0, legendrank=2000,
                hoverinfo="skip",
                marker={"color": "#222"}, **look.trace,
            )  # fmt: skip


def _differs(table: pd.DataFrame, called: Sequence[str]) -> str:
    """Of each allocator but the first: how much more or less it reserves, where that is most."""
    said = []
    for number, name in enumerate(called[1:], 1):
        base, own = (table[column].to_numpy(float) for column in (0, number))
        if not np.isfinite(own - base).any():
            continue
        at = int(np.nanargmax(np.abs(own - base)))
        gap, length = float(own[at] - base[at]), f"{int(table.index[at]):,} tokens"
        if gap:
            way = f"{format_size(abs(gap))} {'less' if gap < 0 else 'more'} ({gap / base[at]:+.1%}) at {length}"
        else:
            way = "as much at every length"
        said.append(f"{name} reserves {way}")
    return f"Against {called[0]}: {'; '.join(said)}." if said else ""
