"""Figures of speed against length: measured tokens, samples and steps per second, share of the GPU's peak, estimate."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import Group, whatever
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.memory import parts_of
from vramsweep.analysis.figures.plots import LENGTH, End, Figure, finish, new_panels, new_plot, sentence
from vramsweep.analysis.figures.style import Look, View, baseline, having, names
from vramsweep.analysis.model.curves import FEWEST
from vramsweep.analysis.model.fit import FEWEST_TIMES, Fit

PANELS = (((0.0, 1.0),), ((0.54, 1.0), (0.0, 0.46)))  # of the height: for one column, for two


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


SPEEDS = ("samples_per_s", "tokens_per_s")
OF_A_STEP = ("micro_batch", "grad_accum", "world_size")  # their product is the samples of a step


def throughput(view: View) -> list[Figure]:
    """Draw tokens per second against length; the curve is tokens per step over the fitted step time. Groups with too
    few lengths for a line of step times are points alone."""
    fits = {fit.group: fit for fit in view.fits if fit.metric.column == "step_median_s" and fit.samples_per_step}
    shown, note = baseline([g for g in view.groups if g.id in fits] or _few(view), ("precision", "micro_batch"))
    if not shown:
        return []
    plot = new_plot(LENGTH, "throughput (tokens/s)")
    data, ends, reach = [], [], [0.0]
    for group, name in zip(shown, names(shown), strict=True):
        fit, look = fits.get(group.id), view.look(group)
        rows = _missed(fit, group).assign(group=group.label, name=name)
        x, y = rows["seq_len"].to_numpy(float), rows["tokens_per_s"].to_numpy(float)
        end = (float(x[-1]), float(y[-1])) if fit is None else _draw_fit(plot, fit, look, name, len(shown) <= 3)
        at = plots.thin(x, y)
        ids, out = rows["trial_id"].to_numpy()[at], rows["outside"].to_numpy(bool)[at]
        if not out.all():
            plots.add_points(plot, x[at][~out], y[at][~out], ids[~out], look, name)
        if out.any():
            plots.add_points(plot, x[at][out], y[at][out], ids[out], look, name, bool(out.all()), hollow=True)
        ends.append(End(*end, name, look))
        reach += [float(y.max())]
        data.append(rows)
    finish(plot, ends if len(shown) > 1 else [], reach)
    every = pd.concat(data, ignore_index=True)
    columns = ["group", "seq_len", "tokens_per_s", "over_fit", "outside", "trial_id"]
    if shown[0].id in fits:
        band = "; bands: its 95 % interval" if len(shown) <= 3 else ""
        told = [f"Points: rows. Lines: tokens per step divided by the fitted step time{band}.", _misses(every)]
    else:
        told = ["Points: rows. There are too few lengths for a line."]
        columns = [name for name in columns if name not in ("over_fit", "outside")]
    return [Figure("throughput", "Throughput against sequence length", sentence(*told, note), plot, every[columns])]


def _draw_fit(plot: Any, fit: Fit, look: Look, name: str, banded: bool) -> tuple[float, float]:
    """Draw the curve of a fit's throughput, with its interval if `banded`; return where it ends."""
    samples = fit.samples_per_step or 1
    for part, _ in parts_of(fit):
        predicted, tokens = fit.predict(part), part * samples
        if banded:
            with np.errstate(divide="ignore"):
                low, high = tokens / np.maximum(predicted.high, 0), tokens / np.maximum(predicted.low, 0)
            plots.add_band(plot, part, low, high, look)
        plots.add_curve(plot, part, tokens / predicted.value, look, name)
    return fit.range[1], float(fit.range[1] * samples / fit.value(np.array([fit.range[1]]))[0])


def _few(view: View) -> list[Group]:
    """Return the groups with some lengths, but fewer than a line of step times takes."""
    counts = {g.id: g.ok("tokens_per_s", "seq_len")["seq_len"].nunique() for g in view.groups if not g.varies}
    return [group for group in view.groups if FEWEST <= counts.get(group.id, 0) < FEWEST_TIMES]


def _missed(fit: Fit | None, group: Group) -> pd.DataFrame:
    """Return the rows, with how far each step time lies over the fitted one (a share). Mark those outside the interval
    for a new run. Without a fit, nothing is outside."""
    if fit is None:
        return group.ok("tokens_per_s", "seq_len").sort_values("seq_len").assign(over_fit=np.nan, outside=False)
    rows = group.ok("tokens_per_s", "seq_len", "step_median_s").sort_values("seq_len")
    length, step = (rows[name].to_numpy(float) for name in ("seq_len", "step_median_s"))
    x, at = np.unique(length, return_inverse=True)
    fitted = fit.predict(x)
    outside = (step < fitted.new_low[at]) | (step > fitted.new_high[at])
    return rows.assign(over_fit=step / fitted.value[at] - 1, outside=outside)


def _misses(rows: pd.DataFrame) -> str:
    """Say how many rows the fit misses, and name the worst of them."""
    if (missed := rows[rows["outside"]]).empty:
        return "All rows lie inside the fit's 95 % interval for a new run."
    worst = missed.iloc[int(np.argmax(missed["over_fit"].abs()))]
    way = "slower" if worst["over_fit"] > 0 else "faster"
    return (
        f"Open markers: {len(missed):,} of {len(rows):,} lie outside the fit's 95 % interval for a new run; worst: a "
        f"step {100 * abs(worst['over_fit']):.1f} % {way} than fitted, at {int(worst['seq_len']):,} tokens."
    )


def mfu(view: View) -> list[Figure]:
    """Draw model FLOP/s utilisation against length."""
    return lines(
        view, groups_with(view.groups, "mfu"), {"mfu": "MFU (% of dense peak)"}, 0.01, "mfu",
        "Model FLOP/s utilisation",
        "Model FLOP/s over the published dense peak of this precision on this GPU; median of repeats.", ("precision",),
    )  # fmt: skip


def iterations(view: View) -> list[Figure]:
    """Draw optimizer steps per second against length, as scripts count them. Samples per second are below, unless a
    step has one sample: then they are the same."""
    found, each = [], set()
    for group, rows in () if view.predicted else groups_with(view.groups, "step_median_s", *SPEEDS, *OF_A_STEP):
        samples = rows["samples_per_s"].fillna(rows["tokens_per_s"] / rows["seq_len"])
        steps = (samples / rows[[*OF_A_STEP]].prod(axis=1, skipna=False)).fillna(1 / rows["step_median_s"])
        found.append((group, rows.assign(steps_per_s=steps, samples_per_s=samples)))
        each |= {round(one) for one in [(samples / steps).median()] if pd.notna(one)}
    more, same = each - {1}, each == {1}
    caption = sentence(
        "Optimizer steps per second; medians of repeats.",
        f"Below: samples per second; a step has {' or '.join(map(str, sorted(each)))}." if more else "",
        "A step has one sample, so samples/s are the same." if same else "",
    )
    columns = {"steps_per_s": "iterations/s" + " = samples/s" * same, "samples_per_s": "samples/s" if more else ""}
    title = f"Iterations {'and samples ' * bool(each)}per second"
    return lines(view, found, columns, 1.0, "iterations", title, caption, ("precision", "micro_batch"))


def estimated(view: View) -> list[Figure]:
    """Draw estimated tokens per second against length. Only simulated rows have it; no allocator changes it."""
    speed = "estimated_tokens_per_s"
    return lines(
        view, groups_with(whatever(view.groups, "allocator"), speed),
        {speed: "estimated throughput (tokens/s, not measured)"}, 1.0, "estimated_throughput",
        "Estimated throughput (roofline, not measured)",
        "Roofline estimate of predicted rows: each kernel runs at the GPU's peak, so real runs are usually slower.",
        ("gpu_name", "precision", "micro_batch"),
    )  # fmt: skip
