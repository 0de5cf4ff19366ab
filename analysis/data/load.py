"""Reader of a journal, `rows.csv` or Parquet into one tidy table.

A table has one row per trial: the last terminal one. No repair is silent. `warnings` count what could not be read, was
superseded or had the wrong type.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from vramsweep.analysis.data.export import as_it_was, each
from vramsweep.analysis.data.warnings_of_rows import flagged, measured_again, system_columns, systems
from vramsweep.harness.files import sweep_folder
from vramsweep.harness.files.bounded_reads import open_regular
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import format_count
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.schema import BY_NAME, COLUMNS, EARLY, LARGEST, SCHEMA_VERSION, TEXT_LISTS
from vramsweep.harness.spec.runner_table import flatten_options
from vramsweep.harness.spec.trial_identity import ID_DEFAULTS

_DTYPES = {int: "Int64", float: "Float64", str: "string", bool: "boolean"}
_ARROW = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
# Dicts that are kept, as JSON text; of the others only the trial is read.
_PARTS = ("part_peak_allocated_bytes", "part_peak_reserved_bytes", "oom_parts_bytes", "estimated_kernels_s")
_NESTED = ("trial", *(c.name for c in COLUMNS if c.type is dict and c.name not in ("trial", *_PARTS)))
DRAWN = "lengths:"  # start of `data` if samples have lengths of their own (harness/spec/length_distribution.py)
EXTRA = "trial."  # prefix of settings that only the resolved trial holds
POSITIONS = EXTRA + "model.max_positions"  # maximum length of the model: no setting, but always read

_ZERO_OR_MORE = ("peak_", "device_", "load_", "forward_", "backward_", "optimizer_", "memory_", "unlimited_", "host_")
_SPEEDS = ("tokens_per_s", "samples_per_s", "step_s", "step_median_s", "elapsed_s")
_RANGES = {  # possible numbers of a column; all others only have to be within `LARGEST`
    **{c.name: (0.0, 2.0**60) for c in COLUMNS if c.unit == "B" and c.name.startswith(_ZERO_OR_MORE)},
    **{c.name: (0.0, LARGEST) for c in COLUMNS if c.name.endswith(_SPEEDS)},
    **dict.fromkeys(("seq_len", "micro_batch", "grad_accum", "world_size"), (1.0, 2.0**53)),
}

_PIECE = 1 << 24  # bytes of a journal read at a time
_NOT_SETTINGS = {"seq_len", "micro_batch", "repeat", "seed"}


@dataclass(frozen=True)
class Table:
    """Rows, one per trial. `frame` has every scalar and list column of the registry, typed, plus `trial.*` extras.

    `axis` names what `seq_len` holds, if that is no length; without `tokens`, tokens/s are samples/s (own_axis.py).
    """

    frame: pd.DataFrame
    source: str
    warnings: tuple[str, ...] = ()
    axis: str = "seq_len"
    tokens: bool = True

    def ok(self, *columns: str) -> pd.DataFrame:
        """Return these columns of the rows that finished and measured something, with their trial ids."""
        return finished(self.frame[[*columns, "trial_id"]], self.frame["outcome"])

    def where(self, mask: pd.Series[bool]) -> Table:
        """Return the table with the rows of the mask alone."""
        return replace(self, frame=self.frame[mask])


def load(path: Path) -> Table:
    """Read a results folder, a journal, our own `rows.csv` or a Parquet export.

    Raises UserError if there is no such file, it is empty, or it is not one of these.
    """
    files = journal.files(path)
    if not (file := files[0]).is_file():
        raise UserError(sweep_folder.describe_missing(path) + sweep_folder.FOREIGN)
    if file.suffix == ".parquet":
        return from_frame(pa.parquet.read_table(file).to_pandas(types_mapper=_pandas_type), str(path))
    if file.suffix == ".csv":
        return from_frame(_read_csv(file), str(path))
    warnings: list[str] = []
    try:  # fast, piece by piece, if every line fits the registry, else line by line
        frame = _read_pieces(files)
    except (_Unusual, pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, KeyError):
        frame, warnings = _read_lines(path)
    except OSError as error:
        raise journal.refusal(file, error) from None
    return from_frame(frame, str(path), warnings)


def trials(path: Path, ids: Collection[str]) -> dict[str, Any]:
    """Return the resolved trials with these ids. A journal holds them whole, a CSV or Parquet export does not."""
    found: dict[str, Any] = {}
    for file in journal.files(path):
        if file.suffix != ".jsonl" or not file.is_file():
            continue
        for row, _ in journal.since(file):
            if len(found) == len(ids):
                break
            if row is not None and row["trial_id"] in ids and isinstance(row.get("trial"), dict):
                found[row["trial_id"]] = row["trial"]
    return found


def from_frame(frame: pd.DataFrame, source: str, warnings: list[str] | None = None) -> Table:
    """Return a table from any frame that uses the registry's column names.

    Adds missing columns as null and keeps the last terminal row of each trial. Converts types: a value that does not
    convert becomes null, counted in a warning. Raises UserError if no row is left.
    """
    notes = list(warnings or ())
    typed, problems = _typed(_moved(frame))
    notes += [*problems, *measured_again(typed)]
    typed, dropped = _one_per_trial(typed)
    notes += dropped
    if typed.empty:
        nothing = f"{source} holds no finished rows, so there is nothing to analyse; run its sweep first"
        raise UserError("; ".join([nothing, *notes]))
    notes += [*systems(typed), *flagged(typed)]
    return Table(typed, source, tuple(notes))


def _read_csv(file: Path) -> pd.DataFrame:
    """Read all columns as text, without the guards of export.py. An empty text in quotes is an empty text, nothing at
    all is null. Raises UserError if it is no CSV."""
    try:
        names = pa.csv.open_csv(file).schema.names
        as_text = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, quoted_strings_can_be_null=False
        )
        table = pa.csv.read_csv(file, convert_options=as_text)
    except pa.ArrowInvalid as error:
        raise UserError(f"cannot read {file} as CSV: {str(error).splitlines()[0]}") from None
    for at, column in enumerate(table.schema):
        table = table.set_column(at, column, each(table.column(at), as_it_was))
    frame: pd.DataFrame = table.to_pandas(types_mapper=lambda _: pd.StringDtype())
    return frame


class _Unusual(Exception):
    """Raised for a journal to read line by line: rows of an earlier version, damaged lines or several writers."""


def _read_pieces(files: Sequence[Path]) -> pd.DataFrame:
    used: set[str] = set()
    pieces: list[pa.Table] = []
    if len(files) > 1:
        raise _Unusual
    with open_regular(files[0], journal.LIMIT) as stream:
        while piece := stream.read(_PIECE):
            whole = piece.rfind(b"\n") + 1
            if whole:
                stream.seek(whole - len(piece), os.SEEK_CUR)
                piece = piece[:whole]
            else:  # a line longer than a piece, or the last one
                piece += stream.readline(journal.LONGEST)
            if not all(map(journal.intact, piece.split(b"\n"))):
                raise _Unusual
            pieces.append(_slim(_read_piece(memoryview(piece), used)))
    table = pa.concat_tables(pieces, promote_options="default").combine_chunks()
    if "schema_version" in table.column_names and pc.min(table["schema_version"]).as_py() < SCHEMA_VERSION:
        raise _Unusual
    if EARLY in table.column_names or any(table[name].null_count for name in ("trial_id", "outcome")):
        raise _Unusual
    extras = _varying(table)
    table = table.select([name for name in table.column_names if not name.startswith(EXTRA)])
    frame: pd.DataFrame = table.to_pandas(types_mapper=_pandas_type, self_destruct=True, split_blocks=True)
    return pd.concat([frame, extras], axis=1) if len(extras.columns) else frame


def _read_piece(piece: memoryview, used: set[str]) -> pa.Table:
    """Read whole lines as a table. `used` are the registry's columns that hold something; those found here join them.

    Only these are read by the registry's type. Columns that are null throughout, as most are in any sweep, would
    otherwise cost as much as those with values.
    """
    reading = pa.json.ReadOptions(block_size=1 << 22)
    while True:
        schema = pa.schema([(c.name, _arrow_type(c.type, c.name)) for c in COLUMNS if c.name in used])
        parsing = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer")
        table = pa.json.read_json(pa.BufferReader(piece), reading, parsing)
        found = {field.name for field in table.schema if not pa.types.is_null(field.type)}
        if not (new := found & BY_NAME.keys() - used - {*_NESTED, *_PARTS}):
            return table
        used |= new


def _slim(table: pa.Table) -> pa.Table:
    """Drop columns that are null throughout; make the resolved trial one text column per leaf, `trial.a.b`."""
    for name in _PARTS:
        if name in table.column_names and pa.types.is_struct(table[name].type):
            texts = pa.array([_text(value) for value in table[name].to_pylist()], pa.string())
            table = table.set_column(table.column_names.index(name), name, pa.chunked_array([texts]))
    while any(pa.types.is_struct(column.type) for column in table.columns):
        table = table.flatten()
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if name == "checksum" or column.null_count == len(column) or name.partition(".")[0] in _NESTED[1:]:
            continue
        if name.startswith(EXTRA) and pa.types.is_nested(column.type):
            column = pa.chunked_array([pa.array([json.dumps(v) for v in column.to_pylist()], pa.string())])
        columns[name] = column.cast(pa.string()) if name.startswith(EXTRA) else column
    return pa.table(columns)


def _text(value: Any) -> Any:
    """Return a dict as JSON, without what is null in it; anything else as it is."""
    return json.dumps({k: v for k, v in value.items() if v is not None}) if isinstance(value, dict) else value


def _arrow_type(kind: type, name: str) -> pa.DataType:
    return pa.list_(pa.string() if name in TEXT_LISTS else pa.float64()) if kind is list else _ARROW[kind]


def _pandas_type(kind: pa.DataType) -> Any:
    if pa.types.is_integer(kind):
        return pd.Int64Dtype()
    if pa.types.is_floating(kind):
        return pd.Float64Dtype()
    if pa.types.is_boolean(kind):
        return pd.BooleanDtype()
    if pa.types.is_list(kind):
        return pd.ArrowDtype(kind)
    return pd.StringDtype() if pa.types.is_string(kind) or pa.types.is_null(kind) else None


def _varying(table: pa.Table) -> pd.DataFrame:
    """Return the leaves of the resolved trial that vary between rows, and the model's positions."""
    found = {}
    for name in table.column_names:
        setting = name.startswith(EXTRA) and name.removeprefix(EXTRA) not in _NOT_SETTINGS
        if (setting and len(table[name].unique()) > 1) or name == POSITIONS:
            found[name] = table[name].to_pandas().astype("string")
            default = ID_DEFAULTS.get(tuple(name.removeprefix(EXTRA).split(".")))
            if default is not None:  # rows from before this setting existed
                found[name] = found[name].fillna(default if isinstance(default, str) else json.dumps(default))
    return pd.DataFrame(found)


def _read_lines(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Read line by line: any line that is a whole JSON object with a trial id is a row, others are counted."""
    rows, unreadable = journal.read(path)
    frame = pd.DataFrame([{k: v for k, v in row.items() if k not in _NESTED} for row in rows])
    extras = _varying(pa.Table.from_pandas(_flat([row.get("trial") for row in rows]), preserve_index=False))
    was = "were" if unreadable != 1 else "was"
    files = journal.files(path)
    lines = f"{unreadable} line{'s' * (unreadable != 1)} of {files[0].name if len(files) == 1 else path}"
    notes = [f"{lines} could not be read and {was} skipped"]
    return pd.concat([frame, extras], axis=1), notes if unreadable else []


def _flat(trials: list[Any]) -> pd.DataFrame:
    nodes = (flatten_options({"trial": one} if isinstance(one, dict) else {}) for one in trials)
    leaves = ({name: value for name, value in each if not isinstance(value, dict)} for each in nodes)
    texts = [{k: v if isinstance(v, str) or v is None else json.dumps(v) for k, v in each.items()} for each in leaves]
    return pd.DataFrame(texts).astype("string")


def _typed(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return every registry column with its dtype; what does not convert is null and noted."""
    notes: list[str] = []
    columns: dict[str, Any] = {}
    for column in COLUMNS:
        if column.name in _NESTED:
            continue
        kind = str if column.name in _PARTS else column.type
        dtype: Any = pd.ArrowDtype(_arrow_type(list, column.name)) if kind is list else _DTYPES[kind]
        if column.name not in frame:
            columns[column.name] = pd.Series([None] * len(frame), frame.index, dtype)
            continue
        given = frame[column.name].map(_text) if column.name in _PARTS else frame[column.name]
        if kind is list:
            given = given if given.dtype == dtype else _lists(given, dtype)
        elif str(given.dtype) != dtype:
            given = converted(given, kind, column.name, notes)
        columns[column.name] = given
    unknown = [n for n in frame.columns if n not in columns and n not in _NESTED and not n.startswith(EXTRA)]
    if unknown:
        names = ", ".join(map(str, unknown[:8]))
        notes.append(f"columns unknown to schema version {SCHEMA_VERSION}, left out: {names}")
    columns |= {n: frame[n] for n in frame.columns if str(n).startswith(EXTRA)}
    typed = pd.DataFrame(columns, copy=False)
    if (drawn := varying(typed)).any() and typed.loc[drawn, "seed"].nunique() > 1:  # another seed draws other lengths
        typed[EXTRA + "seed"] = typed["seed"].astype("string").where(drawn, "any")
    versions = sorted(int(v) for v in typed["schema_version"].dropna().unique())
    if versions and versions != [SCHEMA_VERSION]:
        notes.append(f"rows of schema version {', '.join(map(str, versions))}; this program knows {SCHEMA_VERSION}")
    notes += _believed(typed)
    return typed, notes


def _believed(frame: pd.DataFrame) -> list[str]:
    """Make unknown what is no number of its column, and note it: infinite, a size below 0, a length of 0."""
    strange = []
    for name in [n for n in frame if str(frame[n].dtype) in ("Float64", "Int64") and frame[n].notna().any()]:
        least, most = _RANGES.get(str(name), (-LARGEST, LARGEST))
        values = frame[name].to_numpy(float, na_value=np.nan)
        nothing = (values < least) | (values > most) | ((values != 0) & (np.abs(values) < 1 / LARGEST))
        if nothing.any():
            strange.append(str(name))
            frame[name] = frame[name].mask(nothing)
    said = f"{', '.join(strange[:8])}{' and others' * (len(strange) > 8)}"
    return [f"impossible numbers (infinite, beyond {LARGEST:g}, below 0) read as unknown in {said}"] * bool(strange)


def converted(values: pd.Series[Any], kind: type, name: str, notes: list[str]) -> Any:
    """Return values as the registry's dtype; those that do not fit become null, and a note says so."""
    known = values.notna()
    out: Any
    if kind is str:
        out = values.astype("string")
    elif kind is bool:
        words = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
        out = values.astype("string").str.lower().map(words).astype("boolean")
    else:
        numbers: Any = pd.to_numeric(values, errors="coerce").astype("Float64")
        numbers = numbers.mask(numbers.isna())  # NaN is unknown too
        whole = kind is float or ((numbers == numbers.round()) & (numbers.abs() < 2**63))
        out = numbers if kind is float else numbers.where(whole).astype("Int64")
    text = values.astype("string").str.lower()
    bad = values[known & pd.isna(out) & ~text.isin(["nan", "", "none", "null"])]
    if len(bad):
        notes.append(
            f"{name}: {len(bad)} value{'s' * (len(bad) != 1)} such as {str(bad.iloc[0])[:40]!r} "
            f"{'are' if len(bad) != 1 else 'is'} not {kind.__name__} and read as unknown"
        )
    return out


def _lists(values: pd.Series[Any], kind: pd.ArrowDtype) -> pd.Series[Any]:
    """Return lists as they are, text (from a CSV) parsed as JSON, anything else as null."""

    def one(value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return None
        return list(value) if isinstance(value, list | np.ndarray) else None

    found = [one(value) for value in values]
    try:
        array = pa.array(found, kind.pyarrow_dtype)
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # a list of something else
        array = pa.nulls(len(found), kind.pyarrow_dtype)
    return pd.Series(array, index=values.index, dtype=kind)


def extras(frame: pd.DataFrame, apart: tuple[str, ...] = ()) -> list[str]:
    """Return the columns of settings that only the resolved trial holds, except those that begin with `apart`."""
    return [str(c) for c in frame if str(c).startswith(EXTRA) and not str(c).startswith((POSITIONS, *apart))]


def is_(frame: pd.DataFrame, column: str, *values: object) -> pd.Series[bool]:
    """Return the mask of rows with one of these values; a null is none."""
    return frame[column].isin(list(values)).fillna(False).astype(bool)


def varying(frame: pd.DataFrame) -> pd.Series[bool]:
    """Return the mask of rows whose samples vary in length (data=lengths:...): seq_len is only where they are cut."""
    return (frame["data"].str.startswith(DRAWN).fillna(False) & frame["packing"].fillna("none").eq("none")).astype(bool)


def _one_per_trial(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    notes: list[str] = []
    if not frame["terminal"].isna().all():
        terminal = frame["terminal"].fillna(False).astype(bool)
        if not terminal.all():
            finished = frame[terminal]
            if unfinished := set(frame.loc[~terminal, "trial_id"].dropna()) - set(finished["trial_id"].dropna()):
                notes.append(f"{len(unfinished)} trial{'s' * (len(unfinished) != 1)} not finished yet, left out")
            frame = finished
    where = system_columns(frame)
    again = where.duplicated(keep="last") & frame["trial_id"].notna()
    # a row without a torch version counts only until another of its trial follows,
    # as does a GPU's row that does not name the GPU, because its worker died in version 1
    nameless = frame["device"].eq("cuda").fillna(False) & where["gpu_name"].isna()
    # and a row that was never started does not supersede what was measured
    unstarted = frame["attempt"].eq(0).fillna(False)
    followed = frame["trial_id"].duplicated(keep="last") & frame["trial_id"].notna()
    again |= followed & (where["torch_version"].isna() | nameless | unstarted)
    again |= unstarted & frame["trial_id"].isin(frame.loc[~unstarted, "trial_id"].dropna())
    if again.any():
        notes.append(f"{format_count(int(again.sum()), 'row')} superseded by a later row of the same trial")
        frame = frame[~again]
    return frame if isinstance(frame.index, pd.RangeIndex) else frame.reset_index(drop=True), notes


def _moved(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert exports of schema version 1: ZeRO's stage was a column, FSDP2 a runner (`upgrade_row` for rows)."""
    if "zero_stage" not in frame or "runner" not in frame:
        return frame
    frame = frame.copy()
    known = frame["sharding"] if "sharding" in frame else pd.Series(pd.NA, index=frame.index, dtype="string")
    fsdp = frame["runner"].eq("fsdp").fillna(False)
    stage = pd.to_numeric(frame.pop("zero_stage"), errors="coerce").astype("Int64")
    frame["sharding"] = "zero" + stage.astype("string")
    frame["sharding"] = frame["sharding"].mask(fsdp, "fsdp2").mask(frame["sharding"].isna() & ~fsdp, "none")
    frame["sharding"] = known.where(known.notna(), frame["sharding"])  # rows of both versions in one export
    frame["runner"] = frame["runner"].mask(fsdp, "torch")
    return frame


def finished(frame: pd.DataFrame, outcome: pd.Series[Any]) -> pd.DataFrame:
    """Return the rows whose outcome is ok; leave out those whose outcome is missing."""
    return frame[outcome.eq("ok").fillna(False).to_numpy(bool)]
