"""The techniques as tables and sentences: for the documentation, the terminal and programs."""

from __future__ import annotations

from typing import Any

from vramsweep.harness.techniques import AXES, DEFAULTS, TECHNIQUES, Axis, Technique, entries, text, values


def markdown_table() -> str:
    """The techniques as a table for the documentation."""
    lines = ["**techniques**", "", "| setting | what it does | needs | runners | checked | on a card |"]
    lines += ["|---|---|---|---|---|---|"]
    for entry in TECHNIQUES:
        star = " (default)" if DEFAULTS.get(entry.axis) == entry.name else ""
        known = entry.proven or "unproven"
        lines.append(
            f"| `{entry}`{star} | {entry.meaning} | {needs(entry)} | {', '.join(entry.runners)} | "
            f"{', '.join(entry.checked)} | {known} |"
        )
    settings = [axis for axis in AXES if not values(axis.name)]
    lines += ["", "| setting | default | meaning |", "|---|---|---|"]
    lines += [f"| `{a.name}` | `{a.default}` | {a.meaning}{_belongs(a)} |" for a in settings]
    return "\n".join(lines) + "\n"


def needs(entry: Technique) -> str:
    """What measuring needs, in words."""
    parts = [f"{package.name} >= {package.least}" for package in entry.packages]
    if entry.capability is not None:
        parts.append("compute capability " + ".".join(map(str, entry.capability)))
    return ", ".join(parts)


def sentence(entry: Technique) -> str:
    """What the terminal says of an entry: what it does, where it does not go, what it needs, how far it is proven."""
    parts = [entry.meaning]
    if needed := needs(entry):
        parts.append(f"needs {needed} to be measured")
    if entry.runners != Technique.runners:
        parts.append(f"runner={' or '.join(entry.runners)} only")
    parts += [f"not {setting}={'/'.join(map(text, names))} ({why})" for setting, names, why in entry.excludes]
    if entry.name != DEFAULTS.get(entry.axis):
        parts.append(f"on a card: {entry.proven or 'unproven'}")
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
