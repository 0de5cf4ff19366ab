"""The command that runs a trial again: the way back from a resolved trial to Hydra's command line.

The command leaves out what conf/ says already, so it is short. It gives the same trial with the conf/ next to it.
"""

import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vramsweep.harness.config.conf_files import CONF
from vramsweep.harness.config.typed_words import KEY, value
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import migrations
from vramsweep.harness.spec import trial_identity

# Each config group, and the option to start from if the trial's own name is not among the group's options.
_GROUPS = {
    "model": "hub", "allocator": "custom", "runner": "torch", "precision": "bf16", "device": "cuda",
    "protocol": "quick",
}  # fmt: skip
_ALWAYS = ("seq_len", "micro_batch")
_DERIVED = ("repeat", "fingerprints")


def command(resolved: Mapping[str, Any], trial_id: str) -> str:
    """Return `python -m vramsweep sweep ...` for a resolved trial; a comment says if that alone will not give its id.

    Raises UserError if the trial lacks a group, or if Hydra's grammar cannot express it.
    """
    resolved = migrations.upgrade_layout(resolved)
    if missing := _GROUPS.keys() - resolved.keys():
        raise UserError(f"the resolved trial has no {', '.join(sorted(missing))}")
    options = {group: _option(group, resolved[group]) for group in _GROUPS}
    words = [f"{group}={option}" for group, option in options.items()]
    given = _composed(tuple(options.items()))
    for key, wanted in resolved.items():
        if key in _ALWAYS:
            words.append(f"{key}={value(wanted)}")
        elif key not in _DERIVED:
            words += _changes(key, given.get(key), wanted, key in given)
    if resolved.get("repeat"):
        words.append(f"repeats={int(resolved['repeat']) + 1}")
    remarks = [f"with {path} of SHA-256 {digest[:12]}…" for path, digest in resolved.get("fingerprints", {}).items()]
    if trial_identity.trial_id(resolved) != trial_id:
        remarks.append("measured by another version of the runner, so the id will differ")
    comment = [f"# {'; '.join(remarks)}"] if remarks else []
    return " ".join(["python -m vramsweep sweep", *map(shlex.quote, words), *comment])


def _option(group: str, wanted: Any) -> str:
    name = wanted.get("name") if isinstance(wanted, Mapping) else wanted
    return str(name) if (CONF / group / f"{name}.yaml").is_file() else _GROUPS[group]


@cache
def _composed(options: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Return what Hydra composes from these options, with missing values and interpolations as text."""
    found = _read(CONF / "config.yaml")
    for group, option in options:
        file = CONF / group / f"{option}.yaml"
        at_root = file.read_text(encoding="utf-8").startswith("# @package _global_")
        found |= _read(file) if at_root else {group: _read(file)}
    return found


def _read(file: Path) -> dict[str, Any]:
    node = yaml.safe_load(file.read_text(encoding="utf-8")) or {}  # reads as Hydra's reader does; a test compares them
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def _changes(key: str, given: Any, wanted: Any, known: bool) -> Iterator[str]:
    """Yield the overrides that turn the node `key`, `given` if it is `known`, into `wanted`. Raises UserError."""
    if known and type(given) is type(wanted) and given == wanted:
        return
    if not known and key.startswith("model.") and trial_identity.ID_DEFAULTS.get(tuple(key.split(".")), key) is wanted:
        return  # a default that no file of conf/ has to name
    if not isinstance(given, Mapping) or not isinstance(wanted, Mapping):
        yield f"{'' if known else '+'}{key}={value(wanted)}"
        return
    for name in wanted:
        if not KEY.fullmatch(str(name)):
            raise UserError(f"the key {name!r} of {key} cannot be written on the command line")
        yield from _changes(f"{key}.{name}", given.get(name), wanted[name], name in given)
    yield from (f"~{key}.{name}" for name in given if name not in wanted)
