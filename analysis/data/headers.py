"""Column names of other people's scripts, translated into ours: `Sequence length`, `Allocated MiB`, `it/s`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from vramsweep.analysis.data.mapping import TARGETS
from vramsweep.harness.rows.schema import BY_NAME

_WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("header_words.json").read_text("utf-8"))
_NAMES = {word: name for name, words in _WORDS.items() for word in words}
_UNITS = {"b": "bytes", "sec": "s", "secs": "s", "seconds": "s", "milliseconds": "ms", "m": "mib", "g": "gib"}
_UNIT = re.compile(r"^(.*?)[\s_([]+(bytes|[kmg]i?b|[bmg]|ms|us|s|secs?|seconds|milliseconds)[)\]]*$")
_NUMBER = re.compile(r"-?\d+(\.\d*)?(e[-+]?\d+)?")
# Unit of a column without one in its name, if its largest value is at least this: no GPU has 300 GiB.
_SIZES = {"peak": ((1 << 27, "bytes"), (300, "mib"), (0, "gib")), "step": ((50, "ms"), (0, "s"))}


def our_name(name: str, values: Sequence[str]) -> tuple[str, str]:
    """Return our name of an imported column, "" if unknown, and what was assumed, "" for nothing.

    `values` are its cells: they decide the unit if the name has none.
    """
    if name in TARGETS:
        column = BY_NAME[TARGETS[name].column]
        setting = column.group == "axes" and column.type is str  # a loss of 3.1 is no setting
        return (name if not setting or not all(map(_NUMBER.fullmatch, values)) else ""), ""
    lower = name.strip().lower()
    if (whole := _NAMES.get(_plain(lower))) in TARGETS:
        return str(whole), ""
    found = _UNIT.match(lower)
    base, unit = (_NAMES.get(_plain(found[1])), _UNITS.get(found[2], found[2])) if found else (whole, "")
    if base is None:
        return "", ""
    if not unit and (sizes := _SIZES.get(base[:4])) is not None:
        largest = max((float(value) for value in values if _NUMBER.fullmatch(value)), default=0.0)
        unit = next(unit for least, unit in sizes if largest >= least)
        shown = {"mib": "MiB", "gib": "GiB"}.get(unit, unit)
        assumed = f"{name} has no unit; its values, up to {largest:,.6g}, were read as {shown}" * (largest > 0)
    else:
        powers = f"{name} was read in powers of 10, because its unit is {unit.upper()}; if it is in powers of 1024"
        assumed = f"{powers}, use --columns ...,{base}_{unit[0]}ib" if unit in ("kb", "mb", "gb") else ""
    ours = f"{base}_{unit or 's'}"
    return (ours, assumed) if ours in TARGETS else ("", "")


def one_each(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return pairs of their name and ours that use each of our columns once. Of several candidates the one whose name
    says peak wins, else the first; the others get "" instead."""
    best: dict[str, str] = {}
    for theirs, ours in sorted(pairs, key=lambda pair: not re.search("max|peak", pair[0], re.IGNORECASE)):
        if ours:
            best.setdefault(TARGETS[ours].column, theirs)
    return [(theirs, ours if ours and best[TARGETS[ours].column] == theirs else "") for theirs, ours in pairs]


def _plain(name: str) -> str:
    """Return a lower-case name as words with a space between."""
    return " ".join(re.findall(r"[a-z0-9]+", name))
