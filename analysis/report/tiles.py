"""Six questions of a reader, each answered in a few words from rows, fits and limits.

All answers but the fastest are of one configuration: the one in which the longest length ran.

Not covered: what was asked, and whether to trust it (answer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.compare import verdicts
from vramsweep.analysis.data.beyond import BEYOND, beyond_peak
from vramsweep.analysis.data.groups import Group, label
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import GIB, METRICS, MIB, show_bytes
from vramsweep.analysis.figures.composition import OF_PEAK, called, oom_parts
from vramsweep.analysis.figures.view import ON_CARD
from vramsweep.analysis.model.fit import Fit
from vramsweep.analysis.model.frontier import SIZES, Limit
from vramsweep.harness import gpus, repeats
from vramsweep.harness.errors import UserError

MEASURED, PREDICTED, IMPORTED, ESTIMATED = "measured", "predicted", "imported", "estimated"
UNKNOWN = "–"
_PHASES = ("load", "forward", "backward", "optimizer")
NARROW = "\u202f"  # the space before a percent sign, which no line is broken at
_FLAT = 0.01  # of the peak: what a curve rises by over all lengths, to be called flat
_COMPARED = 2_000  # rows of two allocators; more would take longer than anyone waits


@dataclass(frozen=True)
class Tile:
    """One question and its answer in a few words; its interval, a sentence about it, and what it rests on. "–" and ""
    where nothing is known."""

    question: str
    value: str = UNKNOWN
    interval: str = ""
    about: str = ""
    basis: str = ""


@dataclass(frozen=True)
class Head:
    """The configuration that answers are of: its name, the rows that finished, the longest length and its row."""

    group: Group
    name: str
    frame: pd.DataFrame
    longest: int
    row: pd.Series[Any]
    basis: str

    @property
    def kind(self) -> str:
        """Measured, predicted or imported."""
        return _kind(self.row)


def head(groups: Sequence[Group]) -> Head | None:
    """The longest length that ran: what was measured first; of equals the largest batch, in the least memory."""
    found: list[tuple[tuple[float, ...], Group, Any]] = []
    order = (PREDICTED, IMPORTED, MEASURED)
    for group in groups:
        rows = group.ok("seq_len", also=("micro_batch", "peak_reserved_bytes", "foreign", "device"))
        if group.varies or rows.empty:
            continue
        row = rows.loc[rows["seq_len"].astype(float).idxmax()]
        batch, memory = (0.0 if pd.isna(row[n]) else float(row[n]) for n in ("micro_batch", "peak_reserved_bytes"))
        found.append(((order.index(_kind(row)), float(row["seq_len"]), batch, -memory), group, row.name))
    if not found:
        return None
    _, group, at = max(found, key=lambda one: one[0])
    done = _ended(group.frame, "ok")
    row = done.loc[at]
    name = _name(group, row) if len(groups) > 1 else ""
    return Head(group, name, done, int(row["seq_len"]), row, _basis(row))


def said(*parts: str) -> str:
    """Parts of a sentence, the empty ones left out."""
    text = "; ".join(part for part in parts if part)
    return text[:1].upper() + text[1:] + "." if text else ""


def _ended(frame: pd.DataFrame, outcome: str) -> pd.DataFrame:
    return frame[frame["outcome"].eq(outcome).fillna(False).astype(bool)]


def _kind(row: Mapping[str, Any] | pd.Series[Any]) -> str:
    if not pd.isna(row["foreign"]):
        return IMPORTED
    return PREDICTED if str(row["device"]) == "simulated" else MEASURED


def _basis(row: pd.Series[Any]) -> str:
    unproven = row["unproven"]
    return _kind(row) + (", unproven" if isinstance(unproven, list | np.ndarray) and len(unproven) else "")


def _name(group: Group | None, row: pd.Series[Any]) -> str:
    """The configuration: what distinguishes it, the batch always."""
    batch = {} if pd.isna(row["micro_batch"]) else {"micro_batch": int(row["micro_batch"])}
    own = batch | dict(group.settings if group else {})
    return label(own) if own else ""


def fits(frame: pd.DataFrame, of: Head | None, groups: Sequence[Group], limits: Sequence[Limit]) -> Tile:
    """The longest length that ran, what ran out of memory, and how far the curve goes on this card; of other cards with
    these settings, those that differ."""
    question = "Does it fit? How long can I go?"
    oom = _ended(frame, "oom")
    ok = _ended(frame, "ok")
    if of is None:
        if len(oom) and not len(ok):
            return _nothing(question, oom)
        ends = ", ".join(f"{n:,} {outcome}" for outcome, n in frame["outcome"].value_counts().items())
        return Tile(question, about=said(f"no trial of a fixed length says what it needs ({ends})"))
    lengths = of.group.take("outcome", "seq_len")
    longer = lengths[lengths["seq_len"].gt(of.longest).fillna(False).astype(bool)].sort_values("seq_len")
    beyond = _ended(longer, "oom")["seq_len"]
    if of.group.resident:
        next_ = "on a CPU: says nothing of a card's limit"
    elif len(beyond):
        next_ = f"{int(beyond.min()):,} ran out of memory"
    elif len(longer):
        next_ = f"{int(longer['seq_len'].iloc[0]):,} did not get so far ({longer['outcome'].iloc[0]})"
    else:
        next_ = "the longest that was tried"
    most = f"batch {int(ok['micro_batch'].max())} ran too" if _larger(ok, of) else ""
    number = len(ok) + len(oom)
    all_ = f"{len(ok):,} of {number:,} trials fit" if len(oom) else f"all {number:,} trials fit" if number > 1 else ""
    value = f"{'Up to' if len(beyond) else 'Yes,'} {of.longest:,} tokens"
    return Tile(question, value, _reach(of, limits), said(next_, all_, most, *_elsewhere(of, groups)), of.basis)


def _nothing(question: str, oom: pd.DataFrame) -> Tile:
    """What the smallest needs where nothing fits, and which card has as much."""
    small = oom.sort_values(["seq_len", "micro_batch"]).iloc[0]
    need = small["unlimited_peak_reserved_bytes"]
    would = ""
    if not pd.isna(need):
        known = ((size, card) for size in SIZES if (card := gpus.smallest(size)) is not None)
        enough = next((f": a card of {size:g} GiB" for size, card in known if gpus.memory_limit(card) > need), "")
        would = f"the smallest needs {show_bytes(float(need))}{enough}"
    both = "both" if len(oom) == 2 else f"all {len(oom):,}"
    told = said(f"already {_at(small)} ran out of memory", f"{both} trials did" * (len(oom) > 1))
    return Tile(question, "Nothing fits", would, told, _basis(small))


def _elsewhere(of: Head, groups: Sequence[Group]) -> list[str]:
    """What fits on other cards with the same settings, where that is less."""
    rest = {key: value for key, value in of.group.settings.items() if key not in ON_CARD}
    found: dict[int, list[str]] = {}
    for group in groups:
        which = next((str(value) for key, value in group.settings.items() if key in ON_CARD), "")
        if group is of.group or {k: v for k, v in group.settings.items() if k not in ON_CARD} != rest or not which:
            continue
        longest = _ended(group.take("outcome", "seq_len"), "ok")["seq_len"].max()
        longest = 0 if pd.isna(longest) else int(longest)
        if longest < of.longest:
            found.setdefault(longest, []).append(which)
    return [
        f"{f'only {longest:,}' if longest else 'nothing'} on {', '.join(cards)}"
        for longest, cards in sorted(found.items(), reverse=True)
    ]


def _at(row: pd.Series[Any]) -> str:
    length = "the smallest" if pd.isna(row["seq_len"]) else f"{int(row['seq_len']):,} tokens"
    return length + ("" if pd.isna(row["micro_batch"]) else f" at batch {int(row['micro_batch'])}")


def _larger(ok: pd.DataFrame, of: Head) -> bool:
    """Whether a larger batch ran somewhere."""
    most, own = ok["micro_batch"].max(), of.row["micro_batch"]
    return bool(not pd.isna(most) and not pd.isna(own) and most > own)


def size_of_card(row: pd.Series[Any]) -> float | None:
    """The nominal size (GiB) of the card that a row is of, as the frontier knows sizes; None if that is not known."""
    name = row["simulated_gpu"] if str(row["device"]) == "simulated" else row["gpu_name"]
    listed = {gpu.name: gpu for gpu in gpus.GPUS}.get(str(name)) or gpus.find(str(name))
    if listed is not None:
        return listed.memory_gib
    if pd.isna(row["device_total_bytes"]):
        return None
    total = float(row["device_total_bytes"]) / GIB
    near = min(SIZES, key=lambda size: abs(size - total))
    return near if abs(near - total) <= gpus.SHORTFALL * near else None


def _reach(of: Head, limits: Sequence[Limit]) -> str:
    """How far the curve goes on this card; on which card the longest fits, where the rows name none."""
    mine = [limit for limit in limits if limit.group == of.group.id and limit.multiples_of is None]
    gib = size_of_card(of.row)
    if gib is None:
        whole = [limit.gib for limit in mine if limit.largest_ok == of.longest]
        return f"fits in a card of {min(whole):g} GiB" if whole else ""
    one = next((limit for limit in mine if limit.gib == gib), None)
    if one is None or (one.value is None and not one.extrapolated):
        return ""
    if one.value is None:
        return f"by the curve {one.remark} on {gib:g} GiB"
    if one.value == one.low == one.high:
        return f"proven on {gib:g} GiB"
    ends = [f"safe to {one.low:,}"] * (one.low is not None) + [f"at most {one.high:,}"] * (one.high is not None)
    both = f"95{NARROW}%: {one.low:,} to {one.high:,}" if len(ends) == 2 else "".join(ends)
    return f"by the curve up to {one.value:,} on {gib:g} GiB" + (f" ({both})" if both else "")


def _memory_fit(of: Head, found: Sequence[Fit]) -> Fit | None:
    own = {fit.metric.column: fit for fit in found if fit.group == of.group.id and fit.metric.memory}
    return next((own[name] for name in METRICS if name in own), None)


def _last(fit: Fit) -> tuple[float, float, float, float, tuple[float, float] | None]:
    """The piece that holds at the longest: from where, its level, slope and square; the slope's 95 % interval."""
    key, curve = next(iter(fit.chosen.model.curves.items()))
    pieces = list(enumerate(curve.lines(), 1))
    number, (start, _, a, b, c) = next((p for p in reversed(pieces) if not p[1][0] >= fit.range[1]), pieces[0])
    return start, a, b, c, None if c else fit.intervals[key].get(f"b{number}")


def cost(of: Head | None, found: Sequence[Fit]) -> Tile:
    """What one more token (of any sample) takes at the longest, and the part that no length changes."""
    question = "What does a token cost?"
    if of is None:
        return Tile(question, about="No row holds a peak.")
    fit = _memory_fit(of, found)
    if fit is None:
        column = next((name for name in METRICS if METRICS[name].memory and not pd.isna(of.row[name])), None)
        peak = f"{METRICS[column].label} is {show_bytes(float(of.row[column]))} at {of.longest:,}" if column else ""
        lengths = of.frame["seq_len"].nunique()
        return Tile(question, about=said(f"{lengths} length{'s' * (lengths != 1)} ran, and a curve needs three", peak))
    start, fixed, slope, square, ends = _last(fit)
    batch = 1 if pd.isna(of.row["micro_batch"]) else int(of.row["micro_batch"])
    low, high = fit.range
    top = float(fit.value(np.array([high]))[0])
    if abs(top - float(fit.value(np.array([low]))[0])) < _FLAT * top:
        told = said(f"{fit.metric.label} stays at {show_bytes(top)} from {low:,.0f} to {high:,.0f} tokens")
        return Tile(question, "Next to nothing", "", told, of.kind)
    interval = f"95{NARROW}%: {_between(ends[0] / batch, ends[1] / batch)}" if ends else ""
    base = f"on top of {show_bytes(fixed)} that no length changes" if fixed > 0 else ""
    where = f"so from {start:,.0f} tokens on" if np.isfinite(start) and start > low else ""
    grows = "more with every token: its square counts" if square > 0 else ""
    modulus, aligned = fit.chosen.model.modulus, next(iter(fit.chosen.model.curves))
    of_class = f"lengths {'' if aligned else 'not '}divisible by {modulus}" if modulus else ""
    value = f"{_fine((slope + 2 * square * high) / batch)} per token"
    return Tile(
        question, value, interval, said(base, where, of_class, grows, f"counted in {fit.metric.label}"), of.kind
    )


def _fine(value: float) -> str:
    """Bytes to three digits."""
    scale, unit = (MIB, "MiB") if abs(value) >= MIB else (1024, "KiB") if abs(value) >= 1024 else (1, "B")
    return f"{float(f'{value / scale:.3g}'):,g} {unit}"


def _between(low: float, high: float) -> str:
    """An interval of bytes; of ends that are alike to three digits, how far they are from their middle."""
    ends = _fine(low), _fine(high)
    return f"{ends[0]} to {ends[1]}" if ends[0] != ends[1] else f"± {_fine((high - low) / 2)}"


def speed(frame: pd.DataFrame, of: Head | None, groups: Sequence[Group]) -> Tile:
    """The highest tokens/s that was timed, else estimated; of equal ones that of the head."""
    question = "How fast is it?"
    ok = _ended(frame, "ok")
    timed, rough = (ok.dropna(subset=[name]) for name in ("tokens_per_s", "estimated_tokens_per_s"))
    timed = timed[timed["device"].ne("simulated").fillna(True)]
    if len(timed):
        return _timed(question, timed, groups)
    if rough.empty:
        return Tile(question, about="No row holds a speed.")
    best = _highest(rough, "estimated_tokens_per_s", of)
    most, likely = float(best["estimated_tokens_per_s"]), best["calibrated_tokens_per_s"]
    at = _point(best, _of(best, groups))
    if pd.isna(likely):
        return Tile(question, f"≤ {most:,.0f} tokens/s", "an upper bound (roofline)", said(at, "not timed"), ESTIMATED)
    told = said(at, "by published speeds, not timed")
    return Tile(question, f"≈ {float(likely):,.0f} tokens/s", f"at most {most:,.0f} (roofline)", told, ESTIMATED)


def _highest(rows: pd.DataFrame, column: str, of: Head | None) -> pd.Series[Any]:
    values = rows[column].astype(float)
    best = rows[values.eq(values.max())]
    own = best[best.index.isin(of.frame.index)] if of is not None else best.iloc[:0]
    return (own if len(own) else best).iloc[0]


def _timed(question: str, timed: pd.DataFrame, groups: Sequence[Group]) -> Tile:
    best = timed.loc[timed["tokens_per_s"].astype(float).idxmax()]
    group = _of(best, groups)
    runs = _ended(group.frame, "ok") if group else timed.loc[[best.name]]
    for axis in ("seq_len", "micro_batch"):  # an unknown one is like no other
        runs = runs[runs[axis].eq(best[axis]).fillna(False).astype(bool)]
    sure = repeats.interval([float(v) for v in runs["tokens_per_s"].dropna()])
    interval = "one process, so no interval"
    if sure is not None:
        interval = f"95{NARROW}%: {sure.low:,.0f} to {sure.high:,.0f} ({sure.runs} processes)"
    mfu = "" if pd.isna(best["mfu"]) else f"MFU {100 * float(best['mfu']):.1f}{NARROW}%"
    value = float(best["tokens_per_s"]) if sure is None else sure.mean
    return Tile(question, f"{value:,.0f} tokens/s", interval, said(_point(best, group), mfu), _basis(best))


def _of(row: pd.Series[Any], groups: Sequence[Group]) -> Group | None:
    return next((group for group in groups if row.name in group.source.index[group.rows]), None)


def _point(row: pd.Series[Any], group: Group | None) -> str:
    """Where a row is: its length, and its configuration."""
    length = "" if pd.isna(row["seq_len"]) else f"at {int(row['seq_len']):,} tokens"
    return ", ".join(part for part in (length, _name(group, row)) if part)


def dominates(frame: pd.DataFrame, of: Head | None, found: Sequence[Fit]) -> Tile:
    """The largest part of the peak at the longest; without parts, what grows with length against what does not. Where
    nothing ran, the phase in which memory ran out."""
    question = "What dominates the peak?"
    if of is None:
        lost = _ended(frame, "oom").sort_values(["seq_len", "micro_batch"])
        if lost.empty or len(_ended(frame, "ok")):
            return Tile(question, about="No row holds a peak.")
        held = {called(part): float(size) for part, size in oom_parts(lost.iloc[0]).items()}
        phase = str(lost["phase"].dropna().mode().get(0, "")).split(", ")[-1]
        if sum(held.values()) > 0:
            what = f"of {show_bytes(sum(held.values()))} held or asked for when memory ran out"
            return _largest(question, held, f"{what}, in {phase}" if phase else what, _basis(lost.iloc[0]))
        if not phase:
            return Tile(question, about="No row holds a peak.")
        return Tile(question, phase.capitalize(), "", "Where memory ran out, so no peak is known.")
    at = f"at {of.longest:,} tokens"
    parts = {called(part): float(of.row[column]) for part, column in OF_PEAK.items() if not pd.isna(of.row[column])}
    if sum(parts.values()) > 0:
        return _largest(question, parts, f"of {show_bytes(sum(parts.values()))} allocated {at}", of.basis)
    peaks = {phase: float(v) for phase in _PHASES if not pd.isna(v := of.row[f"{phase}_peak_allocated_bytes"])}
    phase = f"the {max(peaks, key=lambda one: peaks[one])} phase has the peak" if peaks else ""
    fit = _memory_fit(of, found)
    grows = _growing(fit, float(of.longest)) if fit is not None else None
    if fit is not None and grows is not None:
        value = f"What grows with length, {100 * grows:.0f}{NARROW}%"
        told = f"activations and the like; {100 * (1 - grows):.0f}{NARROW}% is weights, gradients, optimizer state"
        if grows < 0.5:
            value = f"What no length changes, {100 * (1 - grows):.0f}{NARROW}%"
            told = f"weights, gradients, optimizer state; {100 * grows:.0f}{NARROW}% grows with length"
        return Tile(question, value, "", said(told, f"of {fit.metric.label} {at}", phase), of.kind)
    if phase:
        return Tile(question, phase.removesuffix(" has the peak").capitalize(), "", said(at), of.basis)
    return Tile(question, about="The rows hold a peak without its parts, and no curve tells them apart.")


def _largest(question: str, parts: Mapping[str, float], of: str, basis: str) -> Tile:
    """The largest part, and the few after it."""
    total = sum(parts.values())
    first, *others = sorted(parts, key=lambda name: -parts[name])
    share = {name: f"{100 * size / total:.0f}{NARROW}%" for name, size in parts.items()}
    rest = [f"{name} {share[name]}" for name in others[:3] if parts[name] >= 0.005 * total]
    told = said(f"then {', '.join(rest)}" if rest else "", of)
    return Tile(question, f"{first.capitalize()}, {share[first]}", "", told, basis)


def _growing(fit: Fit, longest: float) -> float | None:
    """The share of the curve at the longest that grows with length; None where its parts are none."""
    _, fixed, slope, square, _ = _last(fit)
    peak = float(fit.value(np.array([longest]))[0])
    share = (slope * longest + square * longest**2) / peak if peak > 0 else float("nan")
    return max(share, 0.0) if -_FLAT < share <= 1 and fixed >= 0 else None


def allocator(table: Table, of: Head | None, kinds: str) -> Tile:
    """By how much the allocator that changes most changes reserved memory, over all pairs of equal settings."""
    question = "What did the allocator change?"
    answers = table.frame["outcome"].isin(["ok", "oom"]).fillna(False).astype(bool)
    known = table.frame.loc[answers, "allocator"].dropna()
    names = [str(name) for name in known.value_counts().index]
    if len(names) < 2:
        only = f"only {names[0]} was tried" if names else "no row names one"
        return Tile(question, "Not varied" if names else UNKNOWN, "", said(only, _left_over(of)), of.kind if of else "")
    base = "default" if "default" in names else names[0]
    every = {name: _compared(table, base, name) for name in names if name != base}
    found = {name: one for name, one in every.items() if one is not None and one[0].change is not None}
    if not found:
        return Tile(question, about=said(f"no pair of equal settings ran both with {base} and with another"))
    changes = {name: over.change or 0.0 for name, (over, _) in found.items()}
    saves = min(changes, key=lambda one: changes[one])  # what to change, if anything helps
    name = saves if changes[saves] < 0 else max(changes, key=lambda one: changes[one])
    over, pairs = found[name]
    what = METRICS[over.metric].label.removeprefix("peak ")
    more = sum(one.a is None and one.b is not None for _, one in pairs)
    fewer = sum(one.b is None and one.a is not None for _, one in pairs)
    fit = [
        f"{n:,} setting{'s fit' if n != 1 else ' fits'} only with {who}"
        for n, who in ((more, name), (fewer, base))
        if n
    ]
    if over.verdict == "EQUAL":
        return Tile(question, "Nothing", "", said(f"{', '.join(found)}: {what} as with {base}", *fit), kinds)
    both = [(one.b - one.a, settings) for settings, one in pairs if one.a is not None and one.b is not None]
    less = changes[name] < 0
    size, where = max(both, key=lambda one: -one[0] if less else one[0])
    told = f"up to {show_bytes(abs(size))} {'less' if less else 'more'}{_place(where)}"
    other = sum((change > 0) is less and change != 0 for change, _ in both)
    but = f"{'more' if less else 'less'} in {other:,} pair{'s' * (other != 1)}" if other else ""
    rest = [f"{one}: {_less(changes[one])}" for one in found if one != name][:3]
    number = f"mean of {len(both):,} pairs" if len(both) != 1 else "one pair"
    return Tile(
        question,
        f"{name}: {_less(changes[name])} {what}",
        number,
        said(f"against {base}", told, but, *fit, *rest),
        kinds,
    )


def _place(settings: Mapping[str, Any]) -> str:
    told = {key: settings[key] for key in ("seq_len", "micro_batch") if settings.get(key) is not None}
    return f", at {label(told)}" if told else ""


def _less(change: float | None) -> str:
    if change is None or abs(change) < 0.0005:
        return "no less"
    return f"{100 * abs(change):.1f}{NARROW}% {'less' if change < 0 else 'more'}"


def _compared(
    table: Table, base: str, other: str
) -> tuple[verdicts.OverAll, list[tuple[Mapping[str, Any], verdicts.Memory]]] | None:
    """The verdict on reserved memory over all pairs, else on the first memory that both sides know; and that of each
    pair, with its settings."""
    try:
        one, two = (_some(side) for side in verdicts.split(table, "allocator", [base, other]))
        found = verdicts.compare(one, two, (base, other))
    except UserError:
        return None
    over = min(found.memory, key=lambda one: one.metric != "peak_reserved_bytes", default=None)
    if over is None:
        return None
    return over, [(pair.settings, m) for pair in found.pairs for m in pair.memory if m.metric == over.metric]


def _some(side: Table) -> Table:
    """At most about `_COMPARED` rows, of evenly spaced lengths."""
    lengths = np.sort(side.frame["seq_len"].dropna().unique().astype(int))
    if len(side.frame) <= _COMPARED or not len(lengths):
        return side
    most = max(1, _COMPARED * len(lengths) // len(side.frame))
    keep = lengths[np.unique(np.linspace(0, len(lengths) - 1, most).astype(int))]
    return side.where(side.frame["seq_len"].isin(keep).fillna(False))


def _left_over(of: Head | None) -> str:
    """What was reserved beyond the peak, at most."""
    rows = beyond_peak([of.group])[0] if of else pd.DataFrame()
    if rows.empty:
        return ""
    row = rows.loc[rows[BEYOND].idxmax()]
    share = 100 * float(row[BEYOND]) / float(row["peak_reserved_bytes"]) if row["peak_reserved_bytes"] else 0.0
    return f"it held at most {show_bytes(float(row[BEYOND]))} ({share:.0f}{NARROW}%) beyond {row['base']}"
