"""The answer about the allocator in a few words: its changes over pairs of equal settings, and what fits only with one.

Measured pairs come first, then imported ones. Predicted pairs answer only if no GPU ran a pair.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vramsweep.analysis.compare import verdicts
from vramsweep.analysis.data import groups
from vramsweep.analysis.data.groups import label
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import METRICS
from vramsweep.analysis.report.tiles import KINDS, NARROW, UNKNOWN, Head, Tile, join, kinds
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import format_size

_COMPARED = 2_000  # most rows of an allocator; more would take longer than anyone waits
_Pairs = list[tuple[Mapping[str, Any], verdicts.Memory]]


def allocator(table: Table, of: Head | None) -> Tile:
    """Return what the allocator that saves most, else costs most, changes in reserved memory over equal settings."""
    question = "What did the allocator change?"
    known = table.frame.loc[table.frame["outcome"].isin(["ok", "oom"]).fillna(False).astype(bool), "allocator"].dropna()
    if len(names := [str(name) for name in known.value_counts().index]) < 2:
        only = f"only {names[0]} was tried" if names else "no row names an allocator"
        return Tile(question, "Not varied" if names else UNKNOWN, "", join(only, _unused(of)), of.kind if of else "")
    base = "default" if "default" in names else names[0]
    kind = kinds(table.frame)
    for which in KINDS:
        rows = table.where(kind.eq(which))
        every = ((name, _compared(rows, base, name)) for name in names if name != base)
        if found := {name: one for name, one in every if one is not None}:
            return _make_tile(question, base, found, which)
    return Tile(question, about=join(f"no settings ran with both {base} and another allocator"))


def _make_tile(question: str, base: str, found: Mapping[str, tuple[verdicts.OverAll, _Pairs]], kind: str) -> Tile:
    changes = {name: over.change or 0.0 for name, (over, _) in found.items()}
    saves = min(changes, key=lambda one: changes[one])  # the allocator to change to, if any helps
    name = saves if changes[saves] < 0 else max(changes, key=lambda one: changes[one])
    over, pairs = found[name]
    what = METRICS[over.metric].label.removeprefix("peak ")
    more = sum(one.a is None and one.b is not None for _, one in pairs)
    fewer = sum(one.b is None and one.a is not None for _, one in pairs)
    sides = ((more, name), (fewer, base))
    fit = [f"{n:,} setting{'s fit' * (n != 1) or ' fits'} only with {who}" for n, who in sides if n]
    if over.verdict == "EQUAL":
        return Tile(question, "Nothing", "", join(f"{', '.join(found)}: as much {what} as with {base}", *fit), kind)
    both = [(one.b - one.a, settings) for settings, one in pairs if one.a is not None and one.b is not None]
    less = changes[name] < 0
    size, where = max(both, key=lambda one: -one[0] if less else one[0])
    at = {key: where[key] for key in ("seq_len", "micro_batch") if where.get(key) is not None}
    told = f"up to {format_size(abs(size))} {'less' if less else 'more'} than with {base}"
    told += f", at {label(at)}" if at else ""
    other = sum((change > 0) is less and change != 0 for change, _ in both)
    but = f"{'more' if less else 'less'} in {other:,} pair{'s' * (other != 1)}" if other else ""
    rest = [f"{one}: {_less(changes[one])}" for one in found if one != name][:3]
    number = f"mean of {len(both):,} pairs" if len(both) != 1 else "one pair"
    told = join(told, but, *fit, *rest)
    return Tile(question, f"{name}: {_less(changes[name])} {what}", number, told, kind)


def _less(change: float) -> str:
    if abs(change) < 0.0005:
        return "no less"
    return f"{100 * abs(change):.1f}{NARROW}% {'less' if change < 0 else 'more'}"


def _compared(table: Table, base: str, other: str) -> tuple[verdicts.OverAll, _Pairs] | None:
    """Return the verdict over all pairs on reserved memory, else on the first memory that both sides know; and each
    pair's verdict with its settings. Return None if nothing can be compared."""
    try:
        one, two = (_some(side) for side in groups.split(table, "allocator", [base, other]))
        found = verdicts.compare(one, two, (base, other))
    except UserError:
        return None
    over = min(found.memory, key=lambda one: one.metric != "peak_reserved_bytes", default=None)
    if over is None or over.change is None:
        return None
    return over, [(pair.settings, m) for pair in found.pairs for m in pair.memory if m.metric == over.metric]


def _some(side: Table) -> Table:
    """Return at most about `_COMPARED` rows, of evenly spaced lengths."""
    if len(side.frame) <= _COMPARED:
        return side
    different = np.sort(side.frame["seq_len"].dropna().unique())
    kept = different[:: -(-len(side.frame) // _COMPARED)]
    return side.where(side.frame["seq_len"].isin(kept).fillna(False))


def _unused(of: Head | None) -> str:
    """Say by how much at most peak reserved exceeded peak allocated, or peak active if that is unknown."""
    if of is None or of.group.resident:
        return ""
    base = next((one for one in ("allocated", "active") if of.frame[f"peak_{one}_bytes"].notna().any()), "allocated")
    beyond = (of.frame["peak_reserved_bytes"] - of.frame[f"peak_{base}_bytes"]).dropna().astype(float)
    if beyond.empty:
        return ""
    most: Any = beyond.idxmax()
    share = 100 * beyond[most] / float(of.frame["peak_reserved_bytes"][most])
    return f"peak reserved was up to {format_size(float(beyond[most]))} ({share:.0f}{NARROW}%) above peak {base}"
