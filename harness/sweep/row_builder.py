"""The row of an attempt: what the parent knows before it, what the attempt left, and its outcome.

What is known before includes the system that the trial would be measured on now: GPUs, driver, versions of packages.
`system_of` in rows/schema.py decides which of these make two rows comparable.
"""

import json
import math
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
from vramsweep.harness.rows.schema import BY_NAME, Outcome, Row, system_of
from vramsweep.harness.spec import command_template, trial_identity
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep.plan import Planned


def initial_columns(item: Planned, own: Sequence[machine.Gpu] | None = None) -> Row:
    """Return the columns that every attempt's row of the trial has, whatever its outcome; `own` are its GPUs, if that
    is settled."""
    known: Row = machine.machine_facts() | axis_columns(item)
    if item.trial is None:
        return known
    cards = visible_gpus(item.trial) if own is None else own
    known |= {"unproven": catalog.unproven_techniques(item.trial) or None}
    return known | facts_of(item.trial) | system_columns(item.trial, cards)


def started_columns(number: int) -> Row:
    """Return the columns about an attempt's start, which is now; `number` counts the trial's attempts."""
    return {"attempt": number, "started_at": now(), "host_load": machine.host_load(), "node_trials": []}


def unstarted_row(item: Planned, kind: Outcome, reason: str | None) -> Row:
    """Make the row of a trial for which no process is started: it cannot run, or the user asked to skip it."""
    never = {"attempt": 0, "terminal": True, "outcome": kind, "reason": reason}
    return initial_columns(item) | never | {"started_at": now()}


def process_columns(done: AttemptResult, environ: Mapping[str, str], gpu_name: str | None) -> Row:
    """Return the columns that an attempt filled; `gpu_name` is the parent's and takes precedence if it is known."""
    evidence = done.evidence
    found: Row = {"environment": worker_environment.recorded_variables(environ)}
    filled: Row = (evidence.result or {}).get("values", {})  # the parent may know what the worker does not
    found |= {
        name: value for name, value in filled.items() if value is not None or name == "seq_len"
    }  # of images: null
    found |= {"duration_s": done.duration_s, "exit_code": evidence.exit_code}
    found |= {"isolation": done.isolation, "cold_reason": done.cold_reason}
    found["gpu_name"] = gpu_name or found.get("gpu_name")  # with several GPUs, the system is the first one's
    spent = found.pop("steps_s", None)
    late = outcome.describe_end(evidence)  # then the time after the measured steps is unknown
    found["overhead_s"] = None if spent is None or late else done.duration_s - spent
    notes = [*(found.get("notes") or []), *done.notes, late]
    found["notes"] = [note for note in notes if note] or None
    known = worker_environment.secrets(environ)
    return found | {name: redaction.redact(found.get(name), known) for name in ("notes", "runner_config")}


def classified_row(row: Row, trial: Trial, evidence: outcome.Evidence, phase: str | None, final: bool) -> Row:
    """Return the row with its outcome. `phase` is where the attempt ended; `final`: no other one follows, whatever the
    outcome."""
    kind, reason = outcome.classify(evidence)
    reason = reason and redaction.mask_text(reason, worker_environment.secrets(os.environ))  # a library may quote them
    foreign, after = evidence.foreign, row.get("foreign_processes")  # what the worker saw; None if it could not tell
    row = row | {
        "outcome": kind,
        "reason": reason,
        "terminal": outcome.is_verdict(kind) and (final or not outcome.is_retryable(kind, evidence)),
        "phase": None if kind is Outcome.OK else phase,
        "foreign_processes": sorted({*foreign, *(after or [])}) if foreign or after is not None else None,
    }
    found = flags(row) if kind in (Outcome.OK, Outcome.OOM) else None
    return row | {"flags": found or (None if trial.device.name == "simulated" else found)}


def phase(records: Sequence[Mapping[str, Any]]) -> str:
    """Return where an attempt stopped, from the records that it left."""
    records = [record for record in records if record.get("event") != ENDED]
    if not records:
        return "start"
    if "phase" in records[-1]:  # a prediction records more
        step = records[-1].get("at_step")
        return "load" if step is None else f"step {step}, {records[-1]['phase']}"
    if done := [r["step"] for r in records if "step" in r]:
        return f"step {done[-1] + 1}"
    return "step 0" if records[-1].get("event") == "train" else "load"


def count_attempts(folder: Path) -> int:
    """Return the highest number of an attempt so far; a killed parent leaves attempts without a row."""
    return max((int(p.name) for p in folder.glob("*") if p.name.isdecimal()), default=0)


def now() -> str:
    """Return the current time as rows have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def axis_columns(planned: Planned) -> Row:
    """Return the axis columns of a row. A value that does not fit its column (an invalid trial's) is left to
    `trial`."""
    flat = dict(planned.resolved)
    nested = {name: flat.get(name) for name in ("model", "allocator", "device", "protocol")}
    device = planned.trial.device if planned.trial else None
    card = device.card.name if device and device.name == "simulated" else None
    values: Row = {
        "trial_id": planned.trial_id,
        **{key: value for key, value in flat.items() if key in BY_NAME},
        **{name: trial_identity.node_name(flat, name) for name in (*nested, "runner")},
        "simulated_gpu": card or (nested["device"] or {}).get("gpu"),
        "zero_init": flat.get("zero_init") if flat.get("sharding") == "zero3" else None,
        "versions": ", ".join(f"{k} {v}" for k, v in sorted((flat.get("versions") or {}).items())) or None,
        "allocator_conf": (nested["allocator"] or {}).get("conf"),
        "parameters": (nested["model"] or {}).get("parameters"),
        # what JSON cannot hold, such as a number that is not finite, becomes a text
        "trial": json.loads(json.dumps(flat, default=str), parse_constant=lambda text: str(float(text))),
    }
    if planned.trial is not None and planned.trial.runner.command is not None:
        values |= dict.fromkeys(command_template.unseen_settings(planned.trial) & BY_NAME.keys())
    return {name: value for name, value in values.items() if _fits(name, value)}


def _fits(name: str, value: Any) -> bool:
    kind = BY_NAME[name].type
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool)))


def systems_here(planned: Sequence[Planned]) -> dict[str, tuple[str | None, ...]]:
    """Return the system that each trial would be measured on here, by id, as `schema.system_of` has it of rows."""
    seen, facts = machine.visible_gpus(os.environ), machine.machine_facts()
    return {p.trial_id: _system_here(p, seen, facts) for p in planned}


def _system_here(item: Planned, seen: Sequence[machine.Gpu], facts: Row) -> tuple[str | None, ...]:
    """Return the system that a trial would be measured on now, with the GPUs that are visible here, as
    `schema.system_of` has it of rows."""
    if item.trial is None:
        return ()
    device, runner = item.trial.device.name, item.trial.runner.name
    known = facts | facts_of(item.trial) | system_columns(item.trial, seen if device == "cuda" else [])
    return system_of(known | {"device": device, "runner": runner})


def find_outdated(planned: Sequence[Planned], rows: Mapping[str, Row]) -> dict[str, str]:
    """Find the trials that a process called invalid with other versions than there are now; return which versions these
    are, in words, by id. Versions unknown to it or to this process are not compared."""
    found, facts = {}, machine.machine_facts()
    for item in planned:
        row = rows.get(item.trial_id, {})
        if item.trial is None or row.get("outcome") != Outcome.INVALID or row.get("attempt") == 0:
            continue
        before, now = _versions(row), _versions(facts | facts_of(item.trial) | system_columns(item.trial, []))
        if changed := [name for name in before if before[name] != now.get(name, before[name])]:
            old = ", ".join(f"{name} {before[name]}" for name in changed)
            found[item.trial_id] = f"invalid with {old} and run again with {', '.join(now[name] for name in changed)}"
    return found


def _versions(row: Row) -> dict[str, str]:
    """Return the versions that a verdict may depend on, by name. Edits of a checkout have none."""
    own: Row = {"vramsweep's commit": str(row.get("git_commit") or "").removesuffix("+dirty")}
    own |= {name: row.get(f"{name}_version") for name in ("vramsweep", "torch", "transformers", "deepspeed")}
    return {name: str(text) for name, text in (own | (row.get("package_versions") or {})).items() if text}


def visible_gpus(trial: Trial) -> list[machine.Gpu]:
    """Return the GPUs that the trial's ranks would run on."""
    return machine.visible_gpus(os.environ)[: trial.world_size] if trial.device.name == "cuda" else []


def facts_of(trial: Trial) -> Row:
    """Return the facts that differ from this process's own, because a script may run in another Python."""
    return {} if trial.runner.command is None else dict(interpreter.interpreter_facts(trial.runner.command))


def system_columns(trial: Trial, seen: Sequence[machine.Gpu]) -> Row:
    """Return what the parent knows of the system under test, so that rows whose worker died have it too."""
    packages = [package.name for entry in catalog.chosen_techniques(trial) for package in entry.packages]
    return {
        "gpu_name": seen[0].name if seen else None,
        "gpu_uuid": seen[0].uuid if seen else None,
        "driver_version": seen[0].driver if seen else None,
        "deepspeed_version": machine.deepspeed_version(trial.sharding),
        "package_versions": {name: found for name in packages if (found := machine.version(name)) is not None} or None,
    }
