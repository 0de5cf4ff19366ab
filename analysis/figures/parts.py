"""The figure of whole jobs (protocol=job): the peak of each part, next to that of the steps."""

from __future__ import annotations

import pandas as pd

from vramsweep.analysis.data.parts import called
from vramsweep.analysis.figures.plots import ABOVE, COLOURS, MOST, Figure, axis_unit, escape, new_plot, sentence, short
from vramsweep.analysis.figures.style import View
from vramsweep.harness.rows.schema import PARTS

JOBS = MOST
_PATTERNS = {"load": ".", "resume": "\\", "first_step": "-", "steps": "", "evaluation": "/", "save": "x"}


def of_jobs(view: View) -> list[Figure]:
    """Draw each part's peak as a bar, grouped by job, for the jobs that most exceed their steps; frame the steps."""
    if not (jobs := view.jobs):
        return []
    shown = jobs[:JOBS]
    bases = sorted({job.base for job in shown})
    unit, called_ = axis_unit(max(max(job.peaks.values()) for job in shown))
    plot = new_plot("whole job", f"peak {' or '.join(bases)} ({called_})")
    x = [f"{number}. {escape(short(job.name))}" for number, job in enumerate(shown, 1)]
    for part, colour in zip(PARTS, COLOURS, strict=False):  # there are more colours than parts
        if not any(part in job.peaks for job in shown):
            continue
        line = {"color": "#000", "width": 2 * (part == "steps")}
        plot.add_bar(
            x=x, y=[job.peaks[part] / unit if part in job.peaks else float("nan") for job in shown], name=called(part),
            marker={"color": colour, "pattern": {"shape": _PATTERNS[part]}, "line": line},
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
