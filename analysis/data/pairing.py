"""Pairs of measured and predicted rows: equal settings on one model of GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from vramsweep.analysis.data.groups import ASKED, Group
from vramsweep.analysis.data.load import EXTRA, Table, extras, is_
from vramsweep.harness.hardware.gpu_lookup import find_gpu
from vramsweep.harness.messages.errors import UserError

# A prediction cannot share these with a measurement, or its memory does not depend on them: a simulated run always has
# three steps, its weights are never pretrained, and an allocator is its settings, whatever its name.
_APART = ("foreign", "device", "weights", "protocol", "allocator")
KEYS = ("seq_len", *(key for key in ASKED if key not in _APART))
CARD = ("device", "host", "gpu_name", "simulated_gpu")  # columns that identify a row's GPU
_NOT_COMPARED = ("seq_len", "micro_batch", "versions", "data", "zero_init")
COMPARED = tuple(key for key in KEYS if key not in _NOT_COMPARED)
EXTRAS_APART = tuple(f"trial.{name}" for name in ("device", "protocol", "weights", "allocator", "record"))


def card(frame: pd.DataFrame) -> pd.Series[Any]:
    """Return each row's GPU by its name in harness/hardware/gpu_lookup.py: the simulated one, or by the driver's name.

    A row that ran out of memory does not know its GPU. It gets its host's, if the other rows there name only one.
    """
    named = frame["gpu_name"].where(~is_(frame, "device", "simulated"))
    by_host = named.groupby(frame["host"])
    named = named.fillna(by_host.transform("first").where(by_host.transform("nunique") == 1))
    cards = {name: card.name for name in named.dropna().unique() if (card := find_gpu(str(name))) is not None}
    return frame["simulated_gpu"].fillna(named.map(cards).astype("string"))


def sides(frame: pd.DataFrame, which: pd.Series[bool], settings: Sequence[str], *carried: str) -> pd.DataFrame:
    """Return these rows of listed GPUs, with these columns and their GPU as `gpu`. `configuration` numbers each
    different combination of settings and GPU; null is equal to null."""
    found = frame.loc[which, list(dict.fromkeys([*settings, *carried, *CARD]))]
    found = found.assign(gpu=card(found)).dropna(subset="gpu")
    return found.assign(configuration=found.groupby([*settings, "gpu"], dropna=False, sort=False).ngroup())


class Beside:
    """Predicted rows of a table with a measured group's settings, at any batch and length."""

    def __init__(self, table: Table) -> None:
        self._frame = frame = table.frame
        settings = [name for name in (*KEYS, *extras(frame, EXTRAS_APART)) if name not in ("seq_len", "micro_batch")]
        own = frame["outcome"].isin(["ok", "oom"]) & frame["foreign"].isna()
        self._predicted = own & is_(frame, "device", "simulated")
        measured = own & is_(frame, "device", "cuda")
        self._codes = pd.Series(dtype=int)
        if self._predicted.any() and measured.any():
            self._codes = sides(frame, self._predicted | measured, settings)["configuration"]

    def of(self, group: Group) -> pd.DataFrame | None:
        """Return these rows; None if there are none, or the group is predicted itself."""
        label = group.source.index[group.rows[0]]
        if label not in self._codes.index or self._predicted[label]:
            return None
        same = self._codes.index[self._codes.eq(self._codes[label])]
        found = self._frame.loc[same][self._predicted[same]]
        return found if len(found) else None


class Chosen:
    """Rows of a table of predictions that nothing known of a group contradicts, for imported rows."""

    def __init__(self, table: Table) -> None:
        frame = table.frame
        self._source = table.source
        self._rows = frame[is_(frame, "device", "simulated") & frame["outcome"].isin(["ok", "oom"])]
        if self._rows.empty:
            raise UserError(
                f"{table.source} holds no predicted rows (device=simulated); make some with vramsweep predict"
            )

    def of(self, group: Group) -> pd.DataFrame | None:
        """Return the rows of one configuration and GPU. Raises UserError if several are possible, or none."""
        first = group.frame.iloc[0]
        rows = self._of_card(group)
        more = extras(rows, (*EXTRAS_APART, *(EXTRA + name for name in _NOT_COMPARED)))
        for name in (*COMPARED, *more):
            if not pd.isna(value := first.get(name)):
                rows = rows[rows[name].isna() | rows[name].astype("string").eq(str(value))]
        if rows.empty:
            raise UserError(f"{self._source} has no prediction with the settings of {group.label}")
        for name in ("simulated_gpu", *COMPARED, *more):
            if rows[name].nunique(dropna=False) > 1:
                there = ", ".join(map(str, rows[name].unique()))
                way = "give predictions of only one"
                if not name.startswith(EXTRA):
                    way = f"add --set {'gpu_name' if name == 'simulated_gpu' else name}=..."
                raise UserError(
                    f"{self._source} has predictions for {name} {there}, but the rows do not name theirs; {way}"
                )
        return rows

    def _of_card(self, group: Group) -> pd.DataFrame:
        """Return rows for the group's GPU, by the driver's name or ours; all if unknown. Raises UserError if none."""
        sides = group.take(*CARD)
        if not (names := {str(name) for name in pd.concat([sides["gpu_name"], card(sides)]).dropna()}):
            return self._rows
        if (found := self._rows[self._rows["simulated_gpu"].isin(names)]).empty:
            there = ", ".join(map(str, self._rows["simulated_gpu"].dropna().unique()))
            raise UserError(f"{self._source} has no prediction for {min(names)}, only for {there}")
        return found
