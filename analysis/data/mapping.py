"""Mapping of an imported file: the source and unit of each of our columns, and the constants.

A `FileMapping` holds it, from `--columns` or a header with our names. `--set` adds constants.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vramsweep.analysis.data.metrics import GIB, METRICS, MIB
from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows.schema import BY_NAME, Outcome


@dataclass(frozen=True)
class Target:
    """Meaning of a name of ours: `peak_active_mib` is peak_active_bytes by 2^20, `iterations_per_s` an inverse."""

    column: str
    factor: float = 1.0
    inverse: bool = False


_SUFFIXES = {
    "B": ("_bytes", {"_kib": 1024.0, "_mib": MIB, "_gib": GIB, "_kb": 1e3, "_mb": 1e6, "_gb": 1e9}),
    "s": ("_s", {"_ms": 1e-3, "_us": 1e-6}),
}
_MADE = ("schema_version", "trial_id", "attempt", "terminal")  # made by the importer for every row
TARGETS: dict[str, Target] = {
    **{
        column.name.removesuffix(ending) + suffix: Target(column.name, factor)
        for column in BY_NAME.values()
        if column.type in (int, float) and column.unit in _SUFFIXES
        for ending, factors in [_SUFFIXES[column.unit]]
        for suffix, factor in factors.items()
    },
    **{name: Target(name) for name, column in BY_NAME.items() if column.type is not dict and name not in _MADE},
    "iterations_per_s": Target("step_median_s", inverse=True),
}
PER_RANK = {name: f"rank_{name}" for name in METRICS if f"rank_{name}" in BY_NAME}  # lists of every rank's values
MEASURED = (*METRICS, "tokens_per_s", "samples_per_s")  # a 0 in these was never measured
COUNTS = ("seq_len", "micro_batch", "grad_accum", "world_size")  # at least 1
_EXAMPLE = "--columns 'seq_len,8*(peak_active_mib,peak_reserved_mib),iterations_per_s'"
_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Source:
    """Origin of one of our columns: `name` as declared, `places` one column, from 1, or one per rank in order.

    A value is cell x scale in the unit of the column, or 1 / (cell x scale) if the name is that of a rate.
    """

    name: str
    places: tuple[int, ...]
    per_rank: bool = False

    @property
    def scale(self) -> float:
        """Return the factor of a cell that its name implies."""
        return TARGETS[self.name].factor

    @property
    def inverse(self) -> bool:
        """Return whether the name is that of a rate, which we keep as a time."""
        return TARGETS[self.name].inverse

    @property
    def column(self) -> str:
        """Name of our column."""
        return TARGETS[self.name].column

    @property
    def measured(self) -> bool:
        """Return whether the column is unknown if its run ran out of memory."""
        column = BY_NAME[self.column]
        of_device = column.name.startswith(("device_", "memory_limit_", "oom_"))
        is_peak_or_speed = column.group in ("memory", "speed") and column.type in (int, float) and not of_device
        return is_peak_or_speed or column.name in MEASURED

    @property
    def kind(self) -> type:
        """Type of our column."""
        return BY_NAME[self.column].type


@dataclass(frozen=True)
class FileMapping:
    """Columns of an imported file and what holds for all its lines, by our columns' names and in their units.

    `width` is the number of columns of a line, if declared. Raises UserError if statements about one column, or about
    the ranks, conflict.
    """

    sources: tuple[Source, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    width: int | None = None

    def __post_init__(self) -> None:
        by_column: dict[str, Source] = {}
        for source in self.sources:
            other = by_column.setdefault(source.column, source)
            if other is not source:
                raise UserError(
                    f"{source.column} comes from two columns, {other.name} and {source.name}; "
                    "leave one out (with - in --columns)"
                )
            if source.column in self.constants:
                raise UserError(
                    f"{source.column} is both a constant and the column {source.name}; leave out the constant, or the "
                    "column (with - in --columns)"
                )
            if source.per_rank and source.column not in PER_RANK:
                raise UserError(f"{source.name} cannot be given per rank; these can: {', '.join(PER_RANK)}")
        counts = {source.name: len(source.places) for source in self.sources if source.per_rank}
        if len(set(counts.values())) > 1:
            said = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise UserError(f"columns per rank must have the same number of ranks, not {said}")
        if self.constants.get("world_size") is not None and self.constants["world_size"] < self.ranks:
            size = self.constants["world_size"]
            raise UserError(f"world_size is {size}, but columns of {self.ranks} ranks are named")

    @property
    def ranks(self) -> int:
        """Number of ranks with columns; 0 if no column is of a rank."""
        return max((len(source.places) for source in self.sources if source.per_rank), default=0)

    @property
    def columns(self) -> set[str]:
        """Names of our columns that the file or a constant gives."""
        return {*(source.column for source in self.sources), *self.constants}


def by_position(text: str) -> FileMapping:
    """Parse `seq_len,8*(peak_active_mib,peak_reserved_mib),-`: names by position, `N*()` once per rank, `-` to skip.

    Raises UserError for what cannot be read and for names that are not ours.
    """
    parts = list(_parts(text))
    named = [name for names, _ in parts for name in names if name != "-"]
    for name, times in Counter(named).items():
        target(name, "--columns")
        if times > 1:
            raise UserError(
                f"--columns names {name} {times} times; name it once, skip others by -, ranks as {_EXAMPLE}"
            )
    places: dict[tuple[str, bool], list[int]] = {}
    position = 0
    for names, ranks in parts:
        for _ in range(ranks or 1):
            for name in names:
                position += 1
                if name != "-":
                    places.setdefault((name, ranks is not None), []).append(position)
    sources = tuple(Source(name, tuple(found), per_rank) for (name, per_rank), found in places.items())
    return FileMapping(sources, width=position)


def _parts(text: str) -> Iterator[tuple[list[str], int | None]]:
    """Yield the names between commas, and how many ranks have them. Raises UserError if that cannot be read."""
    part = re.compile(r"\s*(?:(\d+)\s*\*\s*(?:\(([^()]*)\)|([^,()*]+))|([^,()*]+))\s*(?:,|$)")
    at = 0
    while at < len(text):
        match = part.match(text, at)
        names = [name.strip() for name in next(filter(None, match.groups()[1:]), "").split(",")] if match else []
        if match is None or not all(names) or not 1 <= int(match[1] or 1) <= 1 << 16:
            raise UserError(f"--columns cannot be read from {text[at:][:40]!r} on; write it as in {_EXAMPLE}")
        yield names, None if match[1] is None else int(match[1])
        at = match.end()


def by_name(names: Sequence[str]) -> FileMapping:
    """Return the mapping of a header by our names of its columns, "" where a column is none of ours.

    Raises UserError if two of them are one column of ours.
    """
    return FileMapping(tuple(Source(name, (position,)) for position, name in enumerate(names, 1) if name))


def from_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Parse `seq_len=2048`, `device_total_gib=24` into constants by our columns' names, in their types and units.

    Raises UserError for a name that is not ours, a value of another type, or a name given twice.
    """
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or not name:
            raise UserError(f"--set takes NAME=VALUE, such as --set seq_len=2048, not {setting!r}")
        column = target(name, "--set").column
        if column in found:
            raise UserError(f"--set gives {column} twice; give it once")
        found[column] = _constant(name, text)
    return found


def _constant(name: str, value: str) -> Any:
    """Return a value in the type and unit of the column that `name` stands for. Raises UserError if it does not fit."""
    to = target(name, "--set")
    kind = BY_NAME[to.column].type
    if kind is list:
        raise UserError(f"--set: {name} holds a list in every row, so it cannot be one value; name a column for it")
    fits: Any = None
    if kind is str:
        fits = value or None
    elif kind is bool:
        fits = {"true": True, "false": False}.get(value.lower())
    else:
        try:
            number = float(value) * to.factor
            number = 1 / number if to.inverse else number
        except (ValueError, ZeroDivisionError):
            number = math.nan
        if math.isfinite(number) and (kind is float or to.factor != 1 or number.is_integer()):
            fits = number if kind is float else round(number)
    if fits is None:
        expected = _TYPES[float if kind is int and to.factor != 1 else kind]
        raise UserError(f"--set: {name} is {expected}, not {json.dumps(value)}")
    if to.column in COUNTS and fits < 1:
        raise UserError(f"--set: {name} is 1 or more, not {fits}")
    if to.column == "outcome":
        suggestions.check_listed(f"--set: outcome={value}", "outcome", fits, Outcome)
    return fits


def target(name: str, said: str) -> Target:
    """Return the meaning of a name of ours. Raises UserError, with similar names, if it is none."""
    if name in TARGETS:
        return TARGETS[name]
    if name in _MADE or name in BY_NAME:
        raise UserError(f"{said}: {name} cannot be given, because the importer makes it; leave it out")
    near = suggestions.find_nearest(name, TARGETS, most=3)
    meant = f"did you mean {' or '.join(near)}?" if near else "`vramsweep columns` lists our columns"
    raise UserError(f"{said}: there is no column {name}; {meant} (memory also as ..._mib, ..._gib, ..._mb, ..._gb)")
