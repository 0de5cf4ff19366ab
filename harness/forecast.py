"""Which trials will run out of memory, by those of the same configuration that are predicted or have run.

More tokens need more memory: what fails fails at every larger length and batch, what fits fits at every smaller one.
Rounding and fragmentation can break that by a little, so this is an expectation, told as one. Not covered: predicting
(preview.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vramsweep.harness.budget import configuration
from vramsweep.harness.plan import Planned
from vramsweep.harness.row import Outcome, Row


@dataclass(frozen=True)
class Known:
    """Whether one trial fits into memory; `how` says by what that is known: "measured", "predicted for ..."."""

    resolved: Mapping[str, Any]
    fits: bool
    how: str


@dataclass(frozen=True)
class Forecast:
    """Whether a trial will fit, and what that rests on in words; None where nothing that is known tells."""

    fits: bool | None = None
    basis: str | None = None


def measured(rows: Iterable[Row]) -> list[Known]:
    """What rows tell; those of simulated trials are predictions."""
    answers = {Outcome.OK: True, Outcome.OOM: False}
    return [
        Known(row["trial"], answers[row["outcome"]], "predicted" if row.get("device") == "simulated" else "measured")
        for row in rows
        if row["outcome"] in answers and isinstance(row.get("trial"), Mapping)
    ]


def forecasts(todo: Iterable[Planned], known: Iterable[Known]) -> dict[str, Forecast]:
    """For each trial, by its id, whether it will fit. Of a failure and a success that contradict the failure counts."""
    failing: dict[str, dict[int, tuple[int, str]]] = {}  # by configuration and batch the shortest length that fails
    fitting: dict[str, dict[int, tuple[int, str]]] = {}  # and the longest that fits
    for one in known:
        seq_len, batch = one.resolved.get("seq_len"), one.resolved.get("micro_batch")
        if not isinstance(seq_len, int) or not isinstance(batch, int):
            continue
        found = (fitting if one.fits else failing).setdefault(configuration(one.resolved), {})
        new = (seq_len, one.how)
        found[batch] = (max if one.fits else min)(found.get(batch, new), new)
    return {p.trial_id: _forecast(p, failing, fitting) for p in todo}


def _forecast(
    item: Planned,
    failing: Mapping[str, Mapping[int, tuple[int, str]]],
    fitting: Mapping[str, Mapping[int, tuple[int, str]]],
) -> Forecast:
    if item.trial is None:
        return Forecast()
    key, seq_len, micro_batch = configuration(item.resolved), item.trial.seq_len, item.trial.micro_batch
    fails = [(n, b, how) for b, (n, how) in failing.get(key, {}).items() if n <= seq_len and b <= micro_batch]
    fits = [(n, b, how) for b, (n, how) in fitting.get(key, {}).items() if n >= seq_len and b >= micro_batch]
    for of, does in ((fails, False), (fits, True)):
        if of:
            n, b, how = next((one for one in of if one[:2] == (seq_len, micro_batch)), of[0])
            what = "fits" if does else "runs out of memory"
            itself = (n, b) == (seq_len, micro_batch)
            return Forecast(does, how if itself else f"seq {n} · batch {b} {what}, {how}")
    return Forecast()
