"""The techniques as sentences and plain values, for the documentation, the terminal and programs."""

from typing import Any

from vramsweep.harness.spec.runner_table import technique_runners
from vramsweep.harness.spec.techniques.catalog import DEFAULTS, Axis, Technique, entries, text


def needs(entry: Technique) -> str:
    """Return in words what measuring an entry needs."""
    parts = [f"{package.name} >= {package.least}" for package in entry.packages]
    if entry.capability is not None:
        parts.append("compute capability " + ".".join(map(str, entry.capability)))
    return ", ".join(parts)


def sentence(entry: Technique, whole: bool) -> str:
    """Return what the terminal says of an entry: what it does, what it needs, how far it is proven.

    The `whole` text also says what it does not go with, with reasons, and what is not installed here.
    """
    parts = [entry.meaning]
    if needed := needs(entry):
        missing = [said for package in entry.packages if (said := package.missing())] if whole else []
        parts.append(f"needs {needed} to be measured" + (f" (here: {'; '.join(missing)})" if missing else ""))
    if whole:
        if entry.runners is not None:
            parts.append(f"runner={' or '.join(entry.runners)} only")
        if entry.shardings is not None:
            parts.append(f"sharding={' or '.join(entry.shardings)} only")
        parts += [f"not {setting}={'/'.join(map(text, names))} ({why})" for setting, names, why in entry.excludes]
    if entry.name != DEFAULTS.get(entry.axis):
        parts.append(f"proven on {entry.proven}" if entry.proven else "unproven")
    return "; ".join(parts)


def described(axis: Axis) -> dict[str, Any]:
    """Return an axis and its entries as plain values."""
    plain = ("name", "meaning", "capability", "shardings", "excludes", "checked", "proven", "source")
    return {
        "axis": axis.name,
        "type": axis.kind.__name__,
        "default": axis.default,
        "meaning": axis.meaning,
        "of": axis.of,
        "values": [
            {name: getattr(entry, name) for name in plain}
            | {"runners": technique_runners(entry), "packages": [f"{one.name}>={one.least}" for one in entry.packages]}
            for entry in entries(axis.name)
        ],
    }
