"""Figures of trade-offs: memory over batch and length at once, and memory against speed."""

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import others_equal
from vramsweep.analysis.figures.plots import GREY, LENGTH, End, Figure, axis_unit, escape, finish, new_plot, spread
from vramsweep.analysis.figures.style import COLOURS, MOST, View, names

_HEAT = ("micro_batch", "seq_len", "peak_reserved_bytes", "peak_allocated_bytes", "outcome", "trial_id")


def heat_map(view: View) -> list[Figure]:
    """Draw peak reserved (else allocated) over batch and length, with the border beyond which memory ran out."""
    shown = others_equal(view.groups, ("micro_batch",))[:MOST]
    rows = pd.concat([g.take(*_HEAT) for g in shown]) if shown else pd.DataFrame({"outcome": []})
    rows = rows[rows["outcome"].isin(["ok", "oom"])]
    if rows.empty or rows["micro_batch"].nunique() < 2 or rows["seq_len"].nunique() < 2:
        return []
    counted = ("peak_reserved_bytes", "peak_allocated_bytes")[shown[0].resident :]
    if (column := next((c for c in counted if rows[c].notna().any()), None)) is None:
        return []
    lengths = np.sort(rows["seq_len"].dropna().unique().astype(int))
    lengths = lengths[spread(lengths, 24)]
    rows = rows[rows["seq_len"].isin(lengths)]
    batches = np.sort(rows["micro_batch"].dropna().unique().astype(int))
    size = rows.pivot_table(index="micro_batch", columns="seq_len", values=column, aggfunc="max", observed=True)
    z = size.reindex(index=batches, columns=lengths).to_numpy(float, na_value=np.nan)
    unit, called = axis_unit(float(np.nanmax(z)))
    z = z / unit
    oom = {(int(b), int(s)) for b, s in rows.loc[rows["outcome"] == "oom", ["micro_batch", "seq_len"]].to_numpy()}
    texts = [["" if np.isnan(v) or len(lengths) > 12 else f"{v:.3g}" for v in line] for line in z]
    plot: Any = new_plot(LENGTH, "micro-batch (samples)")
    plot.update_layout(margin={"r": 84})
    plot.add_heatmap(
        x=[f"{v:,}" for v in lengths], y=[f"{v:,}" for v in batches], z=z, text=texts, texttemplate="%{text}",
        colorscale="Cividis", colorbar={"title": {"text": called}, "outlinewidth": 0, "thickness": 12},
        hoverongaps=False, xgap=1, ygap=1,
        hovertemplate="%{x} tokens, batch %{y}: %{z:.4~g} " + called + "<extra></extra>",
    )  # fmt: skip
    plot.add_scatter(
        x=[f"{s:,}" for _, s in sorted(oom)], y=[f"{b:,}" for b, _ in sorted(oom)], mode="markers", hoverinfo="skip",
        marker={"symbol": "x", "size": 9, "color": COLOURS[1]},
    )  # fmt: skip
    _edge(plot, lengths, batches, oom)
    plot.update_xaxes(type="category", showgrid=False)
    plot.update_yaxes(type="category", showgrid=False)
    what = "reserved" if column == "peak_reserved_bytes" else "allocated"
    crosses = ". Crosses: out of memory; the line separates what fitted from what did not" if oom else ""
    data = rows[["micro_batch", "seq_len", column, "outcome", "trial_id"]]
    return [Figure("heat_map", "Peak memory by batch and length", f"Peak {what} memory{crosses}.", plot, data)]


def _edge(plot: Any, lengths: Any, batches: Any, oom: set[tuple[int, int]]) -> None:
    """Draw a line along cell borders between the largest length that fitted and the first that did not."""
    corners: list[tuple[float, float]] = []
    for row, batch in enumerate(batches if oom else ()):
        first = next((i for i, s in enumerate(lengths) if (int(batch), int(s)) in oom), len(lengths))
        corners += [(first - 0.5, row - 0.5), (first - 0.5, row + 0.5)]
    # shapes, unlike traces, may lie between the categories
    for (x0, y0), (x1, y1) in pairwise(corners):
        plot.add_shape(type="line", x0=x0, x1=x1, y0=y0, y1=y1, line={"color": COLOURS[1], "width": 3})


def pareto(view: View) -> list[Figure]:
    """Draw memory against speed at one length; a line joins the points that no other beats in both.

    Points whose speed the host limits are hollow, and no part of that line.
    """
    if not (groups := view.groups):
        return []
    what = "allocated" if groups[0].resident else "reserved"  # a process's resident set says little
    need = ("tokens_per_s", f"peak_{what}_bytes", "seq_len")
    rows = pd.concat([g.ok(*need, also=["bound_by"]).assign(id=g.id, group=g.label) for g in groups])
    if rows["id"].nunique() < 3:
        return []
    counts = rows.groupby("seq_len")["id"].nunique()
    length = int(counts[counts == counts.max()].index.max())
    rows = rows[rows["seq_len"] == length]
    points = rows.groupby("id", sort=False).agg(
        group=("group", "first"), memory=(f"peak_{what}_bytes", "max"), speed=("tokens_per_s", "median"),
        trial_id=("trial_id", lambda ids: " ".join(map(str, ids))),
        hollow=("bound_by", lambda by: bool(by.eq("host").fillna(False).any())),
    ).reset_index()  # fmt: skip
    if len(points) < 3:
        return []
    unit, called = axis_unit(float(points["memory"].max()))
    plot: Any = new_plot(f"peak {what} memory ({called})", "throughput (tokens/s)")
    front = points[~points["hollow"].astype(bool)].sort_values(["memory", "speed"], ascending=[True, False])
    front = front[front["speed"] > front["speed"].cummax().shift(fill_value=-1.0)]
    plot.add_scatter(
        x=front["memory"] / unit, y=front["speed"], mode="lines", hoverinfo="skip", showlegend=False,
        line={"color": GREY, "dash": "dot", "shape": "hv"},
    )  # fmt: skip
    ends = []
    known = {group.id: group for group in groups}
    told = dict(zip(known, names(groups), strict=True))
    best = set(front["id"])
    for _, point in points.iterrows():
        look, name = view.look(known[str(point["id"])]), told[str(point["id"])]
        symbol = f"{look.symbol}-open" if point["hollow"] else look.symbol
        plot.add_scatter(
            x=[point["memory"] / unit], y=[point["speed"]], mode="markers", name=escape(name),
            showlegend=point["id"] in best or not best,
            marker={"color": look.colour, "symbol": symbol, "size": 10},
            hovertemplate=escape(name) + "<br>%{x:.4~g} " + called + ", %{y:,.4~g} tokens/s<extra></extra>",
            **look.trace,
        )  # fmt: skip
        if point["id"] in best:
            ends.append(End(point["memory"] / unit, float(point["speed"]), name, look))
    finish(plot, ends, [0.0, float(points["speed"].max())], zero=True)
    plot.update_xaxes(tickformat=",~g")
    joined = " None beats those on the dotted line in both memory and speed." if len(front) else ""
    caption = f"Configurations at {length:,} tokens.{joined}"
    if points["hollow"].any():
        caption += " The host, not the GPU, limits the speed of hollow ones, so no line joins them."
    return [Figure("pareto", "Peak memory against throughput", caption, plot, points.drop(columns=["id", "hollow"]))]
