"""The system that a trial would be measured on now, as its row records it: GPUs, driver, versions of packages.

`system_of` in rows/schema.py decides which of these make two rows comparable.
"""

import os
from collections.abc import Mapping, Sequence

from vramsweep.harness.machine import machine
from vramsweep.harness.process import interpreter
from vramsweep.harness.rows.schema import Outcome, Row, system_of
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep.plan import Planned


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
