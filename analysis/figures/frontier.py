"""What fits in which card: a row for each setting, on an axis of length, the cards below each other.

Whoever asks how far they can go looks for their card, then reads along the rows to a length: so that is the real axis,
and cards are headings. A bar is solid as far as rows ran, hatched as far as a new run is safe, a tick is the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.plots import INK, Figure, escape, faint, new_plot, sentence
from vramsweep.analysis.figures.view import Look, View, baseline, names
from vramsweep.analysis.model.frontier import REACH, Limit, as_frame

CARDS, LINES = 3, 18  # at most: cards, and rows in all
APART = 1.4  # times as large: cards nearer to each other say nearly the same
AROUND = 90  # px of the figure that are not rows
ROW = 26  # px
ROOM = 0.2  # of the width: the numbers behind the longest bar


def frontier_chart(view: View) -> list[Figure]:
    """Rows of the cards that this sweep is about, and of those around them that have something to say."""
    every = [one for one in view.limits if one.axis == "seq_len" and one.multiples_of is None]
    said = [one for one in every if _reach(one) > 0]
    having = {one.group for one in said}
    shown, note = baseline([group for group in view.groups if group.id in having], ("micro_batch", "allocator"))
    if not shown:
        return []
    sizes = _cards(view, [one for one in said if one.group in {group.id for group in shown}])
    if len(shown) > (most := max(1, LINES // len(sizes))):
        shown, note = shown[:most], f"{most} of {len(having):,} groups."
    told = names(shown) if len(shown) > 1 else ["" for _ in shown]
    plot = new_plot("sequence length (tokens)", "")
    at, ticks, top, endless = 0.0, [], 0.0, False
    for size in sizes:
        heading = next(one for one in said if one.gib == size)
        plot.add_annotation(
            x=0, xref="paper", y=at, text=f"<b>{size:g} GiB card</b>, {heading.usable_gib:.1f} usable", xanchor="left",
            yanchor="middle", showarrow=False, font={"size": 12, "color": INK}, name="card",
        )  # fmt: skip
        at += 1
        for group, name in zip(shown, told, strict=True):
            one = next((one for one in said if one.gib == size and one.group == group.id), None)
            ticks.append((at, name if one is not None else f"{name}: nothing known"))
            if one is not None:
                beyond = _beyond(view, one)
                _row(plot, at, one, view.look(group), name or group.label, view.predicted, beyond)
                top, endless = max(top, _reach(one), one.high or 0, beyond or 0), endless or bool(beyond)
            at += 1
        at += 0.4
    plot.update_layout(barmode="overlay", bargap=0.35, height=AROUND + ROW * at, margin={"t": 16})
    plot.update_yaxes(
        tickvals=[where for where, _ in ticks], ticktext=[escape(plots.short(name, 40)) for _, name in ticks],
        range=[at - 0.6, -0.7], showgrid=False, ticks="", tickformat=None, showline=False,
    )  # fmt: skip
    plot.update_xaxes(range=[0, top / (1 - ROOM)], rangemode="tozero", tickformat=",~d")
    solid = "Hatched: predicted to fit" if view.predicted else "Solid: ran; hatched: a new run is safe (97.5 %)"
    caption = sentence(
        f"{solid}; tick: the estimate, line: as far as one may fit (95 %).",
        "Arrow: more than the fit can say." if endless else "",
        "° and paler: beyond the lengths that the fit has seen." if any(one.extrapolated for one in said) else "",
        note,
    )  # fmt: skip
    return [Figure("frontier", "How long one can go on which card", caption, plot, as_frame(every))]


def _reach(one: Limit) -> int:
    """The largest length of which anything good is said."""
    return max(one.largest_ok or 0, one.low or 0, one.value or 0)


def _cards(view: View, said: Sequence[Limit]) -> list[float]:
    """The sizes of the rows' own cards, then those nearest below and above; of sizes that say the same only one."""
    own = view.table.frame["memory_limit_bytes"].fillna(view.table.frame["device_total_bytes"]).dropna().unique()
    sizes = sorted({one.gib for one in said})
    usable = {one.gib: one.usable_gib for one in said}
    mine = {min(sizes, key=lambda size: abs(usable[size] - float(limit) / 2**30)) for limit in own} & set(sizes)
    known = {size: tuple((one.group, one.largest_ok, one.value) for one in said if one.gib == size) for size in sizes}
    kept = sorted(mine)[:CARDS]
    middle = kept[0] if kept else sizes[len(sizes) // 2]
    for size in sorted(sizes, key=lambda size: abs(np.log(size / middle))):
        new = all(known[size] != known[other] and abs(np.log(size / other)) > np.log(APART) for other in kept)
        if len(kept) < CARDS and new:
            kept.append(size)
    return sorted(kept)


def _beyond(view: View, one: Limit) -> int | None:
    """The length up to which the fit says that all fits, where it says no more than that."""
    if one.value is not None or not one.extrapolated:
        return None
    fit = next((fit for fit in view.fits if fit.group == one.group and fit.metric.label == one.basis), None)
    return None if fit is None else int(REACH * fit.range[1])


def _row(plot: Any, at: float, one: Limit, look: Look, name: str, predicted: bool, beyond: int | None) -> None:
    proven, low = one.largest_ok or 0, max(one.low or 0, one.largest_ok or 0)
    if predicted:
        proven, low = 0, max(low, proven)
    pale = 0.25 if one.extrapolated else 0.45
    bar: dict[str, Any] = {"y": [at], "orientation": "h", "showlegend": False, "width": 0.62, "name": escape(name)}
    if low > proven:
        plot.add_bar(
            x=[low], marker={"color": faint(look.colour, pale / 3), "line": {"color": look.colour, "width": 1},
            "pattern": {"shape": "/", "fgcolor": look.colour, "size": 7, "solidity": 0.25}},
            hovertemplate=f"safe up to {low:,}<extra>{escape(name)}</extra>", **bar, **look.trace,
        )  # fmt: skip
    if proven:
        plot.add_bar(
            x=[proven], marker={"color": look.colour}, hovertemplate=f"{proven:,} ran<extra>{escape(name)}</extra>",
            **bar, **look.trace,
        )  # fmt: skip
    end = max(low, proven, one.value or 0)
    if one.value is not None:
        plot.add_scatter(
            x=[one.value], y=[at], mode="markers", hovertemplate=f"estimate {one.value:,}<extra>{escape(name)}</extra>",
            marker={"symbol": "line-ns", "size": 19, "line": {"color": INK, "width": 2.5}}, showlegend=False, **look.trace,
        )  # fmt: skip
        if one.high is not None and one.high > end:
            plot.add_scatter(
                x=[end, one.high], y=[at, at], mode="lines", line={"color": INK, "width": 1.2}, hoverinfo="skip",
                showlegend=False, **look.trace,
            )  # fmt: skip
            end = one.high
    if beyond is not None:
        plot.add_scatter(
            x=[end, beyond], y=[at, at], mode="lines+markers", line={"color": INK, "width": 1.2, "dash": "dot"},
            marker={"symbol": ["line-ns", "arrow-right"], "size": 9, "color": INK}, hoverinfo="skip", showlegend=False,
            **look.trace,
        )  # fmt: skip
        end = beyond
    ran = f"{one.largest_ok:,} ran" if one.largest_ok and not predicted else ""
    guess = f"> {beyond:,}°" if beyond is not None else ""
    if one.value is not None and one.value != one.largest_ok:
        guess = f"≈ {one.value:,}{'°' * one.extrapolated}"
    text = ", ".join(filter(None, (ran, guess)))
    plots.add_text(plot, [end], [at], [f" {text}"], Look(INK, settings=look.settings), "middle right", 11)


