"""Rows from the cells of an imported file, by its mapping: units, missing values, outcomes, ranks, tokens/s.

What is assumed on the way is in notes.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.load import Table, converted, from_frame
from vramsweep.analysis.data.mapping import COUNTS, MEASURED, PER_RANK, FileMapping, Source
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import format_count
from vramsweep.harness.rows.schema import BY_NAME, Outcome

OUT_OF_MEMORY = re.compile(r"(?<![a-z])oom(?![a-z])|out[ _-]*of[ _-]*memory", re.IGNORECASE)
_OF_HOST = re.compile(r"(?:host|cpu|ram)[ _-]*(?:oom|out[ _-]*of[ _-]*memory)", re.IGNORECASE)
_RAN_OUT = ("oom", "host_oom")
_WORDS = {
    **{outcome.value: outcome.value for outcome in Outcome},
    **dict.fromkeys(("success", "succeeded", "passed", "done", "completed", "finished"), "ok"),
    **dict.fromkeys(("failed", "failure", "error", "crashed", "exception"), "crash"),
    "timed out": "timeout",
}
_MISSING = ("", "-", "na", "n/a", "#n/a", "nan", "null")
_FACTORS = ("micro_batch", "grad_accum", "world_size")
_WORST_BY = ("peak_reserved_bytes", "peak_allocated_bytes", "peak_active_bytes")  # as for our own rows

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


def to_table(cells: pd.DataFrame, mapping: FileMapping, origin: str, label: str, notes: list[str]) -> Table:
    """Return the lines of a file as a table, a row each, or one per run if they are of single ranks.

    `cells` has a row a line and the file's columns in order. `origin` is its path, `label` what rows hold as `foreign`.
    What is assumed is added to `notes`. Raises UserError if a column is missing or nothing was measured.
    """
    frame, ranks = _values(cells, mapping, notes)
    frame["line"] = np.arange(1, len(frame) + 1)
    if ranks:
        if "world_size" not in frame:
            frame["world_size"] = pd.Series(mapping.ranks, index=frame.index, dtype="Int64")
            notes.append(f"world_size is taken as {mapping.ranks}, the number of ranks with columns")
        frame = _runs(frame, ranks, notes)
    _add_throughput(frame, notes)
    measured = [name for name in MEASURED if name in frame]
    if not measured and frame["outcome"].isna().all():
        raise UserError(
            f"{origin} has no measured column among {', '.join(sorted(mapping.columns))}; name one such as "
            "peak_reserved_mib or iterations_per_s with --columns"
        )
    anything = frame[measured].notna().any(axis=1)
    frame["outcome"] = frame["outcome"].fillna(anything.map({True: "ok", False: "bad_result"}).astype("string"))
    digest = hashlib.sha256(origin.encode()).hexdigest()[:8]
    frame["trial_id"] = [f"{digest}-{line}" for line in frame.pop("line")]
    if "foreign" not in frame:
        frame["foreign"] = label
    return from_frame(frame, origin, None)


def _values(cells: pd.DataFrame, mapping: FileMapping, notes: list[str]) -> tuple[pd.DataFrame, dict[str, Floats]]:
    """Return our columns, a row a line, and by column each rank's values, (lines, ranks) with NaN for unknown."""
    read = {source: [cells.iloc[:, place - 1] for place in source.places] for source in mapping.sources}
    frame = pd.DataFrame(index=cells.index)
    for name, value in mapping.constants.items():
        kind = BY_NAME[name].type
        frame[name] = converted(pd.Series([value] * len(frame), index=frame.index, dtype=object), kind, name, notes)
    for source, columns in read.items():
        if not source.measured:
            frame[source.column] = _of_source(columns, source, notes)[0]
    measured = {source: columns for source, columns in read.items() if source.measured}
    _add_outcome(frame, [column for columns in measured.values() for column in columns], notes)
    failed = frame["outcome"].isin(_RAN_OUT).fillna(False).astype(bool)
    ranks: dict[str, Floats] = {}
    for source, columns in measured.items():
        values = _of_source([column.mask(failed) for column in columns], source, notes)
        if source.per_rank:
            ranks[source.column] = np.column_stack([value.to_numpy(float, na_value=np.nan) for value in values])
        else:
            frame[source.column] = values[0]
        if source.inverse:
            notes.append(f"{source.name} is read as optimizer steps per second; the step time is its inverse")
    return frame, ranks


def _of_source(columns: Sequence[pd.Series[Any]], source: Source, notes: list[str]) -> list[Any]:
    """Return a source's columns in our type and unit; what does not convert is null and noted."""
    values: list[Any] = []
    counts = Counter[str]()
    for rank, column in enumerate(columns):
        if source.kind is list:
            values.append(column)
            continue
        column = column.mask(column.astype("string").str.strip().str.lower().isin(_MISSING).fillna(False).astype(bool))
        name = f"{source.name} of rank {rank}" if source.per_rank else source.name
        value = converted(column, float if source.kind is int else source.kind, name, notes)
        if source.kind in (int, float):
            for what, strange in _not_measured(value, source).items():
                counts[what] += int(strange.sum())
                value = value.mask(strange)
            value = 1 / (value * source.scale) if source.inverse else value * source.scale
        if source.kind is int:
            value = converted(value if source.scale == 1 else value.round(), int, name, notes)
        values.append(value)
    notes += [f"{source.name}: {format_count(count, what)} read as unknown" for what, count in counts.items() if count]
    return values


def _not_measured(value: pd.Series[Any], source: Source) -> dict[str, pd.Series[bool]]:
    """Return masks of impossible numbers (infinite, negative, ...), by their name in words."""
    found = {"infinite value": value.abs().eq(np.inf)}
    at_least_one = source.column in COUNTS
    if source.column in MEASURED or source.inverse or at_least_one:
        found["zero"] = value.eq(0)
    if source.kind is int:
        found["oversized value"] = (value * source.scale).abs().ge(2.0**63) & ~found["infinite value"]
    if source.measured or at_least_one:
        found["negative value"] = value.lt(0) & ~found["infinite value"]
    return found


def _add_outcome(frame: pd.DataFrame, measured: Sequence[pd.Series[Any]], notes: list[str]) -> None:
    """Add outcome and reason, in our words: from an outcome column, or a cell with an out-of-memory message.

    Null if neither says anything.
    """
    said = pd.Series(pd.NA, index=frame.index, dtype="string")
    for column in measured:
        text = column.astype("string")
        said = said.fillna(text.where(text.str.contains(OUT_OF_MEMORY, na=False)))
    if (count := int(said.notna().sum())) > 0:
        example = str(said.dropna().iloc[0])[:40]
        notes.append(
            f"{format_count(count, 'line')} with {example!r} instead of a value: read as out of memory, values unknown"
        )
    said = said.fillna(frame["outcome"].astype("string") if "outcome" in frame else said).str.strip()
    word = said.str.lower()
    outcome = word.map(_WORDS).astype("string")
    outcome = outcome.mask(outcome.isna() & said.str.contains(_OF_HOST, na=False).astype(bool), "host_oom")
    outcome = outcome.mask(outcome.isna() & said.str.contains(OUT_OF_MEMORY, na=False).astype(bool), "oom")
    if len(strange := said[outcome.isna()].dropna()):
        notes.append(
            f"outcome: {format_count(len(strange), 'value')} such as {str(strange.iloc[0])[:40]!r} read as bad_result; "
            f"known are {', '.join(Outcome)}"
        )
    frame["outcome"] = outcome.mask(outcome.isna() & said.notna(), "bad_result")
    why = said.mask(word.isin(_WORDS).fillna(False).astype(bool))
    frame["reason"] = frame["reason"].fillna(why) if "reason" in frame else why


def _runs(frame: pd.DataFrame, peaks: dict[str, Floats], notes: list[str]) -> pd.DataFrame:
    """Merge lines, of which each knows some of its ranks, into a row per run.

    Memory of ranks becomes a list. The row's own is that of the rank with the largest peak reserved (without it,
    allocated, active). Speed is the slowest line's and the outcome the worst. Other memory is the largest known, all
    else the first.
    """
    settings = [n for n in frame if n in BY_NAME and BY_NAME[n].group == "axes" and BY_NAME[n].type is not list]
    keys = frame.groupby(settings, dropna=False, sort=False).ngroup() if settings else frame["line"] * 0
    reported: Bools = np.any(~np.isnan(np.stack(list(peaks.values()))), axis=0)
    run = pd.Series(_run_of_each_line(keys.tolist(), reported), index=frame.index)

    speed = -frame["tokens_per_s"] if "tokens_per_s" in frame else frame["line"]
    made = _first(frame, run, frame.get("step_median_s", speed).sort_values(ascending=False, kind="stable"))
    badness = frame["outcome"].map({"oom": 3, "host_oom": 2, "ok": 0}).fillna(frame["outcome"].notna().astype(int))
    made[["outcome", "reason"]] = _first(frame[["outcome", "reason"]], run, badness.sort_values(ascending=False))
    largest = [n for n in frame if n in BY_NAME and BY_NAME[n].group == "memory" and BY_NAME[n].type in (int, float)]
    made[largest] = frame[largest].groupby(run).max()
    made["line"] = frame["line"].groupby(run).min()

    of_ranks = {name: pd.DataFrame(values).groupby(run.to_numpy()).first().to_numpy() for name, values in peaks.items()}
    known: Bools = np.any(~np.isnan(np.stack(list(of_ranks.values()))), axis=0)
    worst = _worst_rank(of_ranks, len(made))
    made["worst_rank"] = pd.Series(worst, index=made.index, dtype="Int64").mask(worst < 0)
    for name, values in of_ranks.items():
        own = values[np.arange(len(made)), np.maximum(worst, 0)]
        made[name] = pd.Series(own, index=made.index, dtype="Float64").round().astype("Int64").mask(worst < 0)
        lists = [[None if np.isnan(v) else float(v) for v in of_run] for of_run in np.round(values)]
        told = [None if set(of_run) == {None} else of_run for of_run in lists]
        made[PER_RANK[name]] = pd.Series(told, made.index, dtype=object)
    repeat = keys.groupby(run).first().pipe(lambda of_run: of_run.groupby(of_run).cumcount())
    if "repeat" not in made:
        made["repeat"] = repeat
    notes += _words_of_runs(frame, made, known, repeat)
    return made


def _first(frame: pd.DataFrame, run: pd.Series[Any], order: pd.Series[Any]) -> pd.DataFrame:
    """Return each run's first known value in every column, its lines taken in that order."""
    return frame.loc[order.index].groupby(run.loc[order.index]).first()


def _run_of_each_line(keys: Sequence[int], reported: Bools) -> list[int]:
    """Return each line's run, numbered from 0: it ends when a rank reports again, or with as many lines as ranks.

    `keys` tell settings apart: a run has equal ones. `reported` (lines, ranks) is which ranks each line knows.
    """
    runs: list[int] = []
    current: dict[int, tuple[int, int, Bools]] = {}
    count = 0
    for key, ranks in zip(keys, reported, strict=True):
        run, lines, seen = current.get(key, (-1, 0, ranks))
        if run < 0 or lines == len(ranks) or (seen & ranks).any():
            run, lines, seen, count = count, 0, np.zeros_like(ranks), count + 1
        current[key] = run, lines + 1, seen | ranks
        runs.append(run)
    return runs


def _worst_rank(peaks: dict[str, Floats], runs: int) -> Ints:
    """Return the rank of each run with the largest peak reserved; without any, allocated or active; else -1."""
    worst = np.full(runs, -1, dtype=np.int64)
    for name in _WORST_BY:
        if name in peaks:
            known = ~np.isnan(peaks[name])
            largest = np.where(known, peaks[name], -np.inf).argmax(axis=1)
            worst = np.where((worst < 0) & known.any(axis=1), largest, worst)
    return worst


def _words_of_runs(frame: pd.DataFrame, made: pd.DataFrame, known: Bools, repeat: pd.Series[Any]) -> list[str]:
    """Return notes on how lines became runs."""
    notes = [
        f"{format_count(len(frame), 'line')} of {known.shape[1]} ranks make {format_count(len(made), 'run')}. Lines of "
        "equal settings are one run until a rank reports again; its memory is that of the rank with the largest peak "
        "reserved (else allocated, else active), its speed that of the slowest"
    ]
    if again := int((repeat > 0).sum()):
        notes.append(f"{format_count(again, 'run')} with the settings of an earlier run, kept as repeats")
    lacking = ~known.all(axis=1) & ~made["outcome"].isin(_RAN_OUT).fillna(False).to_numpy(bool)
    if lacking.any():
        first = int(lacking.argmax())
        ranks = ", ".join(map(str, np.flatnonzero(~known[first])))
        notes.append(
            f"{format_count(int(lacking.sum()), 'run')} without some rank's memory (such as rank {ranks} "
            f"of the run from line {made['line'].iloc[first]} on); the largest known rank counts as the worst"
        )
    return notes


def _add_throughput(frame: pd.DataFrame, notes: list[str]) -> None:
    """Add tokens/s if known: seq_len x samples/s, else seq_len x micro_batch x grad_accum x world_size / step time."""
    if "tokens_per_s" in frame or "seq_len" not in frame:
        return
    if "samples_per_s" in frame:
        frame["tokens_per_s"] = frame["samples_per_s"] * frame["seq_len"]
        return
    if {"measured_steps", "elapsed_s"} <= set(frame):
        seconds = frame["elapsed_s"] / frame["measured_steps"]
    elif "step_median_s" in frame:
        seconds = frame["step_median_s"]
    else:
        return
    frame["tokens_per_s"] = frame["seq_len"] / seconds
    for name in _FACTORS:
        if name in frame:
            frame["tokens_per_s"] *= frame[name]
    if assumed := [name for name in _FACTORS if name not in frame]:
        given = " ".join(f"--set {name}=..." for name in assumed)
        notes.append(f"tokens/s assume 1 for {', '.join(assumed)}, which the file lacks; if that is wrong, add {given}")
