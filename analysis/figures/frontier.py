"""The figure of what fits in which GPU: a row for each setting on an axis of length, GPUs below each other.

Readers look for their GPU, then along its rows to a length. Therefore length is the axis, and GPUs are headings. A bar
is solid as far as rows ran, hatched as far as a new run is safe; a tick is the estimate.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import Group
from vramsweep.analysis.data.metrics import GIB
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.plots import INK, Figure, escape, faint, new_plot, sentence
from vramsweep.analysis.figures.style import ON_CARD, Look, View, baseline, names
from vramsweep.analysis.model.memory_frontier import ALL, REACH, Limit, as_frame
from vramsweep.analysis.model.observations import allocator_limits

CARDS, LINES = 3, 18  # at most: GPUs where there are several settings, and rows in all
APART = 1.4  # times as large: GPUs closer to each other say nearly the same
AROUND = 90  # px of the figure that are not rows
ROW = 26  # px


def frontier_chart(view: View) -> list[Figure]:
    """Draw rows for the GPUs that this sweep is about, and for those of nearby sizes that add something."""
    every = [one for one in view.limits if one.axis == view.table.axis and one.multiples_of is None]
    said = {(one.gib, one.group): one for one in every if max(one.largest_ok or 0, one.low or 0, one.value or 0)}
    having = {group for _, group in said}
    alike = _group_by_setting([group for group in view.groups if group.id in having])
    shown, note = baseline([first for first, *_ in alike], ("micro_batch", "allocator"))
    if max((group.take("seq_len")["seq_len"].nunique() for group in shown), default=0) < 2:
        return []  # with one length, the composition says whether it fits
    of = {first.id: [first, *others] for first, *others in alike}
    best = {(size, group.id): found for size in sorted({size for size, _ in said}) for group in shown
            if (found := _nearest(said, size, of[group.id])) is not None}  # fmt: skip
    sizes = _cards(view, best, LINES if len(shown) == 1 else CARDS)
    if len(shown) > (most := max(1, LINES // len(sizes))):
        shown, note = shown[:most], f"Drawn: {most} of {len(alike):,} configurations."
    refused = {(one.gib, one.group): one.smallest_too_large for one in every if one.smallest_too_large is not None}
    least = {(size, group.id): min(over) for size in sizes for group in shown
             if (over := [refused[size, one.id] for one in of[group.id] if (size, one.id) in refused])}  # fmt: skip
    drawn = [one for (size, _), (one, _) in best.items() if size in sizes]
    caption = sentence(
        "Hatched: predicted to fit. Line: up to the next predicted length, which does not fit." if view.predicted else
        "Solid: ran. Hatched: a new run fits with a probability of 97.5 %. Tick: estimated maximum; line: up to the "
        "end of its 95 % interval.",
        "Arrow: beyond what the fit can predict." if any(_beyond(view, one) for one in drawn) else "",
        "° and paler: beyond the fitted lengths." if any(one.extrapolated for one in drawn) else "",
        "(all): the model has no more positions." if any(one.remark == ALL for one in drawn) else "",
        note,
    )  # fmt: skip
    plot = _drawn(view, shown, sizes, best, least)
    return [Figure("frontier", "Longest sequence that fits, by GPU", caption, plot, as_frame(every))]


def _drawn(
    view: View, shown: Sequence[Group], sizes: Sequence[float], best: Mapping[tuple[float, str], tuple[Limit, Group]],
    least: Mapping[tuple[float, str], int],
) -> Any:  # fmt: skip
    """Draw the rows below each other, under their GPU's name if it has several; `least` is what does not fit."""
    plot: Any = new_plot("sequence length (tokens)", "")
    cardless = [replace(g, settings={k: v for k, v in g.settings.items() if k not in ON_CARD}) for g in shown]
    at, ticks, top, widest = 0.0, [], 0, 0
    for size in sizes:
        if len(shown) > 1:
            usable = next(one.usable_gib for (gib, _), (one, _) in best.items() if gib == size)
            plot.add_annotation(
                x=0, xref="paper", y=at, text=f"<b>{size:g} GiB GPU</b>, {usable:.1f} usable", xanchor="left",
                yanchor="middle", showarrow=False, font={"size": 12, "color": INK}, name="card",
            )  # fmt: skip
            at += 1
        for group, name in zip(shown, names(cardless), strict=True):
            told = name if len(shown) > 1 else f"{size:g} GiB GPU"
            ticks.append((at, "<br>".join(map(escape, textwrap.wrap(told, 44)))))
            one, whose = best.get((size, group.id), (None, group))
            look = replace(view.look(group), settings=view.look(whose).settings)
            if one is None:
                end, text = 0, f"{least[size, group.id]:,} does not fit" if (size, group.id) in least else "unknown"
            else:
                end, text = _row(plot, at, one, look, told, view.predicted, _beyond(view, one))
            plots.add_text(plot, [end], [at], [f" {text}"], replace(look, colour=INK), "middle right", 11)
            top, widest = max(top, end), max(widest, len(text))
            at += 1
        at += 0.4 if len(shown) > 1 else 0
    row = max(ROW, 16 * max((text.count("<br>") + 1 for _, text in ticks), default=1))
    plot.update_layout(barmode="overlay", bargap=0.35, height=AROUND + row * at, margin={"t": 16, "r": 12 + 6 * widest})
    plot.update_yaxes(
        tickvals=[where for where, _ in ticks], ticktext=[text for _, text in ticks], range=[at - 0.5, -0.7],
        showgrid=False, ticks="outside", ticklen=4, tickcolor="rgba(0,0,0,0)", tickformat=None, showline=False,
        tickfont={"size": 12},
    )  # fmt: skip
    plot.update_xaxes(range=[0, 1.02 * top], tickformat=",~d")
    return plot


def _group_by_setting(groups: Sequence[Group]) -> list[list[Group]]:
    """Collect the groups that differ only in their GPU into one setting. For each GPU, its own rows say most."""
    found: dict[Any, list[Group]] = {}
    for group in groups:
        rest = {key: value for key, value in group.settings.items() if key not in ON_CARD}
        found.setdefault(tuple(sorted(rest.items(), key=str)), []).append(group)
    return list(found.values())


def _nearest(
    said: Mapping[tuple[float, str], Limit], size: float, groups: Sequence[Group]
) -> tuple[Limit, Group] | None:
    """Return the limit for a size from the group whose own GPU is nearest to that size, None if no group has one."""
    known = [(one, group) for group in groups if (one := said.get((size, group.id))) is not None]

    def away(one: tuple[Limit, Group]) -> float:
        own = _gpu_limits(one[1].take("memory_limit_bytes", "device_total_bytes"))
        return min((abs(np.log(limit / one[0].usable_gib)) for limit in own), default=0.0)

    return min(known, key=away, default=None)


def _gpu_limits(frame: pd.DataFrame) -> list[float]:
    """Return what the allocator may use of these rows' GPUs, in GiB."""
    limits = allocator_limits(frame)
    return [float(one) / GIB for one in np.unique(limits[np.isfinite(limits)])]


def _cards(view: View, best: Mapping[tuple[float, str], tuple[Limit, Group]], most: int) -> list[float]:
    """Return the sizes of the rows' own GPUs, then the nearest ones below and above that are not too close together."""
    usable = {size: one.usable_gib for (size, _), (one, _) in best.items()}
    own = _gpu_limits(view.table.frame[["memory_limit_bytes", "device_total_bytes"]])
    kept = sorted({min(usable, key=lambda size: abs(usable[size] - limit)) for limit in own})[:most]
    said: dict[float, list[Any]] = {size: [] for size in usable}
    for (size, who), (one, _) in best.items():
        said[size].append((who, one.largest_ok, one.low, one.value))
    ran = {size: sum(one.largest_ok or 0 for (gib, _), (one, _) in best.items() if gib == size) for size in usable}
    middle = kept[0] if kept else min(size for size in ran if ran[size] == max(ran.values()))  # all that ran fits it
    kept = kept or [middle]
    for size in sorted(usable, key=lambda size: abs(np.log(size / middle))):
        new = all(abs(np.log(size / other)) > np.log(APART) and said[size] != said[other] for other in kept)
        if new and len(kept) < min(most, CARDS):
            kept.append(size)
    return sorted(kept)


def _beyond(view: View, one: Limit) -> int | None:
    """Return the length up to which the fit says that all fits, if it says no more than that; else None."""
    if one.value is not None or not one.extrapolated:
        return None
    fit = next((fit for fit in view.fits if fit.group == one.group and fit.metric.label == one.basis), None)
    return None if fit is None else int(REACH * fit.range[1])


def _row(
    plot: Any, at: float, one: Limit, look: Look, name: str, predicted: bool, beyond: int | None
) -> tuple[int, str]:  # fmt: skip
    """Draw one setting on one GPU; return how far it reaches on the axis, and what that is in words."""
    proven, low = 0 if predicted else one.largest_ok or 0, max(one.low or 0, one.largest_ok or 0)
    pale = 0.25 if one.extrapolated else 0.45
    own: dict[str, Any] = {"showlegend": False, **look.trace}
    bar = own | {"y": [at], "orientation": "h", "width": 0.62, "name": escape(name)}
    if low > proven:
        plot.add_bar(
            x=[low], marker={"color": faint(look.colour, pale / 3), "line": {"color": look.colour, "width": 1},
            "pattern": {"shape": "/", "fgcolor": look.colour, "size": 7, "solidity": 0.25}},
            hovertemplate=f"safe up to {low:,}<extra>{escape(name)}</extra>", **bar,
        )  # fmt: skip
    if proven:
        said = f"{proven:,} ran<extra>{escape(name)}</extra>"
        plot.add_bar(x=[proven], marker={"color": look.colour}, hovertemplate=said, **bar)
    end = max(low, proven, one.value or 0)
    if one.value is not None and not predicted:
        plot.add_scatter(
            x=[one.value], y=[at], mode="markers", hovertemplate=f"estimate {one.value:,}<extra>{escape(name)}</extra>",
            marker={"symbol": "line-ns", "size": 19, "line": {"color": INK, "width": 2.5}}, **own,
        )  # fmt: skip
    if one.high is not None and one.high > end:
        plot.add_scatter(
            x=[end, one.high], y=[at, at], mode="lines", line={"color": INK, "width": 1.2}, hoverinfo="skip", **own,
        )  # fmt: skip
        end = one.high
    if beyond is not None:
        plot.add_scatter(
            x=[end, beyond], y=[at, at], mode="lines+markers", line={"color": INK, "width": 1.2, "dash": "dot"},
            marker={"symbol": ["line-ns", "arrow-right"], "size": 9, "color": INK}, hoverinfo="skip", **own,
        )  # fmt: skip
        end = beyond
    ran = f"{one.largest_ok:,} ran" if one.largest_ok and not predicted else ""
    guess = f"> {beyond:,}°" if beyond is not None else ""
    if one.value is not None and one.value != one.largest_ok:
        guess = f"≈ {one.value:,}{'°' * one.extrapolated}"
    told = ", ".join(filter(None, (ran, guess))) or f"{one.largest_ok or one.low:,} fits"
    return end, told + " (all)" * (one.remark == ALL)
