"""Trials that need not be run, as more tokens need more memory.

Where that is asked for, a trial is not even run that one which ran out of memory dominates: the same but for a larger
micro-batch, a greater length, or both. Two things keep this true: kernels pad what 8 does not divide, so a length that
8 divides may need less than a shorter one that it does not divide, and is not dominated by that one; and only of our
own loops on lengths that do not vary is it known that more of either never makes do with less. A card that was
fragmented by chance, or shared, is the reader's to judge: the row says which trial it rests on.

Pure; not covered: when it is asked (run_trials.py).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.spec import length_distribution, runner_table
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep.plan import Planned

PADDED_TO = 8  # lengths that it divides need no padding
GROWING = ("seq_len", "micro_batch")


class OomDominance:
    """Trials that ran out of the GPU's memory, to be asked whether they dominate another; rows may be added."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._full: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Take a row into account; of the system that is asked about, which the rows that count are."""
        trial = row.get("trial")
        if row.get("outcome") == Outcome.OOM and isinstance(trial, Mapping) and (size := _size(trial)) is not None:
            self._full[_key_without_growth(trial)].append((*size, row["trial_id"]))

    def reason(self, item: Planned) -> str | None:
        """Why the trial need not be run, naming the trial that dominates it; None where it has to be."""
        trial = item.trial
        if trial is None or not _grows(trial):
            return None
        for length, batch, trial_id in self._full.get(_key_without_growth(item.resolved), ()):
            if trial_id != item.trial_id and batch <= trial.micro_batch and _no_less(trial.seq_len, length):
                return f"not run, as {trial_id} (length {length}, batch {batch}) ran out of memory and needs no more"
        return None


def order(planned: Sequence[Planned]) -> list[Planned]:
    """Lengths in their order, and of each the small batches first: what runs out of memory before what needs more."""
    turn: dict[int, int] = {}
    for item in planned:
        if item.trial:
            turn.setdefault(item.trial.seq_len, len(turn))

    def place(item: Planned) -> tuple[int, int]:
        return (turn[item.trial.seq_len], item.trial.micro_batch) if item.trial else (-1, 0)

    return sorted(planned, key=place)


def _size(resolved: Mapping[str, Any]) -> tuple[int, int] | None:
    """Length and batch of a resolved trial; None where they are no whole numbers."""
    length, batch = (resolved.get(name) for name in GROWING)
    return (length, batch) if type(length) is int and type(batch) is int else None


def _grows(trial: Trial) -> bool:
    own = runner_table.runner(trial.runner.name).monotonic and trial.runner.command is None
    return own and not length_distribution.has_varying_lengths(trial)


def _no_less(length: int, than: int) -> bool:
    return length == than or (length > than and (than % PADDED_TO == 0 or length % PADDED_TO != 0))


def _key_without_growth(resolved: Mapping[str, Any]) -> str:
    """A resolved trial without what grows, nor which repeat it is."""
    rest = {name: value for name, value in resolved.items() if name not in (*GROWING, "repeat")}
    return json.dumps(rest, sort_keys=True, default=str)
