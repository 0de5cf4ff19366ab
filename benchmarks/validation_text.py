"""The output of validate.py: short tables, every reading if they are few, and how much was left out.

validation_page.py writes all tables as a page.
"""

from __future__ import annotations

from io import StringIO

import pandas as pd
import validation
from validation import RUN, Validation

from vramsweep.harness.messages.console import Console, make_table

MOST = 8  # reasons that are printed
FEW = 20  # readings that are shown one by one


def format_validation(made: Validation) -> str:
    """Return the tables as text; terminal commands in names are escaped."""
    stream = StringIO()
    console = Console(file=stream, width=max(Console().width, 120))
    found = made.readings[~made.readings["again"]]
    whole = found[found["phase"].isna()]
    tables = {
        "By counter": validation.of_summary(whole),
        "By source": validation.of_summary(whole, "title"),
        "Next to other tools": validation.other_tools_errors(whole, made.others),
        "Which runs fit": validation.of_outcomes(made.readings),
        "Large errors": validation.of_misses(found),
        "Every reading": validation.of_readings(made.readings.head(FEW if len(made.readings) <= FEW else 0)),
    }
    for title, frame in tables.items():
        if len(frame):
            rows = [list(map(str, row)) for row in frame.to_numpy()]
            console.print(make_table(list(map(str, frame.columns)), rows, title=title))
            console.print()
    gone = made.readings[made.readings["reason"].notna()]
    left, wrong = gone[~gone["mistake"]], gone[gone["mistake"]]
    if len(left):
        runs = left.drop_duplicates([*RUN, "reason"])
        console.print(f"{_count_readings(left)} were not predicted:")
        counts = runs["reason"].value_counts()
        for reason, count in counts.head(MOST).items():
            console.print(f"  {count:,}: {reason}")
        if (more := len(counts) - MOST) > 0:
            console.print(f"  and {more} more reasons: in readings.json, or with --json")
    if len(wrong):
        console.print(f"{_count_readings(wrong)} were left out as mistaken.")
    return stream.getvalue().rstrip()


def _count_readings(readings: pd.DataFrame) -> str:
    return f"{len(readings):,} readings of {len(readings.drop_duplicates(RUN)):,} runs"
