"""The difference between the memory of two runs at their peaks: what is new, gone, larger or smaller, and its line.

A run is predicted (a trace's storages, runners/predict/explanation.py), recorded (blocks) or measured (a row: sums
only). Memory of layers counts as one. All sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from vramsweep.harness.rows.schema import Row

PHASES = ("load", "forward", "backward", "optimizer")
Storages = Sequence[Mapping[str, Any]]  # with category, module, operator, line, bytes (all together) and count
# A moved line is no change, so what is equal but for its line belongs together before what is on the same line.
_ALIKE = (("line", "bytes", "count"), ("bytes", "count"), ("line",))


@dataclass(frozen=True)
class Moment:
    """Memory at the peak of a run or of one phase; what is not known is None."""

    allocated: int | None
    parts: Mapping[str, int] | None = None
    storages: Storages | None = None


@dataclass(frozen=True)
class Run:
    """One side: its name as typed, `kind` (predicted, measured or recorded), its peak, and the peak of each phase.

    `when` says in which phase the peak is; `fits`: whether a predicted run fits on its GPU.
    """

    name: str
    kind: str
    peak: Moment
    reserved: int | None
    when: str = ""
    fits: bool = True
    phases: Mapping[str, Moment] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """Memory that one line requests for one category, in A and in B: `bytes` in all and `count`; 0 if there is none.

    `lines` are those of A and B; "" if there is none, or it is unknown.
    """

    category: str
    module: str
    operator: str
    lines: tuple[str, str]
    bytes: tuple[int, int]
    count: tuple[int, int]

    @property
    def difference(self) -> int:
        """Return by how many bytes B has more."""
        return self.bytes[1] - self.bytes[0]

    @property
    def kind(self) -> str:
        """Return what happened from A to B."""
        if not all(self.count):
            return "gone" if self.count[0] else "new"
        return "larger" if self.difference > 0 else "smaller"


def read_answer(name: str, answer: Mapping[str, Any]) -> Run:
    """Return the run of a predicted trial, from the answer to the question "peak" (runners/worker/query_server.py)."""

    def read(one: Mapping[str, Any]) -> Moment:
        return Moment(one["allocated"], one["parts"], one["storages"])

    peak = answer["peak"]
    when = "while loading" if peak["step"] is None else f"in the {peak['phase']} phase of step {peak['step']}"
    phases = {one["phase"]: read(one) for one in answer["phases"]}
    return Run(name, "predicted", read(peak), answer["reserved"], when, answer["fits"], phases)


def read_measured(name: str, row: Row) -> Run:
    """Return the run of a measured row, whose columns say what was allocated but not for what."""
    phases = {phase: row.get(f"{phase}_peak_allocated_bytes") for phase in PHASES}
    highest = {phase: Moment(size) for phase, size in phases.items() if size is not None}
    return Run(
        name, "measured", Moment(row.get("peak_allocated_bytes")), row.get("peak_reserved_bytes"), phases=highest
    )


def find_changes(a: Storages, b: Storages) -> list[Change]:
    """Return what differs between the storages of two moments, the largest difference first.

    Storages of one category, module and operator are paired: those that are equal, then those on the same line, then
    the others in their order.
    """
    groups: dict[tuple[str, str, str], tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]] = {}
    for side, storages in enumerate((a, b)):
        for one in storages:
            groups.setdefault((one["category"], one["module"], one["operator"]), ([], []))[side].append(one)
    nothing = {"line": "", "bytes": 0, "count": 0}
    found = []
    for maker, (mine, theirs) in groups.items():
        for one, other in _pair(mine, theirs):
            sides = [nothing if side is None else side for side in (one, other)]
            lines, sizes, counts = ((sides[0][name], sides[1][name]) for name in ("line", "bytes", "count"))
            found.append(Change(*maker, lines, sizes, counts))
    return sorted((one for one in found if one.difference), key=lambda one: -abs(one.difference))


def _pair(mine: Storages, theirs: Storages) -> Iterable[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]:
    left, right, pairs = list(mine), list(theirs), []
    for names in _ALIKE:
        for one in list(left):
            other = next((other for other in right if all(one[name] == other[name] for name in names)), None)
            if other is not None:
                left.remove(one)
                right.remove(other)
                pairs.append((one, other))
    return [*pairs, *zip_longest(left, right)]


def find_parts(a: Moment, b: Moment) -> dict[str, int]:
    """Return by how many bytes each category differs, the largest difference first; rounding is one of them."""
    mine, theirs = a.parts or {}, b.parts or {}
    changes = {name: theirs.get(name, 0) - mine.get(name, 0) for name in {**mine, **theirs}}
    return dict(sorted(((n, size) for n, size in changes.items() if size), key=lambda one: -abs(one[1])))


def needs_more(a: Run, b: Run) -> bool:
    """Return whether B allocates or reserves more than A."""
    pairs = ((a.peak.allocated, b.peak.allocated), (a.reserved, b.reserved))
    return any(mine is not None and theirs is not None and theirs > mine for mine, theirs in pairs)
