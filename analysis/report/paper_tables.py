"""The tables of a paper. Settings, maximum lengths and fits are laid out for one column; others are the report's own.

The former never mix measured, predicted and imported rows. Each caption names GPU, versions and protocol; of imported
rows, their source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, floor, log10

import numpy as np
import pandas as pd

from vramsweep.analysis.compare import residuals
from vramsweep.analysis.data.groups import Group, groups
from vramsweep.analysis.data.load import Table as Rows
from vramsweep.analysis.data.metrics import GIB, MIB, UNITS, Unit, unit_of
from vramsweep.analysis.model.curves import NAMES
from vramsweep.analysis.model.fit import Fit
from vramsweep.analysis.model.fit_wording import format_r2
from vramsweep.analysis.model.fit_wording import number as format_number
from vramsweep.analysis.model.memory_frontier import FEW, Limit
from vramsweep.analysis.report import findings
from vramsweep.analysis.report.content import PREDICTED, Content, split_worlds
from vramsweep.analysis.report.findings import WORDS, unproven, values
from vramsweep.analysis.report.latex import BEYOND, Column, Table, columns, markdown, number, slug, split_unit
from vramsweep.harness.messages.units import format_count
from vramsweep.harness.rows import repeats
from vramsweep.version import __version__

CARDS = (16, 24, 40, 48, 80, 96, 141, 180)  # GiB: sizes of GPUs, of which a paper shows up to SIZES
SIZES = 5
OWN = ("settings", "frontier", "fits")  # tables of the report that others replace here
_SAID: dict[str, str] = WORDS["numbers"]
MOST_SAID = 3  # most sentences about a table
_VALUE = re.compile(r"[+-]?\d+(?:\.\d+)?")  # a number at the beginning of a cell
MOST_DIGITS = 6  # of MiB: a millionth is a byte
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")
FITTED = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")


def tables(content: Content) -> list[Table]:
    """Return every table of the paper's folder in reading order; none is empty."""
    worlds = split_worlds(content.table)
    made: list[Table] = []
    for world, rows in worlds:
        found = groups(rows)
        ids = {group.id for group in found}
        fits = [fit for fit in content.fits if fit.group in ids]
        about = context(world, rows)
        own = [
            _settings([group for group in found if not group.varies], about, world == PREDICTED),
            *_models(fits, about),
            _frontier([limit for limit in content.limits if limit.group in ids], about),
        ]
        ending = f"_{slug(world).replace('-', '_')}" if len(worlds) > 1 else ""
        made += [
            replace(table, name=table.name + ending, says=f"{world[0].upper()}{world[1:]}: {table.says}")
            for table in own
            if table is not None
        ]
    whole = " ".join(context(world, rows) for world, rows in worlds[:2])
    answer = content.answer
    others = [*([(answer.title, "answer", answer.frame)] if answer else []), *content.tables]
    known = {"residuals": residuals.sentences(content.residuals),
             "estimated_throughput": findings.estimates(content.table),
             "answer": [f"{title}: {verdict}." for title, verdict, _ in answer.cards()] if answer else []}  # fmt: skip
    for title, name, frame in others:
        if name not in OWN and len(frame):
            shown = tuple(columns(frame))
            ranges = f": {said}" if (said := _ranges(shown)) else ""
            says = " ".join(known.get(name, [])[:MOST_SAID]) or f"A separate table gives: {title}{ranges}."
            made.append(Table(slug(name), sentence(title, whole), shown, says=says, own=frame))
    return made


def _ranges(columns: Sequence[Column], at: Iterable[int] | None = None, named: Sequence[str] = ()) -> str:
    """Return the least and the largest number of each column, over the lines `at` or over all. For columns whose heads
    are `named`, add the line that has the largest."""
    said = []
    for column in columns[1:]:
        cells = [(place, column.cells[place]) for place in at or range(len(column.cells))]
        known = [(float(match[0]), match[0], place) for place, cell in cells if (match := _VALUE.match(cell))]
        if column.kind == "numbers" and known:
            ends = dict.fromkeys(_grouped(text) for _, text, _ in (min(known), max(known)))
            several = column.head in named and len(known) > 1
            whose = f" (the largest: {columns[0].cells[max(known)[2]].split(' [')[0]})" if several else ""
            beyond = " (partly extrapolated)" if any(BEYOND in cell for _, cell in cells) else ""
            said.append(
                f"{_SAID.get(column.head, column.head)} {' to '.join(ends)} {column.unit}".rstrip() + whose + beyond
            )
    return "; ".join(said)


def _grouped(text: str) -> str:
    """Return a number with its thousands apart."""
    return f"{float(text):{'+' * (text[0] == '+')},.{len(text.partition('.')[2])}f}".replace("-", "−")


def sentence(title: str, more: str) -> str:
    """Return a caption: what it shows, then `more`, of which rows."""
    return f"{title}{'' if title.endswith(('?', '.', '!')) else '.'} {more}".strip()


def context(world: str, rows: Rows) -> str:
    """Return what a caption says of its rows: on which device, with which versions, by which protocol."""
    of = partial(values, rows.frame, most=3)
    named = [f"{name} {text}" for column, name in WORDS["software"].items() if (text := of(column))]
    return markdown(
        "context.txt.j2", of=of, foreign=rows.frame["foreign"].notna().any(), predicted=world == PREDICTED,
        device=next(filter(None, map(of, ("gpu_name", "simulated_gpu", "cpu_name"))), "an unknown machine"),
        software="; ".join([*named, f"vramsweep {__version__}"]), version=__version__, unproven=unproven(rows.frame),
        resident=rows.frame["memory_source"].eq("cpu_tensors_and_rss").fillna(False).any(),
    )  # fmt: skip


def _settings(found: Sequence[Group], about: str, predicted: bool) -> Table | None:
    """Return memory and speed of each configuration at the longest sequence that ran, and the first that did not."""
    names, spans, peaks, speeds = [], [], [], []
    remarks: dict[str, str] = {}
    for group in found:
        frame = group.take("outcome", "seq_len", *PEAKS, "tokens_per_s", "flags", "model")
        done, failed = (frame[frame["outcome"].eq(how).fillna(False).astype(bool)] for how in ("ok", "oom"))
        longest = done["seq_len"].max()
        at = done[done["seq_len"].eq(longest).fillna(False).astype(bool)]
        flags = ", ".join(sorted({str(flag) for of_row in at["flags"].dropna() for flag in of_row}))
        mark = f" [{remarks.setdefault(flags, chr(ord('a') + len(remarks) % 26))}]" if flags else ""
        alone = "" if group.settings else values(group.take("model"), "model")
        names.append((alone or group.label) + mark)
        spans.append((number(longest), number(failed["seq_len"].min())))
        peaks.append([at[name].median() if len(at) else None for name in PEAKS])
        speeds.append(_speed(at["tokens_per_s"].dropna()))
    unit = min(map(_unit, zip(*peaks, strict=True)), default=UNITS[0], key=lambda one: one.bytes)
    lines = [
        (name, *lengths, *(_in(unit, size) for size in of_group), speed)
        for name, lengths, of_group, speed in zip(names, spans, peaks, speeds, strict=True)
    ]
    fast = " and throughput" if any(speed != "–" for speed in speeds) else ""
    at_which = f"Peak memory{fast} at the longest sequence that {'fits' if predicted else 'ran'}"
    title = at_which if any(longest != "–" for longest, _ in spans) else "No sequence that was tried fits"
    notes = [f"[{letter}] flagged: {flags.replace('_', ' ')}." for flags, letter in remarks.items()]
    notes += _brackets(speeds, "the mean between processes")
    sizes = f"peak allocated ({unit.name})", f"peak reserved ({unit.name})"
    heads = ("setting", "longest (tokens)", "first out of memory (tokens)", *sizes, "speed (tokens/s)")
    table = _table("settings", sentence(title, about), heads, lines, notes)
    ranges = _ranges(table.columns, named=("peak reserved", "speed")) if table else ""
    return table and replace(table, says=f"{title}, over {format_count(len(lines), 'configuration')}: {ranges}.")


def _speed(found: pd.Series[float]) -> str:
    """Return the mean with its interval if that is known, else the median."""
    if (sure := repeats.interval(list(found)) if len(found) else None) is None:
        return number(found.median() if len(found) else None)
    return _uncertain(sure.mean, (sure.low, sure.high))


def _brackets(cells: Sequence[str], what: str) -> list[str]:
    """Return the notes that explain the brackets in these cells; `what` is what they are an interval of."""
    return [note.format(what) for sign, note in WORDS["brackets"].items() if any(sign in cell for cell in cells)]


def _unit(sizes: Iterable[float | None]) -> Unit:
    """Return the unit for these sizes in bytes; GiB if none is known."""
    return unit_of(max((abs(size) for size in sizes if size is not None and not pd.isna(size)), default=float(GIB)))


def _in(unit: Unit, size: float | None) -> str:
    return number(None if size is None else size / unit.bytes, unit.digits)


def _models(fits: Sequence[Fit], about: str) -> list[Table]:
    """Return a table of fits for each fitted quantity; quantities whose tables are equal share one."""
    found: dict[Table, list[list[Fit]]] = {}
    for column in FITTED:
        mine = [fit for fit in fits if fit.metric.column == column]
        if (table := _models_of(mine)) is not None:
            found.setdefault(table, []).append(mine)
    made = []
    for table, same in found.items():
        labels = [mine[0].metric.label.removeprefix("peak ") for mine in same]
        alike = f" The same numbers hold for {' and '.join(labels)} memory." if len(labels) > 1 else ""
        caption = sentence(f"Fitted peak {' and '.join(labels)} memory against sequence length", about)
        made.append(replace(table, name=f"fits_{labels[0]}", caption=caption, says=_of_fits(same[0]) + alike))
    return made


def _models_of(mine: Sequence[Fit]) -> Table | None:
    """Return a line for each piece of each fit's line, parabola and chosen model, without name and caption."""
    found = [
        (fit, one, key, number_of, piece)
        for fit in mine
        for one in fit.shown
        for key, curve in one.model.curves.items()
        for number_of, piece in enumerate(curve.lines(), 1)
    ]
    unit = _unit([piece[2] for *_, piece in found])
    misfit = _unit([one.worst for _, one, *_ in found])
    starts = [at for at, (fit, *_) in enumerate(found) if at == 0 or found[at - 1][0] is not fit]
    lines: list[tuple[str, ...]] = []
    for fit, one, key, number_of, (start, _, at, slope, bend) in found:
        new_fit, new_model = len(lines) in starts, number_of == 1
        modulus = one.model.modulus
        of = f", lengths {'' if key else 'not '}divisible by {modulus}" if modulus else ""
        name = f"{NAMES[one.model.curves[key].kind]}{of}{', chosen' if one is fit.chosen else ''}"
        ends = fit.intervals[key].get(f"b{number_of}") if one is fit.chosen else None
        bounds = None if ends is None or not np.isfinite(ends).all() else (ends[0] / MIB, ends[1] / MIB)
        quality = (_in(misfit, one.rms), _in(misfit, one.worst), format_r2(one.r2), number(one.probability, 2))
        lines.append((
            f"{fit.label}: {name}" if new_fit else name if new_model else "",
            number(start if np.isfinite(start) else None),
            _in(unit, at), _slope(slope / MIB, bounds), _digits(bend) if bend else "–",
            *(quality if new_model else ("",) * 4),
        ))  # fmt: skip
    notes = [WORDS["models"], *_brackets([line[3] for line in lines], "the slope")]
    table = _table(
        "", "",
        ("model", "from (tokens)", f"intercept ({unit.name})", "slope (MiB/position)", "curvature (bytes/position²)",
         f"RMS ({misfit.name})", f"worst ({misfit.name})", "R²", "probability"),
        lines, notes,
    )  # fmt: skip
    return table and replace(table, groups=tuple(starts[1:]))


def _of_fits(fits: Sequence[Fit]) -> str:
    """Describe the first fit and its rows, how often each kind of curve was chosen, and the worst misfit."""
    first, names = fits[0], [NAMES[fit.chosen.model.kind] for fit in fits]
    (low, high), worst = first.range, max(fits, key=lambda fit: fit.chosen.worst)
    kinds = ", ".join(f"{names.count(name):,} × {name}" for name in dict.fromkeys(names))
    rms, most = (format_number(*one) for one in ((first.chosen.rms, first.metric), (worst.chosen.worst, worst.metric)))
    several = f"The curves of {len(fits):,} configurations are {kinds}; the largest residual is {most} ({worst.label})."
    return (
        f"{findings.of_fit(first)} The fit uses {len(first.points.x):,} rows at {first.lengths:,} lengths from "
        f"{low:,.0f} to {high:,.0f} tokens (R² {format_r2(first.chosen.r2)}, RMS {rms}). "
        + (several if len(fits) > 1 else f"The largest residual is {most}.")
    )


def _digits(value: float) -> str:
    """Return a number to four digits, down to MOST_DIGITS after the point."""
    return number(value, min(max(3 - floor(log10(abs(value))), 0), MOST_DIGITS)) if value else number(0.0)


def _slope(slope: float, ends: tuple[float, float] | None) -> str:
    """Return a slope to four digits, or with its interval if known; – for a level, which has none."""
    return (_digits(slope) if ends is None else _uncertain(slope, ends)) if slope or ends else "–"


def _uncertain(value: float, ends: tuple[float, float]) -> str:
    """Return `12.30(42)`: the value, and the longer half of its interval in units of the last digit. The half is
    rounded up to two digits. Return `12 [−1, 25]` if the half is no less than the value, and – if all is 0."""
    half = max(ends[1] - value, value - ends[0])
    digits = min(max(1 - floor(log10(half)), 0), MOST_DIGITS) if half > 0 else MOST_DIGITS
    spread = max(ceil(half * 10**digits - 1e-9), 1)
    if not any(round(one, digits) for one in (value, *ends)):
        return "–"
    if spread < abs(round(value, digits)) * 10**digits:
        return f"{value:.{digits}f}({spread})"
    shown, low, high = (f"{round(one, digits) + 0.0:.{digits}f}".replace("-", "−") for one in (value, *ends))
    return f"{shown} [{low}, {high}]"


def _frontier(limits: Sequence[Limit], about: str) -> Table | None:
    """Return the maximum length for a few GPU sizes: what ran, what is safe, what the curve says, what failed."""
    known = [limit for limit in limits if limit.remark != FEW]
    of_use = [size for size in CARDS if any(limit.gib == size and limit.value is not None for limit in known)]
    of_use = of_use[:SIZES] or [size for size in CARDS if any(limit.gib == size for limit in known)][:1]
    lines, firsts = [], []
    for limit in _distinct_limits(limit for limit in known if limit.gib in of_use):
        of = f", multiples of {limit.multiples_of}" if limit.multiples_of else ""
        firsts.append(f"{limit.group}{of}")
        name = "" if firsts[-2:-1] == firsts[-1:] else limit.label + of
        curve = number(limit.value) + BEYOND * (limit.extrapolated and limit.value is not None)
        proven = number(limit.largest_ok), number(limit.low)
        lines.append((name, f"{limit.gib:g}", *proven, curve, number(limit.smallest_too_large)))
    predicted = all(limit.predicted for limit in known)
    ran, run = ("fits", "predicted length") if predicted else ("ran", "measured length")
    notes = [
        f"{ran.capitalize()}: the longest {run} within PyTorch's limit on such a GPU. Safe: a new run of that length "
        f"fits with a probability of 97.5 %. Curve: maximum by the fitted curve. Too long: shortest that needs more."
    ]
    if any(BEYOND in line[4] for line in lines):
        notes.append(f"{BEYOND}: beyond what was {'predicted' if predicted else 'measured'}.")
    axis = known[0].axis.replace("seq_len", "sequence length") if known else ""
    heads = ("setting", "GPU (GiB)", *(f"{what} (tokens)" for what in (ran, "safe", "curve", "too long")))
    table = _table("frontier", sentence(f"Maximum {axis} that fits, by GPU", about), heads, lines, notes)
    breaks = tuple(at for at in range(1, len(firsts)) if firsts[at] != firsts[at - 1])
    return table and replace(table, groups=breaks, says=_of_limits(table.columns, [line[1] for line in lines]))


def _of_limits(columns: Sequence[Column], sizes: Sequence[str]) -> str:
    """Describe what fits in the smallest and in the largest of the GPUs that are shown."""
    ends = dict.fromkeys((min(sizes, key=float), max(sizes, key=float)))
    places = {size: [at for at, one in enumerate(sizes) if one == size] for size in ends}
    shown = [columns[0], *(column for column in columns[1:] if column.head != "GPU")]
    said = []
    for size, at in places.items():
        said.append(f"On a GPU of {size} GiB, over {format_count(len(at), 'configuration')}: {_ranges(shown, at)}.")
    return " ".join(said)


def _distinct_limits(limits: Iterable[Limit]) -> Iterator[Limit]:
    """Yield limits, without those of larger GPUs that add nothing: all that was tried fits, and no curve ends."""
    before: dict[tuple[str, int | None], Limit] = {}
    for limit in limits:
        last = before.get((limit.group, limit.multiples_of))
        if last is None or limit.value is not None or last.value is not None or last.largest_ok != limit.largest_ok:
            yield limit
        before[limit.group, limit.multiples_of] = limit


def _table(
    name: str, caption: str, heads: Sequence[str], lines: Sequence[Sequence[str]], notes: Sequence[str]
) -> Table | None:
    """Return the table without columns of unknowns; None if no line or column is left. Columns after the first are
    numbers, with their unit in brackets in the head."""
    if not lines:
        return None
    first, *others = zip(*lines, strict=True)
    pairs = zip(map(split_unit, heads[1:]), others, strict=True)
    made = [Column(heads[0], first), *(Column(head, cells, unit, "numbers") for (head, unit), cells in pairs)]
    kept = tuple(column for column in made if any(cell not in ("–", "") for cell in column.cells))
    return Table(name, caption, kept, tuple(notes)) if kept else None
