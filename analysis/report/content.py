"""Everything that a report or a paper folder shows, computed once from a table."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from vramsweep.analysis.answers.answer_table import Answered, answer_question, what_if_tables
from vramsweep.analysis.compare import lengths, residuals
from vramsweep.analysis.compare.calibrate import calibrate, calibrated
from vramsweep.analysis.data import parts
from vramsweep.analysis.data.groups import Group, groups
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import METRICS
from vramsweep.analysis.data.pairing import Beside
from vramsweep.analysis.figures import figure_table, plots, timeline
from vramsweep.analysis.figures import inferred as figures_inferred
from vramsweep.analysis.figures import residuals as figures_residuals
from vramsweep.analysis.figures.style import View
from vramsweep.analysis.model import fit_wording
from vramsweep.analysis.model.fit import Fit, fit_table
from vramsweep.analysis.model.memory_frontier import EDGE, Limit, frontier
from vramsweep.analysis.report import answer as answers
from vramsweep.analysis.report import findings, own_axis, summary, tables, tiles
from vramsweep.analysis.report.picker import Picker, picker
from vramsweep.analysis.report.summary import Summary

FITTED = 24  # most groups; fits of more would take longer than anyone waits at the end of a sweep
SHOWN = 200  # most groups that figures, findings and warnings consider
PREDICTED = "predicted"
FITS = "°: beyond the fitted lengths; safe: a new run fits with a probability of 97.5 %, CUDA context included"
JOBS = "; only load and steps count, although other parts of the job need more"
KEPT = ("table", "fits", "limits", "residuals", "screen", "asked", "machine", "picker", "again")  # words of their own
LENGTHS = 12_000  # most lengths over all fitted groups, for the same reason as FITTED


@dataclass(frozen=True)
class Content:
    """Data of one report. `tables` are (title, file name, frame of text cells)."""

    table: Table
    title: str
    subtitle: str
    coverage: dict[str, int]
    findings: list[str]
    warnings: list[str]
    figures: list[plots.Figure]
    tables: list[tuple[str, str, pd.DataFrame]]
    fits: list[Fit]
    limits: list[Limit]
    residuals: pd.DataFrame
    fit_text: str
    summary: str
    screen: Summary
    asked: dict[str, str]
    machine: dict[str, str]
    methods: str
    card: answers.Card
    picker: Picker
    again: str
    then: str
    answer: Answered | None = None


@dataclass(frozen=True)
class Fitting:
    """A request for fits: their range of x, the curve kinds drawn next to the chosen one, and its command."""

    start: float | None = None
    stop: float | None = None
    curves: tuple[str, ...] = ()
    command: str = ""


ALL_ROWS = Fitting()


def collect(table: Table, answer: str | None = None, fitting: Fitting = ALL_ROWS) -> Content:
    """Fit, draw and describe a table; measured, predicted and imported rows each by themselves.

    Raises UserError if there is no `answer` of that name.
    """
    answered = answer_question(table, answer)
    unchanged, table = table, own_axis.swap(table)
    views: list[tuple[str, View]] = []
    found: list[str] = []
    leading: list[str] = []  # sentences before the fits, also shown in the terminal
    notes: list[str] = []
    worlds = split_worlds(table)
    beside = Beside(table)
    by_world = [(name, groups(part)) for name, part in worlds]
    head = tiles.head([group for _, own in by_world for group in own])
    if head is not None:
        by_world = [(name, _led(own, head.group)) for name, own in by_world]
    all_groups = [group for _, own in by_world for group in own]
    all_jobs: list[parts.Job] = []
    for (name, part), (_, own) in zip(worlds, by_world, strict=True):
        most = max(6, min(FITTED, LENGTHS // max(int(part.frame["seq_len"].nunique()), 1)))
        ends = fitting.start, fitting.stop
        own_fits, own_notes = fit_table(part, tuple(METRICS), *ends, most, own, table.axis, beside.of)
        own = own[:SHOWN]
        jobs = parts.jobs(own)
        own_limits = frontier(part, axis=table.axis, fits=own_fits, found=own, most=most)
        over_lengths = lengths.runs(own)
        predicted = name == PREDICTED
        still, varied = ([group for group in own if group.varies is side] for side in (False, True))
        drawn_from = still, varied, own_fits, own_limits, over_lengths, jobs
        views.append((name, View(part, *drawn_from, predicted=predicted, curves=fitting.curves)))
        kind = "Predicted: " * predicted
        first = [kind + said for said in (*parts.sentences(jobs), *lengths.sentences(over_lengths))]
        leading += first
        found += [*first, *(kind + said for said in findings.findings(own, own_fits))]
        all_jobs += jobs
        notes += own_notes
    fits = [fit for _, view in views for fit in view.fits]
    limits = [limit for _, view in views for limit in view.limits]
    replays, replay_notes = what_if_tables(table)
    over_steps, peaks, step_notes = timeline.of_table(table)
    drawn = [*figure_table.draw(views, beside), *over_steps, *figures_inferred.of_inferred(table)]
    notes += [*replay_notes, *step_notes]
    calibrations, calibration_notes = calibrate(table) if len(worlds) > 1 else ([], [])
    estimates = calibrated(table, calibrations)
    told = [one for one in drawn if one.caption and one.name.startswith("allocators") and "by_speed" not in one.name]
    found += [f"{'Predicted: ' * one.title.endswith(f'({PREDICTED})')}{one.caption}" for one in told]
    found += [*findings.estimates(table), *findings.calibrations(calibrations, estimates)]
    notes += calibration_notes if len(estimates) else []
    apart = residuals.residuals(table)
    drawn += figures_residuals.of_residuals(apart)
    found += residuals.sentences(apart)
    notes += residuals.not_compared(table)
    beyond_steps = parts.remark(sorted(all_jobs, key=lambda job: -job.excess.size))
    notes += [beyond_steps] if beyond_steps else []
    fixed, varied = ([g for g in all_groups if g.varies is side] for side in (False, True))
    alone = f"{PREDICTED}; " if {name for name, _ in worlds} == {PREDICTED} else ""
    kind = f" ({PREDICTED})" if alone else ""
    card = answers.card(table, all_groups, head, fits, limits, beside, answers.verdict(table))
    first, last = table.frame["started_at"].min(), table.frame["started_at"].max()
    days = [] if pd.isna(first) else list(dict.fromkeys(str(one)[:10] for one in (first, last)))
    when = f", {' to '.join(days)}" if days else ""
    ended = " · ".join(f"{count:,} {outcome}" for outcome, count in findings.coverage(table).items())
    fit_in = f"Longest sequence that fits ({alone}{FITS}{JOBS if beyond_steps else ''})"
    beyond = "; °: calibrated, outside the measured range" if calibrations else ""
    roofline = f"Estimated throughput (roofline, not measured{beyond})"
    content = Content(
        table=table,
        title=f"Memory and throughput: {findings.values(table.frame, 'sweep') or findings.name_source(table)}",
        subtitle=f"{len(table.frame):,} trial{'s' * (len(table.frame) != 1)} ({ended}) from {table.source}{when}",
        coverage=findings.coverage(table),
        findings=found,
        warnings=[*findings.warnings(table, all_groups, fits), *notes],
        figures=figure_table.with_source(drawn, table.frame),
        tables=[
            (f"Settings{kind}", "settings", tables.of_groups(fixed[:60])),
            (f"Settings where lengths vary{kind}", "lengths", lengths.table(varied[:60])),
            ("Peak memory by part of the job", "parts", tables.of_jobs(all_jobs[:60])),
            (f"Fitted curves ({alone}*: chosen)", "fits", tables.of_fits(fits)),
            (fit_in, "frontier", tables.of_limits(limits)),
            (roofline, "estimated_throughput", tables.of_estimates(all_groups[:60], estimates)),
            ("Calibration of the estimated throughput", "calibration", tables.of_calibrations(calibrations)),
            *residuals.tables(apart),
            *peaks,
            *replays,
        ],
        fits=fits,
        limits=limits,
        residuals=apart,
        fit_text="\n\n".join(fit_wording.text(fit) for fit in fits),
        summary="\n".join(filter(None, [*leading, fit_wording.summary(fits)])),
        screen=summary.summary(table, _beyond(card)),
        asked=findings.swept_axes(unchanged),
        machine=findings.machine(table),
        methods=findings.methods(unchanged, fits),
        card=card,
        picker=picker(table, by_world),
        again=fitting.command,
        then=_ask_next(fits, limits, table),
        answer=answered,
    )
    worded: Content = own_axis.reword(content, table, KEPT)
    return worded


def _ask_next(fits: Sequence[Fit], limits: Sequence[Limit], table: Table) -> str:
    """Return what to ask next: a maximum only the predictor knows, or the most informative length; "" for neither."""
    name = {"seq_len": "seq_len (or micro_batch)", own_axis.SAMPLES: "micro_batch"}.get(table.axis, table.axis)
    if any(limit.remark == EDGE for limit in limits):
        verb = "run" if table.frame["runner"].eq("script").any() else "predict"
        return f"Find the maximum with vramsweep {verb} --largest {name} and the same settings."
    known = [fit for fit in fits if fit.metric.memory and fit.next_x is not None]
    of = name.partition(" ")[0]
    return f"Measure {of}={known[0].next_x}; it improves the fit of {known[0].metric.label} most." if known else ""


def _led(found: list[Group], by: Group) -> list[Group]:
    """Return the groups with the one most like `by` first, because figures begin with it."""

    def alike(group: Group) -> int:
        return sum(group.settings.get(key) == value for key, value in by.settings.items())

    first = max(found, key=lambda group: (group.id == by.id, not group.varies, alike(group)), default=by)
    return [*(group for group in found if group is first), *(group for group in found if group is not first)]


def _beyond(card: answers.Card) -> str:
    """Return what the curve says of untried lengths for the answers' own configuration; "" for nothing."""
    told = card.fits.interval
    return f"B{told[1:]}{card.of and f': {card.of}'}." if told.startswith("by the curve") else ""


def split_worlds(table: Table) -> list[tuple[str, Table]]:
    """Return what must not share a figure, largest first: rows measured per device, predicted, each imported origin."""
    frame = table.frame
    keys = frame["foreign"].fillna("").astype("string") + "|" + frame["device"].fillna("unknown").astype("string")
    parts = []
    for key in keys.value_counts().index:
        origin, device = str(key).rsplit("|", 1)
        name = f"from {origin}" if origin else PREDICTED if device == "simulated" else f"measured on {device}"
        parts.append((name, table.where(keys == key) if keys.nunique() > 1 else table))
    return parts
