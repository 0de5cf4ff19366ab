"""Trials that need not be run, as more tokens need more memory.

Where that is asked for, a trial is not even run that one which ran out of memory dominates: the same but for a larger
micro-batch, a greater length, or both (harness/search/fit_knowledge.py says which). Only of our own loops on lengths
that do not vary is it known that more of either never makes do with less. A trial that fitted is not dominated, nor is
one that needs no more. A card that was fragmented by chance, or shared, is the reader's to judge: the row says which
trial it rests on.

Pure; not covered: when it is asked (trial_loop.py).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.search.fit_knowledge import FitKnowledge, TriedPoint
from vramsweep.harness.spec import length_distribution, runner_table
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep.plan import Planned

GROWING = ("seq_len", "micro_batch")


class OomDominance:
    """Trials that fitted or ran out of the GPU's memory, to be asked if one dominates another; rows may be added."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._known: dict[str, FitKnowledge] = defaultdict(FitKnowledge)
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Take a row into account; of the system that is asked about, which the rows that count are."""
        trial, outcome = row.get("trial"), row.get("outcome")
        if outcome not in (Outcome.OK, Outcome.OOM) or not isinstance(trial, Mapping):
            return
        length, batch = (trial.get(name) for name in GROWING)
        if type(length) is int and type(batch) is int:
            point = TriedPoint(length, batch, outcome == Outcome.OK, row["trial_id"])
            self._known[_key_without_growth(trial)].points.append(point)

    def reason(self, item: Planned) -> str | None:
        """Why the trial need not be run, naming the trial that dominates it; None where it has to be."""
        trial = item.trial
        if trial is None or not _grows(trial):
            return None
        known = self._known[_key_without_growth(item.resolved)]
        if all(point.fits for point in known.points):  # which looks at each of them
            return None
        one = known.decide(trial.seq_len, trial.micro_batch, without=item.trial_id)
        if one is None or one.fits:
            return None
        size = f"length {one.length}, batch {one.batch}"
        return f"not run, as {one.trial_id} ({size}) ran out of memory and needs no more"


def order(planned: Sequence[Planned]) -> list[Planned]:
    """Lengths in their order, and of each the small batches first: what runs out of memory before what needs more."""
    turn = {length: n for n, length in enumerate(dict.fromkeys(p.trial.seq_len for p in planned if p.trial))}

    def place(item: Planned) -> tuple[int, int]:
        return (turn[item.trial.seq_len], item.trial.micro_batch) if item.trial else (-1, 0)

    return sorted(planned, key=place)


def _grows(trial: Trial) -> bool:
    own = runner_table.runner(trial.runner.name).monotonic and trial.runner.command is None
    return own and not length_distribution.has_varying_lengths(trial)


def _key_without_growth(resolved: Mapping[str, Any]) -> str:
    """A resolved trial without what grows, nor which repeat it is."""
    rest = {name: value for name, value in resolved.items() if name not in (*GROWING, "repeat")}
    return json.dumps(rest, sort_keys=True, default=str)
