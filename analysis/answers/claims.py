"""Claims of guides about memory and time, tested on rows: confirmed, refuted or not tested, with the numbers.

A claim is an entry of `CLAIMS`. Each comparison gives one number, and the claim holds if it lies between two bounds.
Rows of a GPU decide if any can be compared; otherwise predicted ones do, and the card says so. Rows that are compared
differ only in chosen axes (`group_alike`), and rows of a GPU and predicted ones come apart (`kinds`). Rows in, cards
out; conf/sweep/claims.yaml asks for rows of every claim.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import ASKED
from vramsweep.analysis.data.load import EXTRA, Table, extras, is_
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.rows.schema import SYSTEM
from vramsweep.harness.spec.techniques.catalog import AXES

# Precision's depends on the runner. Only a long protocol changes what is held, so the others are not named.
DEFAULTS = {axis.name: axis.default for axis in AXES} | {"precision": "bf16"}
_OTHERS = {"runner": ("torch",), "zero_init": (True,), "versions": (), "protocol": ("brief", "quick")}
_SETTINGS = (*ASKED, "seq_len", "simulated_gpu")
# Observed, not set: null if a worker died early, then as in the rows of equal settings if these agree.
FOUND = (*SYSTEM, "memory_limit_bytes", "host_ranks", "estimated_link")
_FOLLOWS = {"allocator": ("allocator_conf", f"{EXTRA}allocator.name", f"{EXTRA}allocator.conf")}


@dataclass(frozen=True)
class Rows:
    """Rows of one kind: measured on a GPU, or predicted."""

    frame: pd.DataFrame
    measured: bool

    @property
    def basis(self) -> str:
        """GPUs of all rows: `predicted: h100-80gb`, `measured: NVIDIA L4`."""
        kind, column = ("measured", "gpu_name") if self.measured else ("predicted", "simulated_gpu")
        return ", ".join(sorted(f"{kind}: {name}" for name in self.frame[column].fillna("unknown").unique()))

    @property
    def seconds(self) -> tuple[str, ...]:
        """Columns of a step's time, the best first; two rows are compared in one column (`shared`)."""
        return ("step_median_s",) if self.measured else ("calibrated_step_s", "estimated_step_s")

    def where(self, mask: pd.Series[bool]) -> Rows:
        """Return only the rows that the mask selects."""
        return Rows(self.frame[mask.fillna(False).astype(bool)], self.measured)

    def ok(self, *columns: str) -> pd.DataFrame:
        """Return the rows that finished and have these columns."""
        return self.frame[is_(self.frame, "outcome", "ok")].dropna(subset=list(columns))


def kinds(table: Table) -> list[Rows]:
    """Return rows measured on a GPU, then predicted ones, without imported rows; a kind without rows is left out."""
    frame = table.frame[table.frame["foreign"].isna()]
    found = [Rows(frame[is_(frame, "device", device)], device == "cuda") for device in ("cuda", "simulated")]
    return [rows for rows in found if len(rows.frame)]


def shared(one: pd.Series[Any], other: pd.Series[Any], columns: Sequence[str]) -> str | None:
    """Return the first of these columns that both have, because estimates of two kinds are not compared; else None."""
    return next((name for name in columns if not pd.isna(one[name]) and not pd.isna(other[name])), None)


def group_alike(frame: pd.DataFrame, *axes: str) -> Iterator[pd.DataFrame]:
    """Yield parts of the rows within which only `axes`, and what follows from them, differ; repeats are in one part."""
    varied = {name for axis in axes for name in (axis, EXTRA + axis, *_FOLLOWS.get(axis, ()))}
    keys = [name for name in (*_SETTINGS, *extras(frame)) if name not in varied]
    if len(frame):
        asked = _joined(frame[keys])
        found = frame[list(FOUND)].astype("string")
        same = found.groupby(asked)
        agreed = same.transform("first").where(same.transform("nunique") == 1)
        found = found.where(is_(frame, "outcome", "ok"), found.fillna(agreed))
        yield from (part for _, part in frame.groupby(asked + "|" + _joined(found), sort=False))


def trial_keys(frame: pd.DataFrame) -> pd.Series[Any]:
    """Return what tells trials apart, whichever GPU they are on, measured or predicted."""
    return _joined(frame[[name for name in (*ASKED, "seq_len") if name != "device"]])


def _joined(frame: pd.DataFrame) -> pd.Series[Any]:
    return frame.astype("string").fillna("").agg("|".join, axis=1)


def label(row: pd.Series[Any], *without: str) -> str:
    """Return `gpt2, 1,024 tokens, batch 4, checkpointing=full`: known settings that are not the default, but for
    `without`."""
    known = {name: value for name, value in row.dropna().items() if name not in without}
    parts = [str(known.get("model", "unknown"))]
    parts += [f"{known['seq_len']:,} tokens"] if "seq_len" in known else []
    parts += [f"batch {known['micro_batch']}"] if "micro_batch" in known else []
    if known.get("world_size", 1) != 1 or known.get("sharding", "none") != "none":
        parts.append(f"{known.get('sharding')} x {known.get('world_size')}")
    parts += [name.replace("_", " ") for name in ("offload_optimizer", "offload_param") if known.get(name)]
    parts += [
        str(known[axis.name]) if axis.name == "precision" else f"{axis.name}={known[axis.name]}"
        for axis in AXES
        if axis.name in known and known[axis.name] != DEFAULTS[axis.name]
    ]
    parts += [
        f"{name}={str(value).lower() if isinstance(value, bool | np.bool_) else value}"
        for name, usual in _OTHERS.items()
        if (value := known.get(name)) is not None and value not in usual
    ]
    return ", ".join(parts + ([str(known["allocator"])] if known.get("allocator", "default") != "default" else []))


def reasons(frame: pd.DataFrame, most: int = 3) -> str:
    """Return why these rows ended as they did, each reason once, and how many more there are."""
    found = list(map(str, frame["reason"].dropna().unique()))
    return "; ".join([*found[:most], *([f"and {len(found) - most} more reasons"] if len(found) > most else [])])


GB = 1e9  # as guides count
_ADAM = ("default", "adamw_torch", "adamw_torch_fused", "adamw_torch_foreach", "adamw_torch_loop")
_PEAK = "peak_allocated_bytes"
_FORWARD = "forward_peak_allocated_bytes"  # holds weights, optimizer state and activations, no gradients

Numbers = Iterator[tuple[pd.DataFrame, str, float]]  # the rows that are compared, where, and the number there


@dataclass(frozen=True)
class Claim:
    """A statement, its source, the rows that test it, and what decides.

    `numbers` compares the rows that `about` chooses: by column, values `among` which they are, values that they are
    `without`, and bounds that they lie `between`. The claim holds if the number, shown as `shown`, is within `low` and
    `high`, for the reason `why`. It has to hold in all comparisons. With `own` it says that something can be done, so
    one comparison suffices. It is then refuted only if the source's own configuration, the rows of `own`, was tried.
    """

    name: str
    statement: str
    source: str
    compared: str
    numbers: Callable[[Rows], Numbers]
    shown: str
    why: str
    low: float = -math.inf
    high: float = math.inf
    among: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    without: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    between: Mapping[str, Sequence[float]] = field(default_factory=dict)
    own: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def about(self, frame: pd.DataFrame) -> pd.Series[bool]:
        """Mark the rows that test the claim; the column `gpu_bytes` stands for the memory of a row's GPU."""
        chosen = _among(frame, self.among)
        for name, values in self.without.items():
            chosen &= ~is_(frame, name, *values)
        for name, (low, high) in self.between.items():
            chosen &= (_room(frame) if name == "gpu_bytes" else frame[name]).between(low, high).fillna(False)
        return chosen

    def holds(self, number: float) -> bool:
        """Check whether the claim holds at this number."""
        return self.low <= number <= self.high

    def show(self, number: float) -> str:
        """Return the number in words."""
        return "out of memory" if math.isinf(number) else self.shown.format(number)


@dataclass(frozen=True)
class Card:
    """A claim's verdict. `found` is where and the number of each comparison, `basis` the GPUs of its rows; `reason`
    says why the claim is not tested."""

    claim: Claim
    verdict: str
    found: tuple[tuple[str, float], ...] = ()
    basis: str = ""
    reason: str = ""

    def text(self, most: int = 4) -> str:
        """Return the numbers in words, those that decide first."""
        if not self.found:
            return self.reason
        shown = [f"{self.claim.show(number)} ({where})" for where, number in self.found]
        held = sum(self.claim.holds(number) for _, number in self.found)
        rest = f"; and {len(shown) - most} more" if len(shown) > most else ""
        return f"{'; '.join(shown[:most])}{rest}. Holds in {held} of {len(shown)}, {self.basis}"


def make(table: Table) -> tuple[pd.DataFrame, list[str]]:
    """Return one line per claim, and what a reader should know."""
    found = cards(table)
    lines = []
    for card in found:
        of = card.claim
        line = {"claim": of.statement, "verdict": card.verdict, "found": card.text(), "compared": of.compared}
        lines.append(line | {"what decides": f"{_bounds(of)}: {of.why}", "source": of.source})
    note = "Predicted: no GPU has run these trials; `device=cuda` measures them. Seconds are estimates."
    return pd.DataFrame(lines), [note] * any("predicted" in card.verdict for card in found)


def cards(table: Table) -> list[Card]:
    """Return every claim's card, in the order of `CLAIMS`."""
    return [_card(claim, kinds(table)) for claim in CLAIMS]


def _card(claim: Claim, kinds: Sequence[Rows]) -> Card:
    failed: list[pd.DataFrame] = []
    tried: set[str] = set()
    undecided: list[Card] = []
    for rows in kinds:
        chosen = rows.where(claim.about(rows.frame))
        if claim.own and len(chosen.frame):  # what a GPU has tried needs no prediction
            settings = trial_keys(chosen.frame)
            settled = set(settings[is_(chosen.frame, "outcome", "ok", "oom", "host_oom")])
            chosen = chosen.where(~settings.isin(tried))
            tried |= settled
        compared = list(claim.numbers(chosen))
        found = sorted(((where, n) for _, where, n in compared), key=lambda one: claim.holds(one[1]))  # refuting first
        if found:
            held = [claim.holds(number) for _, number in found]
            verdict = "confirmed" if (any(held) if claim.own else all(held)) else "refuted"
            if claim.own and any(held):
                found.reverse()
            elif claim.own and not list(claim.numbers(chosen.where(_among(chosen.frame, claim.own)))):
                verdict = "not confirmed"
            basis = Rows(pd.concat([same for same, _, _ in compared]), chosen.measured).basis
            marked = verdict if rows.measured else f"{verdict} (predicted)"
            undecided.append(Card(claim, marked, tuple(found), basis))
            if not claim.own or any(held):
                return undecided[-1]
        elif chosen.ok().empty:
            failed.append(chosen.frame)
    if undecided:
        return next((card for card in undecided if card.verdict.startswith("refuted")), undecided[0])
    why = reasons(pd.concat(failed)) if failed else ""
    return Card(claim, "not tested", reason=why or "no measured or predicted rows of a GPU can be compared")


def _bounds(claim: Claim) -> str:
    low, high = (claim.shown.format(bound) for bound in (claim.low, claim.high))
    if math.isinf(claim.low):
        return f"at most {high}"
    return f"at least {low}" if math.isinf(claim.high) else f"{low} to {high}"


def _among(frame: pd.DataFrame, values: Mapping[str, Sequence[Any]]) -> pd.Series[bool]:
    """Mark the rows that have one of the values in each of these columns."""
    marks: Any = np.all([is_(frame, name, *some) for name, some in values.items()], axis=0)
    return pd.Series(marks, index=frame.index)


def _ratios(rows: Rows, axis: str, one: str, other: Sequence[str], shown: str, columns: Sequence[str] = ()) -> Numbers:
    """Yield the ratio at two of an axis's values, all else equal, of the first of these columns that both have; without
    `columns`, of a step's time. It is `shown` as one of `_RATIOS`."""
    done = rows.ok() if columns else rows.ok()[~is_(rows.ok(), "bound_by", "host")]  # whose time is not the GPU's
    columns = columns or rows.seconds
    for same in group_alike(done, axis):
        where = label(same.iloc[0], axis)
        values = dict(same.groupby(axis)[list(columns)].median().iterrows())
        for b in (value for value in other if one in values and value in values):
            if (column := shared(values[one], values[b], columns)) is not None:
                ratio = float(values[b][column]) / float(values[one][column])
                yield same, f"{where}, {b}" if len(other) > 1 else where, _RATIOS[shown](ratio)


def _saved(rows: Rows) -> Numbers:
    """Yield the percentage of what the forward phase keeps for each sample that checkpointing takes away."""
    for same in group_alike(rows.ok(_FORWARD), "micro_batch", "checkpointing"):
        pivot = same.pivot_table(_FORWARD, "micro_batch", "checkpointing", "median")
        table = pivot.reindex(columns=["none", "full"]).dropna()
        if len(table) < 2:
            continue
        growth = table.iloc[-1] - table.iloc[0]
        if growth["none"] > 0:
            where = label(same.iloc[0], "micro_batch", "checkpointing")
            saved = 100 * float(1 - growth["full"] / growth["none"])
            yield same, f"{where}, batch {table.index[0]} to {table.index[-1]}", saved


def _a_parameter(rows: Rows, axis: str, column: str) -> Iterator[tuple[pd.DataFrame, str, pd.Series[float]]]:
    """Yield the bytes per trained parameter at each value of an axis, all else equal."""
    for same in group_alike(rows.ok(column), axis):
        count = same["trainable_parameters"].fillna(same["parameters"]).max()
        values = same.groupby(axis, sort=True)[column].median()
        if len(values) > 1 and not pd.isna(count):
            yield same, label(same.iloc[0], axis), values / float(count)


def _eight_bit(rows: Rows) -> Numbers:
    for same, where, values in _a_parameter(rows, "optimizer", _FORWARD):
        for name in (name for name in _ADAM if name in values.index and "adamw_bnb_8bit" in values.index):
            yield same, f"{where}, against {name}", float(values[name] - values["adamw_bnb_8bit"])


def _accumulated(rows: Rows) -> Numbers:
    for same, where, values in _a_parameter(rows, "grad_accum", _PEAK):
        if values.index[0] == 1:
            yield same, f"{where}, {values.index[-1]} against 1", float(values.iloc[-1] - values.iloc[0])


def _curves(frame: pd.DataFrame, axis: str) -> Iterator[tuple[pd.DataFrame, str, pd.Series[float]]]:
    """Yield peaks at three or more values of an axis, all else equal, if they grow. Flat ones are the optimizer's or
    the model's, or rounding, whatever the value."""
    for same in group_alike(frame, axis):
        peaks = same.groupby(axis)[_PEAK].median().astype(float)
        if len(peaks) > 2 and peaks.max() - peaks.min() >= 0.01 * peaks.max() > 0:
            yield same, label(same.iloc[0], axis), peaks


def _off_the_line(rows: Rows) -> Numbers:
    """Yield the largest distance of a peak, in percent of the growth, from the line through first and last batch."""
    for same, where, peaks in _curves(rows.ok(_PEAK), "micro_batch"):
        line = np.interp(peaks.index.to_numpy(float), [peaks.index[0], peaks.index[-1]], peaks.iloc[[0, -1]])
        off = 100 * float(np.abs(peaks.to_numpy() - line).max()) / float(peaks.max() - peaks.min())
        yield same, f"{where}, batch {peaks.index[0]} to {peaks.index[-1]}", off


def _quadratic(rows: Rows) -> Numbers:
    """Yield the quadratic percentage of the growth to the longest length, by a parabola through three or more."""
    frame = rows.ok(_PEAK)
    steps = frame[[_FORWARD, "backward_peak_allocated_bytes"]].max(axis=1)
    others = frame[["optimizer_peak_allocated_bytes", "load_peak_allocated_bytes"]].max(axis=1)
    for same, where, peaks in _curves(frame[~(others > steps).fillna(False).astype(bool)], "seq_len"):
        longest = float(peaks.index[-1])
        c, b, _ = np.polyfit(peaks.index.to_numpy(float) / longest, peaks.to_numpy(), 2)
        if b + c > 0:
            yield same, f"{where}, {peaks.index[0]:,} to {longest:,.0f} tokens", 100 * float(c / (b + c))


def _optimizer_step_gb(rows: Rows) -> Numbers:
    """Yield the GB in the optimizer's step: weights, adapters, gradients and states, without activations."""
    for same in group_alike(rows.ok("optimizer_peak_allocated_bytes")):
        peak = float(same["optimizer_peak_allocated_bytes"].median())
        yield same, label(same.iloc[0], "adapter", "lora_r"), peak / GB


def _reserved(rows: Rows) -> Numbers:
    """Yield the GB reserved by a whole step; the label says what was allocated once model and optimizer were there."""
    for same in group_alike(rows.ok("peak_reserved_bytes")):
        row = same.iloc[0]
        loaded = row["load_peak_allocated_bytes"]
        after = "" if pd.isna(loaded) else f", {loaded / GB:.1f} GB after loading"
        where = label(row, "adapter", "quantization", "lora_r") + after
        yield same, where, float(same["peak_reserved_bytes"].median()) / GB


def _of_the_card(rows: Rows) -> Numbers:
    """Yield the percentage of a GPU's memory that is needed, above 100 if memory ran out; infinite if the need is then
    unknown."""
    frame = rows.frame
    full = is_(frame, "outcome", "oom")
    needed = frame["peak_reserved_bytes"].where(is_(frame, "outcome", "ok"))
    needed = needed.mask(full, frame["unlimited_peak_reserved_bytes"])
    share = (100 * needed / _room(frame)).astype("Float64")
    share = share.mask(full & (share <= 100).fillna(False), math.nextafter(100, math.inf))
    share = share.mask((full | is_(frame, "outcome", "host_oom")) & needed.isna(), math.inf)
    for same in group_alike(frame.assign(share=share).dropna(subset=["share"])):
        row, host = same.iloc[0], same["host_peak_bytes"].max()
        offloaded = row[["offload_optimizer", "offload_param"]].fillna(False).any()
        beside = f", {host / GB:,.0f} GB of host memory" if offloaded and not pd.isna(host) else ""
        yield same, label(row, "micro_batch") + beside, float(same["share"].max())


def _room(frame: pd.DataFrame) -> pd.Series[Any]:
    """Return the bytes of each row's GPU: the allocator's limit, else all, else the listed size of its name."""
    listed = {name: gpu_lookup.find_gpu(str(name)) for name in frame["gpu_name"].dropna().unique()}
    sizes = {name: gpu.memory_gib * gpu_lookup.GIB for name, gpu in listed.items() if gpu is not None}
    known = frame["memory_limit_bytes"].fillna(frame["device_total_bytes"]).astype("Float64")
    return known.fillna(frame["gpu_name"].map(sizes).astype("Float64"))


# What claims.json names: how a `ratio` is shown, and the functions of `numbers`; an entry has one or the other.
_RATIOS: dict[str, Callable[[float], float]] = {
    "change": lambda ratio: 100 * (ratio - 1), "times_less": lambda ratio: 1 / ratio, "percent": lambda r: 100 * r,
}  # fmt: skip
_NUMBERS = (_saved, _eight_bit, _accumulated, _off_the_line, _quadratic, _optimizer_step_gb, _reserved, _of_the_card)
_BY_NAME = {one.__name__.removeprefix("_"): one for one in _NUMBERS}
_WORDS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("claims.json").read_text("utf-8"))
CLAIMS = tuple(
    Claim(numbers=partial(_ratios, **one.pop("ratio")) if "ratio" in one else _BY_NAME[one.pop("numbers")], **one)
    for one in _WORDS
)
