"""The answer card of a report as data: the question, the answers to six questions, and their basis.

In: rows, groups, fits and limits. Out: a `Card`, which a template lays out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from vramsweep.analysis.data.groups import Group, groups
from vramsweep.analysis.data.load import Table, is_
from vramsweep.analysis.data.pairing import Beside
from vramsweep.analysis.model.fit import Fit, fit_table
from vramsweep.analysis.model.memory_frontier import Limit, frontier
from vramsweep.analysis.report import tiles
from vramsweep.analysis.report.findings import WORDS, values
from vramsweep.analysis.report.tile_allocator import allocator
from vramsweep.analysis.report.tiles import IMPORTED, MEASURED, PREDICTED, Head, Tile, dominates, join
from vramsweep.harness.hardware.gpu_lookup import find_gpu
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.sweep import publication_check as check

CARDS = 2  # GPUs that the question names; more are counted there, and named among what varied
JUDGED = 50_000  # most rows of a folder that are read again for the verdict


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
        dominates=dominates(table.frame, head, fits, beside),
        allocator=allocator(table, head),
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
