"""Figures of peak memory against length: rows, their fit, where a new run lies, what did not fit, and residuals."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import Group, label, others_equal
from vramsweep.analysis.data.metrics import Unit, unit_of
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.gpus import add_card_limit, card_limit
from vramsweep.analysis.figures.plots import GREY, LENGTH, End, Figure, finish, sentence
from vramsweep.analysis.figures.style import Look, View, names, shared
from vramsweep.analysis.model import fit_wording
from vramsweep.analysis.model.curves import BASES, PLAIN, Array
from vramsweep.analysis.model.fit import Fit
from vramsweep.analysis.model.observations import AXES, UNITS
from vramsweep.analysis.model.residual_model import Unaligned

CONFIGURATIONS = 6  # of which the page's reader can choose; all but the first few are hidden until then
TOGETHER = 3
ABOVE, STRIP = (0.28, 1.0), (0.0, 0.2)  # of the height: the fits, and below them the residuals
ZERO = {"zeroline": True, "zerolinecolor": GREY, "zerolinewidth": 1}
FAINT = 0.45
PLAIN_DASHES = {"linear": "dot", "quadratic": "dashdot"}


def by_length(view: View) -> list[Figure]:
    """Draw peak allocated (else active) and reserved memory of a few groups that differ in batch."""
    fitted = {fit.group for fit in view.fits if fit.metric.memory}
    most = {fit.group: fit.lengths for fit in view.fits}
    known = [group for group in view.groups if group.id in fitted]
    known.sort(key=lambda group: (group is not view.groups[0], -most[group.id]))
    drawn = known if len(known) <= TOGETHER else others_equal(known, ("micro_batch",))[:TOGETHER]
    if not drawn:
        return []
    others = [group for group in known if all(group is not one for one in drawn)]
    fits = [fit for group in drawn for fit in _drawn_fits(view, group)]
    unit, called = plots.axis_unit(max(float(fit.points.y.max()) for fit in fits))
    plot = plots.new_panels(LENGTH, {f"peak memory ({called})": ABOVE, "": STRIP}, yaxis2=ZERO)
    ends: list[End] = []
    data: list[pd.DataFrame] = []
    reach = [0.0]
    for group, which in zip(drawn, names(drawn), strict=True):
        look = view.look(group)
        for fit in _drawn_fits(view, group):
            own = look if fit.metric.column != "peak_reserved_bytes" or len(drawn) > 1 else look.numbered(1)
            what = fit.metric.label.removeprefix("peak ")
            called = f"{what}, {which}" if len(drawn) > 1 else what
            data.append(_draw(plot, fit, own, called, unit, ends))
            _add_plain(plot, fit, own, unit, view.curves)
            reach += [float(fit.points.y.max()) / unit]
    for group in others[: CONFIGURATIONS - len(drawn)]:
        for fit in _drawn_fits(view, group):
            _draw(plot, fit, view.look(group, hidden=True), f"{fit.metric.label}, {group.label}", unit, ends)
    limit = card_limit(drawn[0], max(reach) * unit)
    out = [_misfits(plot, group, view.look(group), limit, unit) for group in drawn]
    if limit is not None and (limit.near or any(len(one) for one in out)):
        reach.append(limit.size / unit)
        add_card_limit(plot, limit, unit)
    finish(plot, ends, reach, share=ABOVE[1] - ABOVE[0])
    _strip_range(plot)
    caption = sentence(
        _lines_are(fits), _kinds(drawn, fits), _crosses(out), "" if limit is None else limit.told(),
        f"All with {label(shared(drawn))}." if len(drawn) > 1 and shared(drawn) else "",
        f"Drawn: {len(drawn)} of {len(known):,} configurations." if len(drawn) < len(known) else "",
    )  # fmt: skip
    every = pd.concat([*data, *(one.rename(columns={"seq_len": fits[0].axis}) for one in out)], ignore_index=True)
    return [Figure("memory_by_length", "Peak memory against sequence length", caption, plot, every)]


def of_fit(fit: Fit, curves: Sequence[str] = PLAIN) -> Figure:
    """Draw one fit with its line and parabola (`curves`): points, the chosen curve and its band, residuals below."""
    axis, metric = AXES[fit.axis], fit.metric
    unit, called = (1, metric.unit) if not metric.memory else plots.axis_unit(float(fit.points.y.max()))
    panels = {f"{metric.label} ({called})": ABOVE, "": STRIP}
    plot = plots.new_panels(f"{axis} ({UNITS[fit.axis]})", panels, yaxis2=ZERO)
    ends: list[End] = []
    name = "chosen curve" if fit.modulus else fit.chosen.model.name  # a line's class of lengths follows it
    data = _draw(plot, fit, Look(plots.COLOURS[0]), name, unit, ends)
    for trace in plot.data if fit.axis != "seq_len" else ():
        trace.hovertemplate = trace.hovertemplate and trace.hovertemplate.replace(" tokens", f" {UNITS[fit.axis]}")
    _add_plain(plot, fit, Look(plots.COLOURS[0]), unit, curves)
    finish(plot, ends, [0.0, float(fit.points.y.max()) / unit], share=ABOVE[1] - ABOVE[0])
    _strip_range(plot, metric.memory)
    told = [fit_wording.equations(fit, one) for one in fit.shown if one is fit.chosen or one.model.kind in curves]
    title = f"{metric.label.capitalize()} against {axis}{', ' * bool(fit.settings)}{fit.label * bool(fit.settings)}"
    return Figure("fit", title, sentence(_lines_are([fit]), *told), plot, data)


def _add_plain(plot: Any, fit: Fit, look: Look, unit: int, asked: Sequence[str]) -> None:
    """Draw line and parabola of all points, shown if `asked` for or clicked in the legend; it has one entry a kind."""
    x = np.linspace(*fit.range, 160)
    for one in fit.shown[:-1]:
        kind = one.model.kind
        first = all(trace.legendgroup != kind for trace in plot.data)
        plot.add_scatter(
            x=x, y=one.model.predict(x) / unit, mode="lines", name=one.model.name, legendgroup=kind, showlegend=first,
            line={"color": plots.shade(look.colour, 0.7), "width": 1.5, "dash": PLAIN_DASHES[kind], "simplify": False},
            hovertemplate=f"{plots.escape(fit_wording.equations(fit, one))}<br>R² {fit_wording.format_r2(one.r2)}"
            "<extra></extra>",
            **look.trace | ({} if kind in asked else {"visible": "legendonly"}),
        )  # fmt: skip
        plot.update_layout(showlegend=True)


def _drawn_fits(view: View, group: Group) -> list[Fit]:
    """Return the group's fits that are drawn; without resident sets, which say little next to tensor bytes."""
    own = {fit.metric.column: fit for fit in view.fits if fit.group == group.id}
    first = own.get("peak_allocated_bytes") or own.get("peak_active_bytes")
    reserved = None if group.resident else own.get("peak_reserved_bytes")
    return [fit for fit in (first, reserved) if fit is not None]


def parts_of(fit: Fit, many: int = 160) -> list[tuple[Array, str]]:
    """Return the x at which a fit is drawn, each with its name. Lengths that are not aligned and those that are have a
    line each, instead of a comb."""
    x = np.linspace(max(fit.range[0], 1), fit.range[1], many)
    if not (modulus := fit.modulus):
        return [(np.unique(fit.predictor.of_other_class(x)) if isinstance(fit.predictor, Unaligned) else x, "")]
    x = np.unique(np.floor(x))
    return [(x[x % modulus != 0], "others"), (np.unique(x - x % modulus)[1:], f"multiples of {modulus}")]


def _draw(plot: Any, fit: Fit, look: Look, name: str, unit: int, ends: list[End]) -> pd.DataFrame:
    """Draw one fit: band of a new run, points, lines on top of them, labels, residuals; return the data."""
    points, dashed = fit.points, fit.metric.column == "peak_reserved_bytes"
    at = plots.thin(points.x, points.y)
    ids = np.array(points.ids, dtype=object)[at]
    x, y, fitted = points.x[at], points.y[at], fit.value(points.x[at])
    lines = [(part, kind, fit.predict(part)) for part, kind in parts_of(fit, 40 if look.hidden else 160) if len(part)]
    for part, _, new in lines:
        plots.add_band(plot, part, new.new_low / unit, new.new_high / unit, look)
    plots.add_points(plot, x, y / unit, ids, look, name, hollow=dashed, faded=FAINT)
    above = look if len(x) <= plots.MANY else replace(look, colour=plots.shade(look.colour, 0.6))
    for part, kind, new in lines:
        plots.add_curve(plot, part, new.value / unit, above, name, "dash" if dashed else "solid")
        ends.append(End(float(part[-1]), float(new.value[-1]) / unit, f"{name}, {kind}" if kind else name, look))
    plots.add_points(plot, x, y - fitted, ids, look, name, False, dashed, FAINT, yaxis="y2")
    plain = {one.model.kind: one.model.predict(points.x) for one in fit.shown if one.model.kind in PLAIN}
    found = {"group": fit.label, "metric": fit.metric.column, fit.axis: points.x, "value": points.y}
    found |= {"fitted": fit.value(points.x), **plain, "model": fit.chosen.model.name}
    return pd.DataFrame(found | {"rests_on": fit.basis, "trial_id": points.ids})  # all points; fewer are drawn


def _misfits(plot: Any, group: Group, look: Look, limit: Any, unit: int) -> pd.DataFrame:
    """Draw rows that ran out of memory as crosses at their length on the GPU's limit, because their need is unknown.
    Return them."""
    rows = group.take("seq_len", "outcome", "trial_id").assign(group=group.label)
    rows = rows[rows["outcome"].eq("oom").fillna(False) & rows["seq_len"].notna()]
    if limit is not None and len(rows):
        x = rows["seq_len"].to_numpy(float)
        plot.add_scatter(
            x=x, y=np.full(len(x), limit.size / unit), mode="markers", name="out of memory", showlegend=False,
            marker={"symbol": "x", "size": 9, "color": look.colour, "line": {"color": "#fff", "width": 1}},
            hovertemplate="%{x:,} tokens: out of memory<extra></extra>", **look.trace,
        )  # fmt: skip
    return rows[["group", "seq_len", "outcome", "trial_id"]]


def _strip_range(plot: Any, memory: bool = True) -> None:
    """Convert residuals from the column's unit to their own; show nearly all of them, the same up and down."""
    found = [np.abs(np.asarray(t.y, dtype=float)) for t in plot.data if t.yaxis == "y2" and t.visible is not False]
    most = float(np.nanpercentile(np.concatenate(found), 99.5)) if found else 0.0
    unit = unit_of(most) if memory else Unit(1, "s", 3)
    for trace in plot.data:
        if trace.yaxis == "y2":
            trace.y = np.asarray(trace.y, dtype=float) / unit.bytes
    reach = 1.2 * (most / unit.bytes or 1.0)
    power = 10.0 ** np.floor(np.log10(reach))
    tick = next(power * step for step in (5, 2, 1) if power * step <= reach)
    title = {"text": f"row − fit<br>({unit.name})"}
    plot.update_layout(yaxis2={"range": [-reach, reach], "tickvals": [-tick, 0, tick], "title": title})


def _lines_are(fits: Sequence[Fit]) -> str:
    """Say what points, lines and bands are, and what the lines rest on (of each quantity, if that differs)."""
    of: dict[str, list[str]] = {}
    for fit in fits:
        of.setdefault(fit.basis, []).append(fit.metric.label)
    rest = [BASES[basis] + f" ({' and '.join(dict.fromkeys(labels))})" * (len(of) > 1) for basis, labels in of.items()]
    return (
        f"Points: rows. Lines: the fit, based {', or '.join(rest)}. Bands: 95 % interval of a new run. Below: rows "
        "minus fit."
    )


def _kinds(groups: Sequence[Group], fits: Sequence[Fit]) -> str:
    if all(group.resident for group in groups):
        return "On a CPU, memory is the bytes of live tensors."
    return "Open markers and dashed lines: reserved." if any(fit.metric.limited for fit in fits) else ""


def _crosses(out: Sequence[pd.DataFrame]) -> str:
    if (every := pd.concat(out)).empty:
        return ""
    return f"Crosses: {len(every):,} ran out of memory, the shortest at {int(every['seq_len'].min()):,} tokens."
