"""The main figure: peak memory by component, in bars at each length (or batch, or one bar for each configuration).

Components are those of predicted rows. They sum to the peak allocated, and memory reserved but unused lies on top.
Measured peaks of equal settings are points over the stack, because a measurement does not give components. Rows
without components are not drawn here (phases.py draws their phases).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import Group, groups, label
from vramsweep.analysis.data.pairing import Beside
from vramsweep.analysis.data.parts import called, read_peaks
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.gpus import add_card_limit, all_limits, card_limit
from vramsweep.analysis.figures.phases import highest
from vramsweep.analysis.figures.plots import INK, LENGTH, Figure, escape, new_plot, sentence
from vramsweep.analysis.figures.style import GREY, LOOKS, Look, View, names
from vramsweep.harness.messages.units import format_size

# From the bottom up, the familiar ones first. Okabe and Ito's colours; olive and grey for what no code of a user asks.
PARTS = LOOKS["parts"]
OF_PEAK = {part: f"peak_{part}_bytes" for part in PARTS}
LATER = "peak_recomputed_activations_bytes"  # null in rows of earlier versions, whose other parts sum to the peak
BEYOND = "reserved, unused"
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")
AXES = {"seq_len": LENGTH, "micro_batch": "micro-batch (samples)"}
BARS = 20  # most bars next to each other
OUT = 4  # most crosses next to them
CONFIGURATIONS = 16  # most in one figure: its reader selects one of them; horizontal bars show all
THIN = 300  # a part below 1/THIN of the axis is not in the legend


def composition(view: View, beside: Beside | None = None, measured: Sequence[Group] = ()) -> list[Figure]:
    """Draw the figure of these rows; [] if no row has components. `measured` are groups of measured rows."""
    if not view.predicted:
        return []
    for axis in AXES:
        found = view.groups if axis == "seq_len" else groups(view.table, axis)
        if known := [group for group in found if not group.varies and _rows(group, axis)[axis].nunique() > 1]:
            first = view.groups[0].settings.items()
            known.sort(key=lambda one: (-sum(one.settings.get(k) == v for k, v in first), -len(_rows(one, axis))))
            return [_stacked(view, known[:CONFIGURATIONS], axis, len(known), beside, measured)]
    if known := [group for group in view.groups if len(_rows(group, "seq_len"))][:CONFIGURATIONS]:
        return [_bars(view, known, [_rows(group, "seq_len").iloc[-1] for group in known])]
    return _out_of_memory(view)


def _rows(group: Group, axis: str) -> pd.DataFrame:
    """Return the rows that finished and have components, one for each value of the axis, in order."""
    need = [*(column for column in OF_PEAK.values() if column != LATER), *PEAKS, axis]
    also = [LATER, *(name for name in AXES if name != axis)]
    also += [f"{phase}_peak_allocated_bytes" for phase in ("load", "forward", "backward", "optimizer")]
    if any(column not in group.source for column in need):
        return pd.DataFrame({axis: []})
    return group.ok(*need, also=also).drop_duplicates(axis).sort_values(axis)


def sizes(rows: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return what is stacked, from the bottom: each part in bytes, shape (rows,), then what is reserved but unused. A
    part is nan where it is unknown, and left out if it is unknown of all rows."""
    known = {part: rows[column] for part, column in OF_PEAK.items() if rows[column].notna().any()}
    found = {part: column.to_numpy(float, na_value=np.nan) for part, column in known.items()}
    return found | {BEYOND: rows[PEAKS[1]].to_numpy(float) - rows[PEAKS[0]].to_numpy(float)}


def _stacked(
    view: View, known: Sequence[Group], axis: str, every: int, beside: Beside | None, measured: Sequence[Group]
) -> Figure:  # fmt: skip
    """Draw vertical bars at computed lengths or batches, one configuration at a time, up to the GPU's limit."""
    first = known[0]
    stacks = [_some(_rows(group, axis), axis) for group in known]
    rows, ran, out = stacks[0], _ran(first, axis, beside, measured), _some(_out(first, axis), axis, OUT)
    drawn = _some(ran, axis)
    top = float(max(rows[PEAKS[1]].max(), ran[list(PEAKS)].max(axis=None) if len(ran) else 0))
    own = card_limit(first, top)
    top = max(top, own.size if own is not None else 0.0)
    unit, unit_name = plots.axis_unit(top)
    plot = new_plot(AXES[axis], f"peak memory ({unit_name})")
    plot.update_layout(
        barmode="stack", bargap=0.25, hovermode="x unified", showlegend=True, meta={"most": 1},
        legend=plots.ABOVE | {"traceorder": "normal"},
    )  # fmt: skip
    data = []
    for number, (group, mine) in enumerate(zip(known, stacks, strict=True)):
        _stack(plot, mine, axis, view.look(group, hidden=number > 0), unit, top)
        data.append(_frame(mine, group).assign(shown=number == 0))
    _crosses(plot, out, axis, own, view.look(first), unit)
    _measured(plot, drawn, axis, view.look(first), unit)
    for limit in all_limits(own, top, view.table.frame):
        add_card_limit(plot, limit, unit)
    plot.update_yaxes(range=[0.0, 1.06 * top / unit])
    places = np.unique(np.concatenate([frame[axis].to_numpy(float) for frame in (*stacks, out, drawn)]))
    plot.update_xaxes(type="category", categoryorder="array", categoryarray=list(map(_place, places)), showgrid=False)
    fewer = f"Drawn: {len(rows):,} of {n:,} predicted rows." if len(rows) < (n := len(_rows(first, axis))) else ""
    shown = f"{len(drawn):,} of " * (len(drawn) < len(ran))
    caption = sentence(
        _most(rows.iloc[-1], axis), f"Shown: {first.label}, one of {every:,} configurations." if every > 1 else "",
        fewer, _phases(rows, axis),
        f"Points: {shown}{len(ran):,} measured row{'s' * (len(ran) != 1)} (round: allocated, diamond: reserved)."
        if len(ran) else "",
        f"Crosses: out of memory, first at {int(out[axis].min()):,}." if len(out) else "",
    )  # fmt: skip
    data += [ran.assign(group="measured", shown=True), out.assign(group=first.label, shown=True)]
    found = pd.concat(data, ignore_index=True)
    return Figure("composition", "Peak memory by component", caption, plot, found)


def _some(rows: pd.DataFrame, axis: str, most: int = BARS) -> pd.DataFrame:
    """Return the rows at no more values than fit next to each other: evenly spread, with both ends."""
    places = np.sort(rows[axis].unique())
    return rows[rows[axis].isin(places[plots.spread(places, most)])] if len(places) else rows


def _place(value: float) -> str:
    return f"{int(value):,}"


def _stack(plot: Any, rows: pd.DataFrame, axis: str, look: Look, unit: int, top: float) -> None:
    """Draw the stacked bars of one configuration."""
    x = list(map(_place, rows[axis]))
    for part, size in sizes(rows).items():
        if np.nan_to_num(size).any():
            _add_part(plot, part, float(np.nanmax(size)) > top / THIN, x=x, y=size / unit, hovertemplate="%{y:,.4~f}",
                      **look.trace)  # fmt: skip


def _add_part(plot: Any, part: str, named: bool, **more: Any) -> None:
    """Draw the bars of one part in its colour; memory reserved but unused is hatched."""
    pattern = {"pattern": {"shape": "/", "fgcolor": GREY, "bgcolor": "rgba(0,0,0,0)", "solidity": 0.3}}
    marker = {"color": GREY, **pattern} if part == BEYOND else {"color": PARTS[part]}
    plot.add_bar(name=called(part), legendgroup=part, showlegend=named, marker=marker, **more)


def _phases(rows: pd.DataFrame, axis: str) -> str:
    """Say which phase holds the peak, and from where on."""
    held, places = highest(rows), [int(place) for place in rows[axis]]
    if not (turns := [i for i in range(len(held)) if held[i] and (i == 0 or held[i] != held[i - 1])]):
        return ""
    told = [f"{f'from {places[i]:,} on, ' if i else ''}in the {held[i]} phase" for i in turns]
    return f"The peak is {'; '.join(told)}."


def _ran(group: Group, axis: str, beside: Beside | None, measured: Sequence[Group]) -> pd.DataFrame:
    """Return measured rows with this predicted group's settings and GPU, only those of its batches (or lengths)."""
    other = next(name for name in AXES if name != axis)
    mine = group.take(other, "trial_id")
    found = []
    for one in measured if beside is not None else ():
        rows = one.ok(axis, other, also=PEAKS).dropna(subset=list(PEAKS), how="all")
        predicted = beside.of(one) if beside is not None and len(rows) else None
        if predicted is not None and predicted["trial_id"].isin(mine["trial_id"]).any():
            found.append(rows[rows[other].isin(mine[other])])
    empty = pd.DataFrame({axis: [], **{peak: [] for peak in PEAKS}, "trial_id": []})
    return pd.concat(found, ignore_index=True) if found else empty


def _measured(plot: Any, ran: pd.DataFrame, axis: str, look: Look, unit: int) -> None:
    for peak, symbol in zip(PEAKS, ("circle", "diamond"), strict=True):
        if len(rows := ran.dropna(subset=[peak])):
            plot.add_scatter(
                x=list(map(_place, rows[axis])), y=rows[peak].to_numpy(float) / unit, mode="markers",
                name=f"measured {peak.split('_')[1]}", cliponaxis=False, hovertemplate="%{y:,.4~f}",
                marker={"symbol": symbol, "size": 8, "color": "#fff",
                        "line": {"color": "#000", "width": 1.8}}, **look.trace,
            )  # fmt: skip


def _out(group: Group, axis: str) -> pd.DataFrame:
    """Return the rows that run out of memory."""
    rows = group.take(axis, "outcome", "unlimited_peak_reserved_bytes", "trial_id")
    return rows[rows["outcome"].eq("oom").fillna(False) & rows[axis].notna()].sort_values(axis)


def _crosses(plot: Any, out: pd.DataFrame, axis: str, own: Any, look: Look, unit: int) -> None:
    if own is not None and len(out):
        needed = out["unlimited_peak_reserved_bytes"].to_numpy(float, na_value=np.nan)
        told = [f", would reserve {format_size(size)}" if np.isfinite(size) else "" for size in needed]
        plot.add_scatter(
            x=list(map(_place, out[axis])), y=np.full(len(out), own.size / unit), mode="markers", name="out of memory",
            marker={"symbol": "x", "size": 9, "color": "#D55E00", "line": {"color": "#fff", "width": 1}},
            customdata=told, hovertemplate="out of memory%{customdata}", **look.trace,
        )  # fmt: skip


def _bars(view: View, known: Sequence[Group], rows: Sequence[pd.Series[Any]]) -> Figure:
    """Draw a horizontal bar for each configuration."""
    frame = pd.DataFrame(rows)
    return _lying(
        view, known, sizes(frame), frame, "peak memory", "Peak memory by component",
        sentence(_most(frame.iloc[int(frame[PEAKS[1]].to_numpy(float).argmax())], None), "Each at one length and batch."
                 if len(known) > 1 else ""),
    )  # fmt: skip


def _out_of_memory(view: View) -> list[Figure]:
    """Draw the components when memory ran out, including the failed request, if nothing fits."""
    found = []
    for group in view.groups:
        rows = group.take("seq_len", "micro_batch", "oom_parts_bytes", "unlimited_peak_reserved_bytes", "trial_id")
        rows = rows.dropna(subset=["oom_parts_bytes", "seq_len", "micro_batch"])
        found += [(group, row) for _, row in rows.sort_values("seq_len").head(2).iterrows()]
    if not (found := [(group, row) for group, row in found if oom_parts(row)][:CONFIGURATIONS]):
        return []
    frame = pd.DataFrame([row for _, row in found])
    known = [oom_parts(row) for _, row in found]
    stack = {part: np.array([float(one.get(part, 0)) for one in known]) for part in PARTS}
    caption = (
        "Nothing in this sweep fits. Bars: memory when it ran out, including the failed request; needs: what would be "
        "reserved without a limit."
    )
    title = "Memory by component when it ran out"
    return [_lying(view, [group for group, _ in found], stack, frame, "memory", title, caption)]


def oom_parts(row: pd.Series[Any]) -> dict[str, int]:
    """Return bytes by part when a row ran out of memory, including the failed request; {} if unknown."""
    told = read_peaks(row["oom_parts_bytes"])
    return {part: told[part] for part in PARTS if part in told}


def _lying(
    view: View, known: Sequence[Group], stack: dict[str, np.ndarray], rows: pd.DataFrame, axis: str, title: str,
    caption: str,
) -> Figure:  # fmt: skip
    """Draw horizontal stacked bars, one for each row, with up to three GPUs' limits; the rows' own GPU comes first."""
    total = np.nansum(list(stack.values()), axis=0)
    own = card_limit(known[0], float(total.max()))
    top = max(float(total.max()), own.size if own is not None else 0.0)
    unit, unit_name = plots.axis_unit(top)
    told = names(known) if len({group.id for group in known}) > 1 else [""] * len(known)
    lengths = rows["seq_len"].nunique() > 1 or len(known) == 1
    place = [f"{length:,} tokens" if pd.isna(batch) else f"{length:,} tokens × {batch:,}"
             for length, batch in zip(rows["seq_len"], rows["micro_batch"], strict=True)]  # fmt: skip
    y = [escape(" · ".join(filter(None, (one if one != "all rows" else "", where if lengths else ""))))
         for one, where in zip(told, place, strict=True)]  # fmt: skip
    plot: Any = new_plot(f"{axis} ({unit_name})", "")
    for part, size in stack.items():
        if not np.nan_to_num(size).any():
            continue
        for number, group in enumerate(known):
            _add_part(
                plot, part, number == 0 and float(np.nanmax(size)) > top / THIN, x=[size[number] / unit], y=[y[number]],
                orientation="h", hovertemplate="%{x:,.4~f} " + unit_name + "<extra>" + called(part) + "</extra>",
                **view.look(group).trace,
            )  # fmt: skip
    height = 34 * len(known)
    plot.update_layout(
        barmode="stack", bargap=0.3, showlegend=True, height=height + 130,
        legend=plots.ABOVE | {"traceorder": "normal", "y": 1 + 18 / height},
    )  # fmt: skip
    needed = rows.get("unlimited_peak_reserved_bytes", pd.Series(dtype=float)).to_numpy(float, na_value=np.nan)
    for place_of, size, end in zip(y, needed, total / unit, strict=False):
        if np.isfinite(size):
            plots.add_text(plot, [end], [place_of], [f" needs {format_size(size)}"], Look(INK), "middle right", 11)
    plot.update_xaxes(tickformat=",~g", range=[0, top / unit * (1.2 if np.isfinite(needed).any() else 1.04)])
    plot.update_yaxes(type="category", autorange="reversed", tickformat=None, showgrid=False)
    for limit in all_limits(own, top, view.table.frame)[:3]:
        add_card_limit(plot, limit, unit, upright=True)
    data = rows.drop(columns=["oom_parts_bytes"], errors="ignore")
    data = data.assign(group=[group.label for group in known], **stack)
    return Figure("composition", title, caption, plot, data)


def _most(row: pd.Series[Any], axis: str | None) -> str:
    """Say what dominates the peak: its two largest parts."""
    allocated = float(row[PEAKS[0]])
    known = {part: float(row[column]) for part, column in OF_PEAK.items() if pd.notna(row[column])}
    largest = sorted(known.items(), key=lambda one: -one[1])[:2]
    shares = [f"{called(part)} ({size / allocated:.0%})" for part, size in largest]
    where = label({axis: int(row[axis])}) if axis else f"{int(row['seq_len']):,} tokens"
    return f"At {where}, {format_size(allocated)} are allocated; the largest components are {' and '.join(shares)}."


def _frame(rows: pd.DataFrame, group: Group) -> pd.DataFrame:
    """Return the drawn numbers of a configuration, a line for each row."""
    kept = [*AXES, *OF_PEAK.values(), *PEAKS, "trial_id"]
    beyond = sizes(rows)[BEYOND]
    return rows[kept].assign(group=group.label, reserved_beyond_bytes=beyond, phase=highest(rows))
