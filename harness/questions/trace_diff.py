"""The difference between the memory of two runs at their peaks: what is new, gone, larger or smaller, and its line.

A run is predicted (a trace's storages, runners/predict/explanation.py), recorded (blocks) or measured (a row: sums
only). All sizes are in bytes. A difference is B minus A.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from vramsweep.harness.rows.schema import Row

# A moment has `allocated`, `parts` (bytes by category) and `storages`, each with category, module, operator, line,
# `bytes` (of all together) and count; the last two are None if they are not known.
Moment = Mapping[str, Any]
Change = dict[str, Any]  # a storage's first three, and pairs for A and B of its line, bytes and count; difference, kind
_ABSENT = {"line": "", "bytes": 0, "count": 0}
# A moved line is no change, so storages that are equal but for their line are paired before those on the same line.
_ALIKE = (("line", "bytes", "count"), ("bytes", "count"), ("line",))


@dataclass(frozen=True)
class Run:
    """One side: its name as typed, `kind` (predicted, measured, recorded), its peak and when that is, phases' peaks."""

    name: str
    kind: str
    when: str
    reserved: int | None
    peak: Moment
    phases: Mapping[str, Moment]


def read_answer(name: str, answer: Mapping[str, Any]) -> Run:
    """Return the run of a predicted trial, from the answer to the question "peak" (runners/worker/query_server.py)."""
    peak, phases = answer["peak"], {one["phase"]: one for one in answer["phases"]}
    when = "while loading" if peak["step"] is None else f"in the {peak['phase']} phase of step {peak['step']}"
    return Run(name, "predicted", when + ", does not fit" * (not answer["fits"]), answer["reserved"], peak, phases)


def read_measured(name: str, row: Row) -> Run:
    """Return the run of a measured row, whose columns say how much was allocated but not for what."""

    def read(of: str) -> Moment:
        return {"allocated": row.get(f"{of}peak_allocated_bytes"), "parts": None, "storages": None}

    phases = {phase: read(f"{phase}_") for phase in ("load", "forward", "backward", "optimizer")}
    return Run(name, "measured", "", row.get("peak_reserved_bytes"), read(""), phases)


def needs_more(a: Run, b: Run) -> bool:
    """Return whether B allocates or reserves more than A."""
    pairs = ((a.peak["allocated"], b.peak["allocated"]), (a.reserved, b.reserved))
    return any(mine is not None and theirs is not None and theirs > mine for mine, theirs in pairs)


def compare_parts(a: Moment, b: Moment) -> dict[str, int] | None:
    """Return by how many bytes each category differs, the largest difference first; None if not known of both."""
    mine, theirs = a["parts"], b["parts"]
    if mine is None or theirs is None:
        return None
    changes = {name: theirs.get(name, 0) - mine.get(name, 0) for name in {**mine, **theirs}}
    return {name: changes[name] for name in sorted(changes, key=lambda name: -abs(changes[name])) if changes[name]}


def compare_storages(a: Moment, b: Moment) -> list[Change] | None:
    """Return what differs between two moments, the largest difference first; None if not known of both.

    Storages of one category, module and operator are paired: those that are equal, then those on the same line, then
    the others in their order.
    """
    if a["storages"] is None or b["storages"] is None:
        return None
    groups: dict[tuple[str, str, str], tuple[list[Any], list[Any]]] = {}
    for side, moment in enumerate((a, b)):
        for one in moment["storages"]:
            groups.setdefault((one["category"], one["module"], one["operator"]), ([], []))[side].append(one)
    changes = []
    for maker, (mine, theirs) in groups.items():
        for one, other in _pair(mine, theirs):
            change = dict(zip(("category", "module", "operator"), maker, strict=True))
            pairs = {name: (one[name], other[name]) for name in _ABSENT}
            difference = other["bytes"] - one["bytes"]
            grown = "larger" if difference > 0 else "smaller"
            kind = "new" if one is _ABSENT else "gone" if other is _ABSENT else grown
            changes.append({**change, **pairs, "difference": difference, "kind": kind})
    return sorted((one for one in changes if one["difference"]), key=lambda one: -abs(one["difference"]))


def _pair(mine: Sequence[Any], theirs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    left, right = list(mine), list(theirs)
    for names in _ALIKE:
        for one in list(left):
            alike = [other for other in right if all(one[name] == other[name] for name in names)]
            if alike:
                left.remove(one)
                right.remove(alike[0])
                yield one, alike[0]
    yield from zip_longest(left, right, fillvalue=_ABSENT)
