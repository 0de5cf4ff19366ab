"""A trial's id: a hash of what changes the measurement. Names and settings left at their defaults do not enter it."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vramsweep.harness.spec import length_distribution, runner_table
from vramsweep.harness.spec.shardings import SHARDINGS
from vramsweep.harness.spec.techniques import catalog

ID_VERSION = 2

SIMULATION = 17  # raise it when what a simulated run predicts changes


# Ids of version 2 leave out a setting whose value is the one that rows had before the setting existed. These values are
# frozen: a new default in conf/ changes no line of id_defaults.json, and a new axis adds one. Techniques bring theirs.
_OWN: dict[str, Any] = json.loads(Path(__file__).with_name("id_defaults.json").read_text("utf-8"))
ID_DEFAULTS: dict[tuple[str, ...], Any] = {tuple(name.split(".")): value for name, value in _OWN.items()}
ID_DEFAULTS |= {(name,): default for name, default in catalog.DEFAULTS.items()}


# Names and remarks, which change no measurement; but a custom target may choose its model by the name.
NAMES = (("allocator", "name"), ("protocol", "name"), ("model", "name"), ("model", "parameters"),
         ("model", "max_positions"), ("fingerprints",))  # fmt: skip


# Settings that name files: in ids the content of the files stands for the names.
FILES = (("runner", "target"), ("model", "path"), ("data",), ("ds_config",))


# Nodes that libraries read: there an empty node or a null has a meaning.
VERBATIM = (("runner", "options"), ("model", "config"))


def trial_id(resolved: Mapping[str, Any]) -> str:
    """Return 16 hex digits of the SHA-256 of the canonical JSON of `identity`."""
    text = json.dumps(identity(resolved), sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def identity(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a resolved trial changes the measurement, and the version of the program that measures it."""
    prints = resolved.get("fingerprints")
    content = prints if isinstance(prints, Mapping) else {}

    def pruned(value: Any, at: tuple[str, ...]) -> Any:
        """Return the value without names and defaults; None if nothing is left."""
        if at in VERBATIM:
            return value or None
        if isinstance(value, Mapping):
            kept = {str(k): p for k, v in value.items() if (p := pruned(v, (*at, str(k)))) is not None}
            return kept or None
        custom_name = at == ("model", "name") and node_name(resolved, "runner") in runner_table.TARGETED
        if at in NAMES and not custom_name:
            return None
        if at in ID_DEFAULTS and type(value) is type(ID_DEFAULTS[at]) and value == ID_DEFAULTS[at]:
            return None
        if at in FILES and isinstance(value, str):
            return _content_digest(value, content)
        if at == ("runner", "command") and content:
            return {"words": value, "files": sorted(content.values())}
        return {"null": None} if value is None else value

    kept = {key: p for key, v in resolved.items() if key != "fingerprints" and (p := pruned(v, (key,))) is not None}
    return {"id": ID_VERSION, "measurement": _measurement(resolved), "trial": kept}


def key_without(resolved: Mapping[str, Any], *axes: str) -> str:
    """Return a key of a resolved trial without these axes, which trials that differ in no other setting share."""
    kept = {name: value for name, value in resolved.items() if name not in axes}
    return json.dumps(kept, sort_keys=True, default=str)


def _content_digest(name: str, content: Mapping[str, Any]) -> Any:
    """Return the digest of a file, or those of a folder's files, in place of its name; the name if there is none."""
    if (lengths_file := length_distribution.lengths_file(name)) is not None:
        return [length_distribution.PREFIX, content.get(str(lengths_file), str(lengths_file))]
    path, colon, function = name.rpartition(":")
    if colon and str(Path(path)) in content:
        return [content[str(Path(path))], function]
    place = Path(name)
    return sorted(digest for file, digest in content.items() if place in (Path(file), Path(file).parent)) or name


def _measurement(resolved: Mapping[str, Any]) -> dict[str, Any]:
    runners = {entry.name: entry.measurement for entry in runner_table.RUNNERS}
    shardings = {entry.name: entry.measurement for entry in SHARDINGS}
    versions = {
        "runner": runners.get(str(node_name(resolved, "runner"))),
        "sharding": shardings.get(str(resolved.get("sharding", "none"))),
        "simulation": SIMULATION if node_name(resolved, "device") == "simulated" else None,
    }
    return {key: value for key, value in versions.items() if value not in (None, 1)}


def node_name(resolved: Mapping[str, Any], axis: str) -> Any:
    """Return the name of a resolved trial's model, runner, device and the like; None if there is none."""
    value = resolved.get(axis)
    return value.get("name") if isinstance(value, Mapping) else None
