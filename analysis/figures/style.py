"""What figures are drawn from, and how a configuration looks in all of them.

A colour stands for one configuration in every figure of a report, predicted or measured. Each trace says which settings
it is of (`meta`), so that a page can let its reader choose among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from vramsweep.analysis.compare.lengths import Runs
from vramsweep.analysis.data.groups import Group, label, plain_value
from vramsweep.analysis.data.load import Table, extras
from vramsweep.analysis.data.pairing import CARD, COMPARED, EXTRAS_APART, card
from vramsweep.analysis.data.parts import Job
from vramsweep.analysis.model.fit import Fit
from vramsweep.analysis.model.memory_frontier import Limit

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#332288")  # Okabe and Ito, Tol
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "bowtie")
DASHES = ("solid", "dashdot", "longdash")
GREY = "#7f7f7f"
ON_CARD = ("simulated_gpu", "gpu_name", "trial.device.gpu")  # settings that say on which card
MOST = 6  # configurations in one figure
# What two rows of one configuration share, whoever measured or predicted them.
_SHARED = (*COMPARED, "micro_batch", "allocator_conf", "data", "protocol")


@dataclass(frozen=True)
class Look:
    """How what is drawn of one configuration looks, and which settings it is of."""

    colour: str
    symbol: str = MARKERS[0]
    dash: str = "solid"
    settings: Mapping[str, str] = field(default_factory=dict)
    hidden: bool = False  # until the page's reader chooses it

    @property
    def trace(self) -> dict[str, Any]:
        """What every trace of it carries."""
        own: dict[str, Any] = {"meta": {"settings": dict(self.settings)}}
        return own | ({"visible": False} if self.hidden else {})

    def numbered(self, number: int) -> Look:
        """The same configuration in another colour: one of several things that are known of it."""
        return replace(self, colour=COLOURS[number % MOST], symbol=MARKERS[number % MOST], dash="solid")


@dataclass(frozen=True)
class View:
    """What a table's figures are drawn from: rows of one kind (measured, predicted, of one foreign file).

    Of `varied` groups the lengths vary from sample to sample. `looks` are by the groups' ids; a group that is not there
    looks like the first. `curves` are the kinds that are drawn beside the chosen one.
    """

    table: Table
    groups: Sequence[Group]
    varied: Sequence[Group] = ()
    fits: Sequence[Fit] = ()
    limits: Sequence[Limit] = ()
    runs: Sequence[Runs] = ()
    jobs: Sequence[Job] = ()
    looks: Mapping[str, Look] = field(default_factory=dict)
    predicted: bool = False
    curves: Sequence[str] = ()

    def look(self, group: Group, hidden: bool = False) -> Look:
        """How this configuration looks in every figure."""
        return replace(self.looks.get(group.id) or Look(COLOURS[0], settings=settings(group)), hidden=hidden)

    def of_trial(self, trial_id: str) -> Look:
        """How the configuration of a row looks."""
        every = (*self.groups, *self.varied)
        found = (self.look(group) for group in every if group.take("trial_id")["trial_id"].eq(trial_id).any())
        return next(found, Look(COLOURS[0]))


def settings(group: Group) -> dict[str, str]:
    """What tells the group from the others, as text."""
    return {key: str(value) for key, value in group.settings.items()}


def looks(groups: Sequence[Group]) -> dict[str, Look]:
    """The look of each group, by its id: of the first one and those nearest to it all are different.

    Colours repeat after eight configurations, then with another marker and dash.
    """
    order: dict[tuple[str, ...], int] = {}
    found = {}
    for group in sorted(groups, key=lambda one: _apart(one, groups[0])):
        turn, colour = divmod(order.setdefault(_identity(group), len(order)), len(COLOURS))
        symbol, dash = MARKERS[(colour + turn) % len(MARKERS)], DASHES[turn % len(DASHES)]
        found[group.id] = Look(COLOURS[colour], symbol, dash, settings(group))
    return found


def _apart(group: Group, base: Group) -> int:
    """In how many settings it differs from the first; groups of other worlds come after those of the first's."""
    if set(group.settings) != set(base.settings):
        return 1000
    return sum(value != base.settings[key] for key, value in group.settings.items())


def _identity(group: Group) -> tuple[str, ...]:
    first = group.source.iloc[group.rows[0]]
    known = card(group.take(*CARD)).dropna()
    which = str(known.iloc[0]) if len(known) else str(first.get("gpu_name"))
    foreign = ("allocator",) if pd.isna(first.get("allocator_conf")) else ()  # of which the name is all that is known
    keys = (*_SHARED, *foreign, *extras(group.source, EXTRAS_APART))
    return (which, *(str(plain_value(first.get(name))) for name in keys))


def baseline(groups: Sequence[Group], prefer: Sequence[str] = ()) -> tuple[list[Group], str]:
    """At most six groups that can be read in one figure, and which these are when there are more.

    With too many, the largest group and those that differ from it in one setting of `prefer` only (else in any one).
    """
    if len(groups) <= MOST:
        return list(groups), ""
    base = groups[0]

    def differs(group: Group) -> list[str]:
        return [key for key, value in group.apart.items() if value != base.apart.get(key)]

    near = [g for g in groups[1:] if len(differs(g)) == 1]
    near.sort(key=lambda g: (differs(g)[0] not in prefer, -len(g.rows)))
    chosen = [base, *near[: MOST - 1]]
    note = f"{len(chosen)} of {len(groups):,} groups: {base.label}, and groups that differ from it in one setting."
    return chosen, note


def shared(groups: Sequence[Group]) -> dict[str, Any]:
    """The settings in which these groups are equal."""
    return {k: v for k, v in groups[0].settings.items() if all(g.settings.get(k) == v for g in groups)}


def names(groups: Sequence[Group]) -> list[str]:
    """Labels of groups that stand in one figure: only what differs between these."""
    same = shared(groups)
    found = [label(_drop_repeated({k: v for k, v in group.settings.items() if k not in same}), 2) for group in groups]
    return [name + f" ({found[:i].count(name) + 1})" * (found.count(name) > 1) for i, name in enumerate(found)]


def _drop_repeated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without what only repeats another setting: an allocator's name says its configuration, a card's name is one."""
    again = {"allocator_conf": "allocator", "trial.device.gpu": "simulated_gpu", "gpu_name": "trial.device.gpu"}
    return {key: value for key, value in settings.items() if again.get(key) not in settings}
