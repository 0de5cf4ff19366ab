"""The answer card of a report as data: the question, the answers to six questions, and their basis.

In: rows, groups, fits and limits. Out: a `Card`, which a template lays out. The answer about the allocator is its
changes over pairs of equal settings: measured pairs first, then imported ones. Predicted pairs answer only if no GPU
ran a pair.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.compare import verdicts
from vramsweep.analysis.data.groups import Group, groups, label, split
from vramsweep.analysis.data.load import Table, is_
from vramsweep.analysis.data.metrics import METRICS
from vramsweep.analysis.data.pairing import Beside
from vramsweep.analysis.model.fit import Fit, fit_table
from vramsweep.analysis.model.memory_frontier import Limit, frontier
from vramsweep.analysis.report import tiles
from vramsweep.analysis.report.findings import WORDS, values
from vramsweep.analysis.report.tiles import IMPORTED, MEASURED, NARROW, PREDICTED, UNKNOWN, Head, Tile, join
from vramsweep.harness.hardware.gpu_lookup import find_gpu
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import format_size
from vramsweep.harness.sweep import publication_check as check

CARDS = 2  # GPUs that the question names; more are counted there, and named among what varied
JUDGED = 50_000  # most rows of a folder that are read again for the verdict
_COMPARED = 2_000  # most rows of an allocator; more would take longer than anyone waits
_Pairs = list[tuple[Mapping[str, Any], verdicts.Memory]]


@dataclass(frozen=True)
class Card:
    """The question, what varied, the configuration `of` the answers ("" if there is only one), and the answers.

    `counts` are numbers of rows: measured, predicted, imported, flagged, unproven.
    """

    asked: str
    varied: str
    of: str
    fits: Tile
    cost: Tile
    speed: Tile
    dominates: Tile
    allocator: Tile
    trust: Tile
    counts: Mapping[str, int]

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Return the answers in reading order."""
        return (self.fits, self.cost, self.speed, self.dominates, self.allocator, self.trust)


def card(
    table: Table, found: Sequence[Group], head: Head | None, fits: Sequence[Fit], limits: Sequence[Limit],
    beside: Beside, judged: check.Verdict | None,
) -> Card:  # fmt: skip
    """Return the answers from rows, their groups, fits and limits; most of them are about `head`.

    `judged` is the verdict of harness/sweep/publication_check.py on the folder, None if the rows came without one.
    """
    what, varied = describe_question(table, found)
    number = counts(table)
    kinds = " and ".join(kind for kind in (MEASURED, PREDICTED, IMPORTED) if number[kind])
    return Card(
        asked=what,
        varied=varied,
        of=head.name if head else "",
        fits=tiles.fits(table.frame, head, found, limits),
        cost=tiles.cost(head, fits),
        speed=tiles.speed(table.frame, head, found),
        dominates=tiles.dominates(table.frame, head, fits, beside),
        allocator=_allocator(table, head),
        trust=_trust(number, kinds, judged),
        counts=number,
    )


def brief(table: Table) -> Card:
    """Return the answers from a table alone; only the configuration that they are about is fitted."""
    found = groups(table)
    head = tiles.head(found)
    mine = [head.group] if head else []
    fits, _ = fit_table(table, limit=1, found=mine)
    return card(table, found, head, fits, frontier(table, fits=fits, found=mine), Beside(table), verdict(table))


def verdict(table: Table) -> check.Verdict | None:
    """Return what `vramsweep check` says of the rows' folder; None without a folder, and for more than JUDGED rows."""
    folder = Path(table.source)
    if not folder.is_dir() or len(table.frame) > JUDGED:
        return None
    try:
        return check.judge_folder(folder)
    except UserError:
        return None


def counts(table: Table) -> dict[str, int]:
    """Count the ok and oom rows that are measured, predicted, imported, flagged, and predicted but unproven."""
    frame = table.frame
    told = frame[is_(frame, "outcome", "ok", "oom")]
    kind = tiles.kinds(told)
    lists = {name: told[name].list.len().fillna(0).astype(int).gt(0) for name in ("flags", "unproven")}
    unproven = lists["unproven"] & kind.eq(PREDICTED)  # a measured row needs no such proof
    return {one: int(kind.eq(one).sum()) for one in (MEASURED, PREDICTED, IMPORTED)} | {
        "flagged": int(lists["flags"].sum()), "unproven": int(unproven.sum()),
    }  # fmt: skip


def axis_name(key: str) -> str:
    """Return a reader's name for a setting that distinguishes groups."""
    plain = key.removeprefix("trial.").removeprefix("runner.options.")
    return WORDS["settings"].get(key) or plain.replace("_", " ").replace(".", " ")


def describe_question(table: Table, found: Sequence[Group]) -> tuple[str, str]:
    """Return what was run on which device, as a question, and what varied ("" if nothing did)."""
    invalid = is_(table.frame, "outcome", "invalid")
    frame = table.frame if invalid.all() else table.frame[~invalid]
    axes = list(dict.fromkeys(key for group in found for key in group.settings))
    varied = [n for n in ("seq_len", "micro_batch") if n not in axes and frame[n].nunique() > 1]
    names = [*varied, *(key for key in axes if key in frame and frame[key].nunique(dropna=True) > 1)]
    told = "; ".join(f"{axis_name(key)} {values(frame, key, most=4)}" for key in names)
    fixed = [text for key in ("precision", "runner") if key not in names and (text := values(frame, key, most=3))]
    model = values(frame, "model", most=3) or "an unknown model"
    how = f" ({', '.join(fixed)})" if fixed else ""
    return f"What does training {model}{how} need on {_describe_devices(frame)}?", told


def _describe_devices(frame: pd.DataFrame) -> str:
    """Return the devices in words; a GPU that was both measured and predicted appears once."""
    kind = tiles.kinds(frame)
    own = frame[kind.eq(MEASURED)]
    cards = list(own["gpu_name"].dropna().unique())
    known = {card.name for name in cards if (card := find_gpu(str(name))) is not None}
    cards += [name for name in frame.loc[kind.eq(PREDICTED), "simulated_gpu"].dropna().unique() if name not in known]
    cards += [name for name in frame.loc[kind.eq(IMPORTED), "gpu_name"].dropna().unique() if name not in cards]
    found = [f"{len(cards)} GPUs"] if len(cards) > CARDS else [" and ".join(sorted(map(str, cards)))] if cards else []
    on_cpu = own[own["device"].eq("cpu").fillna(False)]
    found += [f"the CPU {values(on_cpu, 'cpu_name', most=2)}".rstrip()] if len(on_cpu) else []
    nameless = not cards and len(frame) > len(on_cpu)
    return " and ".join([*found, *["an unknown GPU"] * nameless]) or "an unknown device"


def _trust(number: Mapping[str, int], kinds: str, judged: check.Verdict | None) -> Tile:
    question = "Can I trust it?"
    total = sum(number[kind] for kind in (MEASURED, PREDICTED, IMPORTED))
    told = f"{total:,} ok or oom: " + " · ".join(f"{n:,} {name}" for name, n in number.items() if n)
    if not total:
        return Tile(question, about="No trial finished, and none ran out of memory.")
    if number[PREDICTED] == total:
        rest = f"{number['unproven']:,} use techniques whose prediction no GPU has confirmed yet"
        text = join("no GPU ran any of this, so measure before you rely on it", rest if number["unproven"] else "")
        return Tile(question, "A prediction", told, text, kinds)
    if judged is None:
        who = "others measured it; not checked here" if number[IMPORTED] else "not checked (vramsweep check FOLDER)"
        flagged = f"{number['flagged']:,} rows are flagged" if number["flagged"] else "no row is flagged"
        return Tile(question, "As much as its source", told, join(who, flagged), kinds)
    may, may_not = ([claim for claim, well in judged.claims.items() if well is which] for which in (True, False))
    if may and not may_not:
        text = "vramsweep check found no reason against publishing it."
        return Tile(question, f"{' and '.join(may).capitalize()}: yes", told, text, kinds)
    value = f"{' and '.join(may).capitalize()} yes, {' and '.join(may_not)} not yet" if may else "Not yet"
    worst = next((one.text for one in judged.findings if one.forbids), "")
    return Tile(question, value, told, join(worst, "vramsweep check lists all reasons"), kinds)


def _allocator(table: Table, of: Head | None) -> Tile:
    """Return what the allocator that saves most, else costs most, changes in reserved memory over equal settings."""
    question = "What did the allocator change?"
    known = table.frame.loc[table.frame["outcome"].isin(["ok", "oom"]).fillna(False).astype(bool), "allocator"].dropna()
    if len(names := [str(name) for name in known.value_counts().index]) < 2:
        only = f"only {names[0]} was tried" if names else "no row names an allocator"
        return Tile(question, "Not varied" if names else UNKNOWN, "", join(only, _unused(of)), of.kind if of else "")
    base = "default" if "default" in names else names[0]
    kind = tiles.kinds(table.frame)
    for which in tiles.KINDS:
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
        one, two = (_some(side) for side in split(table, "allocator", [base, other]))
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
