"""Figures that compare allocators: peak reserved and speed against length, their ratios, and one against the other.

In: a view's groups. Out: figures; ratios are to the first allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import Group, label, others_equal
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.plots import LENGTH, End, Figure, finish, new_plot, sentence
from vramsweep.analysis.figures.style import MOST, Look, View, names, shared

FEW = 60  # lengths; if there are more, lines are thin
SETS = 6  # most sets of allocators with all else equal; the page's reader chooses one
RESERVED, SPEED = "peak_reserved_bytes", "tokens_per_s"
PANELS = ((0.58, 1.0), (0.29, 0.52), (0.0, 0.23))  # of the height: memory, speed, ratios
RATIOS = ((RESERVED, "reserved", "solid"), (SPEED, "speed", "dot"))
FEWER = ((0.33, 1.0), (0.0, 0.27))  # memory and ratios alone


@dataclass(frozen=True)
class Side:
    """One allocator's rows. `middle`, `low` and `high` are medians and ends of repeats, a line a length, in bytes and
    tokens/s, NaN if unknown."""

    name: str
    look: Look
    rows: pd.DataFrame
    middle: pd.DataFrame
    low: pd.DataFrame
    high: pd.DataFrame


def compared(view: View) -> list[Figure]:
    """Draw the largest group and those that differ from it only in the allocator; other settings appear when chosen."""
    sets: list[list[Side]] = []
    left = list(view.groups)
    shown: list[Group] = []
    while left and len(sets) < SETS:
        own = others_equal(left, ("allocator",))
        left = [group for group in left if all(group is not one for one in own)]
        own.sort(key=lambda group: group.settings.get("allocator") != "default")  # others are compared with it
        known = [g for g in own[:MOST] if not g.resident and g.ok(RESERVED, "seq_len")["seq_len"].nunique() > 1]
        sides = [_side(view, g, name, bool(sets)) for g, name in zip(known, names(known) if known else (), strict=True)]
        if len(sides) > 1 and any(len(_common(sides[0], side)) for side in sides[1:]):
            sets, shown = [*sets, sides], shown or known
    if not sets:
        return []
    rest = f"All with {label(same)}." if (same := shared(shown)) else ""
    told = [_differs(sets[0][0], side) for side in sets[0][1:]]
    caption = sentence(f"Compared with {sets[0][0].name}: {'; '.join(filter(None, told))}." if any(told) else "", rest)
    data = pd.concat([side.rows.assign(group=group.label) for side, group in zip(sets[0], shown, strict=True)])
    data = data.reset_index(drop=True)
    fast = any(side.middle[SPEED].notna().any() for side in sets[0])
    found = [Figure("allocators", "Allocators compared", caption, _against_length(sets, fast), data)]
    if fast:
        title = "Peak reserved memory against throughput, by allocator"
        lines = "Each line joins one allocator's lengths, shortest first. Further right and lower is better."
        found.append(Figure("allocators_by_speed", title, sentence(lines, rest), _against_speed(sets), data))
    return found


def _side(view: View, group: Group, name: str, hidden: bool) -> Side:
    rows = group.ok(RESERVED, "seq_len", also=[SPEED, "peak_allocated_bytes", "bound_by"]).sort_values("seq_len")
    values = rows[["seq_len", RESERVED, SPEED]].astype(float).groupby("seq_len")
    return Side(name, view.look(group, hidden), rows, values.median(), values.min(), values.max())


def _common(one: Side, other: Side) -> pd.Index[Any]:
    return one.middle.index.intersection(other.middle.index)


def _ratio(base: Side, side: Side, column: str) -> pd.Series[float]:
    """Return the ratio of the side to the base, at each length that both have."""
    found: pd.Series[float] = (side.middle[column] / base.middle[column]).dropna()
    return found


def _differs(base: Side, side: Side) -> str:
    """Say how much a side reserves and, if no host limits it, how fast it is: ratios to the base, median and ends."""
    said = []
    for column, words in ((RESERVED, "reserves {} times as much{}"), (SPEED, "runs at {} times the speed{}")):
        limited = column == SPEED and any(one.rows["bound_by"].eq("host").fillna(False).any() for one in (base, side))
        if len(found := _ratio(base, side, column)) and not limited:
            ends = f" ({found.min():.3f} to {found.max():.3f})" if found.min() < found.max() else ""
            said.append(words.format(f"{found.median():.3f}", ends))
    return f"{side.name} {' and '.join(said)}, median of {len(_common(base, side)):,} lengths" if said else ""


def _against_length(sets: Sequence[Sequence[Side]], fast: bool) -> Any:
    """Draw memory, speed and ratios to the first allocator in panels over each other, along one axis of lengths."""
    largest = max(float(side.high[RESERVED].max()) for side in sets[0])
    unit, called = plots.axis_unit(largest)
    titles = (f"reserved ({called})", *["tokens/s"] * fast, f"× {plots.escape(sets[0][0].name)}")
    domains, ratios = PANELS if fast else FEWER, f"y{len(titles)}"
    plot = plots.new_panels(LENGTH, dict(zip(titles, domains, strict=True)), height=560)
    plot.update_yaxes(nticks=6).update_layout({"yaxis2": {"rangemode": "tozero"}} if fast else {})
    ends = []
    for number, sides in enumerate(sets):
        for side in sides:
            end = _draw(plot, side, side.middle.index, RESERVED, unit)
            ends += [end] if number == 0 else []
            if side.middle[SPEED].notna().any():
                _draw(plot, side, side.middle.index, SPEED, 1, yaxis="y2")
            for column, what, dash in RATIOS if side is not sides[0] else ():
                if len(found := _ratio(sides[0], side, column)):
                    x, y = np.asarray(found.index, dtype=float), np.asarray(found, dtype=float)
                    more = {"yaxis": ratios, "showlegend": False}
                    plots.add_line(plot, x, y, side.look, f"{what}, {side.name}", {"dash": dash, "width": 1.5}, **more)
                    if side is sets[0][1]:
                        plot.add_annotation(x=x[-1], y=y[-1], yref=ratios, text=f" {what}", xanchor="left",
                                            showarrow=False, font={"size": 11}, name="beside")  # fmt: skip
    finish(plot, ends, [0.0, largest / unit], share=PANELS[0][1] - PANELS[0][0])
    return plot


def _against_speed(sets: Sequence[Sequence[Side]]) -> Any:
    """Draw peak reserved over tokens/s, a line of lengths for each allocator."""
    largest = max(float(side.high[RESERVED].max()) for side in sets[0])
    unit, called = plots.axis_unit(largest)
    plot = new_plot("throughput (tokens/s)", f"peak reserved memory ({called})")
    ends = []
    for number, sides in enumerate(sets):
        for side in sides:
            if side.middle[SPEED].notna().any():
                end = _draw(plot, side, side.middle[SPEED], RESERVED, unit)
                ends += [end] if number == 0 else []
    plot.update_traces(hovertemplate="%{customdata} tokens: %{y:,.4~g} reserved, %{x:,.0f} tokens/s<extra></extra>")
    finish(plot, ends, [0.0, largest / unit])
    return plot


def _draw(plot: Any, side: Side, x: Any, column: str, unit: int, **more: Any) -> End:
    """Draw one allocator's medians at x, with the spread of its repeats if there are any; return the line's end."""
    known = side.middle[column].notna() & pd.Series(x, side.middle.index).notna()
    middle, low, high = (one.loc[known, column].to_numpy(float) / unit for one in (side.middle, side.low, side.high))
    at = np.asarray(pd.Series(x, side.middle.index)[known], dtype=float)
    lengths = [f"{int(length):,}" for length in side.middle.index[known]]
    spread = {"type": "data", "array": high - middle, "arrayminus": middle - low, "thickness": 1, "width": 2}
    own = {"customdata": lengths} | ({"error_y": spread} if np.any(high > low) else {})
    more |= {"showlegend": "yaxis" not in more, "legendgroup": side.name}
    if np.any(np.diff(at) <= 0) and len(at) > FEW:  # x goes to and fro: a line of many points would be a knot
        plots.add_points(plot, at, middle, lengths, side.look, side.name)
    else:
        plots.add_line(plot, at, middle, side.look, side.name, {"width": 2 if len(at) <= FEW else 1.3}, **own, **more)
    return End(float(at[-1]), float(middle[-1]), side.name, side.look)
