"""The choices of a page's reader, and the choices to which each group and row belongs.

In: a table's groups. Out: a `Picker` for report.js. An axis is a setting that distinguishes groups. If rows are of
several kinds (measured, predicted, imported), the kind is an axis too. Values are compared as text, as figures write
them into their traces (`meta.settings`).
"""

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
from vramsweep.analysis.report.findings import WORDS
from vramsweep.harness.rows.quality_flags import BY_NAME

KIND = "rows"
_WORDS: dict[str, str] = WORDS["values"]
MOST = 200  # most values of an axis; nobody looks through more


@dataclass(frozen=True)
class Axis:
    """One select: its key in settings, its name, and its values, each as settings have it and in words."""

    key: str
    name: str
    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Picker:
    """The axes; settings, label and flags (rows of each) by group; the group of each row, -1 if it has none."""

    axes: tuple[Axis, ...] = ()
    settings: tuple[dict[str, str], ...] = ()
    labels: tuple[str, ...] = ()
    flags: tuple[dict[str, int], ...] = ()
    of_row: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    numbers: dict[str, int] = field(default_factory=dict, repr=False)

    def number(self, group: Any) -> int | None:
        """Return the number of the group with this id, None if there is none."""
        return self.numbers.get(str(group))


def picker(table: Table, worlds: Sequence[tuple[str, Sequence[Group]]]) -> Picker:
    """Return the picker for groups of the table, given by the name of their kind. Rows of no group are always shown."""
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
    """Return the key that sorts a setting's values: numbers by size, then words."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def forbidding(flags: dict[str, int], claim: str) -> dict[str, int]:
    """Return the flags that speak against a claim, or that belong next to any number."""
    return {name: n for name, n in flags.items() if name not in BY_NAME or claim in (BY_NAME[name].forbids or (claim,))}


def in_words(flags: dict[str, int]) -> str:
    """Return flags as a sentence: of each the number of rows, its name and its meaning."""
    said = []
    for name, n in flags.items():
        meaning = f": {BY_NAME[name].meaning}" if name in BY_NAME else ""
        said.append(f"{n:,} row{'s' * (n != 1)} {name}{meaning}")
    return "Flagged. " + "; ".join(said)


def claim_of(column: str) -> str | None:
    """Return the kind of number in a column of a report's table, by its unit or name; None if no flag is about it."""
    if "GiB" in column or "MiB" in column or column in METRICS:
        return "memory"
    return "speed" if "tokens/s" in column or "samples/s" in column else None
