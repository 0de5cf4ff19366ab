"""Names as people type them, and the values that each can have, from conf/ and the tables.

It imports nothing heavy, so that a mistyped word is refused before anything heavy is imported.
"""

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
# Our words by other tools' names of a setting, or of one value of it. Such names are accepted, and the user is told.
ALIASES = {name: ours for ours, names in _WORDS["names of other tools"].items() for name in names.split()}
# Names that are no settings: ignored, because memory and speed of a step do not depend on them, or found ELSEWHERE.
LEFT_OUT = frozenset(_WORDS["no settings"].pop("left out").split())
ELSEWHERE = {name: said for said, names in _WORDS["no settings"].items() for name in names.split()}


@cache
def setting_names() -> set[str]:
    """Return the names of all settings and groups of conf/."""
    return conf_files.written_defaults().keys() | set(conf_files.chosen_options())


@cache
def all_names() -> set[str]:
    """Return every name that is understood, including those of other tools."""
    return setting_names() | {name.partition("=")[0] for name in ALIASES} | LEFT_OUT


def find_name(typed: str) -> str | None:
    """Return the name that is meant, whatever its case and with - for _; None if there is none."""
    plain = typed.replace("-", "_")
    return next((name for name in (typed, plain, plain.casefold()) if name in all_names()), None)


def find_model(typed: str) -> str | None:
    """Return the one built-in model with this name, ours or the hub's, in any case, dashes and dots; else None."""
    of_hub = {hub_id.rpartition("/")[2]: name for hub_id, name in conf_files.hub_ids().items()}
    names = {name: name for name in conf_files.file_names("model")} | of_hub
    parts, *each = ([*re.findall(r"\d+(?:\.\d+)?b|\d+|[a-z]+", one.casefold())] for one in (typed, *names))
    found = {name for name, its in zip(names.values(), each, strict=True) if its == parts and "/" not in typed}
    return found.pop() if len(found) == 1 else None


@cache
def list_options(key: str) -> tuple[str, ...]:
    """Return the values of a group or setting that files of conf/ or a table list; otherwise an empty tuple."""
    if key == "device.gpu":
        return tuple(gpu.name for gpu in gpu_lookup.GPUS)
    files = conf_files.file_names(key) if key in conf_files.chosen_options() else []
    in_table = [one.name for one in runner_table.RUNNERS] if key == "runner" else catalog.values(key)
    named = shardings.NAMES if key == "sharding" else in_table
    return tuple(dict.fromkeys([*files, *map(catalog.text, named), *(["auto"] if key in conf_files.AUTO else [])]))


def describe_unknown(typed: str, said: str, prog: str, flags: Mapping[str, str]) -> str:
    """Return `said` with a guess at what an unknown name means; `flags` are the verb's own, by their names."""
    name = typed.replace("-", "_").casefold()
    if name in ELSEWHERE:
        return f"{said}; {ELSEWHERE[name]}"
    # other tools' names are short: guess only with the same first letter
    others = sorted(one for one in all_names() - LEFT_OUT - setting_names() if one[0] == name[:1])
    near = str(suggestions.find_closest(name, [*flags, *sorted(setting_names()), *others]))
    meant = flags.get(near) or ALIASES.get(f"{near}=true") or ALIASES.get(near, near)
    guess = "" if meant == "None" else f" did you mean {meant}?"
    return f"{said};{guess} {prog} --help-all lists all settings"
