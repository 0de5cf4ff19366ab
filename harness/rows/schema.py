"""The schema of all results: `Row`, its columns, and `Outcome`.

A row is the record of one attempt, a flat JSON object. columns.tsv gives each of its keys a type, a unit and a meaning.
The columns' page of the documentation, the CSV export and the checks below all come from it. An unknown value is null,
never 0. A column ends in its unit (`_bytes`, `_s`, `_w`, ...) if it has one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from vramsweep.harness.messages.errors import describe
from vramsweep.harness.spec.not_covered import CODES
from vramsweep.harness.spec.runner_table import RUNNERS, STARTING
from vramsweep.harness.spec.shardings import NAMES as SHARDINGS
from vramsweep.harness.spec.techniques.catalog import AXES

SCHEMA_VERSION = 2
EARLY = "gradient_checkpointing"  # only in rows from before techniques were axes; some of them are of version 2
LARGEST = 1e40  # largest size of a number: above any loss in fp32, and far below where its square overflows
DEEPEST = 40  # most levels of a dict or list in a column, because code that walks through a row may recurse

Row = dict[str, Any]

PARTS = ("load", "resume", "first_step", "steps", "evaluation", "save")  # of a whole job (protocol=job)
OF_TRAINING = ("load", "first_step", "steps")  # parts whose peaks are the row's own


class Outcome(StrEnum):
    """The way an attempt ended."""

    OK = "ok"
    OOM = "oom"
    HOST_OOM = "host_oom"
    TIMEOUT = "timeout"
    CRASH = "crash"
    CUDA_ERROR = "cuda_error"
    CONTENDED = "contended"
    INVALID = "invalid"
    BAD_RESULT = "bad_result"
    ENVIRONMENT = "environment"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Column:
    """One key of a row: its JSON type (null is always allowed), its unit and its meaning."""

    name: str
    type: type
    unit: str
    meaning: str
    group: str


class RowError(ValueError):
    """A row does not fit the schema. The message names the column, what it holds and what it should hold."""


def _read_columns() -> tuple[Column, ...]:
    """Return the columns of columns.tsv in that order, with the techniques' axes in place of their placeholder."""
    runners = tuple(entry.name for entry in RUNNERS)
    named = (("outcomes", tuple(Outcome)), ("runners", runners), ("shardings", SHARDINGS), ("parts", PARTS))
    told = {name: ", ".join(values) for name, values in (*named, ("left", CODES))}
    kinds = {kind.__name__: kind for kind in (int, float, str, bool, list, dict)}
    found: list[Column] = []
    _, *lines = Path(__file__).with_name("columns.tsv").read_text("utf-8").splitlines()
    for line in lines:
        group, name, *others = line.split("\t")
        if name == "*techniques":  # a placeholder for the axes of all techniques
            found += [Column(axis.name, axis.kind, "", axis.meaning, group) for axis in AXES]
        else:
            kind, unit, meaning = others
            found.append(Column(name, kinds[kind], unit, meaning.format(**told), group))
    return tuple(found)


COLUMNS = _read_columns()

# Columns that are lists of texts; every other list holds numbers.
TEXT_LISTS = ("notes", "throttle_reasons", "flags", "node_trials", "attention_kernels", "differences", "unproven",
              "not_covered")  # fmt: skip
# Columns of the machine and software that a measurement depends on, in addition to its trial.
SYSTEM = ("gpu_name", "cpu_name", "torch_version", "transformers_version", "deepspeed_version")
# Columns that only the harness sets, never the measured process: which trial the row is of, and how it ended.
OF_PARENT = frozenset(
    [column.name for column in COLUMNS if column.group == "identity"]
    + ["trial", "seed", "repeat", "foreign", "flags", "node_trials", "host_load", "git_commit", "vramsweep_version"]
    + ["cold_reason", "recording"]
)
BY_NAME: dict[str, Column] = {column.name: column for column in COLUMNS}

UNSETTLED = ("estimate", "host")  # groups of columns whose meaning may still change


def is_stable(column: Column) -> bool:
    """Return whether a column keeps its name, type, unit and meaning in all versions (docs/compatibility.md)."""
    return column.group not in UNSETTLED and column.type is not dict


def complete_row(values: Mapping[str, Any]) -> Row:
    """Return a whole row from known values: every column, in the order of `COLUMNS`, null if not given.

    Raises RowError for an unknown column or a value of the wrong type.
    """
    unknown = sorted(set(values) - set(BY_NAME))
    if unknown:
        raise RowError(f"unknown column {', '.join(unknown)}")
    row = {name: values.get(name) for name in BY_NAME}
    row["schema_version"] = SCHEMA_VERSION
    for name, value in row.items():
        _check(BY_NAME[name], value)
    return row


def system_of(row: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Return the values of `SYSTEM`, with the GPU only on cuda, and the CPU only on cpu.

    A script's system is without DeepSpeed's version, because whether the script uses it is known only after it has run.
    """
    where = {"cuda": "gpu_name", "cpu": "cpu_name"}.get(str(row.get("device")))
    out = {"gpu_name", "cpu_name"} - {where}
    if row.get("runner") in STARTING:
        out.add("deepspeed_version")
    return tuple(None if name in out else row.get(name) for name in SYSTEM)


def to_encodable(values: Any) -> Any:
    """Return JSON values without lone surrogates, which no file can hold; file names that are not UTF-8 have them."""
    return json.loads(json.dumps(values, ensure_ascii=False).encode(errors="replace"))


def _check(column: Column, value: Any) -> None:
    if value is None:
        return
    kinds = (int, float) if column.type is float else (column.type,)
    if not isinstance(value, kinds) or (column.type is not bool and isinstance(value, bool)):
        raise RowError(f"column {column.name} holds {describe(value)}, expected {column.type.__name__} or null")
    if column.name == "outcome" and value not in set(Outcome):
        raise RowError(f"outcome {describe(value)} is not one of {', '.join(Outcome)}")


def is_plausible(values: Mapping[str, Any]) -> bool:
    """Return whether all values of a row from anywhere have a possible type, size and depth for their columns.

    It allows more than `complete_row`: a whole number as a float, unknown columns and missing columns. It does not
    check whether the numbers make sense together.
    """
    for name, value in values.items():
        if value is None:
            continue
        column = BY_NAME.get(name)
        kind = None if column is None else column.type
        if kind in (int, float):
            fits = _is_number(value)
        elif kind is list:
            texts, nulls = name in TEXT_LISTS, name.endswith("_bytes")
            fits = isinstance(value, list) and all(
                isinstance(one, str) if texts else _is_number(one) or (nulls and one is None) for one in value
            )
        elif kind in (str, bool):
            fits = isinstance(value, kind)
        else:
            fits = (kind is None or isinstance(value, kind)) and _shallow(value, DEEPEST)
        if not fits:
            return False
    return True


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -LARGEST < value < LARGEST


def _shallow(value: Any, levels: int) -> bool:
    """Return whether a value has at most `levels` levels, and no number too large to compute with."""
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(_shallow(one, levels - 1) for one in inner)
    return type(value) not in (int, float) or _is_number(value)


def markdown_table() -> str:
    """Return the columns as tables for the documentation, one table per group."""
    lines: list[str] = []
    for group in dict.fromkeys(column.group for column in COLUMNS):
        lines += [f"**{group}**", "", "| column | type | unit | meaning |", "|---|---|---|---|"]
        lines += [f"| `{c.name}` | {c.type.__name__} | {c.unit} | {c.meaning} |" for c in COLUMNS if c.group == group]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
