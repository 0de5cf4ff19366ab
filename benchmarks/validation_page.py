"""docs/validation.md and its figure, from readings that `vramsweep validate` wrote: no reading is predicted again.

python benchmarks/validation_page.py READINGS.json OUT.md FIGURE.png
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from speed_factors import of_speed

from vramsweep.analysis.compare.validation import (
    GIB,
    MEMORY,
    MISS,
    Validation,
    load,
    of_misses,
    of_outcomes,
    of_readings,
    of_summary,
    other_tools_errors,
    percent,
    size,
    worst,
)
from vramsweep.analysis.data import markup
from vramsweep.analysis.figures.drawing import Picture, draw_one
from vramsweep.analysis.figures.plots import COLOURS, GREY
from vramsweep.harness.files import outputs
from vramsweep.harness.hardware.gpu_lookup import CONTEXT_BYTES
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.spec.trial_identity import SIMULATION

TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
REACH = 10.0  # percent: errors beyond it stand at the edge, with their number
WIDTH, TOP, LINE = 270, 260, 26  # pixels: of a panel, of the upper ones' height, of a source
_SPEED = (
    "Seconds a step: as estimated by the roofline, the longer of computation and communication; and calibrated by the "
    "speeds of all other sources, with the same card where one of them has it."
)
_HEAD = """\
# Predicted against what others published

Each run below was measured by somebody else on a real GPU and published; `vramsweep validate` predicts it on
`device=simulated`, from its settings alone. What a reading told is never compared with that reading: milabench's
contexts, below, the lengths of lit-gpt's later passes, and that the softmax of 2020 kept its input.
This page is written by `make validate`, with {made}, simulation {simulation}.
[The format](../benchmarks/published/README.md) of the files, and how to add a run of your own.

- Counters are never pooled: *allocated*, *active* and *reserved* are PyTorch's, *device* is what the driver reports,
  predicted as reserved plus the CUDA context: as the source says it, or as one reading of each card shows it
  (milabench; those are not counted), else {context} MiB.
- A peak that is the optimizer's, or weights and gradients alone (*fixed*), can be counted without a tool; it stands
  apart from one that *moves* with batch and length: in the forward or backward phase, with 1 % of activations at least.
- A run that is predicted to run out of memory though it fitted (*does not fit*) stands apart as well: what it reserved
  is put beside what it would reserve without a limit; its other readings are listed as not predicted.
- A reading is counted once where its source has the same value of the same counter for another run that is the same
  trial here (milabench's fp32 and tf32); *every reading* has it again. So are such runs in *what fits*.
- *between the bounds*: with several streams it is not known when a freed block comes back. The prediction is of a card
  that keeps up with the host, the upper bound of a host that runs ahead as far as it may. So many lie between the two,
  a thousandth more or less.
- *above the states*: the same difference as a share of what was measured above weights, buffers, gradients and
  optimizer state.
- Grade A: the script and its versions were published. B: the configuration is clear.
"""


def of_differences(found: pd.DataFrame) -> pd.DataFrame:
    """Errors with and without the known differences of the versions that ran, by source and counter."""
    both = found[found["error"].notna() & found["plain_error"].notna() & found["quantity"].isin(MEMORY)]
    return pd.DataFrame(
        {
            "source": title,
            "counter": kind,
            "readings": str(len(mine)),
            "median with them": size(mine["error"].abs().median()),
            "worst": percent(worst(mine["error"])),
            "median without": size(mine["plain_error"].abs().median()),
            "worst without": percent(worst(mine["plain_error"])),
            "differences": ", ".join(sorted({name for names in mine["differences"] for name in names})),
        }
        for (title, kind), mine in both.groupby(["title", "kind"], sort=False)
    )


def of_left_out(found: pd.DataFrame) -> pd.DataFrame:
    """What was not predicted, and why; mistakes have a list of their own."""
    gone = found[found["reason"].notna() & ~found["mistake"]]
    lines = []
    for (title, reason), mine in gone.groupby(["title", "reason"], sort=False):
        runs = list(dict.fromkeys(mine["run"]))
        names = "; ".join(runs[:4]) + (f" and {len(runs) - 4} more" if len(runs) > 4 else "")
        lines.append({"source": title, "readings": str(len(mine)), "runs": names, "why": reason})
    return pd.DataFrame(lines)


def all_tables(made: Validation) -> list[tuple[str, str, pd.DataFrame]]:
    """Every table with its title and a sentence that says what it shows."""
    found = made.readings[~made.readings["again"]]
    whole = found[found["phase"].isna()]
    tools = "; ".join(f"*{name}*: {source}" for name, source in made.others.items()) + "."
    return [
        ("By counter", "Errors are predicted / measured - 1. Grade A and B together.", of_summary(whole)),
        ("By counter, grade A", "Script and versions were published.", of_summary(whole[whole["grade"].eq("A")])),
        ("By source", "", of_summary(whole, "title")),
        ("By phase", "Peaks of a step's phases.", of_summary(found[found["phase"].notna()], "title")),
        ("Next to other tools", tools, other_tools_errors(whole, made.others)),
        ("Older versions", "As the versions that ran do it, and as the installed ones do.", of_differences(whole)),
        ("What fits", "", of_outcomes(made.readings)),
        ("Misses", f"Memory that was missed by more than {100 * MISS:.0f} %.", of_misses(found)),
        ("Not predicted", "", of_left_out(found)),
        ("Speed", _SPEED, of_speed(found)),
        ("Every reading", "", of_readings(made.readings)),
    ]  # fmt: skip


def write_page(made: Validation, out: Path, figure: Path) -> None:
    """Write all tables as Markdown; the page shows `figure`."""
    versions = ", ".join(f"{name} {version}" for name, version in made.made.items() if version)
    lines = [_HEAD.format(made=versions, context=CONTEXT_BYTES >> 20, simulation=SIMULATION)]
    link = os.path.relpath(figure, out.parent)
    lines.append(f"![Predicted against measured, and errors by source]({link})\n")
    for title, about, frame in all_tables(made):
        if len(frame):
            lines += [f"## {title}\n", f"{about}\n" if about else "", markup.markdown(_without_empty(frame))]
    if made.mistakes:
        lines += ["## Left out as mistaken\n", *(f"- {one}" for one in made.mistakes), ""]
    outputs.write(out, "\n".join(line for line in lines if line) + "\n")


def _without_empty(frame: pd.DataFrame) -> pd.DataFrame:
    """Without columns in which nothing is said."""
    return frame[[name for name in frame if not frame[name].isin(["", "–"]).all()]]


def draw_errors(found: pd.DataFrame) -> go.Figure | None:
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


def main(readings: Path, out: Path, figure: Path) -> None:
    """Write the page, then the figure. Raises UserError where there is nothing to draw."""
    made = load(readings)
    write_page(made, out, figure)
    plot = draw_errors(made.readings)
    if plot is None:
        raise UserError(f"no memory was predicted: {out} is written, {figure}, which it links, is not")
    draw_one(Picture(plot, figure, scale=2))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(str(__doc__))
    try:
        main(*map(Path, sys.argv[1:]))
    except UserError as error:
        sys.exit(str(error))
