"""Names as people type them, and what each can be, from conf/ and the tables: light, as a mistyped word is refused
before anything heavy is imported.

Not covered: flags, ranges and models (typed_words.py), which values go together (trial_rules.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from vramsweep.harness.config import conf_files
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.messages import suggestions
from vramsweep.harness.spec import runner_table, shardings
from vramsweep.harness.spec.techniques import catalog

_WORDS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("known_words.json").read_text("utf-8"))
# What other tools call a setting, or one value of it, and what it is here: accepted, and said.
ALIASES = {name: ours for ours, names in _WORDS["names of other tools"].items() for name in names.split()}
# What is no setting, and where it is found; or left out, as neither memory nor speed of a step depends on it.
LEFT_OUT = frozenset(_WORDS["no settings"].pop("left out").split())
ELSEWHERE = {name: said for said, names in _WORDS["no settings"].items() for name in names.split()}


@cache
def setting_names() -> set[str]:
    """Return every setting and group of conf/."""
    return conf_files.written_defaults().keys() | set(conf_files.chosen_options())


@cache
def all_names() -> set[str]:
    """Return every name that is understood, those of other tools included."""
    return setting_names() | {name.partition("=")[0] for name in ALIASES} | LEFT_OUT


def find_name(typed: str) -> str | None:
    """Return the name that is meant, in any case and with dashes; None for no such."""
    plain = typed.replace("-", "_")
    return next((name for name in (typed, plain, plain.casefold()) if name in all_names()), None)


def find_model(typed: str) -> str | None:
    """Return the one built-in model of this name, or that the hub calls so, whatever its case, dashes and dots."""
    of_hub = {hub_id.rpartition("/")[2]: name for hub_id, name in conf_files.hub_ids().items()}
    names = {name: name for name in conf_files.file_names("model")} | of_hub
    parts, *each = ([*re.findall(r"\d+(?:\.\d+)?b|\d+|[a-z]+", one.casefold())] for one in (typed, *names))
    found = {name for name, its in zip(names.values(), each, strict=True) if its == parts and "/" not in typed}
    return found.pop() if len(found) == 1 else None


@cache
def list_options(key: str) -> tuple[str, ...]:
    """Return what a group or a setting can be, where files of conf/ or a table say it; else nothing."""
    if key == "device.gpu":
        return tuple(gpu.name for gpu in gpu_lookup.GPUS)
    files = conf_files.file_names(key) if key in conf_files.chosen_options() else []
    in_table = [one.name for one in runner_table.RUNNERS] if key == "runner" else catalog.values(key)
    named = shardings.NAMES if key == "sharding" else in_table
    return tuple(dict.fromkeys([*files, *map(catalog.text, named), *(["auto"] if key in conf_files.AUTO else [])]))


def describe_unknown(typed: str, said: str, prog: str, flags: Mapping[str, str]) -> str:
    """Say what was probably meant by a name that is no setting; `flags` are the verb's own, by their names."""
    name = typed.replace("-", "_").casefold()
    if name in ELSEWHERE:
        return f"{said}; {ELSEWHERE[name]}"
    others = sorted(all_names() - LEFT_OUT - setting_names())  # short words: the guess must begin as what was typed
    near = str(
        suggestions.find_closest(name, [*flags, *sorted(setting_names()), *(o for o in others if o[0] == name[:1])])
    )
    meant = flags.get(near) or ALIASES.get(f"{near}=true") or ALIASES.get(near, near)
    guess = "" if meant == "None" else f" did you mean {meant}?"
    return f"{said};{guess} {prog} --help-all lists what can be set"
