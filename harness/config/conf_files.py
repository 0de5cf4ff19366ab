"""The files of conf/ read as text: their settings with defaults and comments, and the options of each group.

It imports nothing heavy, so that a mistyped name is refused before anything heavy is imported.
"""

import dataclasses
import itertools
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
