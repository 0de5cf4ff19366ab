"""Trials and rows of earlier versions in today's layout, so that what they say still counts if it is still right.

In version 1 (until 0.1) ranks, ZeRO's stage and offloads belonged to the runner, and FSDP2 was a runner. Checkpointing
was a yes or no, and optimizers had names of our own. Ids hashed the whole resolved trial, names and defaults included.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from vramsweep.harness.hardware.gpu_lookup import peak_flops
from vramsweep.harness.rows.quality_flags import CORRECTED
from vramsweep.harness.rows.schema import BY_NAME, EARLY, SCHEMA_VERSION, Row
from vramsweep.harness.spec import runner_table, trial_identity
from vramsweep.harness.spec.techniques import catalog

# Each runner's measurement number in ids of version 1; runner_table.py counts on from there.
FIRST_MEASUREMENT = {"torch": 1, "trainer": 1, "deepspeed": 2, "fsdp": 1, "custom": 1}
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "bf16_pure")
OPTIMIZERS = {"adamw": "adamw_torch", "adamw_fused": "adamw_torch_fused"}
MOVED = ("world_size", "offload_optimizer", "offload_param")


def upgrade_layout(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved trial with the runner's former settings where they are now; today's are unchanged."""
    runner = values.get("runner")
    if not isinstance(runner, Mapping):
        return dict(values)
    found, kept = dict(values), dict(runner)
    if (checkpointing := found.pop(EARLY, None)) is not None:
        found["checkpointing"] = "full" if checkpointing else "none"
    if isinstance(found.get("optimizer"), str):
        found["optimizer"] = OPTIMIZERS.get(found["optimizer"], found["optimizer"])
    for name in MOVED:
        if (moved := kept.pop(name, None)) is not None:
            found[name] = moved
    if (stage := kept.pop("zero_stage", None)) is not None:
        found["sharding"] = f"zero{stage}"
    if kept.get("name") == "fsdp":
        kept["name"] = "torch"
        found["sharding"] = "fsdp2"
    found["runner"] = kept
    return found


def upgrade_row(old: Row) -> Row:
    """Return a row of any version as one of today's.

    Its id becomes today's if it would be measured alike now. Else its id stays, and belongs to no trial of today.
    """
    version = old.get("schema_version")
    if not isinstance(version, int) or version >= SCHEMA_VERSION:
        if EARLY not in old or "checkpointing" in old:
            return old
        found = dict(old)  # from the first day of version 2, before techniques were axes; its id is today's
        _techniques(found)
        return _in_order(found)
    found = dict(old)
    stage = found.pop("zero_stage", None)
    sharding = "fsdp2" if found.get("runner") == "fsdp" else "none" if stage is None else f"zero{stage}"
    found |= {"sharding": sharding, "schema_version": SCHEMA_VERSION}
    found["runner"] = "torch" if found.get("runner") == "fsdp" else found.get("runner")
    for name in ("offload_optimizer", "offload_param"):
        found[name] = bool(found.get(name))
    _techniques(found)
    resolved = old.get("trial")
    if isinstance(resolved, Mapping):
        if _measured_as_now(resolved, str(found.get("trial_id"))) and not _after_measuring(found):
            found["trial_id"] = trial_identity.trial_id(found["trial"])
        else:
            found["flags"] = [CORRECTED]
    _rescale(found)
    return _in_order(found)


def _in_order(row: Row) -> Row:
    return {name: row.get(name) for name in BY_NAME} | {k: v for k, v in row.items() if k not in BY_NAME}


def _techniques(row: Row) -> None:
    """Write techniques as axes, in place. Before, checkpointing (a yes or no) and the optimizer's class were columns,
    and nothing else could be chosen."""
    row["optimizer_effective"] = row.pop("optimizer", None)
    checkpointing = row.pop(EARLY, None)
    row |= {"checkpointing": None if checkpointing is None else "full" if checkpointing else "none"}
    if isinstance(row.get("trial"), Mapping):
        row["trial"] = upgrade_layout(row["trial"])
        row |= {name: row["trial"].get(name, default) for name, default in catalog.DEFAULTS.items()}


def _after_measuring(row: Row) -> bool:
    """Return whether it ran out of memory in the step that only counted FLOPs, after it was measured and fitted."""
    step, steps = re.fullmatch(r"step ([0-9]{1,9})", str(row.get("phase"))), row["trial"].get("protocol")
    if row.get("outcome") != "oom" or step is None:
        return False
    counts = [steps.get(name, 0) for name in ("warmup_steps", "measured_steps")] if isinstance(steps, Mapping) else []
    return int(step[1]) > sum(count for count in counts if isinstance(count, int))


def _rescale(row: Row) -> None:
    """Rescale MFU and HFU, in place, to today's peak of the GPU, because some GPUs had another GPU's peak."""
    before, name, precision = row.get("peak_flops"), row.get("gpu_name"), row.get("precision")
    if not before or not name or precision not in PRECISIONS:
        return
    peak = peak_flops(name, precision)
    for column in ("mfu", "hfu"):
        value = row.get(column)
        row[column] = None if value is None or peak is None else value * before / peak
    row["peak_flops"] = peak


def first_id(resolved: Mapping[str, Any]) -> str:
    """Return the id that version 1 gave a trial."""
    measurement = FIRST_MEASUREMENT.get(str(trial_identity.node_name(resolved, "runner")))
    payload = {"trial": resolved, "measurement": measurement}
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _measured_as_now(resolved: Mapping[str, Any], trial_id: str) -> bool:
    """Return whether nothing in the row has been corrected since; its id shows which version measured it.

    FLOPs of flash_attention_2 were not counted, and a prediction's GPU had its nominal memory. The numbers in
    runner_table.py tell the rest.
    """
    runner, device = resolved.get("runner"), resolved.get("device")
    if not isinstance(runner, Mapping) or not isinstance(device, Mapping):
        return False
    name = str(runner.get("name"))
    if first_id(resolved) != trial_id:
        return False
    options = runner.get("options")
    owned = next((entry.owned for entry in runner_table.RUNNERS if entry.name == name), {})
    if isinstance(options, Mapping) and dict(runner_table.flatten_options(options)).keys() & owned.keys():
        return False  # they contradicted the axes, from which speed and FLOPs were computed
    now = {entry.name: entry.measurement for entry in runner_table.RUNNERS}
    whole = upgrade_layout(resolved).get("sharding", "none") == "none"
    unchanged = whole and now.get(name) == FIRST_MEASUREMENT.get(name)
    return unchanged and device.get("name") != "simulated" and resolved.get("attention") != "flash_attention_2"
