"""`vramsweep predict --largest AXIS`: the largest length or batch that fits, for every setting and card at once.

One attempt a template finds it out (runners/largest.py). Nothing is journalled: an edge is no trial.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vramsweep.harness import account, outcome, registry
from vramsweep.harness.attempt import LARGEST, LOGS, Launcher, environment
from vramsweep.harness.errors import UserError
from vramsweep.harness.plan import Planned, Settings
from vramsweep.harness.predictions import FOLDER
from vramsweep.harness.trial import Trial

AXES = ("seq_len", "micro_batch")
MOST_BATCH = 4096  # where no range is given: of sequences on one card
Answer = Mapping[str, Any]  # survey.Edge, in the axis's own numbers


def find(
    planned: Sequence[Planned],
    settings: Settings,
    folder: Path,
    launcher: Launcher,
    axis: str,
    values: range | Sequence[int] | None,
    every: bool,
) -> list[tuple[Planned, Answer]]:
    """The edge of each trial along the axis. Raises UserError where there can be none, and where none was found."""
    answers: list[tuple[Planned, Answer]] = []
    templates: dict[tuple[str, tuple[int, ...]], list[Planned]] = defaultdict(list)
    for item in planned:
        if item.trial is None:
            raise UserError(f"no largest {axis}: {item.reason}")
        templates[registry.template(item.trial), tuple(_within(item.trial, axis, values))].append(item)
    for (name, allowed), items in templates.items():
        root = folder / "attempts" / FOLDER
        place = root / str(account.attempts(root) + 1)
        spec = {
            "trials": [{"trial_id": item.trial_id, "trial": item.resolved} for item in items],
            "axis": axis,
            "values": list(allowed),
            "every": every,
            "timeout_s": settings.timeout_s,
        }
        environ = environment("", "simulated", os.environ)
        longest = 2 * settings.timeout_s * len(allowed) * len(items)  # each traced, and looked at, one after the other
        try:
            done = launcher.attempt(spec, place, environ, name, longest)
        except OSError as error:
            raise UserError(f"cannot write under {folder}: {error.strerror}") from None
        if not (place / LARGEST).exists():
            reason = outcome.classify(done.evidence)[1] or "the process ended without an answer"
            raise UserError(f"no largest {axis}: {reason}; {place / LOGS[1]} may say more")
        found = json.loads((place / LARGEST).read_text())
        worst = max(found.values(), key=lambda one: one["unanswered"])
        if worst["unanswered"]:
            print(
                f"{worst['unanswered']} of {worst['unanswered'] + worst['looked_at']} values of {axis} that were asked "
                f"for have no answer, so both edges leave them out; {place / LOGS[1]} may say why",
                file=sys.stderr,
            )
        answers += [(item, found[item.trial_id]) for item in items]
    return answers


def _within(trial: Trial, axis: str, values: range | Sequence[int] | None) -> Sequence[int]:
    """The values to look at: those asked for, or all that the model takes."""
    positions = trial.model.max_positions if axis == "seq_len" else MOST_BATCH
    if values is None and positions is None:
        raise UserError(
            f"--largest {axis}: how many positions {trial.model.name} has is not known; give {axis}=1..8192"
        )
    asked = range(1, (positions or 0) + 1) if values is None else values
    if axis == "seq_len" and positions is not None and asked[-1] > positions:
        raise UserError(f"--largest {axis}: {axis} up to {asked[-1]}, but {trial.model.name} has {positions} positions")
    return asked


def show(answers: Sequence[tuple[Planned, Answer]], axis: str, as_json: bool) -> int:
    """Print what was found; the exit status: 1 where something asked for has no answer, as no trace could be made."""
    status = int(any(found["unanswered"] for _, found in answers))
    if as_json:
        print(json.dumps([{"trial_id": item.trial_id, "trial": item.resolved, **found} for item, found in answers]))
        return status
    console = Console() if Console().is_terminal else Console(width=160)
    table = Table("configuration", f"every {axis} fits up to", f"largest {axis} that fits", "looked at", "trace")
    for item, found in answers:
        assert item.trial is not None
        table.add_row(_label(item.trial, axis), *(_number(found, name) for name in ("all_up_to", "largest")),
                      f"{found['looked_at']:,} of {found['of']:,}", found["trace_basis"] or "none")  # fmt: skip
    console.print(table)
    margins = [found["margin"] for _, found in answers if found["margin"] is not None]
    if margins:
        console.print(
            "Not looked at: what asks for more than there is, and so cannot fit; and what fits by at least "
            f"{min(margins):.1%}, judged by what its neighbours need (--every looks at those)."
        )
    if any(not found["complete"] for _, found in answers):
        console.print(
            "Some near an edge were not looked at, as there are many (give a shorter range, or --every) or they "
            "cannot be traced (a sweep of them says why)."
        )
    return status


def _number(found: Answer, name: str) -> str:
    unknown = "unknown" if found["unanswered"] and not found["looked_at"] else "none"
    return unknown if found[name] is None else f"{found[name]:,}"


def _label(trial: Trial, axis: str) -> str:
    field = {"seq_len": f"seq {trial.seq_len}", "micro_batch": f"batch {trial.micro_batch}"}[axis]
    parts = [part for part in trial.label().split(" · ") if part != field]
    return " · ".join([*parts, *([trial.allocator.name] if not trial.allocator.conf else []), str(trial.device.gpu)])
