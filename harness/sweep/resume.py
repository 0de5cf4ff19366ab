"""The finished trials of a sweep's folder, the remaining ones, and the orphans that a killed sweep has left."""

import json
import os
import sys
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vramsweep.harness.files.bounded_reads import replaced
from vramsweep.harness.files.sweep_folder import own_files
from vramsweep.harness.machine import machine
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process import orphans
from vramsweep.harness.rows import journal_lock, outcome
from vramsweep.harness.rows.journal import System, finished, plan_name, plans
from vramsweep.harness.rows.schema import Outcome, Row, system_of, to_encodable
from vramsweep.harness.spec.trial_identity import ID_VERSION
from vramsweep.harness.sweep import row_builder, shards
from vramsweep.harness.sweep.plan import Planned, Settings

Counted = tuple[dict[str, Row], dict[str, Row]]  # rows that count, and those that do not, by id


def reject_too_many_ranks(planned: Sequence[Planned]) -> list[Planned]:
    """Return the trials; those with more ranks than visible GPUs cannot run here, and say so."""

    def checked(item: Planned, visible: int) -> Planned:
        reason = machine.too_many_ranks(visible, item.trial.world_size) if item.trial and on_cuda(item) else None
        return replace(item, trial=None, reason=reason) if reason else item

    visible = len(machine.visible_gpus(os.environ)) if any(map(on_cuda, planned)) else 0
    return [checked(item, visible) for item in planned]


def on_cuda(item: Planned) -> bool:
    """Return whether the trial is possible and runs on a CUDA device."""
    return item.trial is not None and item.trial.device.name == "cuda"


def remaining_trials(
    rows: Sequence[Row], planned: Sequence[Planned], settings: Settings
) -> tuple[list[Planned], dict[str, Row], list[str]]:
    """Return the trials to do, as they can run here; the rows that count, by id; and notes about rows that do not."""
    mine, others = rows_for_system(rows, row_builder.systems_here(planned), settings.any_system)
    outdated = row_builder.find_outdated(planned, others | mine)
    notes = [f"{n} trial{'s were' if n > 1 else ' was'} {why}" for why, n in Counter(outdated.values()).items()]
    # a trial that was refused before it started has a row of no system
    if others := {trial: row for trial, row in others.items() if trial not in outdated and any(system_of(row))}:
        notes.append(f"{other_systems(others)}; any_system=true counts them")
    todo = reject_too_many_ranks(pending_trials(planned, mine, settings.retry_failed, outdated))
    # again, because trials that still cannot run here have their answer
    return pending_trials(todo, mine, settings.retry_failed, outdated), mine, notes


def rows_for_system(rows: Sequence[Row], wanted: Mapping[str, System], any_system: bool) -> Counted:
    """Return the rows measured on each trial's `wanted` system, by id, and those of other systems. With `any_system`
    all of them count; those of the wanted system take precedence."""
    mine, others = finished(rows, wanted)
    return (others | mine, {}) if any_system else (mine, others)


def other_systems(rows: Mapping[str, Row]) -> str:
    """Say how many trials have rows of other systems only, and which systems these are."""
    names = sorted({" · ".join(filter(None, system_of(row))) for row in rows.values()})
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    were = "s were" if len(rows) != 1 else " was"
    return f"{len(rows)} trial{were} measured on another system ({'; '.join(names[:2])}{more}) and run again here"


def pending_trials(
    planned: Iterable[Planned], finished: Mapping[str, Row], retry_failed: bool, outdated: Container[str] = ()
) -> list[Planned]:
    """Return the trials without an answer that still counts. Finished ones run again if they are `outdated`, by id, and
    with `retry_failed` also if they failed."""
    return [
        p for p in planned
        if p.trial_id not in finished or p.trial_id in outdated or _again(p, finished[p.trial_id], retry_failed)
    ]  # fmt: skip


def _again(planned: Planned, row: Row, retry_failed: bool) -> bool:
    """Return whether a finished trial runs anew. One that was called impossible without a try is decided anew: it is to
    do if it is possible now, or impossible for another reason."""
    if row["outcome"] == Outcome.INVALID and row.get("attempt") == 0:
        return planned.trial is not None or row.get("reason") not in (None, to_encodable(planned.reason))
    return outcome.runs_again(row["outcome"], retry_failed)


def refuse_links(folder: Path) -> None:
    """Raise UserError if a link in a sweep's folder would lead its attempts elsewhere."""
    own = own_files(folder)
    for place in (own, own / "attempts", own / "templates"):
        if place.is_symlink():
            raise UserError(f"{place} is a link, and sweeps do not write through links; choose another results=DIR")


def end_leftovers(folder: Path, run: str) -> None:
    """Kill the orphans of earlier launchers in this folder, on this machine, if they and their guards were killed."""
    for earlier in plans(folder):
        last, launcher = earlier.get("run"), earlier.get("launcher")
        # a copied folder, or another node's shard, names a launcher elsewhere
        gone = isinstance(launcher, dict) and journal_lock.is_alive(launcher) is False
        left = dict(orphans.marked_processes(last)) if gone and isinstance(last, str) and last != run else {}
        if not left:
            continue
        stuck = orphans.end_marked(str(last))
        pids = ", ".join(map(str, sorted(left)))
        came = orphans.describe_stuck(stuck) if stuck else f"ended: {pids}"
        print(f"{folder}: the previous sweep was killed and left orphan processes, which were {came}", file=sys.stderr)


def write_plan(
    folder: Path, planned: Sequence[Planned], settings: Settings, run: str, own: Collection[str], command: Sequence[str]
) -> None:
    """Write what `status` compares the journal with: the trials, this command's own among them, and the system of each.
    The file also names the answer that the report begins with, and the mark of the processes that are started."""
    systems = row_builder.systems_here(planned)
    distinct = list(dict.fromkeys(systems.values()))
    record = {
        "command": list(command),
        "started_at": row_builder.now(),
        "id_version": ID_VERSION,
        "trials": list(systems),
        "own": [at for at, trial_id in enumerate(systems) if trial_id in own],
        "systems": distinct,
        "system": [distinct.index(own) for own in systems.values()],
        "any_system": settings.any_system,
        "answer": settings.answer,
        "price_per_hour": settings.price_per_hour,
        "pid": os.getpid(),
        "launcher": journal_lock.own_identity(),
        "run": run,
        "shard": settings.shard,
    }
    place = own_files(folder) / plan_name(shards.parse(settings.shard).writer)
    with replaced(place) as aside:
        aside.write_text(json.dumps(record))
