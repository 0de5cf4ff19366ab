"""What `vramsweep validate` says: the short tables in the terminal, all of them as a Markdown page."""

from __future__ import annotations

import os
from io import StringIO
from pathlib import Path

import pandas as pd
from rich.table import Table

from vramsweep.analysis.compare import speed
from vramsweep.analysis.compare.validation import RUN, Validation, once
from vramsweep.analysis.compare.validation import tables as of_memory
from vramsweep.analysis.data import markup
from vramsweep.harness import outputs
from vramsweep.harness.console import Console
from vramsweep.harness.gpus import CONTEXT_BYTES
from vramsweep.harness.trial import SIMULATION

MOST = 8  # reasons in the terminal
_SHORT = ("By counter", "By source", "Next to other tools", "Speed", "What fits", "Misses")
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


def all_tables(made: Validation) -> list[tuple[str, str, pd.DataFrame]]:
    """Every table with its title and what it shows, those of speed before the last, long one."""
    *short, every = of_memory(made)
    return [*short, ("Speed", _SPEED, speed.of_speed(once(made.readings))), every]


def text(made: Validation) -> str:
    """For the terminal: errors by counter and source, what fits, misses, and how much was left out."""
    stream = StringIO()
    console = Console(file=stream, width=max(Console().width, 120))
    for title, _, frame in all_tables(made):
        if title in _SHORT and len(frame):
            table = Table(*map(str, frame.columns), title=title, title_justify="left", box=None, padding=(0, 1))
            for row in frame.to_numpy():
                table.add_row(*(str(cell) for cell in row))
            console.print(table)
            console.print()
    gone = made.readings[made.readings["reason"].notna()]
    left, wrong = gone[~gone["mistake"]], gone[gone["mistake"]]
    if len(left):
        runs = left.drop_duplicates([*RUN, "reason"])
        console.print(f"{_counted(left)} were not predicted; --out OUT.md says why.")
        for reason, count in runs["reason"].value_counts().head(MOST).items():
            console.print(f"  {count:,}: {reason}", highlight=False)
    if len(wrong):
        console.print(f"{_counted(wrong)} were left out as mistaken.")
    return stream.getvalue().rstrip()


def _counted(readings: pd.DataFrame) -> str:
    return f"{len(readings):,} readings of {len(readings.drop_duplicates(RUN)):,} runs"


def write(made: Validation, out: Path, figure: Path | None) -> None:
    """The page; `figure` is shown where it was drawn."""
    versions = ", ".join(f"{name} {version}" for name, version in made.made.items() if version)
    lines = [_HEAD.format(made=versions, context=CONTEXT_BYTES >> 20, simulation=SIMULATION)]
    if figure is not None:
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
