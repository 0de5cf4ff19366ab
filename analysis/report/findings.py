"""The rows in sentences: coverage, findings, warnings, the methods paragraph, how to reproduce a row.

In: rows and fits. Out: sentences, all computed from them. Nothing here draws or writes files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.compare.calibrate import Calibration
from vramsweep.analysis.data.groups import OPTIONS, Group
from vramsweep.analysis.data.load import EXTRA, Table, trials, varying
from vramsweep.analysis.data.warnings_of_rows import NAMED, left_out, name_rows, records
from vramsweep.analysis.model import fit_wording
from vramsweep.analysis.model.fit import Fit
from vramsweep.analysis.report import latex
from vramsweep.harness.config.reproduce_command import command
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import format_count, format_size
from vramsweep.harness.rows import repeats
from vramsweep.harness.rows.schema import BY_NAME
from vramsweep.harness.spec.not_covered import describe
from vramsweep.harness.spec.runner_table import STARTING, USER_CODE
from vramsweep.harness.spec.techniques.catalog import AXES, Axis

COMMAND = "command"  # a key of `swept_axes`, whose value is shown as code
_rows = partial(format_count, what="row")
SPREAD = 0.02  # repeats of equal settings should agree in speed to about this; public data shows up to 5 %
# Lists of columns, and names of settings and numbers as readers know them.
WORDS: dict[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text("utf-8"))


def coverage(table: Table) -> dict[str, int]:
    """Count the trials by outcome, most frequent first."""
    return {str(outcome): int(n) for outcome, n in table.frame["outcome"].fillna("unknown").value_counts().items()}


def values(frame: pd.DataFrame, column: str, most: int = 6) -> str:
    """Return the different values of a column in words, or "" if none is known."""
    if not (unique := sorted(value for value in frame[column].unique() if not pd.isna(value))):
        return ""
    if len(unique) > most and BY_NAME.get(column) is not None and BY_NAME[column].type in (int, float):
        return f"{unique[0]:,} to {unique[-1]:,} ({len(unique):,} values)"
    shown = ", ".join(f"{v:,}" if isinstance(v, int | np.integer) else str(v) for v in unique[:most])
    return shown + (f" and {len(unique) - most:,} more" if len(unique) > most else "")


def name_source(table: Table) -> str:
    """Return the names of the rows' files or folder, without the folders above them."""
    return " and ".join(Path(one).name for one in table.source.split(" and "))


def machine(table: Table) -> dict[str, str]:
    """Return what is known of machine and versions: the different values of each column."""
    return {name: text for name in WORDS["machine"] if (text := values(table.frame, name))}


def swept_axes(table: Table) -> dict[str, str]:
    """Return what was asked for: the axes and their values."""
    idle = {axis.name for axis in AXES} - _in_use(table.frame)
    names = [name for name in _axes() if name not in (*WORDS["not_asked"], *idle)]
    found = {name: text for name in names if (text := values(table.frame, name))}
    return _script(table) | found


def _axes() -> list[str]:
    return [column.name for column in BY_NAME.values() if column.group == "axes" and column.type not in (dict, list)]


def _script(table: Table, most: int = 3) -> dict[str, str]:
    """Return the command of runner=script as it was given, and the script's own axes by its own names for them."""
    rows = table.frame[table.frame["runner"].isin(STARTING)]
    commands = EXTRA + "runner.command"
    first = rows.drop_duplicates(commands) if commands in rows else rows.head(1)
    known = trials(Path(table.source), set(first["trial_id"].head(most)))
    runners = [trial.get("runner", {}) for trial in known.values()]
    more = f"\n{len(first) - most:,} more commands" if len(first) > most else ""
    found = {COMMAND: "\n".join(str(one["command"]) for one in runners if "command" in one) + more}
    for name, value in [pair for one in runners for pair in (one.get("options") or {}).items()]:
        column = EXTRA + OPTIONS + name
        found[name] = values(rows, column) if column in rows else str(value)
    return {name: text for name, text in found.items() if text}


def _in_use(frame: pd.DataFrame) -> set[str]:
    """Return the techniques that some row does not have at the default, and the settings of those techniques."""
    changed = {axis.name for axis in AXES if axis.default is None or _in_effect(frame, axis).any()}
    return changed | {a.name for a in AXES if a.of is not None and frame[a.of[0]].isin(a.of[1]).any()}


def _in_effect(frame: pd.DataFrame, axis: Axis) -> pd.Series[bool]:
    """Mark the rows that use this technique other than by default, together with the setting it belongs to."""
    changed = frame[axis.name].notna() & frame[axis.name].ne(axis.default) & frame["outcome"].ne("invalid").fillna(True)
    return changed & (axis.of is None or frame[axis.of[0]].isin(axis.of[1]) | frame["runner"].isin(USER_CODE))


def findings(groups: Sequence[Group], fits: Sequence[Fit]) -> list[str]:
    """Say how memory grows in a few groups of fixed length; compare/lengths.py has the findings on varying lengths."""
    found = []
    for group in [group for group in groups if not group.varies][:3]:
        if (fit := next((f for f in fits if f.group == group.id and f.metric.memory), None)) is not None:
            found.append(of_fit(fit))
    return found


def of_fit(fit: Fit) -> str:
    """Say in a sentence how a quantity grows."""
    which = f" ({fit.label})" if fit.settings else ""
    return f"{fit.metric.label.capitalize()}{which}: {'; '.join(fit_wording.explain(fit)[:6])}."


def estimates(table: Table, most: int = 3) -> list[str]:
    """Name the fastest simulated row of each GPU, by the roofline."""
    speed = "estimated_tokens_per_s"
    rows = table.ok(speed, "seq_len", "micro_batch", "precision", "simulated_gpu").dropna(subset=[speed])
    best = rows.sort_values(speed, ascending=False).drop_duplicates("simulated_gpu").head(most)
    return [
        f"Estimated (roofline, not measured): at most {row[speed]:,.0f} tokens/s at {row['seq_len']:,} tokens, batch "
        f"{row['micro_batch']}, {row['precision']} on {row['simulated_gpu']}."
        for _, row in best.iterrows()
    ]


def calibrations(found: Sequence[Calibration], rows: pd.DataFrame) -> list[str]:
    """Name each calibration's fastest row, and how far to trust the estimate. `rows` are calibrate.calibrated's."""
    sentences = []
    for one in found:
        mine = rows[rows["simulated_gpu"].eq(one.gpu) & rows["precision"].eq(one.precision)]
        mine = mine[~mine["extrapolated"]].sort_values("fitted_tokens_per_s", ascending=False)
        if len(mine):
            best = mine.iloc[0]
            sentences.append(
                f"Not measured: {best['fitted_tokens_per_s']:,.0f} tokens/s at {best['seq_len']:,} tokens, batch "
                f"{best['micro_batch']} ({one.text()})."
            )
    return sentences


def warnings(table: Table, groups: Sequence[Group], fits: Sequence[Fit]) -> list[str]:
    """List what a reader must know before believing a number."""
    found = list(table.warnings)
    frame = table.ok(
        "device", "foreign", "memory_source", "throttle_reasons", "foreign_processes", "plateau", "step_growth_bytes",
        "full_after_steps", "parameters_without_gradient", "trainable_parameters", "step_iqr_s",
        "step_median_s", "unproven", "flags", "not_covered", *NAMED,
    )  # fmt: skip
    if simulated := int(frame["device"].eq("simulated").fillna(False).sum()):
        found.append(f"predicted, not measured: {simulated:,} of {_rows(len(frame))} with outcome ok")
    for code, count in left_out(frame).items():
        found.append(f"not covered in {_rows(count)}: {describe(code)}")
    if names := unproven(frame):
        count = int(frame["unproven"].notna().sum())
        found.append(f"unproven, because no GPU has confirmed the prediction yet: {names} (in {_rows(count)})")
    if foreign := int(frame["foreign"].notna().sum()):
        found.append(f"{foreign:,} of {_rows(len(frame))} with outcome ok are imported from {values(frame, 'foreign')}")
    if resident := int(frame["memory_source"].eq("cpu_tensors_and_rss").fillna(False).sum()):
        found.append(f"in {_rows(resident)} from a CPU, reserved memory is the process's resident set")
    found += _unflagged(frame[frame["flags"].isna()])
    if len(contended := table.frame[table.frame["outcome"].eq("contended").fillna(False)]):
        found.append(f"the GPU was not free for {_rows(len(contended))}: {name_rows(contended, table.frame)}")
    if len(left := frame[frame["step_growth_bytes"].gt(0).fillna(False)]):  # no flag says how much
        most = format_size(left["step_growth_bytes"].max())
        full = left["full_after_steps"].min()
        most += "" if pd.isna(full) else f" (full after about {full:,} steps)"
        found.append(f"every step leaks memory, up to {most}, in {_rows(len(left))}: {name_rows(left, table.frame)}")
    some = frame["parameters_without_gradient"].gt(0).fillna(False) & frame["trainable_parameters"].notna()
    if len(left := frame[some]):
        worst = left.sort_values("parameters_without_gradient").iloc[-1]
        count, every = worst["parameters_without_gradient"], worst["trainable_parameters"]
        what = f"up to {count:,} of {every:,} trainable parameters had no gradient in any step"
        found.append(f"{what}, in {_rows(len(left))}: {name_rows(left, table.frame)}")
    found += _repeats(groups)
    found += _spreads(groups)
    for fit in fits:
        found += [f"{fit.metric.label}, {fit.label}: {text}" for text in fit.warnings]
    return list(dict.fromkeys(found))


def _unflagged(frame: pd.DataFrame) -> list[str]:
    """Say what flags would say of rows that have none: imported rows, and rows of version 1."""
    found = []
    lists = {"throttle_reasons": "the GPU was throttled", "foreign_processes": "other programs used the GPU"}
    for column, what in lists.items():
        if (hit := frame[column].list.len().fillna(0).astype(int) > 0).any():
            found.append(f"{what} in {_rows(int(hit.sum()))}: {name_rows(frame[hit], frame)}")
    creeping = frame["memory_source"].eq("cpu_tensors_and_rss").fillna(False)  # a resident set always rises
    leaking = frame["step_growth_bytes"].gt(0).fillna(False)
    if len(rising := frame[frame["plateau"].eq(False).fillna(False) & ~creeping & ~leaking]):
        found.append(f"memory was still rising at the end in {_rows(len(rising))}: {name_rows(rising, frame)}")
    if wide := int((frame["step_iqr_s"] / frame["step_median_s"]).astype(float).gt(0.1).sum()):
        found.append(f"step times spread by more than 10 % (interquartile) within {_rows(wide)}")
    return found


def _repeats(groups: Sequence[Group]) -> list[str]:
    """List, pair by pair, the repeats whose memory is not byte-identical."""
    found: list[repeats.Apart] = []
    axes = ["seq_len", "micro_batch", "seed"]
    for group in groups:
        frame = group.take(*axes, "device", "foreign", "outcome", "trial_id", "memory_source", *repeats.COLUMNS)
        measured = frame["device"].ne("simulated").fillna(False) & frame["foreign"].isna()
        frame = frame[measured & frame["outcome"].eq("ok").fillna(False)]
        frame = frame[frame.duplicated(axes, keep=False)]
        for _, runs in frame.groupby(axes, dropna=False):
            found += repeats.find_apart(records(runs))
    return repeats.sentences(found)


def _spreads(groups: Sequence[Group]) -> list[str]:
    found = []
    worst = 0.0
    wide = alone = cells = 0
    for group in groups[:200]:
        speed = group.ok("tokens_per_s", "seq_len").groupby("seq_len")["tokens_per_s"]
        spread = (speed.std() / speed.mean()).astype(float)
        cells += len(spread)
        alone += int((speed.size() == 1).sum())
        wide += int((spread > SPREAD).sum())
        worst = max(worst, float(spread.max()) if spread.notna().any() else 0.0)
    if wide:
        found.append(
            f"speed of repeats spreads by more than {100 * SPREAD:.0f} % at {wide} of {cells} points "
            f"(worst {100 * worst:.1f} %)"
        )
    if cells and alone == cells:
        found.append("every point was measured once, so speed has no interval; measure with repeats=3")
    return found


def unproven(frame: pd.DataFrame) -> str:
    """Name the techniques of these rows that no GPU has been seen to run as predicted; "" for none."""
    return ", ".join(sorted({str(name) for of_row in frame["unproven"].dropna() for name in of_row}))


def methods(table: Table, fits: Sequence[Fit]) -> str:
    """Return a paragraph for the methods section of a paper: only what the rows say."""
    frame = table.frame
    own = frame[frame["device"].ne("simulated").fillna(True)]
    techniques = {axis.name: frame[_in_effect(frame, axis)] for axis in AXES if axis.default is not None}
    ran = own[own["outcome"].eq("ok").fillna(False)]
    text = latex.markdown(
        "methods.txt.j2", all=partial(values, frame), own=partial(values, own), varying=varying(frame).any(),
        used=[f"{name} {values(mine, name)} ({_rows(len(mine))})" for name, mine in techniques.items() if len(mine)],
        timed=frame["foreign"].isna().all(), counted=(frame["memory_source"] == "cuda_allocator").any(),
        repeated=sorted(set(ran.groupby([n for n in _axes() if n not in ("repeat", "seed")], dropna=False).size())),
        predicted=frame["device"].eq("simulated").any(), unproven=unproven(frame), bases={fit.basis for fit in fits},
    )  # fmt: skip
    return " ".join(text.split())


def reproduce(row: Any, trial: Mapping[str, Any] | None) -> str:
    """Return the command that runs this row's trial again, or why there is none; for an imported row its origin."""
    if not pd.isna(row["foreign"]):
        return f"imported from {row['foreign']}"
    if trial is None:
        return "no command here, because only the sweep's journal.jsonl has the whole trial; run vramsweep report on it"
    try:
        return command(trial, str(row["trial_id"]))
    except UserError as error:
        return f"no command: {error}"
