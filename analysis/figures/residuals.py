"""Figures of predictions compared with measurements: one against the other, and the relative prediction errors."""

import numpy as np
import pandas as pd

from vramsweep.analysis.compare.residuals import COMPONENTS, HEADLINES, name_of, percent
from vramsweep.analysis.data.metrics import GIB
from vramsweep.analysis.figures.plots import ABOVE, POINTS, Figure, escape, faint, new_plot, thin
from vramsweep.analysis.figures.style import COLOURS, GREY, MARKERS


def of_residuals(found: pd.DataFrame) -> list[Figure]:
    """Return the figures that these residuals allow, in reading order."""
    return [figure for figure in (predicted_against_measured(found), residuals(found)) if figure is not None]


def predicted_against_measured(found: pd.DataFrame) -> Figure | None:
    """Draw predicted over measured peak allocated and reserved, one point a configuration."""
    known = found[found["component"].isin(HEADLINES)].dropna(subset=["predicted_bytes", "measured_bytes"])
    if known.empty:
        return None
    top = float(known[["predicted_bytes", "measured_bytes"]].max().max()) / GIB * 1.05
    plot = new_plot("measured peak (GiB)", "predicted peak (GiB)")
    plot.add_scatter(
        x=[0, top], y=[0, top], mode="lines", line={"color": GREY, "dash": "dot"}, hoverinfo="skip", showlegend=False
    )
    parts = []
    for number, component in enumerate(HEADLINES):
        if (mine := known[known["component"] == component].sort_values("measured_bytes")).empty:
            continue
        measured, predicted = (mine[f"{side}_bytes"].to_numpy(float) / GIB for side in ("measured", "predicted"))
        at = thin(measured, predicted)
        kind = name_of(component).removeprefix("peak ")
        plot.add_scatter(
            x=measured[at], y=predicted[at], mode="markers", name=kind,
            customdata=mine["settings"].map(escape).to_numpy()[at],
            marker={"color": COLOURS[number], "symbol": MARKERS[number] + "-open" * number, "size": 8},
            hovertemplate="%{customdata}<br>measured %{x:.3~f}, predicted %{y:.3~f} GiB<extra>" + kind + "</extra>",
        )  # fmt: skip
        size = percent(float(mine["relative"].abs().median())).removeprefix("+")
        parts.append(f"{kind} {size} ({len(mine):,} configurations)")
    plot.update_xaxes(range=[0, top], tickformat=",~g")
    plot.update_yaxes(range=[0, top])
    plot.update_layout(showlegend=True, legend=ABOVE)
    caption = f"Equal settings on the same GPU. Median absolute error: {', '.join(parts)}. Dotted: both are equal."
    return Figure("predicted_against_measured", "Predicted and measured peak memory", caption, plot, found)


def residuals(found: pd.DataFrame) -> Figure | None:
    """Draw the relative residuals of each component: a box over all configurations, and each as a point."""
    known = found[found["relative"].notna()]
    if not (names := [name for name in COMPONENTS if (known["component"] == name).any()]):
        return None
    plot = new_plot("prediction error (% of measured)", "memory counter")
    plot.add_vline(x=0, line={"color": GREY, "dash": "dot"})
    random = np.random.default_rng(0)  # the height of a point within its line means nothing
    for number, component in enumerate(names):
        mine = known[known["component"] == component].sort_values("relative")
        x = 100 * mine["relative"].to_numpy(float)
        low, first, middle, third, high = np.percentile(x, [5, 25, 50, 75, 95])
        if len(x) > 4:
            plot.add_box(
                y=[number], lowerfence=[low], q1=[first], median=[middle], q3=[third], upperfence=[high],
                orientation="h", width=0.6, fillcolor=faint(COLOURS[0]), line={"color": COLOURS[0], "width": 1.5},
                hoverinfo="skip",
            )  # fmt: skip
        at = thin(np.arange(len(x), dtype=float), x, POINTS // len(COMPONENTS))
        plot.add_scatter(
            x=x[at], y=number + random.uniform(-0.2, 0.2, len(at)), mode="markers",
            customdata=mine["settings"].map(escape).to_numpy()[at],
            marker={"color": COLOURS[1], "size": 5, "opacity": 0.7},
            hovertemplate="%{customdata}: %{x:+.3~f} %<extra>" + name_of(component) + "</extra>",
        )  # fmt: skip
    texts = [name_of(name) for name in names]
    plot.update_yaxes(tickvals=list(range(len(names))), ticktext=texts, range=[len(names) - 0.5, -0.5])
    plot.update_xaxes(tickformat=",~g")
    plot.update_layout(height=90 + 27 * len(names))
    caption = (
        "Predicted minus measured. Points: configurations; boxes: median, quartiles; whiskers: 5th to 95th percentile."
    )
    return Figure("residuals", "Prediction error by counter", caption, plot, found)
