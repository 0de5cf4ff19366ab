"""A comparison in words: verdicts over all pairs first, then changes along the axis, then the pairs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vramsweep.analysis.compare import format_difference
from vramsweep.analysis.compare.trends import BLOCKS, SPEED, Along, Level, Place, Trend, position
from vramsweep.analysis.compare.verdicts import MARGIN, Comparison, OverAll, Pair
from vramsweep.analysis.data.groups import label
from vramsweep.analysis.data.metrics import METRICS

MOST = 12  # pairs, and sentences of a quantity, that are shown at most; --all shows every pair
UNITS = {"seq_len": "token", "micro_batch": "sample", "tokens": "token"}
TITLES = {"seq_len": "sequence length", "micro_batch": "micro-batch", "tokens": "tokens per micro-batch"}


def text(comparison: Comparison, along: Along, every: bool = False) -> str:
    """Return text for a terminal: what differs, verdicts over all, trends and changes, and pairs: 12, or every one."""
    c = comparison
    lines = [f"A {c.a}", f"B {c.b}"]
    lines += [f"  {name}: {a} in A, {b} in B" for name, (a, b) in c.differs.items()]
    pairs = f"all {len(c.pairs):,} pairs" if len(c.pairs) != 1 else "the one pair"
    lines.append(f"over {pairs}{_range(c.pairs, along.axis)}:")
    for one in c.memory:
        lines.append(f"  {METRICS[one.metric].label}: {over_all(one, c.tolerance)}")
        lines += [f"    {sentence}" for sentence in sentences(along, one.metric)]
    lines.append(f"  speed: {c.speed.verdict}: {c.speed.reason}")
    if c.speeds is not None and len(c.pairs) > 1:
        lines.append(f"    {c.speeds.reason}{_reach(c.speeds)}")
    lines += [f"    {sentence}" for sentence in sentences(along, SPEED)]
    shown = c.pairs
    if len(shown) > MOST and not every:
        shown = tuple(shown[i] for i in np.unique(np.linspace(0, len(shown) - 1, MOST).round().astype(int)))
        lines.append(f"{len(shown)} of {len(c.pairs):,} pairs (--all prints every one):")
    for pair in shown:
        verdicts = [f"{METRICS[m.metric].label} {m.verdict} ({m.reason})" for m in pair.memory]
        verdicts.append(f"speed {pair.speed.verdict} ({pair.speed.reason})")
        lines.append(f"{label(pair.settings)}: " + "; ".join(verdicts))
    if c.unpaired:
        lines.append(f"not paired: {c.only_a:,} combinations only in A, {c.only_b:,} only in B")
    return "\n".join(lines)


def _range(pairs: Sequence[Pair], axis: str | None) -> str:
    if axis is None:
        return ""
    places = [x for pair in pairs if not np.isnan(x := position(pair, axis))]
    return f", {TITLES[axis]} {min(places):,.0f} to {max(places):,.0f}"


def over_all(one: OverAll, tolerance: float) -> str:
    """Return `SMALLER: smaller in 4 of 4 pairs; geometric mean -5.2 %; from ... to ...`."""
    exact = one.verdict != "EQUAL" or one.apart == 0
    within = "" if exact else f" within {100 * tolerance:g} %"
    if not exact and one.metric == "peak_reserved_bytes":
        within += " or a block of 2 MiB"
    return f"{one.verdict}{within}: {one.reason}{_reach(one)}"


def _reach(one: OverAll) -> str:
    """Return the sizes of the smallest and the largest B/A, and where they are."""
    if one.least is None or one.most is None or one.least.settings == one.most.settings:
        return ""
    ends = (one.least, one.most)
    changes = [end.change for end in ends]
    if one.metric == SPEED:
        sizes = shares = [format_difference.speed(change) for change in changes]
    else:
        shares = format_difference.format_alike(*changes)
        in_bytes = format_difference.in_bytes(*(end.difference for end in ends))
        sizes = [f"{size} ({share})" for size, share in zip(in_bytes, shares, strict=True)]
    if changes[0] == changes[1]:
        return f", the same in all of them ({shares[0]})"
    said = [f"{size} at {label(end.settings)}" for size, end in zip(sizes, ends, strict=True)]
    return f", from {said[0]} to {said[1]}"


def sentences(along: Along, quantity: str, most: int = MOST) -> list[str]:
    """Return the claims on one quantity (a column of memory, or tokens_per_s): trends, then changes."""
    said = [
        _trend(trend, along) + _settings(trend.settings)
        for trend in along.trends
        if trend.quantity == quantity and trend.claimed and trend.unit != "ratio"
    ]
    said += [_level(one, along) + _settings(one.settings) for one in along.levels if one.quantity == quantity]
    said += [_place(one, along) + _settings(one.settings) for one in along.places if one.quantity == quantity]
    return said if len(said) <= most else [*said[:most], f"and {len(said) - most} more in --json"]


def _settings(settings: Mapping[str, Any]) -> str:
    return f" [{label(settings)}]" if settings else ""


def _trend(trend: Trend, along: Along) -> str:
    unit = UNITS[str(along.axis)]
    near = "around {}" if trend.pairs > BLOCKS else "at {}"
    places = [near.format(_describe_places(round(x), unit)) for x in (trend.start, trend.stop)]
    ends = (trend.at_start, trend.at_stop)
    if trend.unit == "log_ratio":
        first, last = (format_difference.speed(float(np.expm1(end))) for end in ends)
        title = TITLES[str(along.axis)]
        return f"the change depends on {title}: from {first} {places[0]} to {last} {places[1]}"
    shares = format_difference.format_alike(*along.ratios(trend))
    each = zip(format_difference.in_bytes(*ends), shares, places, strict=True)
    said = [f"{size} ({share}) {at}" for size, share, at in each]
    verb = "the difference rises" if trend.slope > 0 else "the difference falls"
    if ends[0] * ends[1] >= 0:
        verb = "the gap grows" if trend.slope * sum(ends) > 0 else "the gap shrinks"
    low, high = sorted((abs(trend.low), abs(trend.high)))
    slope = f"{_number(abs(trend.slope))} bytes per {unit} (95 % interval {_number(low)} to {_number(high)})"
    return f"{verb} by {slope}: from {said[0]} to {said[1]}"


def _level(one: Level, along: Along) -> str:
    """Return `the same up to about 200 tokens (95 % interval 170 to 231), from there 2.1 % to 6.4 % faster`."""
    speed = one.quantity == SPEED
    ends = sorted(abs(end) for end in (one.after_low, one.after_high))
    show = format_difference.speed if speed else format_difference.size
    level = show(one.after)
    if one.after_low * one.after_high > 0 and ends[1] - ends[0] >= 1e-3:
        way = ("slower", "faster")[one.after > 0] if speed else ("less", "more")[one.after > 0]
        level = f"{100 * ends[0]:.1f} % to {100 * ends[1]:.1f} % {way} (8 of 10 pairs)"
    before = "the same" if abs(one.before) <= (MARGIN if speed else 0) else show(one.before)
    sure = "it changes between {} and {}" if one.exact else "95 % interval {} to {}"
    between = sure.format(_number(one.low), _number(one.high))
    return f"{before} up to about {place_of(one, along)} ({between}), from there {level}"


def place_of(one: Level, along: Along) -> str:
    """Return the position of a change, `200 tokens`."""
    return _describe_places(one.at, UNITS[str(along.axis)])


def _place(one: Place, along: Along) -> str:
    """Return `B over A drops by 983.0 MiB at 722 tokens`, or `... dips by 13.0 % from 797 to 838 tokens, and back`."""
    unit = UNITS[str(along.axis)]
    if one.unit == "bytes":
        size = format_difference.in_bytes(abs(one.size), signed=False)[0]
    else:
        size = f"{100 * abs(float(np.expm1(one.size))):.1f} %"
    if one.stop is None:
        return f"B against A {'drops' if one.size < 0 else 'jumps'} by {size} at {_describe_places(one.start, unit)}"
    way = "dips" if one.size < 0 else "rises"
    return f"B against A {way} by {size} from {_number(one.start)} to {_describe_places(one.stop, unit)}, and back"


def _describe_places(x: float, unit: str) -> str:
    return f"{_number(x)} {unit}{'s' * (x != 1)}"


def _number(value: float) -> str:
    """Format a value with three digits, and all of those before the point."""
    digits = max(0, 2 - int(np.floor(np.log10(abs(value))))) if value else 0
    return f"{round(value, digits):,.{digits}f}".removesuffix("." + "0" * digits)
