"""What `plan` shows before anything runs: the trials, those that are impossible and why, how long it will take."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vramsweep.harness import machine, plan
from vramsweep.harness.gpus import peak_flops
from vramsweep.harness.journal import read, terminal
from vramsweep.harness.plan import Planned, Settings
from vramsweep.harness.sweep import duration


def show(planned: Sequence[Planned], settings: Settings, folder: Path) -> None:
    """Print the trials, the impossible ones with reasons, and how long it will take."""
    rows = read(folder)[0] if (folder / "journal.jsonl").exists() else []
    finished = terminal(rows)
    todo = {p.trial_id for p in plan.pending(planned, finished, settings.retry_failed)}
    seconds, basis = plan.estimate_s([p for p in planned if p.trial_id in todo], finished.values(), _speed(planned))
    if settings.output == "json":
        listed = [
            {
                "trial_id": p.trial_id,
                "state": _state(p, todo),
                "reason": p.reason,
                "trial": json.loads(json.dumps(p.resolved, default=str)),
            }
            for p in planned
        ]
        summary = {"folder": str(folder), "trials": listed, "estimated_s": seconds, "estimate_basis": basis}
        print(json.dumps(summary, indent=1))
        return
    for p in planned:
        label = p.trial.label() if p.trial else str((p.resolved.get("model") or {}).get("name"))
        print(f"{p.trial_id}  {_state(p, todo):<8}  {label}{f'  {p.reason}' if p.reason else ''}")
    counts = Counter(_state(p, todo) for p in planned)
    print(", ".join(f"{n} {state}" for state, n in counts.items()) + f" → {folder}")
    print(f"estimated time: {'unknown' if seconds is None else duration(seconds)} ({basis})")


def _state(p: Planned, todo: set[str]) -> str:
    if p.trial is None:
        return "invalid"
    return "to do" if p.trial_id in todo else "finished"


def _speed(planned: Sequence[Planned]) -> float | None:
    """FLOP/s to reckon with: a third of the GPU's published peak, or what numpy reaches on this CPU."""
    trial = next((p.trial for p in planned if p.trial), None)
    if trial is None or trial.device.name == "simulated":
        return None
    if trial.device.name == "cuda":
        cards = machine.visible_gpus(os.environ)
        peak = peak_flops(cards[0].name or "", trial.precision) if cards else None
        return None if peak is None else peak / 3
    import numpy as np

    side = 1024
    matrix = np.ones((side, side), dtype=np.float32)
    began = time.perf_counter()
    for _ in range(3):
        matrix @ matrix
    return 3 * 2 * side**3 / (time.perf_counter() - began)
