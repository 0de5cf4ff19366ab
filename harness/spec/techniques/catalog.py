"""The catalog of settings that trade memory, time or exactness: axes, and an entry for every value of an axis.

A new technique is an entry in one of the tables here, a module under runners/techniques/ that applies it, and a test.
A new axis is also an entry in a table, a field of harness.spec.trial.Trial and a line in conf/config.yaml. Its column,
its use in figures and its default in ids follow. Trials are checked here; workers import what the entries name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.messages import suggestions
from vramsweep.harness.spec.techniques.rules import RULES
from vramsweep.harness.spec.techniques.schema import Axis, Package, Technique, read_table, text, value_of, version

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

__all__ = ["AXES", "DEFAULTS", "TECHNIQUES", "Axis", "Package", "Technique", "text", "version"]

# In the order in which they are applied:
# - weights: their precision and that of the arithmetic, quantisation, adapters. Only the package of fp8 is preloaded,
#   because peft imports bitsandbytes, whose import initialises CUDA (cuda_specs.py: get_compute_capabilities), and such
#   a process cannot be forked. peft 0.18 is the first version that can be imported with transformers 5.
# - layers: their computation: attention, fused kernels, the loss.
# - activations between forward and backward: recomputing, offloading, compiling.
# - optimizers: the update of weights, and when ranks average gradients. Before the least versions, bitsandbytes had
#   blocks of 2,048 elements, and torchao's optimizers were prototypes.
# - batching: the form of samples (padding, packing), and the cache, which training does not need.
_TABLES = [read_table(f"{name}.json", RULES) for name in ("weights", "layers", "activations", "optimizers", "batching")]
AXES: tuple[Axis, ...] = tuple(axis for axes, _ in _TABLES for axis in axes)
TECHNIQUES: tuple[Technique, ...] = tuple(entry for _, entries in _TABLES for entry in entries)
_ENTRIES = ((axis.name, {entry.name: entry for entry in TECHNIQUES if entry.axis == axis.name}) for axis in AXES)
_BY_AXIS: dict[str, dict[Any, Technique]] = {name: found for name, found in _ENTRIES if found}
DEFAULTS = {axis.name: axis.default for axis in AXES if axis.default is not None}


def values(axis: str) -> tuple[Any, ...]:
    """Return the names of an axis's techniques; empty for an axis that takes a number or a text."""
    return tuple(_BY_AXIS.get(axis, ()))


def entries(axis: str) -> tuple[Technique, ...]:
    """Return the entries of an axis; empty for an axis that takes a number or a text."""
    return tuple(_BY_AXIS.get(axis, {}).values())


def technique(axis: str, name: Any) -> Technique:
    """Return the entry of one value of an axis. Raises KeyError if there is none."""
    return _BY_AXIS[axis][name]


def chosen_techniques(trial: Trial) -> tuple[Technique, ...]:
    """Return the entries of the trial's values, in the order of the axes; the user's own code applies them itself."""
    return tuple(entry for name, of in _BY_AXIS.items() if (entry := of.get(getattr(trial, name))) is not None)


def changed_settings(trial: Trial) -> list[str]:
    """Return the trial's techniques that are not the default, as typed; without precision, which is always given."""
    values = ((name, getattr(trial, name), default) for name, default in DEFAULTS.items())
    return [f"{name}={text(value)}" for name, value, default in values if value != default]


def unproven_techniques(trial: Trial) -> list[str]:
    """Return the trial's techniques, except defaults, that no GPU was seen to run as predicted; none on a CPU."""
    if trial.device.name == "cpu":
        return []
    return [str(t) for t in chosen_techniques(trial) if t.proven is None and t.name != DEFAULTS.get(t.axis)]


def technique_rules(trial: Trial, user_code: bool) -> Iterator[str]:
    """Yield the tables' reasons against a trial; `user_code` applies techniques itself, so only values are checked."""
    for axis in AXES:
        yield from _known(trial, axis, user_code)
    if user_code:
        return
    for entry in chosen_techniques(trial):
        yield from _fits(trial, entry)
        for rule in entry.rules:
            yield from rule(trial)


def _known(trial: Trial, axis: Axis, user_code: bool) -> Iterator[str]:
    value = getattr(trial, axis.name)
    allowed = _BY_AXIS.get(axis.name)
    if allowed and value not in allowed:
        yield suggestions.no_such_value(f"{axis.name}={value}", axis.name, value, allowed)
    if axis.of is not None and value != axis.default and not user_code:
        other, needed = axis.of
        if getattr(trial, other) not in needed:
            yield f"{axis.name} belongs to {other}={' or '.join(needed)}, not {getattr(trial, other)}; leave it out"


def _fits(trial: Trial, entry: Technique) -> Iterator[str]:
    elsewhere = entry.runners is not None and trial.runner.name not in entry.runners
    for setting, excluded, why in entry.excludes:
        value = value_of(trial, setting)
        if value in excluded and (setting == "runner" or not elsewhere):
            yield f"{entry} with {setting}={text(value)}: {why}"
    if entry.runners is not None and elsewhere:
        yield f"{entry} needs runner={' or '.join(entry.runners)}, not {trial.runner.name}"
    if entry.shardings is not None and trial.sharding not in entry.shardings:
        yield f"{entry} needs sharding={' or '.join(entry.shardings)}, not {trial.sharding}"
    if trial.device.name == "simulated" and entry.capability is not None:
        listed = any(gpu.name == trial.device.gpu for gpu in gpu_lookup.GPUS)
        card = trial.device.card if listed else None
        if card is not None and card.capability < entry.capability:
            needed, has = (".".join(map(str, c)) for c in (entry.capability, card.capability))
            yield f"{entry} needs compute capability {needed}, and {card.name} has {has}"
    if trial.device.name != "simulated":
        lacking = next((said for package in entry.packages if (said := package.missing())), None)
        if lacking:
            yield f"{entry} needs {lacking} (device=simulated needs no package)"
