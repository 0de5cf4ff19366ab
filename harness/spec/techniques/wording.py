"""The techniques as tables and sentences: for the documentation, the terminal and programs."""

from __future__ import annotations

from typing import Any

from vramsweep.harness.registry import RUNNERS, SHARDINGS
from vramsweep.harness.techniques import AXES, DEFAULTS, Axis, Technique, entries, text


def markdown_table() -> str:
    """The techniques as tables for the documentation, one an axis, and one of the settings that take any value."""
    lines = []
    for axis in AXES:
        if not entries(axis.name):
            continue
        default = "" if axis.default is None else f"; default `{text(axis.default)}`"
        lines += [f"**{axis.name}**: {axis.meaning}{default}", ""]
        lines += ["| value | what it does | needs | not with | checked | on a card |", "|---|---|---|---|---|---|"]
        for entry in entries(axis.name):
            proven = "" if entry.name == axis.default else entry.proven or "unproven"
            cells = (entry.meaning, needs(entry), ", ".join(_without(entry)), ", ".join(entry.checked), proven)
            lines.append(f"| `{text(entry.name)}` | {' | '.join(cells)} |")
        lines.append("")
    lines += ["**further settings**", "", "| setting | default | meaning |", "|---|---|---|"]
    free = [axis for axis in AXES if not entries(axis.name)]
    lines += [f"| `{a.name}` | `{text(a.default)}` | {a.meaning}{_belongs(a)} |" for a in free]
    return "\n".join(lines) + "\n"


def _without(entry: Technique) -> list[str]:
    """What does not go with it, as it is typed; reasons are what a refused trial says."""
    runners = [f"runner={name}" for name in Technique.runners if name not in entry.runners]
    reached = {name for runner in RUNNERS if runner.name in entry.runners for name in runner.shardings}
    left = reached - set(entry.shardings or reached)
    shardings = [f"sharding={sharding.name}" for sharding in SHARDINGS if sharding.name in left]
    excluded = [f"{name}={text(value)}" for name, values, _ in entry.excludes for value in values]
    return list(dict.fromkeys((*runners, *shardings, *excluded)))


def needs(entry: Technique) -> str:
    """What measuring needs, in words."""
    parts = [f"{package.name} >= {package.least}" for package in entry.packages]
    if entry.capability is not None:
        parts.append("compute capability " + ".".join(map(str, entry.capability)))
    return ", ".join(parts)


def sentence(entry: Technique, whole: bool) -> str:
    """What the terminal says of an entry: what it does, what it needs, how far it is proven.

    The whole of it is also where it does not go, with reasons, and what is missing here.
    """
    parts = [entry.meaning]
    if needed := needs(entry):
        missing = [said for package in entry.packages if (said := package.missing())] if whole else []
        parts.append(f"needs {needed} to be measured" + (f" (here: {'; '.join(missing)})" if missing else ""))
    if whole:
        if entry.runners != Technique.runners:
            parts.append(f"runner={' or '.join(entry.runners)} only")
        if entry.shardings is not None:
            parts.append(f"sharding={' or '.join(entry.shardings)} only")
        parts += [f"not {setting}={'/'.join(map(text, names))} ({why})" for setting, names, why in entry.excludes]
    if entry.name != DEFAULTS.get(entry.axis):
        parts.append(f"on a card: {entry.proven}" if entry.proven else "unproven")
    return "; ".join(parts)


def described(axis: Axis) -> dict[str, Any]:
    """An axis and its entries as plain values."""
    plain = ("name", "meaning", "capability", "runners", "shardings", "excludes", "checked", "proven", "source")
    return {
        "axis": axis.name,
        "type": axis.kind.__name__,
        "default": axis.default,
        "meaning": axis.meaning,
        "of": axis.of,
        "values": [
            {name: getattr(entry, name) for name in plain}
            | {"packages": [f"{package.name}>={package.least}" for package in entry.packages]}
            for entry in entries(axis.name)
        ],
    }


def _belongs(axis: Axis) -> str:
    return "" if axis.of is None else f" (with `{axis.of[0]}={' or '.join(axis.of[1])}`)"
