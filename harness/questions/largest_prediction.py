"""The largest length or batch that is predicted to fit, for every setting and GPU at once.

One attempt per fork server finds it (runners/worker/largest_server.py). Nothing is journalled, because a largest value
is no trial. `vramsweep predict --largest AXIS` chooses trials and prints.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vramsweep.harness.files.sweep_folder import own_files
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process.attempt import Launcher, ask_attempt, attempt_environment
from vramsweep.harness.process.worker_files import LOGS
from vramsweep.harness.spec import length_distribution, runner_table
from vramsweep.harness.spec.fit_text import describe_trial
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep import row_builder
from vramsweep.harness.sweep.batch_prediction import FOLDER
from vramsweep.harness.sweep.labels import OPTIONS
from vramsweep.harness.sweep.plan import Planned, Settings

NAMED = ("model", "runner", "allocator", "simulated_gpu")
MOST_BATCH = 4096  # if no range is given: sequences on one GPU
Answer = Mapping[str, Any]  # fit_survey.Edge, in the axis's own numbers; `reason`: why there is none
NO_ANSWER: dict[str, Any] = dict.fromkeys(
    ("all_up_to", "largest", "looked_at", "unanswered", "margin", "complete", "of", "trace_basis", "reason",
     "peak_reserved_bytes", "peak_reserved_most_bytes")
)  # fmt: skip


def predict_edges(
    planned: Sequence[Planned],
    settings: Settings,
    folder: Path,
    launcher: Launcher,
    axis: str,
    values: range | Sequence[int] | None,
    every: bool,
) -> list[tuple[Planned, Answer]]:
    """Return each trial's largest value along the axis; print to stderr why there is none. Raises UserError if there is
    none at all."""
    answers: dict[str, Answer] = {}
    templates: dict[tuple[str, tuple[int, ...]], list[Planned]] = defaultdict(list)
    for item in planned:
        reason, allowed = (item.reason, ()) if item.trial is None else _within(item.trial, axis, values)
        if reason is not None or item.trial is None:
            answers[item.trial_id] = NO_ANSWER | {"reason": reason}
        else:
            templates[runner_table.imports_name(item.trial), tuple(allowed)].append(item)
    for (_, allowed), items in templates.items():
        assert items[0].trial is not None
        template = runner_table.fork_server_name(items[0].trial)
        spec = {
            "trials": [{"trial_id": item.trial_id, "trial": item.resolved} for item in items],
            "axis": axis,
            "values": list(allowed),
            "every": every,
            "timeout_s": settings.timeout_s,
        }
        longest = 2 * settings.timeout_s * len(allowed) * len(items)  # each is traced and tried, one after the other
        try:
            answers |= _attempted(spec, template, folder, launcher, axis, longest)
        except OSError as error:
            raise UserError(f"cannot write under {folder}: {error.strerror}") from None
        except UserError as error:
            answers |= {item.trial_id: NO_ANSWER | {"reason": str(error)} for item in items}
    found = [(item, answers[item.trial_id]) for item in planned]
    if all(one["reason"] is not None for _, one in found):
        raise UserError(f"--largest {axis}: {found[0][1]['reason']}")
    refused = [f"{label(item, axis)}: {one['reason']}" for item, one in found if one["reason"] is not None]
    for line in dict.fromkeys(refused):
        print(f"not searched: {line}", file=sys.stderr)
    return found


def _attempted(
    spec: dict[str, Any], name: str, folder: Path, launcher: Launcher, axis: str, longest: float
) -> dict[str, Answer]:
    """Return what an attempt says of the trials of a fork server, by id. Raises UserError if it says nothing."""
    root = own_files(folder) / "attempts" / FOLDER
    place = root / str(row_builder.count_attempts(root) + 1)
    environ = attempt_environment("", "simulated", os.environ)
    try:
        found: dict[str, Any] = ask_attempt(launcher, spec, place, environ, name, longest)
    except UserError as error:
        raise UserError(f"{error}; {place / LOGS[1]} may say more") from None
    worst = max(found.values(), key=lambda one: one["unanswered"])
    if worst["unanswered"]:
        print(
            f"{worst['unanswered']} of {worst['unanswered'] + worst['looked_at']} values of {axis} could not be "
            f"predicted, so the results leave them out; {place / LOGS[1]} may say why",
            file=sys.stderr,
        )
    return {trial_id: one | {"reason": None} for trial_id, one in found.items()}


def _within(trial: Trial, axis: str, values: range | Sequence[int] | None) -> tuple[str | None, Sequence[int]]:
    """Return why there is nothing to try, and the values to try: those asked for, or all that the model takes."""
    if length_distribution.names_lengths(trial.data) or trial.runner.command is not None:
        way = f"data={trial.data}; predict its trials instead: {axis}=512,1024,..."
        way = (
            f"a command; try its values: vramsweep run --largest {axis} ... -- COMMAND" if trial.runner.command else way
        )
        return f"no formula gives the maximum for {way}", ()
    positions = trial.model.max_positions if axis == "seq_len" else MOST_BATCH
    if values is None and positions is None:
        return f"the number of positions of {trial.model.name} is unknown; give {axis}=1..8192", ()
    asked = range(1, (positions or 0) + 1) if values is None else values
    if axis == "seq_len" and positions is not None and max(asked) > positions:
        return f"{axis} goes up to {max(asked)}, but {trial.model.name} has only {positions} positions; stop there", ()
    return None, asked


def label(item: Planned, axis: str) -> str:
    """Return a configuration without the axis; for one that is no trial, its known names."""
    trial = item.trial
    if trial is None:
        known = row_builder.axis_columns(item)
        return " · ".join(str(known[name]) for name in NAMED if known.get(name) is not None)
    field = {"seq_len": f"seq {trial.seq_len}", "micro_batch": f"batch {trial.micro_batch}"}.get(axis)
    own = f"{axis.removeprefix(OPTIONS)}="
    parts = [part for part in describe_trial(trial).split(" · ") if part != field and not part.startswith(own)]
    card = [str(trial.device.gpu)] if trial.device.name == "simulated" else []
    return " · ".join([*parts, *([trial.allocator.name] if not trial.allocator.conf else []), *card])
