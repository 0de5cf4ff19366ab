"""What figures are drawn from, and the look of a configuration in all of them.

A colour stands for one configuration in every figure of a report, predicted or measured. Each trace names its settings
(`meta`), so that a page can let its reader choose among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
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
ON_CARD = ("simulated_gpu", "gpu_name", "trial.device.gpu")  # settings that name the GPU
MOST = 6  # most configurations in one figure
# What is drawn in which colour and pattern, and the layout of an empty plot.
LOOKS: dict[str, Any] = json.loads(Path(__file__).with_name("looks.json").read_text("utf-8"))
# Columns in which rows of one configuration are equal, whoever measured or predicted them.
_SHARED = (*COMPARED, "micro_batch", "allocator_conf", "data", "protocol")


@dataclass(frozen=True)
class Look:
    """The look of what is drawn of one configuration, and the settings of that configuration."""

    colour: str
    symbol: str = MARKERS[0]
    dash: str = "solid"
    settings: Mapping[str, str] = field(default_factory=dict)
    hidden: bool = False  # until the page's reader chooses it

    @property
    def trace(self) -> dict[str, Any]:
        """Return what every trace of the configuration carries."""
        own: dict[str, Any] = {"meta": {"settings": dict(self.settings)}}
        return own | ({"visible": False} if self.hidden else {})

    def numbered(self, number: int) -> Look:
        """Return this configuration's look in another colour, for one of several quantities."""
        return replace(self, colour=COLOURS[number % MOST], symbol=MARKERS[number % MOST], dash="solid")


@dataclass(frozen=True)
class View:
    """What a table's figures are drawn from: rows of one kind (measured, predicted, imported from one file).

    In `varied` groups the lengths vary from sample to sample. `looks` are by the groups' ids; a group that is missing
    there looks like the first. `curves` are the kinds that are drawn next to the chosen one.
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
        """Return the look of this configuration in every figure."""
        return replace(self.looks.get(group.id) or Look(COLOURS[0], settings=settings(group)), hidden=hidden)

    def of_trial(self, trial_id: str) -> Look:
        """Return the look of a row's configuration."""
        every = (*self.groups, *self.varied)
        found = (self.look(group) for group in every if group.take("trial_id")["trial_id"].eq(trial_id).any())
        return next(found, Look(COLOURS[0]))


def settings(group: Group) -> dict[str, str]:
    """Return what distinguishes the group from the others, as text."""
    return {key: str(value) for key, value in group.settings.items()}


def looks(groups: Sequence[Group]) -> dict[str, Look]:
    """Return the look of each group, by its id. The first one and those nearest to it all look different.

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
    """Count the settings that differ from the first group's; groups with other settings than that come last."""
    if set(group.settings) != set(base.settings):
        return 1000
    return sum(value != base.settings[key] for key, value in group.settings.items())


def _identity(group: Group) -> tuple[str, ...]:
    first = group.source.iloc[group.rows[0]]
    known = card(group.take(*CARD)).dropna()
    which = str(known.iloc[0]) if len(known) else str(first.get("gpu_name"))
    foreign = ("allocator",) if pd.isna(first.get("allocator_conf")) else ()  # only its name is known
    keys = (*_SHARED, *foreign, *extras(group.source, EXTRAS_APART))
    return (which, *(str(plain_value(first.get(name))) for name in keys))


def baseline(groups: Sequence[Group], prefer: Sequence[str] = ()) -> tuple[list[Group], str]:
    """Return at most six groups that can be read in one figure, and which these are if there are more.

    If there are too many, take the largest and those that differ from it in one setting, ones of `prefer` first.
    """
    if len(groups) <= MOST:
        return list(groups), ""
    base = groups[0]

    def differs(group: Group) -> list[str]:
        return [key for key, value in group.apart.items() if value != base.apart.get(key)]

    near = [g for g in groups[1:] if len(differs(g)) == 1]
    near.sort(key=lambda g: (differs(g)[0] not in prefer, -len(g.rows)))
    chosen = [base, *near[: MOST - 1]]
    note = f"{len(chosen)} of {len(groups):,} configurations: {base.label}, and those with one setting changed."
    return chosen, note


def shared(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the settings in which these groups are equal."""
    return {k: v for k, v in groups[0].settings.items() if all(g.settings.get(k) == v for g in groups)}


def having(groups: Sequence[Group], *columns: str) -> Sequence[Group]:
    """Return the groups, or none if their table knows nothing of one of these columns."""
    return groups if groups and all(groups[0].source[column].notna().any() for column in columns) else []


def names(groups: Sequence[Group]) -> list[str]:
    """Return labels of groups that stand in one figure: only what differs between these."""
    same = shared(groups)
    found = [label(_drop_repeated({k: v for k, v in group.settings.items() if k not in same}), 2) for group in groups]
    return [name + f" ({found[:i].count(name) + 1})" * (found.count(name) > 1) for i, name in enumerate(found)]


def _drop_repeated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Drop settings that only repeat another: an allocator's name tells its configuration, and a GPU is named once."""
    again = {"allocator_conf": "allocator", "trial.device.gpu": "simulated_gpu", "gpu_name": "trial.device.gpu"}
    return {key: value for key, value in settings.items() if again.get(key) not in settings}
