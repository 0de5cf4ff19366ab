"""The figure of `vramsweep validate`: predicted against measured, and the errors by source, a column a counter."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from vramsweep.analysis.compare.validation import GIB, MEMORY
from vramsweep.analysis.figures.browser import Picture, draw_one
from vramsweep.analysis.figures.plots import COLOURS, GREY
from vramsweep.harness.errors import UserError

TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
REACH = 10.0  # percent: errors beyond it stand at the edge, with their number
WIDTH, TOP, LINE = 270, 260, 26  # pixels: of a panel, of the upper ones' height, of a source


def figure(found: pd.DataFrame) -> go.Figure | None:
    """Whole-run memory that was predicted; filled markers move with batch and length. None where there is nothing."""
    known = found[found["error"].notna() & found["phase"].isna() & found["quantity"].isin(MEMORY)]
    kinds = [kind for kind in MEMORY if known["quantity"].eq(kind).any()]
    titles = list(dict.fromkeys(known["title"]))[::-1]
    if not kinds:
        return None
    lower = LINE * len(titles) + 20
    height = TOP + lower + 150
    plot = make_subplots(
        rows=2, cols=len(kinds), subplot_titles=kinds, shared_yaxes="rows", horizontal_spacing=0.02,
        vertical_spacing=70 / height, row_heights=[TOP, lower],
    )  # fmt: skip
    sizes = pd.concat([known["measured"], known["predicted"]]).astype(float) / GIB
    ends = [float(sizes.min()) / 1.3, float(sizes.max()) * 1.3]
    for column, kind in enumerate(kinds, start=1):
        mine = known[known["quantity"].eq(kind)]
        colour = COLOURS[MEMORY.index(kind)]
        plot.add_scatter(
            x=ends, y=ends, mode="lines", line={"color": GREY, "width": 1}, showlegend=False, hoverinfo="skip",
            row=1, col=column,
        )  # fmt: skip
        for moving, part in ((True, mine[mine["moving"].fillna(False)]), (False, mine[~mine["moving"].fillna(False)])):
            marker = {"color": colour, "size": 7, "opacity": 0.75, "symbol": "circle" if moving else "circle-open"}
            hover = [f"{t}: {r}" for t, r in zip(part["title"], part["run"], strict=True)]
            plot.add_scatter(
                x=part["measured"].astype(float) / GIB, y=part["predicted"].astype(float) / GIB, mode="markers",
                marker=marker, text=hover, showlegend=False, row=1, col=column,
            )  # fmt: skip
            error = 100 * part["error"].astype(float)
            plot.add_scatter(
                x=error.clip(-REACH, REACH), y=part["title"], mode="markers", marker=marker, text=hover,
                showlegend=False, row=2, col=column,
            )  # fmt: skip
        for (title, above), far in mine[100 * mine["error"].abs() > REACH].groupby(["title", mine["error"] > 0]):
            reach = 100 * far["error"].astype(float)
            plot.add_annotation(
                x=REACH if above else -REACH, y=title, text=f"{reach.max() if above else reach.min():+.0f} %",
                showarrow=False, font={"size": 10}, xanchor="right" if above else "left", yshift=10, row=2, col=column,
            )  # fmt: skip
        plot.add_vline(x=0, line={"color": GREY, "width": 1}, row=2, col=column)
        plot.update_xaxes(type="log", tickvals=TICKS, title_text="measured (GiB)", row=1, col=column)
        plot.update_xaxes(range=[-1.12 * REACH, 1.12 * REACH], title_text="error (%)", row=2, col=column)
    plot.update_yaxes(type="log", tickvals=TICKS, row=1)
    plot.update_yaxes(title_text="predicted (GiB)", row=1, col=1)
    plot.update_yaxes(categoryorder="array", categoryarray=titles, row=2)
    plot.update_layout(
        template="plotly_white", width=190 + WIDTH * len(kinds), height=height, font={"size": 12, "color": "#000"},
        margin={"t": 40, "r": 16, "b": 80, "l": 160},
    )  # fmt: skip
    plot.add_annotation(
        text="filled: the peak moves with batch and length; open: it is fixed, or does not fit",
        showarrow=False, xref="paper", yref="paper", x=0, y=0, yshift=-62, xanchor="left", font={"size": 11},
    )  # fmt: skip
    return plot


def write(found: pd.DataFrame, out: Path) -> None:
    """Write the figure; the suffix says the format. Raises UserError where that cannot be done."""
    plot = figure(found)
    if plot is None:
        raise UserError("no memory was predicted, so there is nothing to draw")
    draw_one(Picture(plot, out, scale=2))
