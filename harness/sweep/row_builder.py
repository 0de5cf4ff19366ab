"""The account of an attempt, which is a row: what the parent knows before it, what it left, what came of it.

Not covered: running it (attempt.py), when it is tried again (run_trials.py), the schema (schema.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vramsweep.harness.files import redaction
from vramsweep.harness.machine import machine
from vramsweep.harness.process import interpreter, worker_environment
from vramsweep.harness.process.attempt import AttemptResult
from vramsweep.harness.process.worker_files import ENDED
from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.quality_flags import flags
from vramsweep.harness.rows.schema import Outcome, Row, system_of
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep import plan
from vramsweep.harness.sweep.plan import Planned


def initial_columns(item: Planned, own: Sequence[machine.Gpu] | None = None) -> Row:
    """What every attempt's row of the trial says, whatever comes of it; `own` are its GPUs, where that is settled."""
    known: Row = machine.machine_facts() | plan.axes(item)
    if item.trial is None:
        return known
    return known | _facts(item.trial) | _provenance(item.trial, cards(item.trial) if own is None else own)


def started_columns(number: int) -> Row:
    """What an attempt's row says of its beginning, which is now; `number` counts the trial's attempts."""
    return {"attempt": number, "started_at": now(), "host_load": machine.host_load(), "node_trials": []}


def unstarted_row(item: Planned, kind: Outcome, reason: str | None) -> Row:
    """Make the row of a trial that no process is started for: it cannot run, or is skipped as that was asked for."""
    never = {"attempt": 0, "terminal": True, "outcome": kind, "reason": reason}
    return initial_columns(item) | never | {"started_at": now()}


def process_columns(done: AttemptResult, environ: Mapping[str, str], gpu_name: str | None) -> Row:
    """The columns that an attempt filled; `gpu_name` is the parent's, which counts where it has one."""
    evidence = done.evidence
    found: Row = {"environment": worker_environment.recorded_variables(environ)}
    filled: Row = (evidence.result or {}).get("values", {})  # what the worker does not know the parent may
    found |= {name: value for name, value in filled.items() if value is not None}
    found |= {"duration_s": done.duration_s, "exit_code": evidence.exit_code}
    found |= {"isolation": done.isolation, "cold_reason": done.cold_reason}
    found["gpu_name"] = gpu_name or found.get("gpu_name")  # with several, the system is the first one's
    spent = found.pop("steps_s", None)
    late = outcome.describe_end(evidence)  # then it is not known what it spent after the measured steps
    found["overhead_s"] = None if spent is None or late else done.duration_s - spent
    notes = [*(found.get("notes") or []), *done.notes, late]
    found["notes"] = [note for note in notes if note] or None
    known = worker_environment.secrets(environ)
    return found | {name: redaction.redact(found.get(name), known) for name in ("notes", "runner_config")}


def classified_row(row: Row, trial: Trial, evidence: outcome.Evidence, phase: str | None, final: bool) -> Row:
    """The row with its outcome; `phase` is where the attempt ended, `final`: none follows, whatever came of it."""
    kind, reason = outcome.classify(evidence)
    reason = reason and redaction.mask_text(reason, worker_environment.secrets(os.environ))  # which a library may quote
    foreign, after = evidence.foreign, row.get("foreign_processes")  # what the worker saw; None if it could not tell
    row = row | {
        "outcome": kind,
        "reason": reason,
        "terminal": outcome.is_verdict(kind) and (final or not outcome.is_retryable(kind, evidence)),
        "phase": None if kind is Outcome.OK else phase,
        "foreign_processes": sorted({*foreign, *(after or [])}) if foreign or after is not None else None,
    }
    measured_here = kind in (Outcome.OK, Outcome.OOM) and trial.device.name != "simulated"
    return row | {"flags": flags(row) if measured_here else None}


def phase(records: Sequence[Mapping[str, Any]]) -> str:
    """Where an attempt stopped, from the records it left."""
    records = [record for record in records if record.get("event") != ENDED]
    if not records:
        return "start"
    if "phase" in records[-1]:  # a simulated run says more
        step = records[-1].get("at_step")
        return "load" if step is None else f"step {step}, {records[-1]['phase']}"
    done = [r["step"] for r in records if "step" in r]
    if done:
        return f"step {done[-1] + 1}"
    return "step 0" if records[-1].get("event") == "train" else "load"


def cards(trial: Trial) -> list[machine.Gpu]:
    """The GPUs that the trial's ranks would run on."""
    return machine.visible_gpus(os.environ)[: trial.world_size] if trial.device.name == "cuda" else []


def system_here(item: Planned, seen: Sequence[machine.Gpu], facts: Row) -> tuple[str | None, ...]:
    """The system that a trial would be measured on now, with the GPUs seen here, as `schema.system_of` says it of
    rows."""
    if item.trial is None:
        return ()
    device, runner = item.trial.device.name, item.trial.runner.name
    known = facts | _facts(item.trial) | _provenance(item.trial, seen if device == "cuda" else [])
    return system_of(known | {"device": device, "runner": runner})


def find_outdated(planned: Sequence[Planned], rows: Mapping[str, Row]) -> dict[str, str]:
    """Of the trials that a process called invalid, by id, those for which it had other versions than there are now,
    and which these are, in words. What either of them does not know is not compared."""
    found, facts = {}, machine.machine_facts()
    for item in planned:
        row = rows.get(item.trial_id, {})
        if item.trial is None or row.get("outcome") != Outcome.INVALID or row.get("attempt") == 0:
            continue
        before, now = _versions(row), _versions(facts | _facts(item.trial) | _provenance(item.trial, []))
        if changed := [name for name in before if before[name] != now.get(name, before[name])]:
            old = ", ".join(f"{name} {before[name]}" for name in changed)
            found[item.trial_id] = f"invalid with {old}, run again with {', '.join(now[name] for name in changed)}"
    return found


def _versions(row: Row) -> dict[str, str]:
    """The versions that a verdict may depend on, by name. Edits of a checkout have none."""
    own: Row = {"vramsweep's commit": str(row.get("git_commit") or "").removesuffix("+dirty")}
    own |= {name: row.get(f"{name}_version") for name in ("vramsweep", "torch", "transformers", "deepspeed")}
    return {name: str(text) for name, text in (own | (row.get("package_versions") or {})).items() if text}


def count_attempts(folder: Path) -> int:
    """The highest number of an attempt so far; a killed parent leaves attempts without a row."""
    return max((int(p.name) for p in folder.glob("*") if p.name.isdecimal()), default=0)


def now() -> str:
    """This moment as rows have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _facts(trial: Trial) -> Row:
    """What differs from this process's own facts: a script may run in another Python."""
    return {} if trial.runner.command is None else dict(interpreter.interpreter_facts(trial.runner.command))


def _provenance(trial: Trial, seen: Sequence[machine.Gpu]) -> Row:
    """What the parent knows of the system under test, so that rows whose worker died say it too."""
    packages = [package.name for entry in catalog.chosen_techniques(trial) for package in entry.packages]
    return {
        "gpu_name": seen[0].name if seen else None,
        "gpu_uuid": seen[0].uuid if seen else None,
        "driver_version": seen[0].driver if seen else None,
        "deepspeed_version": machine.deepspeed_version(trial.sharding),
        "package_versions": {name: found for name in packages if (found := machine.version(name)) is not None} or None,
    }
