"""Trials that need not run, because more tokens need more memory.

If the user asks for it, a trial that ran out of memory causes larger ones to be skipped. They differ from it only by a
larger micro-batch, a greater length, or both (harness/search/fit_knowledge.py has the rule). Memory is known to be
monotonic only for our own loops on lengths that do not vary. A trial that fitted is not dominated, nor is one that
needs no more than it. The GPU may have been fragmented by chance, or shared. The reader must judge that, so the row
names the trial that it depends on. Pure.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.search.fit_knowledge import TriedPoint, decide
from vramsweep.harness.spec import length_distribution, runner_table
from vramsweep.harness.spec.trial_identity import key_without
from vramsweep.harness.sweep.plan import Planned

GROWING = ("seq_len", "micro_batch")


class OomDominance:
    """Trials that fitted or ran out of the GPU's memory, asked if one dominates another; rows may be added."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._known: dict[str, list[TriedPoint]] = defaultdict(list)
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Take a row into account; it must be of the system that is asked about, as the rows that count are."""
        trial, outcome = row.get("trial"), row.get("outcome")
        if outcome not in (Outcome.OK, Outcome.OOM) or not isinstance(trial, Mapping):
            return
        length, batch = (trial.get(name) for name in GROWING)
        if type(length) is int and type(batch) is int:
            point = TriedPoint(length, batch, outcome == Outcome.OK, row["trial_id"])
            self._known[key_without(trial, *GROWING, "repeat")].append(point)

    def reason(self, item: Planned) -> str | None:
        """Return why the trial need not run, naming the trial that dominates it; None if it must run."""
        trial = item.trial
        if trial is None or not runner_table.runner(trial.runner.name).monotonic or trial.runner.command is not None:
            return None
        if length_distribution.has_varying_lengths(trial):
            return None
        known = self._known[key_without(item.resolved, *GROWING, "repeat")]
        if all(point.fits for point in known):  # spares `decide`, which looks at each
            return None
        one = decide(known, trial.seq_len, trial.micro_batch, without=item.trial_id)
        if one is None or one.fits:
            return None
        size = f"length {one.length}, batch {one.batch}"
        return f"not run, because {one.trial_id} ({size}) ran out of memory; this trial needs no less"


def order(planned: Sequence[Planned]) -> list[Planned]:
    """Sort by length in the given order, then by batch: a trial that runs out of memory before those that need more."""
    turn = {length: n for n, length in enumerate(dict.fromkeys(p.trial.seq_len for p in planned if p.trial))}

    def place(item: Planned) -> tuple[int, int]:
        return (turn[item.trial.seq_len], item.trial.micro_batch) if item.trial else (-1, 0)

    return sorted(planned, key=place)
