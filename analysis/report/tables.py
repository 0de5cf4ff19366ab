"""Tables of groups, fits, limits and estimates: frames whose cells are text, which export.py sets.

If each line is about one group, the index holds the groups' ids, for pages whose reader chooses among groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.compare.calibrate import PARTS, SECONDS, Calibration
from vramsweep.analysis.data.groups import Group, whatever
from vramsweep.analysis.data.metrics import GIB
from vramsweep.analysis.data.parts import Job, called
from vramsweep.analysis.model import fit_wording
from vramsweep.analysis.model.fit import Fit
from vramsweep.analysis.model.memory_frontier import ALL, FEW, Limit
from vramsweep.harness.messages.units import format_estimate, format_size
from vramsweep.harness.rows import repeats
from vramsweep.harness.rows.schema import PARTS as OF_JOBS

_AT_LONGEST = tuple((f"peak_{kind}_bytes", f"{kind} (GiB)", GIB, 2) for kind in ("allocated", "reserved"))
_AT_LONGEST += (("tokens_per_s", "tokens/s", 1, 0),)
BETWEEN = "95 % interval (tokens/s)"


def of_groups(groups: Sequence[Group]) -> pd.DataFrame:
    """Return a line per group: number of rows by outcome, the longest length, and memory and speed there."""
    lines = []
    for group in groups:
        frame = group.take("outcome", "seq_len", "peak_allocated_bytes", "peak_reserved_bytes", "tokens_per_s")
        done = frame[(frame["outcome"] == "ok").fillna(False).astype(bool)]
        line = {"settings": group.label, "ok": str(len(done))}
        line["oom"] = str(int((frame["outcome"] == "oom").sum()))
        line["other"] = str(len(frame) - len(done) - int(line["oom"]))
        longest = done["seq_len"].max()
        at = done[done["seq_len"] == longest] if len(done) and not pd.isna(longest) else done.iloc[:0]
        line["longest (tokens)"] = f"{int(longest):,}" if len(at) else "–"
        for column, name, scale, digits in _AT_LONGEST:
            value = at[column].median() if len(at) else np.nan
            line[name] = "–" if pd.isna(value) else f"{float(value) / scale:,.{digits}f}"
        line[BETWEEN] = _between(at["tokens_per_s"].dropna())
        lines.append(line)
    found = pd.DataFrame(lines, index=[group.id for group in groups])
    timed = len(found) and found["tokens/s"].ne("–").any()
    return found if timed else found.drop(columns=["tokens/s", BETWEEN], errors="ignore")


def _between(speeds: pd.Series[Any]) -> str:
    """Return the interval of speed from repeats, each a process; "none: one process" if measured once."""
    if speeds.empty:
        return "–"
    if (found := repeats.interval(list(speeds))) is None:
        return "none: one process"
    return f"{found.low:,.0f} to {found.high:,.0f} ({found.runs} processes)"


def of_fits(fits: Sequence[Fit]) -> pd.DataFrame:
    """Return a line per curve of each fit's line, parabola and chosen model."""
    curves = [(fit, one, key) for fit in fits for one in fit.shown for key in one.model.curves]
    lines = [
        {
            "quantity": fit.metric.label,
            "settings": fit.label,
            "model": one.model.name + " *" * (one is fit.chosen),
            "curve": fit_wording.of_class(fit, one, key),
            "R²": fit_wording.format_r2(one.r2),
            "RMS": fit_wording.number(one.rms, fit.metric),
            "worst": fit_wording.number(one.worst, fit.metric),
            "probability": f"{one.probability:.2f}",
            "based on": fit.basis if one is fit.chosen else "points",
            "range": f"{fit.range[0]:,.0f} to {fit.range[1]:,.0f}",
            "lengths": f"{fit.lengths:,}",
        }
        for fit, one, key in curves
    ]
    return pd.DataFrame(lines, index=[fit.group for fit, *_ in curves])


def of_limits(limits: Sequence[Limit]) -> pd.DataFrame:
    """Return a line per group and a column per memory size; ° marks a limit beyond the measured range. Groups with too
    few lengths for a curve have no line."""
    curved = {limit.group for limit in limits if limit.remark != FEW}
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for limit in (one for one in limits if one.group in curved):
        of = f", multiples of {limit.multiples_of}" if limit.multiples_of else ""
        line = lines.setdefault((limit.group, of), {"settings": limit.label + of})
        text = f"{limit.value:,}" if limit.value is not None else limit.remark
        safe = limit.low if limit.low is not None and (limit.value is None or limit.low < limit.value) else None
        text += "°" * (limit.extrapolated and limit.value is not None) + " (all positions)" * (limit.remark == ALL)
        line[f"{limit.gib:g} GiB"] = text + (f" (safe: {safe:,})" if safe is not None else "")
    return pd.DataFrame(list(lines.values()), index=[group for group, _ in lines])


def of_jobs(jobs: Sequence[Job]) -> pd.DataFrame:
    """Return a line per whole job: the peak of each part that was seen, and the part with the largest."""
    lines, seen = [], [part for part in OF_JOBS if any(part in job.peaks for job in jobs)]
    for job in jobs:
        sizes = {called(part): format_size(job.peaks[part]) if part in job.peaks else "–" for part in seen}
        lines.append({"job": job.name, "peak": job.base, **sizes, "largest": called(job.largest)})
    return pd.DataFrame(lines)


def of_calibrations(calibrations: Sequence[Calibration]) -> pd.DataFrame:
    """Return a line per calibration: efficiencies (the share of the roofline's speed that kernels reach) and errors."""
    lines = []
    for one in calibrations:
        line = {"GPU": one.gpu, "precision": one.precision, "measured rows": f"{one.rows:,}"}
        line["configurations"] = f"{one.configurations:,}"
        for part, found in zip(PARTS, one.efficiencies(), strict=True):
            line[f"{part} efficiency"] = "–" if found is None else f"{found[0]:.2f} ± {found[1]:.2f}"
        line["leave-one-out error, median"] = f"{100 * one.median_error:.1f} %"
        line["worst"] = f"{100 * one.worst_error:.1f} %"
        line["remark"] = one.remark()
        lines.append(line)
    return pd.DataFrame(lines)


def of_estimates(groups: Sequence[Group], calibrated: pd.DataFrame, most: int = 6) -> pd.DataFrame:
    """Return each group's estimated speed at up to `most` lengths, what bounds it, and calibrated where possible."""
    steps = calibrated.set_index("trial_id")
    lines, ids = [], []
    known = [group for group in groups if len(group.ok(*SECONDS))] if len(steps) else []
    for group in whatever(known, "allocator"):
        links = ("estimated_tokens_per_s_no_overlap", "estimated_link", "calibrated_tokens_per_s")
        rows = group.ok(*SECONDS, "estimated_tokens_per_s", "seq_len", also=links).sort_values("seq_len")
        rows = rows.drop_duplicates("seq_len")
        rows = rows.iloc[np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(int))]
        for _, row in rows.iterrows():
            whole = sum(row[name] for name in SECONDS)
            shares = (f"{p} {100 * row[s] / whole:.0f} %" for p, s in zip(PARTS, SECONDS, strict=True))
            line = {
                "settings": group.label,
                "length (tokens)": f"{int(row['seq_len']):,}",
                "estimated, at most (tokens/s)": f"{row['estimated_tokens_per_s']:,.0f}",
                "bound by": ", ".join(shares),
            }
            if pd.notna(row["estimated_link"]):
                least = row["estimated_tokens_per_s_no_overlap"]
                line["if nothing overlaps (tokens/s)"] = f"{least:,.0f} over {row['estimated_link']}"
            if pd.notna(row["calibrated_tokens_per_s"]):
                line["estimated, by speeds of other runs (tokens/s)"] = format_estimate(row["calibrated_tokens_per_s"])
            if steps["fitted_step_s"].notna().any():
                step = steps.loc[row["trial_id"]]
                speed = step["fitted_tokens_per_s"]
                mark = "°" if step["extrapolated"] else ""
                line["estimated, by your measurements (tokens/s)"] = "–" if pd.isna(speed) else f"{speed:,.0f}{mark}"
            lines.append(line)
            ids.append(group.id)
    return pd.DataFrame(lines, index=ids)
