"""The reference of settings, read from conf/: defaults, meanings and values of settings, options of groups, presets.

Help texts and the documentation are made from it, so there is no second list. A comment behind a value, continued below
it with more indent, is the setting's meaning. The first lines of a file describe the option. A comment of its own among
the settings of conf/config.yaml begins a section. Techniques and GPUs are described in their own tables.
"""

import dataclasses
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from vramsweep.harness.config import conf_files
from vramsweep.harness.config.conf_files import AUTO, CONF, TITLES, Option, Setting, chosen_options
from vramsweep.harness.hardware import gpu_lookup, interconnects
from vramsweep.harness.rows import schema
from vramsweep.harness.spec import runner_table
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep.plan import Settings

WIDTH, INDENT = 100, 26
COMMONEST = ("model", "seq_len", "micro_batch", "precision", "device.gpu", "sharding", "world_size", "adapter",
             "checkpointing", "allocator")  # fmt: skip
OWN = "a hub id (ORG/NAME), or a folder with config.json"


@dataclass(frozen=True)
class Group:
    """A group: its options, and the settings below it, as described by the option that describes most of them."""

    name: str
    options: tuple[Option, ...]
    settings: tuple[Setting, ...]


@cache
def settings() -> tuple[Setting, ...]:
    """Return the settings of conf/config.yaml that belong to no group, in its order."""
    return tuple(one for one in _read(CONF / "config.yaml") if one.section in TITLES.values())


@cache
def unwritten() -> dict[tuple[str, str], str]:
    """Return meanings by (group, name) of table entries that need no file, because it would only repeat the name."""
    entries: dict[str, Any] = {"runner": runner_table.RUNNERS, "precision": catalog.entries("precision")}
    found = {(group, one.name): one.meaning for group, table in entries.items() for one in table}
    return {(group, name): one for (group, name), one in found.items() if not (CONF / group / f"{name}.yaml").exists()}


@cache
def groups() -> tuple[Group, ...]:
    """Return the groups of conf/, in the order in which conf/config.yaml chooses from them."""
    return tuple(map(_group, chosen_options()))


def every() -> tuple[Setting, ...]:
    """Return all settings, including those of groups."""
    return (*settings(), *(one for group in groups() for one in group.settings))


def defaults() -> dict[str, str]:
    """Return the default, as written, of every key that can be given as KEY=VALUE."""
    return {one.key: one.default for one in every()}


def option(group: str, name: str) -> Option:
    """Return one option of a group. Raises KeyError if there is none."""
    return {one.name: one for of in groups() if of.name == group for one in of.options}[name]


def of_option(group: str, name: str) -> dict[str, str]:
    """Return the values, as written, that one option gives to the settings below its group, by full key."""
    return {one.key: one.default for one in _read(CONF / group / f"{name}.yaml", group)}


def values(key: str) -> tuple[str, ...]:
    """Return the possible values of a setting; empty if it is a number or a text."""
    if key in ("device.link", "device.interconnect"):
        return tuple(interconnects.link_names(key == "device.interconnect"))
    if named := conf_files.list_options(key):
        return named
    kind = _kind(Trial, key.split(".")) or {one.name: one.type for one in dataclasses.fields(Settings)}.get(key)
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return ("true", "false") if kind in (bool, "bool") else ()


def _kind(model: Any, path: list[str]) -> Any:
    """Return the type of a field, by its path below a model; None if there is no such field."""
    field = model.model_fields.get(path[0]) if isinstance(model, type) and issubclass(model, BaseModel) else None
    if field is None or len(path) == 1:
        return None if field is None else field.annotation
    return _kind(field.annotation, path[1:])


def _group(name: str) -> Group:
    files = sorted((CONF / name).glob("*.yaml"))
    read = [[one for one in _read(file, name) if one.key.startswith(f"{name}.") and one.meaning] for file in files]
    found: dict[str, Setting] = {}
    for own in sorted(read, key=len, reverse=True):  # the file that describes most settings wins
        found = {one.key: one for one in own} | found
    more = (Option(option, meaning, meaning) for (group, option), meaning in unwritten().items() if group == name)
    return Group(name, (*map(conf_files.read_option, files), *more), tuple(found.values()))


def _read(file: Path, prefix: str = "") -> list[Setting]:
    """Return the settings of a file with their possible values; without a comment, with the meaning of their column."""
    meanings = {name: column.meaning for name, column in schema.BY_NAME.items()}
    return [
        dataclasses.replace(one, meaning=one.meaning or meanings.get(one.key, ""), values=values(one.key))
        for one in conf_files.read_settings(file, prefix)
    ]


def text() -> str:
    """Return settings, groups, presets and GPUs as a help text of 100 columns."""
    parts = ["Settings are KEY=VALUE, KEY=A,B, KEY=1..8 (all whole numbers) or --key VALUE; groups are GROUP=NAME."]
    for title in TITLES.values():
        own = [_setting(one) for one in settings() if one.section == title]
        parts.append("\n".join([title, *own]))
    for group in groups():
        if group.name == "sweep":
            continue
        names = ", ".join(one.name for one in group.options)
        lines = [f"{group.name}=NAME"]
        if len(group.options) > 12:
            lines.append(_wrapped("", names))
        else:
            lines += [_entry("auto", AUTO[group.name])] if group.name in AUTO else []
            lines += [_entry(one.name, one.line) for one in group.options]
        parts.append("\n".join([*lines, *map(_setting, group.settings)]))
    lines = [_entry(one.name, one.line) for of in groups() if of.name == "sweep" for one in of.options]
    parts.append("\n".join(["Presets: sweep=NAME", _entry("auto", AUTO["sweep"]), *lines]))
    parts.append(gpu_lookup.CARDS)
    return "\n\n".join(parts)


def commonest() -> str:
    """Return the settings that are set most, one a line, for a help text that fits a screen."""
    told = {one.key: one for one in every()}
    of = {group.name: tuple(one.name for one in group.options) for group in groups()}
    lines = ["The commonest settings, each with its default and its values:"]
    for key in COMMONEST:
        one = told.get(key) or Setting(key, chosen_options()[key], f"{len(of[key])} built-in models, {OWN}", of[key])
        text = ", ".join(one.values) if 0 < len(one.values) < 20 else one.meaning
        head = f"  {key.removeprefix('device.')}={one.default}".ljust(INDENT)
        lines.append(head + textwrap.shorten(text, WIDTH - INDENT, placeholder=" ..."))
    return "\n".join(lines)


def _setting(one: Setting) -> str:
    said = set(re.findall(r"[\w-]+", one.meaning))
    listed = one.values if len(one.values) < 20 and not said.issuperset(one.values) else ()
    more = f"; one of {', '.join(listed)}" if listed and set(listed) != {"true", "false"} else ""
    return _entry(f"{one.key}={one.default}", f"{one.meaning}{more}")


def _entry(head: str, meaning: str) -> str:
    if len(head) > INDENT - 4:
        return f"  {head}\n{_wrapped(' ' * INDENT, meaning)}"
    return _wrapped(f"  {head}".ljust(INDENT), meaning)


def _wrapped(head: str, words: str) -> str:
    head = head or "  "
    return textwrap.fill(
        words, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
