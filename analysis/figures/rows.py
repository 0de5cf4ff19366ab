"""The figures that show rows rather than fits: phases, waste, steps, heat map, Pareto, frontier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.beyond import BEYOND, beyond_peak
from vramsweep.analysis.data.groups import Group, others_equal, whatever
from vramsweep.analysis.data.metrics import GIB
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.plots import (
    COLOURS,
    GREY,
    MARKERS,
    MOST,
    End,
    Figure,
    escape,
    finish,
    new_plot,
    sentence,
)
from vramsweep.analysis.model.frontier import Limit, as_frame

LENGTH = "sequence length (tokens)"
_HEAT = ("micro_batch", "seq_len", "peak_reserved_bytes", "peak_allocated_bytes", "outcome", "trial_id")
_KINDS = ("allocator", "precision", "runner", "micro_batch")
_PHASES = ("load", "forward", "backward", "optimizer")


def unallocated(groups: Sequence[Group]) -> Figure | None:
    """What is reserved beyond allocated (else active) at the peak, against length."""
    known = _with(groups, "peak_reserved_bytes")
    drawn = [(g, rows) for g, rows in zip(known, beyond_peak(known), strict=True) if rows["seq_len"].nunique() > 1]
    if not drawn:
        return None
    unit, called = plots.axis_unit(max(float(rows[BEYOND].max()) for _, rows in drawn))
    bases = sorted({base for _, rows in drawn for base in rows["base"]})
    caption = (
        f"Peak reserved minus peak {bases[-1]}: what the caching allocator holds beyond what tensors ever took at "
        "once; median of repeats."
    )
    if "active" in bases:
        who = "of these rows" if len(bases) == 1 else "of some rows"
        caption += f" Allocated is not known {who}: active stands in for it."
    return _lines(
        drawn, BEYOND, unit, "reserved_unallocated", "Reserved beyond allocated, at the peak",
        f"reserved − {bases[-1]} ({called})", caption, ("allocator",),
    )  # fmt: skip


def mfu(groups: Sequence[Group]) -> Figure | None:
    """Model FLOP/s utilisation against length."""
    return _lines(
        _known(groups, "mfu"), "mfu", 0.01, "mfu", "Model FLOP/s utilisation", "MFU (% of dense peak)",
        "Model FLOP/s over the published dense peak of this precision on this GPU; median of repeats.", ("precision",),
    )  # fmt: skip


def estimated(groups: Sequence[Group]) -> Figure | None:
    """Estimated tokens per second against length; only simulated rows have it, and it knows no allocator."""
    speed = "estimated_tokens_per_s"
    return _lines(
        _known(whatever(groups, "allocator"), speed), speed, 1.0, "estimated_throughput",
        "Estimated throughput (roofline, not measured)", "estimated throughput (tokens/s, not measured)",
        "Roofline estimate of simulated rows, each kernel at its card's peak: as a rule more than a real run reaches.",
        ("gpu_name", "precision", "micro_batch"),
    )  # fmt: skip


def _known(groups: Sequence[Group], column: str) -> list[tuple[Group, pd.DataFrame]]:
    """Groups that know a column at more than one length, with its rows."""
    known = [(g, g.ok(column, "seq_len")) for g in _with(groups, column)]
    return [(g, rows) for g, rows in known if rows["seq_len"].nunique() > 1]


def _lines(
    known: Sequence[tuple[Group, pd.DataFrame]], column: str, scale: float, name: str, title: str, axis: str,
    caption: str, prefer: Sequence[str],
) -> Figure | None:  # fmt: skip
    of = {group.id: rows for group, rows in known}
    shown, note = plots.baseline([group for group, _ in known], prefer)
    if not shown:
        return None
    plot = new_plot(LENGTH, axis)
    data, ends, reach = [], [], [0.0]
    for number, (group, label) in enumerate(zip(shown, plots.names(shown), strict=True)):
        rows = of[group.id]
        middle = rows.groupby("seq_len")[column].median()
        x, y = middle.index.to_numpy(float), middle.to_numpy(float) / scale
        at = plots.thin(x, y)
        _add_line(plot, x[at], y[at], number, label)
        ends.append(End(float(x[-1]), float(y[-1]), label, COLOURS[number]))
        reach += [float(y.min()), float(y.max())]
        data.append(rows.assign(group=group.label)[["group", "seq_len", column, "trial_id"]])
    finish(plot, ends if len(shown) > 1 else [], reach)
    return Figure(name, title, sentence(caption, note), plot, pd.concat(data, ignore_index=True))


def phases(groups: Sequence[Group]) -> Figure | None:
    """Peak allocated of each phase of a step against length: the highest makes the peak."""
    columns = [f"{phase}_peak_allocated_bytes" for phase in _PHASES]
    group = next((g for g in _with(groups, *columns[1:]) if len(g.ok(*columns[1:], "seq_len"))), None)
    if group is None:
        return None
    rows = group.ok(*columns[1:], "seq_len", also=columns[:1])
    unit, called = plots.axis_unit(float(rows[columns].max().max()))
    plot = new_plot(LENGTH, f"peak allocated in the phase ({called})")
    ends, reach = [], [0.0]
    for number, (phase, column) in enumerate(zip(_PHASES, columns, strict=True)):
        middle = rows.dropna(subset=[column]).groupby("seq_len")[column].median()
        if middle.empty:
            continue
        x, y = middle.index.to_numpy(float), middle.to_numpy(float) / unit
        at = plots.thin(x, y)
        _add_line(plot, x[at], y[at], number, phase)
        ends.append(End(float(x[-1]), float(y[-1]), phase, COLOURS[number]))
        reach.append(float(y.max()))
    finish(plot, ends, reach)
    caption = f"Peaks of the phases of the probe step ({group.label}); phases follow each other, so they do not add up."
    return Figure("memory_by_phase", "Memory by phase", caption, plot, rows[["seq_len", *columns, "trial_id"]])


def categories(groups: Sequence[Group]) -> Figure | None:
    """Where the device's memory goes, stacked: state, rest of the peak, cached by the allocator, outside torch."""
    need = ("load_peak_allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "seq_len")
    group = next((g for g in _with(groups, *need) if len(g.ok(*need))), None)
    if group is None or group.resident:
        return None
    rows = (
        group.ok(*need, also=("device_used_bytes", "device_baseline_bytes"))
        .drop_duplicates("seq_len")
        .sort_values("seq_len")
    )
    rows = rows.iloc[np.unique(np.linspace(0, len(rows) - 1, 24).round().astype(int))]
    load, peak, reserved = (rows[c].to_numpy(float) for c in need[:3])
    used = rows["device_used_bytes"].to_numpy(float, na_value=np.nan)
    before = rows["device_baseline_bytes"].to_numpy(float, na_value=np.nan)
    parts = {
        "peak while loading": np.minimum(load, peak),
        "more at the peak of a step": np.maximum(peak - load, 0),
        "reserved beyond the peak": reserved - peak,
        "outside torch (context, libraries)": np.maximum(used - before - reserved, 0),
    }
    plot = new_plot(LENGTH, "device memory (GiB)")
    x = [f"{int(v):,}" for v in rows["seq_len"]]
    patterns = ("", "/", ".", "x")  # readable without colour
    for number, (name, values) in enumerate(parts.items()):
        if not np.isfinite(values).any():
            continue
        plot.add_bar(
            x=x, y=values / GIB, name=name, marker={"color": COLOURS[number], "pattern": {"shape": patterns[number]}},
            hovertemplate="%{x} tokens: %{y:.3~f} GiB<extra>" + name + "</extra>",
        )  # fmt: skip
    plot.update_layout(
        barmode="stack", showlegend=True, legend={"yref": "paper", "y": 1.02, "yanchor": "bottom"}, bargap=0.15
    )
    plot.update_xaxes(type="category")
    data = pd.DataFrame({"seq_len": rows["seq_len"], **parts, "trial_id": rows["trial_id"]})
    caption = f"One row per length ({group.label}). Outside torch: device used minus baseline minus reserved."
    return Figure("memory_by_category", "Memory by category", caption, plot, data)


def steps(groups: Sequence[Group], varied: Sequence[Group] = ()) -> list[Figure]:
    """Step times, and peak reserved, step by step: is the run steady, has memory stopped rising."""
    found = []
    for name, column, scale, title, axis in (
        ("step_times", "step_times_s", 1e-3, "Step times", "step time (ms)"),
        ("plateau", "step_peak_reserved_bytes", GIB, "Has memory stopped rising?", "peak reserved of the step (GiB)"),
    ):
        among = [*groups, *(varied if name == "step_times" else ())]
        group = next((g for g in _with(among, column) if len(g.ok(column, "seq_len"))), None)
        if group is None:
            continue
        rows = group.ok(column, "seq_len").sort_values("seq_len").drop_duplicates("seq_len")
        rows = rows[rows[column].map(lambda v: len(v) > 1)]
        if rows.empty:
            continue
        rows = rows.iloc[np.unique(np.linspace(0, len(rows) - 1, MOST).round().astype(int))]
        plot = new_plot("measured step", axis)
        ends, reach, data = [], [0.0], []
        for number, (_, row) in enumerate(rows.iterrows()):
            y = np.array(row[column], dtype=float) / scale
            label = f"{'at most ' * group.varies}{int(row['seq_len']):,} tokens"
            x = np.arange(1, len(y) + 1, dtype=float)
            _add_line(plot, x, y, number, label)
            ends.append(End(float(x[-1]), float(y[-1]), label, COLOURS[number]))
            reach += [float(y.min()), float(y.max())]
            data.append(
                pd.DataFrame({"seq_len": row["seq_len"], "step": x, column: row[column], "trial_id": row["trial_id"]})
            )
        finish(plot, ends, reach)
        plot.update_xaxes(tick0=1, dtick=max(1, round(max(end.x for end in ends) / 10)))
        caption = f"Up to six lengths of {group.label}, one row each; warm-up steps are left out."
        found.append(Figure(name, title, caption, plot, pd.concat(data, ignore_index=True)))
    return found


def heat_map(groups: Sequence[Group]) -> Figure | None:
    """Peak reserved (else allocated) over batch and length, with the edge beyond which it ran out of memory."""
    shown = others_equal(groups, ("micro_batch",))[:MOST]
    rows = pd.concat([g.take(*_HEAT) for g in shown]) if shown else pd.DataFrame({"outcome": []})
    rows = rows[rows["outcome"].isin(["ok", "oom"])]
    if rows.empty or rows["micro_batch"].nunique() < 2 or rows["seq_len"].nunique() < 2:
        return None
    column = next((c for c in ("peak_reserved_bytes", "peak_allocated_bytes") if rows[c].notna().any()), None)
    if column is None:
        return None
    lengths = np.sort(rows["seq_len"].dropna().unique().astype(int))
    lengths = lengths[np.unique(np.linspace(0, len(lengths) - 1, 24).round().astype(int))]
    rows = rows[rows["seq_len"].isin(lengths)]
    batches = np.sort(rows["micro_batch"].dropna().unique().astype(int))
    size = rows.pivot_table(index="micro_batch", columns="seq_len", values=column, aggfunc="max", observed=True)
    z = size.reindex(index=batches, columns=lengths).to_numpy(float, na_value=np.nan) / GIB
    oom = {(int(b), int(s)) for b, s in rows.loc[rows["outcome"] == "oom", ["micro_batch", "seq_len"]].to_numpy()}
    texts = [["" if np.isnan(v) or len(lengths) > 12 else f"{v:.3g}" for v in line] for line in z]
    plot: Any = new_plot(LENGTH, "micro-batch (samples)")
    plot.add_heatmap(
        x=[f"{v:,}" for v in lengths], y=[f"{v:,}" for v in batches], z=z, text=texts, texttemplate="%{text}",
        colorscale="Cividis", colorbar={"title": {"text": "GiB"}, "outlinewidth": 0}, hoverongaps=False, xgap=1, ygap=1,
        hovertemplate="%{x} tokens, batch %{y}: %{z:.3~f} GiB<extra></extra>",
    )  # fmt: skip
    plot.add_scatter(
        x=[f"{s:,}" for _, s in sorted(oom)], y=[f"{b:,}" for b, _ in sorted(oom)], mode="markers", hoverinfo="skip",
        marker={"symbol": "x", "size": 9, "color": COLOURS[1]},
    )  # fmt: skip
    _edge(plot, lengths, batches, oom)
    plot.update_xaxes(type="category", showgrid=False)
    plot.update_yaxes(type="category", showgrid=False)
    what = "reserved" if column == "peak_reserved_bytes" else "allocated"
    return Figure(
        "heat_map",
        "Batch and length: what fits",
        f"Peak {what} memory; crosses ran out of memory, the line is the edge between what fitted and what did not.",
        plot,
        rows[["micro_batch", "seq_len", column, "outcome", "trial_id"]],
    )


def _edge(plot: Any, lengths: Any, batches: Any, oom: set[tuple[int, int]]) -> None:
    """A line along the cell borders between the largest length that fitted and the first that did not."""
    x: list[float] = []
    y: list[float] = []
    for row, batch in enumerate(batches):
        first = next((i for i, s in enumerate(lengths) if (int(batch), int(s)) in oom), len(lengths))
        x += [first - 0.5, first - 0.5]
        y += [row - 0.5, row + 0.5]
    if not oom:
        return
    # shapes, unlike traces, may lie between the categories
    for (x0, y0), (x1, y1) in zip(zip(x, y, strict=True), zip(x[1:], y[1:], strict=False), strict=False):
        plot.add_shape(type="line", x0=x0, x1=x1, y0=y0, y1=y1, line={"color": COLOURS[1], "width": 3})


def pareto(groups: Sequence[Group]) -> Figure | None:
    """Memory against speed at one length: what is not beaten in both is joined by a line."""
    if not groups:
        return None
    need = ("tokens_per_s", "peak_reserved_bytes", "seq_len")
    rows = pd.concat([g.ok(*need, also=_KINDS).assign(id=g.id, group=g.label) for g in groups])
    if rows["id"].nunique() < 3:
        return None
    counts = rows.groupby("seq_len")["id"].nunique()
    length = int(counts[counts == counts.max()].index.max())
    rows = rows[rows["seq_len"] == length]
    axis = next((a for a in _KINDS if rows[a].nunique() > 1), "allocator")
    points = rows.groupby("id", sort=False).agg(
        group=("group", "first"), memory=("peak_reserved_bytes", "max"), speed=("tokens_per_s", "median"),
        kind=(axis, "first"),
        trial_id=("trial_id", lambda ids: " ".join(map(str, ids))),
    ).reset_index(drop=True)  # fmt: skip
    if len(points) < 3:
        return None
    plot: Any = new_plot("peak reserved memory (GiB)", "throughput (tokens/s)")
    front = points.sort_values(["memory", "speed"], ascending=[True, False])
    front = front[front["speed"] > front["speed"].cummax().shift(fill_value=-1.0)]
    plot.add_scatter(
        x=front["memory"] / GIB, y=front["speed"], mode="lines", hoverinfo="skip", showlegend=False,
        line={"color": GREY, "dash": "dot", "shape": "hv"},
    )  # fmt: skip
    kinds = list(dict.fromkeys(points["kind"].astype("string")))[:MOST]
    for number, kind in enumerate(kinds):
        mine = points[points["kind"].astype("string") == kind]
        plot.add_scatter(
            x=mine["memory"] / GIB, y=mine["speed"], mode="markers", name=escape(f"{axis.replace('_', ' ')} {kind}"),
            marker={"color": COLOURS[number], "symbol": MARKERS[number], "size": 10}, text=mine["group"].map(escape),
            hovertemplate="%{text}<br>%{x:.3~f} GiB, %{y:,.4~g} tokens/s<extra></extra>",
        )  # fmt: skip
    plot.update_layout(showlegend=len(kinds) > 1, legend={"yref": "paper", "y": 1.02, "yanchor": "bottom"})
    plot.update_yaxes(rangemode="tozero")
    plot.update_xaxes(tickformat=",~g")
    return Figure(
        "pareto",
        "Memory against speed",
        f"One point per combination of settings at {length:,} tokens; no other beats those on the dotted line.",
        plot,
        points,
    )


def frontier_chart(limits: Sequence[Limit], groups: Sequence[Group]) -> Figure | None:
    """The largest length that fits against the size of the GPU, with the interval of the fit."""
    data = as_frame([one for one in limits if one.axis == "seq_len" and one.multiples_of is None])
    if data.empty or data["value"].notna().sum() == 0:
        return None
    known = data[data["value"].notna()]
    having = set(known["group"])
    shown, note = plots.baseline([g for g in groups if g.id in having], ("micro_batch", "allocator"))
    if not shown:
        return None
    plot = new_plot("memory of the GPU (GiB)", "largest length (tokens)")
    ends, reach, endless = [], [0.0], False
    sizes = sorted(data["gib"].unique())
    for number, (group, label) in enumerate(zip(shown, plots.names(shown), strict=True)):
        mine = known[known["group"] == group.id]
        y = mine["value"].to_numpy(float)
        high, low = (mine[c].to_numpy(float, na_value=np.nan) for c in ("high", "low"))
        endless |= bool(np.isnan(high).any())
        high, low = np.where(np.isnan(high), y, high), np.where(np.isnan(low), 0.0, low)
        plot.add_scatter(
            x=[f"{g:g}" for g in mine["gib"]], y=y, mode="lines+markers", name=escape(label),
            line={"color": COLOURS[number]},
            marker={"size": 9, "symbol": [MARKERS[number] + "-open" * bool(e) for e in mine["extrapolated"]]},
            error_y={"type": "data", "symmetric": False, "array": np.maximum(high - y, 0), "width": 4,
                     "arrayminus": np.maximum(y - low, 0), "thickness": 1.2},
            hovertemplate="%{x} GiB: %{y:,} tokens<extra>" + escape(label) + "</extra>",
        )  # fmt: skip
        ends.append(End(sizes.index(mine["gib"].iloc[-1]), float(y[-1]), label, COLOURS[number]))
        reach.append(float(np.maximum(high, y).max()))
    finish(plot, ends if len(shown) > 1 else [], reach)
    plot.update_xaxes(type="category", categoryorder="array", categoryarray=[f"{s:g}" for s in sizes])
    caption = "From the fits, bars: 95 % interval for a new run. Open markers lie beyond the fitted lengths."
    if endless:
        caption += " Where there is no bar upwards, no upper end is known."
    return Figure("frontier", "What fits in which GPU", sentence(caption, note), plot, data)


def of_rows(groups: Sequence[Group], limits: Sequence[Limit]) -> list[Figure]:
    """All figures of this module that these rows allow, in reading order; of lengths that vary the step times alone."""
    varied = [group for group in groups if group.varies]
    groups = [group for group in groups if not group.varies]
    drawn = [unallocated(groups), mfu(groups), estimated(groups), phases(groups), categories(groups),
             *steps(groups, varied), heat_map(groups), pareto(groups), frontier_chart(limits, groups)]  # fmt: skip
    return [figure for figure in drawn if figure is not None]


def _with(groups: Sequence[Group], *columns: str) -> Sequence[Group]:
    """The groups, or none if their table knows nothing of one of these columns."""
    known = bool(groups) and all(groups[0].source[column].notna().any() for column in columns)
    return groups if known else []


def _add_line(plot: Any, x: Any, y: Any, number: int, name: str) -> None:
    plot.add_scatter(
        x=x, y=y, mode="lines+markers" if len(x) <= 60 else "lines", name=escape(name),
        line={"color": COLOURS[number], "width": 2}, marker={"symbol": MARKERS[number], "size": 7},
        hovertemplate="%{x:,}: %{y:,.4~g}<extra>" + escape(name) + "</extra>",
    )  # fmt: skip
