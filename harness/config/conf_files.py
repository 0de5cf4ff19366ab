"""The files of conf/ read as text, and the names and values of their settings as people type them.

Of the files it reads settings with defaults and comments, and the options of each group. It imports nothing heavy, so
that a mistyped word is refused before anything heavy is imported.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.messages import suggestions
from vramsweep.harness.spec import runner_table, shardings
from vramsweep.harness.spec.techniques import catalog

CONF = Path(__file__).resolve().parents[2] / "conf"
# The meaning of the further option "auto" of some groups; titles of sections of conf/config.yaml, by their beginning
_TEXTS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("titles.json").read_text("utf-8"))
AUTO, TITLES = _TEXTS["auto"], _TEXTS["titles"]
_SAID = re.compile(r"\$\{vramsweep\.said:\w+,(.*)\}")  # a default that the runner or a ds_config may change
_LINE = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_]\w*):(?: +(?P<value>.*?))??(?: +# ?(?P<comment>.*))?")
_OF_HUB = re.compile(r"\(huggingface: ([^)]*)\)")


@dataclass(frozen=True)
class Setting:
    """One KEY=VALUE: its full key, default as written, meaning (its comment), values (empty: no list) and section."""

    key: str
    default: str
    meaning: str = ""
    values: tuple[str, ...] = ()
    section: str = ""


@dataclass(frozen=True)
class Option:
    """One GROUP=NAME: a file of conf/GROUP, or an entry without one. `line` is the first sentence of `meaning`."""

    name: str
    line: str
    meaning: str


@cache
def chosen_options() -> dict[str, str]:
    """Return the option that conf/config.yaml chooses, by group."""
    return dict(re.findall(r"^  - (\w+): (\S+)", (CONF / "config.yaml").read_text(), re.MULTILINE))


@cache
def written_defaults() -> dict[str, str]:
    """Return a default of every setting by full key: those of conf/config.yaml, and the commented ones of groups."""
    own = {one.key: one.default for one in read_settings(CONF / "config.yaml") if one.section in TITLES.values()}
    below = (read_settings(file, name) for name in chosen_options() for file in (CONF / name).glob("*.yaml"))
    return own | {one.key: one.default for found in below for one in found if "." in one.key and one.meaning}


@cache
def whole_numbers() -> frozenset[str]:
    """Return the trial settings that are whole numbers: their default is one, and their name has no unit (_gib)."""
    sweeps = {one.key for one in read_settings(CONF / "config.yaml") if one.section == TITLES["the sweep"]}
    whole = {key for key, default in written_defaults().items() if default.isdigit() and not key.endswith("_gib")}
    return frozenset(whole - sweeps)


def file_names(group: str) -> list[str]:
    """Return the names of a group's options that are files."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def read_option(file: Path) -> Option:
    """Return the option that the first lines of its file describe."""
    head = itertools.takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
    meaning = " ".join(line.lstrip("# ") for line in head if not line.startswith("# @package"))
    first = re.sub(r": `[^`]*`$", "", meaning.partition(". ")[0].rstrip("."))
    return Option(file.stem, first, meaning)


@cache
def hub_ids() -> dict[str, str]:
    """Return the built-in model by hub id (lower case); the first lines of conf/model/*.yaml name the ids."""
    models = map(read_option, sorted((CONF / "model").glob("*.yaml")))
    named = ((one.name, found[1].split(", ")) for one in models if (found := _OF_HUB.search(one.meaning)))
    return {hub_id.casefold(): name for name, ids in named for hub_id in ids if "/" in hub_id}


def read_settings(file: Path, prefix: str = "") -> list[Setting]:
    """Return the settings of a file with their comments. Keys begin with `prefix`, unless the file is of _global_."""
    whole = "# @package _global_" in file.read_text()
    found: list[Setting] = []
    node, section = "", ""
    for line in file.read_text().splitlines():
        if line.startswith("# "):
            section = next((title for begin, title in TITLES.items() if line[2:].startswith(begin)), section)
            continue
        if line.lstrip().startswith("# ") and found:  # continues the comment above
            last = found.pop()
            found.append(dataclasses.replace(last, meaning=f"{last.meaning} {line.strip()[2:]}".strip()))
            continue
        if (match := _LINE.fullmatch(line)) is None:
            continue
        if not match["indent"]:
            node = match["key"] if not match["value"] else ""
            if match["key"] == "hydra":
                section = "hydra"
        key = match["key"] if not match["indent"] else f"{node}.{match['key']}"
        key = key if whole or not prefix else f"{prefix}.{key}"
        said = _SAID.fullmatch(match["value"] or "")
        found.append(Setting(key, said[1] if said else match["value"] or "", match["comment"] or "", section=section))
    return found


_WORDS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("known_words.json").read_text("utf-8"))
# Our words by other tools' names of a setting, or of one value of it. Such names are accepted, and the user is told.
ALIASES = {name: ours for ours, names in _WORDS["names of other tools"].items() for name in names.split()}
# Names that are no settings: ignored, because memory and speed of a step do not depend on them, or found ELSEWHERE.
LEFT_OUT = frozenset(_WORDS["no settings"].pop("left out").split())
ELSEWHERE = {name: said for said, names in _WORDS["no settings"].items() for name in names.split()}


@cache
def setting_names() -> set[str]:
    """Return the names of all settings and groups of conf/."""
    return written_defaults().keys() | set(chosen_options())


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
    of_hub = {hub_id.rpartition("/")[2]: name for hub_id, name in hub_ids().items()}
    names = {name: name for name in file_names("model")} | of_hub
    parts, *each = ([*re.findall(r"\d+(?:\.\d+)?b|\d+|[a-z]+", one.casefold())] for one in (typed, *names))
    found = {name for name, its in zip(names.values(), each, strict=True) if its == parts and "/" not in typed}
    return found.pop() if len(found) == 1 else None


@cache
def list_options(key: str) -> tuple[str, ...]:
    """Return the values of a group or setting that files of conf/ or a table list; otherwise an empty tuple."""
    if key == "device.gpu":
        return tuple(gpu.name for gpu in gpu_lookup.GPUS)
    files = file_names(key) if key in chosen_options() else []
    in_table = [one.name for one in runner_table.RUNNERS] if key == "runner" else catalog.values(key)
    named = shardings.NAMES if key == "sharding" else in_table
    return tuple(dict.fromkeys([*files, *map(catalog.text, named), *(["auto"] if key in AUTO else [])]))


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
