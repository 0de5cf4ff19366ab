"""What the reader of a page can choose among, and which choice each group and row belongs to.

An axis is a setting that distinguishes groups; where rows are of several kinds (measured, predicted, foreign), the kind
is one too. Values are compared as text, as figures say them in their traces (`meta.settings`).

Not covered: choosing, which the page does (report.js).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vramsweep.analysis.data.groups import Group
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import METRICS
from vramsweep.analysis.figures.style import settings as settings_of
from vramsweep.analysis.report.answer import axis_name
from vramsweep.harness.rows.quality_flags import BY_NAME

KIND = "rows"
_WORDS = {"None": "not known", "True": "yes", "False": "no", "": "none"}
MOST = 200  # values of one axis: nobody looks through more


@dataclass(frozen=True)
class Axis:
    """One select: its key in settings, what it is called, and its values: as settings have them, and in words."""

    key: str
    name: str
    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Picker:
    """The axes; of each group its settings, label and flags (how many rows have each); of each row its group, -1 where
    it is of none."""

    axes: tuple[Axis, ...] = ()
    settings: tuple[dict[str, str], ...] = ()
    labels: tuple[str, ...] = ()
    flags: tuple[dict[str, int], ...] = ()
    of_row: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    numbers: dict[str, int] = field(default_factory=dict, repr=False)

    def number(self, group: Any) -> int | None:
        """Which group an id is of."""
        return self.numbers.get(str(group))


def picker(table: Table, worlds: Sequence[tuple[str, Sequence[Group]]]) -> Picker:
    """Of the groups of a table's worlds, by name; rows of none of them are always shown."""
    of_row = np.full(len(table.frame), -1, dtype=np.int64)
    every = [group for _, groups in worlds for group in groups]
    for number, group in enumerate(every):
        of_row[table.frame.index.get_indexer(group.source.index[group.rows])] = number
    kinds: list[dict[str, str]] = [{KIND: name} if len(worlds) > 1 else {} for name, groups in worlds for _ in groups]
    settings = [settings_of(group) | kind for group, kind in zip(every, kinds, strict=True)]
    labels = tuple("" if group.label == "all rows" else group.label for group in every)
    of_rows = (group.take("flags")["flags"].dropna() for group in every)
    flags = tuple(dict(Counter(str(name) for of_row in column for name in of_row)) for column in of_rows)
    numbers = {group.id: number for number, group in enumerate(every)}
    return Picker(_axes(settings), tuple(settings), labels, flags, of_row, numbers)


def _axes(settings: Sequence[dict[str, str]]) -> tuple[Axis, ...]:
    found: dict[str, set[str]] = {}
    for own in settings:
        for key, value in own.items():
            found.setdefault(key, set()).add(value)
    return tuple(
        Axis(key, axis_name(key), tuple((value, _WORDS.get(value, value)) for value in sorted(values, key=order)))
        for key, values in found.items()
        if 1 < len(values) <= MOST
    )


def order(value: str) -> tuple[int, float, str]:
    """What sorts settings: numbers by size, then words."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def forbidding(flags: dict[str, int], claim: str) -> dict[str, int]:
    """The flags that speak against a claim, or are to be said beside any number."""
    return {name: n for name, n in flags.items() if name not in BY_NAME or claim in (BY_NAME[name].forbids or (claim,))}


def in_words(flags: dict[str, int]) -> str:
    """Flags as a sentence: each with its meaning, and in how many rows where that is more than one thing."""
    said = []
    for name, n in flags.items():
        meaning = f": {BY_NAME[name].meaning}" if name in BY_NAME else ""
        said.append(f"{n:,} row{'s' * (n != 1)} {name}{meaning}")
    return "Flagged. " + "; ".join(said)


def claim_of(column: str) -> str | None:
    """What kind of number a column of a report's table holds, by its unit; None for what no flag is about."""
    if "GiB" in column or "MiB" in column or column in METRICS:
        return "memory"
    return "speed" if "tokens/s" in column else None
