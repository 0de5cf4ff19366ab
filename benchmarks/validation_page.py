"""Write docs/published_runs.md, its figure and the CSV of every reading from the file of benchmarks/validate.py.

    python benchmarks/validation_page.py READINGS.json OUT.md FIGURE.png OUT.csv

No reading is predicted again. The tables of the page's last two sections are not made here:
benchmarks/published_sweep.py and tests/runners/predict/test_predicted_row.py repeat them.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from validation import (
    GIB,
    MEMORY,
    SPEED,
    Validation,
    load,
    of_class,
    of_misses,
    of_outcomes,
    of_speed,
    of_summary,
    other_tools_errors,
    percent,
    size,
    worst,
)

from vramsweep.analysis.data import export
from vramsweep.analysis.figures.drawing import Picture, draw_one
from vramsweep.analysis.figures.plots import COLOURS, GREY
from vramsweep.harness.files import outputs
from vramsweep.harness.hardware.gpu_lookup import CONTEXT_BYTES
from vramsweep.harness.messages.errors import UserError

TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
PAGE = Path(__file__).with_name("published_runs_page.md")  # the prose, with %(name)s for what is computed
REACH = 10.0  # percent: larger errors are drawn at the edge, with their number
WIDTH, TOP, LINE = 270, 260, 26  # pixels: width of a panel, height of the upper ones, height of a source
NEAR = 0.01  # errors up to it are counted
_RANKS = re.compile(r"; active \d+ to \d+, reserved \d+ to \d+")  # the peaks of a run's ranks, in its note
_SPEED = """\
Errors of seconds a step. *estimated* is the roofline estimate, the longer of computation and communication.
*calibrated* is `calibrated_step_s` of simulation 17, whose speeds were fitted to an H100's and an H200's steps, not to
these readings. %d of %d readings have it so far, not evenly over the sources
(`python benchmarks/published_times.py` times the rest)."""
_OLDER = """\
`+versions` makes a prediction allocate what an earlier version of a library allocates. The table has the errors with
these known differences and without them."""
_LARGE = """\
Readings of memory that are more than 3 % off, grouped by note. A note says what is known about the run; it need not
explain the whole error. *not found* means that nothing is known. The notes come from the files in
`benchmarks/published` and are about simulation 11. Since simulation 14, FSDP1's `record_stream` is followed, by [two
bounds](how_prediction_works.md#lower-and-upper-bounds); these were not compared with the runs here. The CSV file names
each run."""


def of_differences(found: pd.DataFrame) -> pd.DataFrame:
    """Tabulate errors with and without the known differences of the versions that ran, by source and counter."""
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
    """Tabulate the readings that were not predicted, by reason. Mistakes have their own list; the CSV has all runs."""
    gone = found[found["reason"].notna() & ~found["mistake"]]
    lines = []
    for (title, reason), mine in gone.groupby(["title", "reason"], sort=False):
        runs = list(dict.fromkeys(mine["run"]))
        lines.append(
            {"source": title, "readings": str(len(mine)), "runs": str(len(runs)), "first": runs[0], "why": reason}
        )
    return pd.DataFrame(lines)


def of_reasons(found: pd.DataFrame) -> pd.DataFrame:
    """Tabulate `of_misses`, with one line for all readings of a source and counter that have the same reason."""
    misses = of_misses(found)
    if misses.empty:
        return misses
    misses["why"] = misses["why"].str.replace(_RANKS, "", regex=True)
    lines = []
    for (title, kind, why), mine in misses.groupby(["source", "counter", "why"], sort=False):
        error = mine["error"].str.removesuffix(" %").astype(float).abs().to_numpy()
        far = mine.iloc[int(error.argmax())]
        least = mine["error"].iloc[int(error.argmin())]
        lines.append(
            {
                "source": title,
                "counter": kind,
                "readings": str(len(mine)),
                "least": least if len(mine) > 1 else "–",
                "worst": far["error"],
                "measured (GiB)": far["measured (GiB)"],
                "predicted": far["predicted"],
                "worst run": far["run"],
                "why": why,
            }
        )
    return pd.DataFrame(lines)


def of_near(found: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Return `of_summary` with the number of readings whose error is within 1 %."""
    text = of_summary(found, *by)
    if text.empty:
        return text
    keys = ["kind", "class", *by]
    known = of_class(found[found["error"].notna()])
    near = known["error"].abs().le(NEAR).groupby([known[key] for key in keys]).sum()
    of = ["counter", "peak", *("source" for _ in by)]
    counts = [str(near[key]) for key in text[of].itertuples(index=False, name=None)]
    text.insert(int(text.columns.get_indexer(pd.Index(["worst"]))[0]), "within 1 %", counts)
    return text


def every_reading(found: pd.DataFrame) -> pd.DataFrame:
    """Tabulate every reading: memory in bytes, times in seconds, errors as shares. `why` says why there is no
    prediction, or has notes on the run. For an outcome, measured and predicted are `ok` or `oom`."""
    lines = []
    for _, line in of_class(found[~found["mistake"]]).iterrows():
        memory, outcome = line["quantity"] in MEMORY, line["quantity"] == "outcome"
        known, notes = pd.notna(line["error"]), (line["reason"], line["note"], line["reading_note"])
        sizes = {name: _number(line[name], memory) for name in ("measured", "predicted", "predicted_most")}
        if outcome:
            sizes = {"measured": line["measured_outcome"], "predicted": line["outcome"], "predicted_most": ""}
        lines.append(
            {
                "source": line["title"],
                "file": line["place"].removeprefix("benchmarks/published/"),
                "grade": line["grade"],
                "run": line["run"],
                "gpu": line["gpu"],
                "world_size": _number(line["world_size"], whole=True),
                "counter": line["kind"],
                "unit": "" if outcome else "bytes" if memory else "s",
                "peak": line["class"] if known else "",
                "peak_in": line["peak_phase"] if known else "",
                "measured": sizes["measured"],
                "predicted": sizes["predicted"],
                "upper_bound": sizes["predicted_most"],
                "without_known_differences": _number(line["predicted_plain"], memory),
                "error": _share(line["error"]),
                "upper_bound_error": _share(line["most_error"]),
                "error_without_known_differences": _share(line["plain_error"]),
                "error_above_states": _share(line["share"]),
                "between_bounds": line["between"],
                "counted_before": line["again"],
                "why": "; ".join(text for text in notes if isinstance(text, str) and text),
            }
        )
    return pd.DataFrame(lines)


def _number(value: float | None, whole: bool) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.0f}" if whole else f"{value:.6g}"


def _share(value: float | None) -> str:
    return "" if value is None or pd.isna(value) else f"{value:+.6f}"


def all_tables(made: Validation) -> list[tuple[str, str, pd.DataFrame]]:
    """Return every table of the page, with its title and a text about it."""
    found = made.readings[~made.readings["again"]]
    whole = found[found["phase"].isna()]
    tools = "Sources of the rules and versions of the tools:\n\n" + "\n".join(
        f"- *{name}*: {source}" for name, source in made.others.items()
    )
    return [
        ("Grade A", "", of_near(whole[whole["grade"].eq("A")])),
        ("Grade B", "", of_near(whole[whole["grade"].eq("B")])),
        ("Both grades", "", of_near(whole)),
        ("By source", "", of_near(whole, "title")),
        ("By phase", "Peaks of the phases of a step.", of_near(found[found["phase"].notna()], "title")),
        ("Next to other tools", tools, other_tools_errors(whole, made.others)),
        ("Earlier versions", _OLDER, of_differences(whole)),
        ("Which runs fit", "How many runs fitted, and how many are predicted to.", of_outcomes(made.readings)),
        ("Large errors", _LARGE, of_reasons(found)),
        ("Not predicted", "*first* names the first of these runs.", of_left_out(found)),
        ("Speed", _SPEED % _timed(found), of_speed(found)),
    ]  # fmt: skip


def _timed(found: pd.DataFrame) -> tuple[int, int]:
    """Return how many readings of speed have a calibrated time, and how many have an estimate."""
    speed = found[found["quantity"].isin(SPEED) & found["error"].notna() & ~found["again"]]
    return int(speed["calibrated_step_s"].notna().sum()) if "calibrated_step_s" in speed else 0, len(speed)


def page(made: Validation, folder: Path, figure: Path, every: Path) -> str:
    """Return the page in Markdown. It shows `figure` and links `every`, by paths relative to `folder`."""
    versions = ", ".join(f"{name} {version}" for name, version in made.made.items() if version)
    taken = made.readings.loc[~made.readings["context_said"].fillna(True).astype(bool), "context_bytes"].dropna()
    lines: list[str] = []
    for title, about, frame in all_tables(made):
        if len(frame):
            lines += [f"## {title}\n", f"{about}\n" if about else "", export.markdown(_without_empty(frame))]
    if made.mistakes:
        lines += ["## Left out as mistaken\n", *(f"- {one}" for one in made.mistakes), ""]
    values = {
        "made": versions,
        "context": " or ".join(f"{int(one) >> 20}" for one in sorted(taken.unique())) or str(CONTEXT_BYTES >> 20),
        "figure": os.path.relpath(figure, folder),
        "csv": os.path.relpath(every, folder),
        "tables": "\n".join(line for line in lines if line).strip() + "\n",
    }
    return re.sub(r"%\((\w+)\)s", lambda found: values[found[1]], PAGE.read_text())


def csv_text(made: Validation) -> str:
    """Return every reading as CSV."""
    return every_reading(made.readings).to_csv(index=False, lineterminator="\n")


def _without_empty(frame: pd.DataFrame) -> pd.DataFrame:
    """Drop columns whose cells are all empty."""
    return frame[[name for name in frame if not frame[name].isin(["", "–"]).all()]]


def draw_errors(found: pd.DataFrame) -> go.Figure | None:
    """Draw predicted whole-run memory; filled: the peak depends on batch and length. None if nothing was predicted."""
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
        text="filled: the peak depends on batch and length; open: it does not, or the run does not fit",
        showarrow=False, xref="paper", yref="paper", x=0, y=0, yshift=-62, xanchor="left", font={"size": 11},
    )  # fmt: skip
    return plot


def main(readings: Path, out: Path, figure: Path, every: Path) -> None:
    """Write the page and the CSV file, then the figure. Raises UserError if there is nothing to draw."""
    made = load(readings)
    outputs.write(out, page(made, out.parent, figure, every))
    outputs.write(every, csv_text(made))
    plot = draw_errors(made.readings)
    if plot is None:
        raise UserError(f"no memory was predicted, so {out} links to {figure}, which is not written")
    draw_one(Picture(plot, figure, scale=2))


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(str(__doc__))
    try:
        main(*map(Path, sys.argv[1:]))
    except UserError as error:
        sys.exit(str(error))
