"""Answers in a few words: whether it fits, what a token costs, how fast it is.

In: rows, fits and limits. Out: `Tile`s. All but the fastest are about one configuration: the one in which the longest
length ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import Group, label
from vramsweep.analysis.data.load import is_, varying
from vramsweep.analysis.data.metrics import GIB, METRICS, MIB, unit_of
from vramsweep.analysis.data.pairing import Beside
from vramsweep.analysis.data.parts import called
from vramsweep.analysis.data.warnings_of_rows import left_out
from vramsweep.analysis.figures.composition import OF_PEAK, oom_parts
from vramsweep.analysis.figures.style import ON_CARD
from vramsweep.analysis.model.fit import Fit
from vramsweep.analysis.model.memory_frontier import ALL, EDGE, SIZES, Limit
from vramsweep.analysis.model.phases import PHASES
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.messages.units import format_estimate, format_size
from vramsweep.harness.rows import repeats

MEASURED, PREDICTED, IMPORTED, ESTIMATED = "measured", "predicted", "imported", "estimated"
KINDS = (MEASURED, IMPORTED, PREDICTED)  # the surest first
UNKNOWN = "–"
NARROW = "\u202f"  # the space before a percent sign, at which no line breaks
# Median errors of predictions against published peaks whose script and versions are known (docs/published_runs.md).
ERRORS = {"peak_allocated_bytes": "0.004 %", "peak_reserved_bytes": "3.5 %"}
FLAT = 0.01  # share of the peak: a curve that rises by less over all lengths is flat


@dataclass(frozen=True)
class Tile:
    """One question and its answer in a few words, with its interval, a sentence about it, and its basis. Unknown parts
    are "–" or ""."""

    question: str
    value: str = UNKNOWN
    interval: str = ""
    about: str = ""
    basis: str = ""


@dataclass(frozen=True)
class Head:
    """The configuration that the answers are about: its name, finished rows, longest length and that length's row."""

    group: Group
    name: str
    frame: pd.DataFrame
    longest: int
    row: pd.Series[Any]
    basis: str

    @property
    def kind(self) -> str:
        """Return measured, predicted or imported."""
        return kind_of(self.row)


def head(groups: Sequence[Group]) -> Head | None:
    """Choose the longest length that ran, measured rows first; among equals the largest batch in the least memory."""
    found: list[tuple[tuple[float, ...], Group, Any]] = []
    for group in groups:
        rows = group.ok("seq_len", also=("micro_batch", "peak_reserved_bytes", "foreign", "device"))
        if group.varies or rows.empty:
            continue
        row = rows.iloc[int(rows["seq_len"].astype(float).argmax())]
        batch, memory = (0.0 if pd.isna(row[n]) else float(row[n]) for n in ("micro_batch", "peak_reserved_bytes"))
        found.append(((-KINDS.index(kind_of(row)), float(row["seq_len"]), batch, -memory), group, row.name))
    if not found:
        return None
    _, group, at = max(found, key=lambda one: one[0])
    done = ended(group.frame, "ok")
    row = done.loc[at]
    name = _name(group, row) if len(groups) > 1 else ""
    return Head(group, name, done, int(row["seq_len"]), row, basis(row))


def join(*parts: str) -> str:
    """Join the parts of a sentence, leaving out empty ones."""
    text = "; ".join(part for part in parts if part)
    return text[:1].upper() + text[1:] + "." if text else ""


def ended(frame: pd.DataFrame, outcome: str) -> pd.DataFrame:
    """Return the rows of one outcome."""
    return frame[is_(frame, "outcome", outcome)]


def kind_of(row: Mapping[str, Any] | pd.Series[Any]) -> str:
    """Return a row's kind: measured, predicted or imported."""
    own = PREDICTED if str(row["device"]) == "simulated" else MEASURED
    return own if pd.isna(row["foreign"]) else IMPORTED


def kinds(frame: pd.DataFrame) -> pd.Series[str]:
    """Return the kind of each row: measured, predicted or imported."""
    found = pd.Series(MEASURED, index=frame.index).mask(is_(frame, "device", "simulated"), PREDICTED)
    return found.mask(frame["foreign"].notna(), IMPORTED)


def basis(row: pd.Series[Any]) -> str:
    """Return a row's kind; for a prediction, also whether any of its techniques is unproven."""
    kind, unproven = kind_of(row), row["unproven"]
    doubt = kind == PREDICTED and isinstance(unproven, list | np.ndarray) and len(unproven)
    return kind + (", unproven" if doubt else "")


def _name(group: Group | None, row: pd.Series[Any]) -> str:
    """Return the configuration in words: what distinguishes it, and always the batch."""
    batch = {} if pd.isna(row["micro_batch"]) else {"micro_batch": int(row["micro_batch"])}
    own = batch | dict(group.settings if group else {})
    return label(own) if own else ""


def fits(frame: pd.DataFrame, of: Head | None, groups: Sequence[Group], limits: Sequence[Limit]) -> Tile:
    """Return the longest length that ran, what ran out of memory, and how far the curve goes on this GPU. Name other
    GPUs on which less fits with these settings."""
    question = "Does it fit, and up to which length?"
    oom = ended(frame, "oom")
    ok = ended(frame, "ok")
    if of is None:
        if len(oom) and not len(ok):
            return _nothing(question, oom)
        ends = ", ".join(f"{n:,} {outcome}" for outcome, n in frame["outcome"].value_counts().items())
        return Tile(question, about=join(f"no trial with a fixed length finished ({ends})"))
    ok, oom = (rows[kinds(rows).eq(of.kind)] for rows in (ok, oom))
    lengths = of.group.take("outcome", "seq_len")
    longer = lengths[lengths["seq_len"].gt(of.longest).fillna(False).astype(bool)].sort_values("seq_len")
    beyond = ended(longer, "oom")["seq_len"]
    if of.group.resident:
        next_ = "ran on a CPU, so what fits on a GPU is unknown"
    elif of.longest == of.group.positions:
        next_ = ALL.replace("the model", "the model" if pd.isna(of.row["model"]) else str(of.row["model"]))
    elif len(beyond):
        next_ = f"{int(beyond.min()):,} ran out of memory"
    elif len(longer):
        next_ = f"{int(longer['seq_len'].iloc[0]):,} was tried: {longer['outcome'].iloc[0]}"
    else:
        next_ = "the longest that was tried"
    reserved = of.row["peak_reserved_bytes"]
    held = "" if of.group.resident or pd.isna(reserved) else f"{format_size(float(reserved))} reserved at this length"
    larger = ok["micro_batch"].gt(of.row["micro_batch"]).fillna(False).any()
    most = f"batch {int(ok['micro_batch'].max())} ran too" if larger else ""
    number = len(ok) + len(oom)
    all_ = f"{len(ok):,} of {number:,} trials fit" if len(oom) else f"all {number:,} trials fit" if number > 1 else ""
    value = f"{'Up to' if len(beyond) else 'Yes,'} {of.longest:,} tokens"
    return Tile(question, value, _reach(of, limits), join(next_, held, all_, most, *_elsewhere(of, groups)), of.basis)


def _nothing(question: str, oom: pd.DataFrame) -> Tile:
    """Return what the smallest trial needs if nothing fits, and which GPU has as much."""
    small = oom.sort_values(["seq_len", "micro_batch"]).iloc[0]
    need = small["unlimited_peak_reserved_bytes"]
    would = ""
    if not pd.isna(need):
        known = ((size, card) for size in SIZES if (card := gpu_lookup.lowest_limit_gpu(size)) is not None)
        enough = (f": a GPU with {size:g} GiB" for size, card in known if gpu_lookup.memory_limit(card) > need)
        would = f"the smallest needs {format_size(float(need))}{next(enough, '')}"
    length = "the smallest" if pd.isna(small["seq_len"]) else f"{int(small['seq_len']):,} tokens"
    batch = "" if pd.isna(small["micro_batch"]) else f" at batch {int(small['micro_batch'])}"
    both = "both" if len(oom) == 2 else f"all {len(oom):,}"
    told = join(f"even {length}{batch} ran out of memory", f"{both} trials did" * (len(oom) > 1))
    return Tile(question, "Nothing fits", would, told, basis(small))


def _elsewhere(of: Head, groups: Sequence[Group]) -> list[str]:
    """Say what fits on other GPUs with the same settings, if that is less."""
    rest = {key: value for key, value in of.group.settings.items() if key not in ON_CARD}
    found: dict[int, list[str]] = {}
    for group in groups:
        which = next((str(value) for key, value in group.settings.items() if key in ON_CARD), "")
        if group is of.group or {k: v for k, v in group.settings.items() if k not in ON_CARD} != rest or not which:
            continue
        longest = ended(group.take("outcome", "seq_len"), "ok")["seq_len"].max()
        longest = 0 if pd.isna(longest) else int(longest)
        if longest < of.longest:
            found.setdefault(longest, []).append(which)
    return [
        f"{f'only {longest:,}' if longest else 'nothing'} on {', '.join(cards)}"
        for longest, cards in sorted(found.items(), reverse=True)
    ]


def size_of_card(row: pd.Series[Any]) -> float | None:
    """Return the nominal size (GiB) of the row's GPU, as the frontier lists sizes; None if it is unknown."""
    name = row["simulated_gpu"] if str(row["device"]) == "simulated" else row["gpu_name"]
    listed = {gpu.name: gpu for gpu in gpu_lookup.GPUS}.get(str(name)) or gpu_lookup.find_gpu(str(name))
    if listed is not None:
        return listed.memory_gib
    if pd.isna(row["device_total_bytes"]):
        return None
    total = float(row["device_total_bytes"]) / GIB
    near = min(SIZES, key=lambda size: abs(size - total))
    return near if abs(near - total) <= gpu_lookup.SHORTFALL * near else None


def _reach(of: Head, limits: Sequence[Limit]) -> str:
    """Say how far the curve goes on this GPU; if the rows name no GPU, on which one the longest length fits."""
    mine = [limit for limit in limits if limit.group == of.group.id and limit.multiples_of is None]
    if (gib := size_of_card(of.row)) is None:
        whole = [limit.gib for limit in mine if limit.largest_ok == of.longest]
        return f"fits a GPU with {min(whole):g} GiB" if whole else ""
    one = next((limit for limit in mine if limit.gib == gib), None)
    if one is None or (one.value is None and not one.extrapolated):
        return ""
    if one.value is None:
        return f"by the curve {one.remark} on {gib:g} GiB"
    if one.predicted and not one.proven:
        return f"{one.high + 1:,} does not fit; {EDGE}" if one.high is not None else f"on {gib:g} GiB; {one.remark}"
    if one.proven:
        return f"{'predicted to fit' if of.kind == PREDICTED else 'proven'} on {gib:g} GiB"
    known = (("safe up to", one.low), ("at most", None if one.high == one.value else one.high))
    ends = [f"{words} {end:,}" for words, end in known if end is not None]
    both = f"95{NARROW}%: {one.low:,} to {one.high:,}" if len(ends) == 2 else "".join(ends)
    every = f", {ALL}," if one.remark == ALL else ""
    return f"by the curve up to {one.value:,}{every} on {gib:g} GiB" + (f" ({both})" if both else "")


def memory_fit(of: Head, found: Sequence[Fit]) -> Fit | None:
    """Return the configuration's fit of the first memory column in METRICS that has one; None without any."""
    own = {fit.metric.column: fit for fit in found if fit.group == of.group.id and fit.metric.memory}
    return next((own[name] for name in METRICS if name in own), None)


def last_piece(fit: Fit) -> tuple[float, float, float, float, tuple[float, float] | None]:
    """Return the piece of the curve at the longest: its start, level, slope, square, and the slope's 95 % interval."""
    key, curve = next(iter(fit.chosen.model.curves.items()))
    pieces = list(enumerate(curve.lines(), 1))
    number, (start, _, a, b, c) = next((p for p in reversed(pieces) if not p[1][0] >= fit.range[1]), pieces[0])
    return start, a, b, c, None if c else fit.intervals[key].get(f"b{number}")


def cost(of: Head | None, found: Sequence[Fit]) -> Tile:
    """Return what one more token (of any sample) costs at the longest length, and the part that no length changes."""
    question = "How much memory per token?"
    if of is None:
        return Tile(question, about="No row has a peak.")
    if (fit := memory_fit(of, found)) is None:
        column = next((name for name in METRICS if METRICS[name].memory and not pd.isna(of.row[name])), None)
        peak = f"{METRICS[column].label} is {format_size(float(of.row[column]))} at {of.longest:,}" if column else ""
        lengths = of.frame["seq_len"].nunique()
        return Tile(question, about=join(f"{lengths} length{'s' * (lengths != 1)} ran, and a curve needs three", peak))
    start, fixed, slope, square, ends = last_piece(fit)
    batch = 1 if pd.isna(of.row["micro_batch"]) else int(of.row["micro_batch"])
    low, high = fit.range
    top = float(fit.value(np.array([high]))[0])
    least, marginal = float(fit.value(np.array([low]))[0]), slope + 2 * square * high
    if abs(top - least) < FLAT * top or marginal <= 0:
        sizes = f"{format_size(least)} at {low:,.0f} tokens, {format_size(top)} at {high:,.0f}"
        told = join(f"{fit.metric.label} is {sizes}")
        return Tile(question, "Next to nothing", "", told, of.kind)
    interval = f"95{NARROW}%: {_between(ends[0] / batch, ends[1] / batch)}" if ends else ""
    if of.kind == PREDICTED:  # a curve's fit to predictions does not say how far these are off
        error = "" if left_out(of.frame) else ERRORS.get(fit.metric.column)
        interval = f"median error on real GPUs: {error}" if error else ""
    whole = low <= of.frame["seq_len"].min()  # a curve that begins at a longer length has no fixed part
    base = f"on top of {format_size(fixed)} at any length" if fixed > 0 and whole else ""
    where = f"valid from {start:,.0f} tokens on" if np.isfinite(start) and start > low else ""
    grows = "every further token needs more (quadratic curve)" if square > 0 else ""
    modulus, aligned = fit.chosen.model.modulus, next(iter(fit.chosen.model.curves))
    of_class = f"lengths {'' if aligned else 'not '}divisible by {modulus}" if modulus else ""
    value = f"{_fine(marginal / batch)} per token"
    told = join(base, where, of_class, grows, f"counted in {fit.metric.label}")
    return Tile(question, value, interval, told, of.kind)


def _fine(value: float) -> str:
    """Return bytes to three digits."""
    unit = unit_of(min(abs(value), MIB))
    return f"{float(f'{value / unit.bytes:.3g}'):,g} {unit.name}"


def _between(low: float, high: float) -> str:
    """Return an interval of bytes; if its ends agree to three digits, their distance from the middle."""
    ends = _fine(low), _fine(high)
    return f"{ends[0]} to {ends[1]}" if ends[0] != ends[1] else f"± {_fine(max((high - low) / 2, 1))}"


def speed(frame: pd.DataFrame, of: Head | None, groups: Sequence[Group]) -> Tile:
    """Return the highest timed tokens/s of the head's model, else the highest estimate; of equal ones the head's."""
    question = "How fast is it?"
    ok = ended(frame, "ok")
    if of is not None and not pd.isna(of.row["model"]):  # a smaller model is always faster
        ok = ok[ok["model"].eq(of.row["model"]).fillna(False).astype(bool)]
    timed, rough = (ok.dropna(subset=[name]) for name in ("tokens_per_s", "estimated_tokens_per_s"))
    if len(timed := timed[timed["device"].ne("simulated").fillna(True)]):
        return _timed(question, timed, groups)
    if rough.empty:
        return Tile(question, about="No row has a speed.")
    highest = rough[rough["estimated_tokens_per_s"].eq(rough["estimated_tokens_per_s"].max())]
    own = highest[highest.index.isin(of.frame.index)] if of is not None else highest.iloc[:0]
    best = (own if len(own) else highest).iloc[0]
    most, likely = float(best["estimated_tokens_per_s"]), best["calibrated_tokens_per_s"]
    at = _point(best, _group(best, groups))
    if pd.isna(likely):
        return Tile(question, f"≤ {most:,.0f} tokens/s", "an upper bound (roofline)", join(at, "not timed"), ESTIMATED)
    told = join(at, "by speeds of other runs, not timed")
    about, within = f"≈ {format_estimate(float(likely))} tokens/s", f"at most {most:,.0f} (roofline)"
    if not pd.isna(best["calibrated_step_high_s"]):
        ends = (likely * best["calibrated_step_s"] / best[f"calibrated_step_{end}_s"] for end in ("high", "low"))
        within = " to ".join(format_estimate(float(one)) for one in ends)
    return Tile(question, about, within, told, ESTIMATED)


def _timed(question: str, timed: pd.DataFrame, groups: Sequence[Group]) -> Tile:
    timed = timed if varying(timed).all() else timed[~varying(timed)]  # if lengths vary, padding counts as tokens
    best = timed.iloc[int(timed["tokens_per_s"].astype(float).argmax())]
    group = _group(best, groups)
    runs = ended(group.frame, "ok") if group else timed.loc[[best.name]]
    for axis in ("seq_len", "micro_batch"):  # an unknown value equals no other
        runs = runs[runs[axis].eq(best[axis]).fillna(False).astype(bool)]
    sure = repeats.interval([float(v) for v in runs["tokens_per_s"].dropna()])
    interval = "one process, so no interval"
    if sure is not None:
        interval = f"95{NARROW}%: {sure.low:,.0f} to {sure.high:,.0f} ({sure.runs} processes)"
    mfu = "" if pd.isna(best["mfu"]) else f"MFU {100 * float(best['mfu']):.1f}{NARROW}%"
    limited = "bound by the host" * (str(best["bound_by"]) == "host")
    value = float(best["tokens_per_s"]) if sure is None else sure.mean
    return Tile(question, f"{value:,.0f} tokens/s", interval, join(_point(best, group), mfu, limited), basis(best))


def _group(row: pd.Series[Any], groups: Sequence[Group]) -> Group | None:
    return next((group for group in groups if row.name in group.source.index[group.rows]), None)


def _point(row: pd.Series[Any], group: Group | None) -> str:
    """Return a row's length and configuration in words."""
    length = "" if pd.isna(row["seq_len"]) else f"at {int(row['seq_len']):,} tokens"
    return ", ".join(part for part in (length, _name(group, row)) if part)


def dominates(frame: pd.DataFrame, of: Head | None, found: Sequence[Fit], beside: Beside) -> Tile:
    """Return the largest part of the peak at the longest length, from the row or a prediction for its settings. Without
    parts, compare what grows with length with what does not. If nothing ran, show memory when it ran out."""
    question = "What dominates the peak?"
    if of is None:
        lost = ended(frame, "oom").sort_values(["seq_len", "micro_batch"])
        if lost.empty or len(ended(frame, "ok")):
            return Tile(question, about="No row has a peak.")
        held = {called(part): float(size) for part, size in oom_parts(lost.iloc[0]).items()}
        phase = str(lost["phase"].dropna().mode().get(0, "")).split(", ")[-1]
        if sum(held.values()) > 0:
            what = f"of {format_size(sum(held.values()))}, including the failed request, when memory ran out"
            return _largest(question, held, f"{what} in {phase}" if phase else what, basis(lost.iloc[0]))
        if not phase:
            return Tile(question, about="No row has a peak.")
        return Tile(question, phase.capitalize(), "", "Memory ran out there, so no peak is known.")
    at = f"at {of.longest:,} tokens"
    if own := _parts(of.row):
        return _largest(question, own, f"of {format_size(sum(own.values()))} allocated {at}", of.basis)
    if (twin := _twin(of, beside)) is not None:
        measured = of.row["peak_allocated_bytes"]
        beside_it = "" if pd.isna(measured) else f"; measured: {format_size(float(measured))}"
        parts = _parts(twin)
        what = f"of {format_size(sum(parts.values()))} predicted {at}{beside_it}"
        return _largest(question, parts, what, basis(twin))
    peaks = {phase: float(v) for phase in PHASES if not pd.isna(v := of.row[f"{phase}_peak_allocated_bytes"])}
    phase = f"the {max(peaks, key=lambda one: peaks[one])} phase has the peak" if peaks else ""
    fit = memory_fit(of, found)
    whole = fit is not None and fit.range[0] <= of.frame["seq_len"].min()  # else its intercept is no fixed part
    grows = _growing(fit, float(of.longest)) if fit is not None and whole else None
    if fit is not None and grows is not None:
        value = f"Length-dependent part, {100 * grows:.0f}{NARROW}%"
        told = f"activations and similar; {100 * (1 - grows):.0f}{NARROW}% is weights, gradients, optimizer state"
        if grows < 0.5:
            value = f"Length-independent part, {100 * (1 - grows):.0f}{NARROW}%"
            told = f"weights, gradients, optimizer state; {100 * grows:.0f}{NARROW}% grows with length"
        return Tile(question, value, "", join(told, f"of {fit.metric.label} {at}", phase), of.kind)
    if phase:
        return Tile(question, phase.removesuffix(" has the peak").capitalize(), "", join(at), of.basis)
    return Tile(question, about="The rows have no components of the peak, and no curve separates them.")


def _parts(row: pd.Series[Any]) -> dict[str, float]:
    """Return the known parts of a row's peak in bytes; {} if they sum to 0."""
    found = {called(part): float(row[column]) for part, column in OF_PEAK.items() if not pd.isna(row[column])}
    return found if sum(found.values()) > 0 else {}


def _twin(of: Head, beside: Beside) -> pd.Series[Any] | None:
    """Return the predicted row with these settings, length and batch that knows its parts, None if there is none."""
    if (rows := beside.of(of.group)) is None:
        return None
    same = rows["outcome"].eq("ok") & rows["seq_len"].eq(of.longest) & rows["micro_batch"].eq(of.row["micro_batch"])
    return next((row for _, row in rows[same.fillna(False).astype(bool)].iterrows() if _parts(row)), None)


def _largest(question: str, parts: Mapping[str, float], of: str, basis: str) -> Tile:
    """Return the answer that names the largest part and the few after it."""
    total = sum(parts.values())
    first, *others = sorted(parts, key=lambda name: -parts[name])
    share = {name: f"{100 * size / total:.0f}{NARROW}%" for name, size in parts.items()}
    rest = [f"{name} {share[name]}" for name in others[:3] if parts[name] >= 0.005 * total]
    told = join(f"then {', '.join(rest)}" if rest else "", of)
    return Tile(question, f"{first.capitalize()}, {share[first]}", "", told, basis)


def _growing(fit: Fit, longest: float) -> float | None:
    """Return the share of the curve at the longest length that grows with length; None if its terms are no parts."""
    _, fixed, slope, square, _ = last_piece(fit)
    peak = float(fit.value(np.array([longest]))[0])
    share = (slope * longest + square * longest**2) / peak if peak > 0 else float("nan")
    return max(share, 0.0) if -FLAT < share <= 1 and fixed >= 0 else None
