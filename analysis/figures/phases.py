"""Figures of a step's phases, how much memory each needs and which holds the peak; and of whole jobs (protocol=job),
the peak of each part next to that of the steps.

In: rows. It does not show what the memory is for, as composition.py does.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.metrics import highest_of
from vramsweep.analysis.data.parts import called
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.gpus import add_card_limit, card_limit
from vramsweep.analysis.figures.plots import ABOVE, LENGTH, End, Figure, escape, finish, new_plot, sentence, short
from vramsweep.analysis.figures.style import COLOURS, GREY, LOOKS, MOST, Look, View, having
from vramsweep.analysis.model.phases import PHASES
from vramsweep.harness.rows.schema import PARTS

NAME = "memory_by_phase"
COLUMNS = tuple(f"{phase}_peak_allocated_bytes" for phase in PHASES)
# Hues of their own, lighter and darker, because the colours of configurations and of parts mean something else.
PHASE_LOOKS = {phase: Look(*look) for phase, look in LOOKS["phases"].items()}


def highest(rows: pd.DataFrame) -> list[str]:
    """Return the phase that holds each row's peak; "" if no phase's peak is known."""
    return list(highest_of(rows[list(COLUMNS)].to_numpy(float, na_value=np.nan), PHASES))


def phases(view: View) -> list[Figure]:
    """Draw the peak allocated of each phase of a step against length, over allocated and reserved of the whole run."""
    known = [g for g in having(view.groups, *COLUMNS[1:]) if len(g.ok(*COLUMNS[1:], "seq_len"))]
    if not known:
        return []
    group = max(known, key=lambda one: one.ok("seq_len")["seq_len"].nunique())  # the first of equals
    columns = ["peak_allocated_bytes", *([] if group.resident else ["peak_reserved_bytes"]), *COLUMNS]
    rows = group.ok("seq_len", also=[*columns, "micro_batch"]).dropna(subset=columns, how="all")
    if rows["seq_len"].nunique() < 2:
        return []
    middle = rows.groupby("seq_len")[columns].median().astype(float)
    unit, called = plots.axis_unit(float(np.nanmax(middle.to_numpy(float))))
    x = middle.index.to_numpy(float)
    plot: Any = new_plot(LENGTH, f"peak memory ({called})")
    look = view.look(group)
    ends: list[End] = []
    for column in columns:
        y = middle[column].to_numpy(float) / unit
        at = np.flatnonzero(np.isfinite(y))
        if not len(at):
            continue
        at = at[plots.thin(x[at], y[at])]
        name = column.removesuffix("_peak_allocated_bytes")
        if name in PHASE_LOOKS:
            own = replace(PHASE_LOOKS[name], settings=look.settings)
            plots.add_line(plot, x[at], y[at], own, name)
        else:
            reserved = column == "peak_reserved_bytes"
            name = "reserved" if reserved else "allocated"
            own = Look(GREY, settings=look.settings)
            plot.add_scatter(
                x=x[at], y=y[at], name=name, mode="lines", fill="tonexty" if reserved else "tozeroy",
                fillcolor="rgba(127,127,127,0.22)" if not reserved else None,
                fillpattern=LOOKS["hatch"] if reserved else None,
                line={"color": GREY, "width": 1}, hovertemplate="%{x:,}: %{y:,.4~g}<extra>" + name + "</extra>",
                **own.trace,
            )  # fmt: skip
        ends.append(End(float(x[at[-1]]), float(y[at[-1]]), name, own))
    reach = [0.0, float(np.nanmax(middle.to_numpy(float))) / unit]
    limit = card_limit(group, reach[1] * unit)
    if limit is not None and limit.near:
        add_card_limit(plot, limit, unit)
        reach.append(limit.size / unit)
    finish(plot, ends, reach, zero=True)
    caption = sentence(
        f"Configuration: {group.label}." if group.settings else "",
        "Lines: peak of each phase of the probe step. Phases follow each other, so their peaks do not add up.",
        "" if group.resident else "Grey: peak allocated of the whole run; hatched: up to its peak reserved.",
        "These rows have no memory by component." if not view.predicted else "",
        "" if limit is None else limit.told(),
    )  # fmt: skip
    return [Figure(NAME, "Peak memory by phase", caption, plot, rows)]


def of_jobs(view: View) -> list[Figure]:
    """Draw each part's peak as a bar, grouped by job, for the jobs that most exceed their steps; frame the steps."""
    if not (jobs := view.jobs):
        return []
    shown = jobs[:MOST]
    bases = sorted({job.base for job in shown})
    unit, called_ = plots.axis_unit(max(max(job.peaks.values()) for job in shown))
    plot = new_plot("whole job", f"peak {' or '.join(bases)} ({called_})")
    x = [f"{number}. {escape(short(job.name))}" for number, job in enumerate(shown, 1)]
    for part, colour in zip(PARTS, COLOURS, strict=False):  # there are more colours than parts
        if not any(part in job.peaks for job in shown):
            continue
        line = {"color": "#000", "width": 2 * (part == "steps")}
        plot.add_bar(
            x=x, y=[job.peaks[part] / unit if part in job.peaks else float("nan") for job in shown], name=called(part),
            marker={"color": colour, "pattern": {"shape": LOOKS["patterns"][part]}, "line": line},
            hovertemplate="%{x}: %{y:,.4~g}<extra>" + called(part) + "</extra>",
        )  # fmt: skip
    plot.update_layout(barmode="group", showlegend=True, legend=ABOVE, bargap=0.2)
    plot.update_xaxes(type="category")
    caption = sentence(
        f"Peak {' or '.join(bases)} of each part of the job. Framed: the steps, on which fits and maxima are based.",
        f"{len(shown)} of {len(jobs):,} jobs: their parts exceed the steps most." if len(jobs) > len(shown) else "",
    )
    data = pd.DataFrame(
        {"job": job.name, "part": part, f"peak_{job.base}_bytes": size, "trial_id": job.trial_id}
        for job in shown
        for part, size in job.peaks.items()
    )
    return [Figure("parts", "Peak memory by part of the job", caption, plot, data)]
