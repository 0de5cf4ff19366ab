"""Groups of rows of equal settings, which share a curve: requested settings and detected values tell them apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.load import EXTRA, POSITIONS, Table, extras, finished, is_, varying
from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows.quality_flags import CORRECTED
from vramsweep.harness.rows.schema import SYSTEM
from vramsweep.harness.spec import command_template
from vramsweep.harness.spec.techniques.catalog import AXES, DEFAULTS

# Requested settings: known for every row, even if the worker died.
ASKED = (
    "foreign", "device", "model", "runner", "precision", "allocator", "allocator_conf", "micro_batch", "grad_accum",
    "sharding", "world_size", "offload_optimizer", "offload_param", "zero_init", "ds_config", "versions",
    *(axis.name for axis in AXES if axis.name != "precision"), "weights", "data", "protocol",
)  # fmt: skip
# Settings that decide a run's needs: named if two known values differ, even if another setting tells groups apart.
DECIDING = (
    "model", "precision", "micro_batch", "grad_accum", "sharding", "world_size", "offload_optimizer", "offload_param",
    *(axis.name for axis in AXES), EXTRA + "device.gpu",
)  # fmt: skip
PRINTS = EXTRA + "fingerprints."
# Detected values: null if the worker died early, then taken from the other rows of equal settings if they agree.
FOUND = ("memory_source", *SYSTEM, "optimizer_effective")


@dataclass(frozen=True)
class Group:
    """Rows of equal settings, as positions in `source`. `settings` holds only what distinguishes the groups. `apart`
    holds fewer that suffice, without those that follow another, as the passes of a step follow a batch."""

    settings: Mapping[str, Any]
    source: pd.DataFrame = field(repr=False)
    rows: np.ndarray[Any, np.dtype[np.int64]] = field(repr=False)
    apart: Mapping[str, Any] = field(repr=False)

    @property
    def id(self) -> str:
        """Text that tells this group from every other, because two may have one label."""
        return f"{self.source['trial_id'].iloc[self.rows[0]]} {sorted(self.settings.items(), key=str)}"

    @property
    def frame(self) -> pd.DataFrame:
        """Copy of all columns of the rows, made anew at each call."""
        return self.source.iloc[self.rows]

    def take(self, *columns: str) -> pd.DataFrame:
        """Return some columns of the rows."""
        return self.source[list(columns)].iloc[self.rows]

    @property
    def resident(self) -> bool:
        """Return whether reserved is the resident set of a CPU process, which tells little next to tensor bytes."""
        return bool(self.take("memory_source")["memory_source"].eq("cpu_tensors_and_rss").any())

    @property
    def varies(self) -> bool:
        """Return whether samples vary in length: seq_len, at which they are cut, is then the length of none."""
        return bool(varying(self.take("data", "packing")).any())

    @property
    def positions(self) -> int | None:
        """Maximum length that the model takes; None if the rows do not state it, or one ran longer."""
        known = list(self.take(POSITIONS)[POSITIONS].dropna().unique()) if POSITIONS in self.source else []
        most = int(known[0]) if len(known) == 1 and str(known[0]).isdigit() else None
        return None if most is None or self.ok("seq_len")["seq_len"].gt(most).any() else most

    def ok(self, *columns: str, also: Sequence[str] = ()) -> pd.DataFrame:
        """Return finished rows with a value in each of `columns`; with trial ids and the columns of `also`."""
        taken = self.take(*columns, *also, "trial_id")
        return finished(taken, self.take("outcome")["outcome"]).dropna(subset=list(columns))

    @property
    def label(self) -> str:
        """Short text for legends: only what varies."""
        return label(self.settings)


OPTIONS = "runner.options."  # prefix of options, such as a script's own axes, which people call by their name alone

# Columns that may vary within a group, by axis; another axis is a table's own, in `seq_len` (own_axis.py).
FREE = {"seq_len": ("seq_len",), "micro_batch": ("micro_batch",), "tokens": ("seq_len", "micro_batch")}


def groups(table: Table, axis: str = "seq_len") -> list[Group]:
    """Return groups of equal settings, except the axis (of `FREE`), seed and repeat; largest group first.

    Simulated, measured and imported rows, and rows whose counters mean different things, never share a group.
    """
    frame = table.frame[~is_(table.frame, "outcome", "invalid")]
    if frame.empty:
        return []
    free = FREE.get(axis, FREE["seq_len"])
    names = [name for name in (*ASKED, "seq_len") if name not in free] + extras(frame)
    codes, keys = _split(frame, np.zeros(len(frame), dtype=np.int64), [], names)
    filled = frame[list(FOUND)].copy()
    filled["cpu_name"] = filled["cpu_name"].mask(frame["device"].isin(["cuda", "simulated"]).fillna(False))
    for name in FOUND:
        if filled[name].isna().any() and filled[name].notna().any():
            by = filled[name].groupby(codes)
            alone = by.transform("nunique") == 1
            filled[name] = filled[name].where(filled[name].notna() | ~alone, by.transform("first"))
    wrong = [at for at, of_row in frame["flags"].dropna().items() if CORRECTED in list(of_row)]  # until a later version
    filled[CORRECTED] = frame.index.isin(wrong)
    codes, keys = _split(filled, codes, keys, [*FOUND, CORRECTED])
    varied = [n for n in DECIDING if n in frame and n not in free and frame[n].nunique() > 1]
    minimal, keys = keys, list(dict.fromkeys([*(name for name in ASKED if name in {*keys, *varied}), *keys, *varied]))
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    found = []
    for rows in np.split(order, starts[1:]):
        settings = {key: plain_value((filled if key in filled else frame)[key].iloc[rows[0]]) for key in keys}
        found.append(Group(settings, frame, rows, {key: settings[key] for key in minimal}))
    return sorted(found, key=lambda group: -len(group.rows))


def plain_value(value: Any) -> Any:
    """Return a cell as a value of Python's own, None if unknown."""
    return None if pd.isna(value) else value.item() if isinstance(value, np.generic) else value


def _split(
    frame: pd.DataFrame, codes: np.ndarray[Any, np.dtype[np.int64]], keys: list[str], names: list[str]
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], list[str]]:
    """Split further by each column that distinguishes rows which the keys so far do not."""
    count = len(np.unique(codes))
    for name in names:
        values, _ = pd.factorize(frame[name], use_na_sentinel=True)
        finer, uniques = pd.factorize(codes * (int(values.max(initial=-1)) + 2) + values + 1)
        if len(uniques) > count:
            codes, count, keys = finer.astype(np.int64), len(uniques), [*keys, name]
    return codes, keys


def whatever(groups: Sequence[Group], axis: str) -> list[Group]:
    """Return the groups, but only the first of those that differ in `axis` alone (and in what follows from it)."""
    first: dict[Any, Group] = {}
    for group in groups:
        apart = group.apart.items()
        first.setdefault(frozenset((k, v) for k, v in apart if not k.removeprefix(EXTRA).startswith(axis)), group)
    return list(first.values())


def others_equal(groups: Sequence[Group], axes: Sequence[str]) -> list[Group]:
    """Return the largest group and those that differ from it in `axes` only (and in what follows from them)."""

    def rest(group: Group) -> list[Any]:
        return [v for k, v in group.apart.items() if not any(k == a or k.startswith(f"trial.{a}") for a in axes)]

    return [group for group in groups if rest(group) == rest(groups[0])]


LONG = 4
_PLAIN = DEFAULTS | {"precision": None, "sharding": "none", "grad_accum": 1, "world_size": 1}


def label(settings: Mapping[str, Any], long: int = LONG) -> str:
    """Return text such as `batch 4 · expandable`: values that explain themselves have no name, and none is repeated.

    Of more than `long` settings, those with default values are left out.
    """
    plain = {
        "model", "precision", "allocator", "runner", "device", "trial.device.gpu", "gpu_name", "cpu_name",
        "memory_source", "foreign",
    }  # fmt: skip
    parts = []
    if len(settings) > long:
        settings = {k: v for k, v in settings.items() if v is None or v != _PLAIN.get(k)} or settings
    for key, value in settings.items():
        if key.startswith(EXTRA) and settings.get(key.removeprefix(EXTRA)) == value is not None:
            continue
        name = key.removeprefix(EXTRA).removeprefix(OPTIONS).replace("_", " ")
        if value is None:
            parts.append(f"{name} unknown")
        elif isinstance(value, bool | np.bool_):
            parts.append(name if value else f"no {name}")
        elif key == "seq_len":
            parts.append(f"{value:,} tokens" if isinstance(value, int) else f"{value} tokens")
        elif key == "sharding":
            parts.append("no sharding" if value == "none" else str(value))
        elif key in plain:
            parts.append(str(value))
        elif key.startswith(PRINTS):  # scripts of one name in different folders, or of different days
            parts.append(f"{Path(key.removeprefix(PRINTS)).name} of SHA-256 {str(value)[:8]}")
        elif key == EXTRA + "runner.command":
            parts.append(command_template.without_python(str(value)))
        else:
            parts.append(f"{name.removeprefix('micro ')} {value}")
    return " · ".join(parts) or "all rows"


def split(table: Table, axis: str, values: Sequence[str]) -> tuple[Table, Table]:
    """Return the rows with `axis` at the first and at the second value. Raises UserError if one does not exist."""
    if axis not in table.frame or len(values) != 2:
        raise UserError(
            f"--by takes AXIS=VALUE,VALUE with a column of the rows, as in allocator=default,expandable; not {axis}"
            f"{'' if axis in table.frame else suggestions.did_you_mean(axis, map(str, table.frame.columns))}"
        )
    column = table.frame[axis].astype("string")
    for value in values:
        if not (column == value).any():
            known = list(map(str, column.dropna().unique()))
            there = ", ".join(known[:12]) or "no values at all"
            raise UserError(f"no row has {axis}={value}; there are {there}{suggestions.did_you_mean(value, known)}")
    return table.where((column == values[0]).fillna(False)), table.where((column == values[1]).fillna(False))
