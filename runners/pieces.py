"""Stand-in for the formulas between traced points: every point is traced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from vramsweep.runners.symbolic import Point
from vramsweep.runners.trace import Trace


class Traced(NamedTuple):
    """A point's trace and the columns about what was built."""

    trace: Trace
    details: dict[str, Any]


Ask = Callable[[Sequence[Point]], Mapping[Point, Traced]]


class Cover:
    """The traces of the points that were asked for."""

    def __init__(self, traced: Mapping[Point, Traced]) -> None:
        self._traced = traced

    def at(self, point: Point) -> tuple[Trace, dict[str, Any], str] | None:
        """The trace, the details and what a row says of how they came; None where the point could not be traced."""
        found = self._traced.get(point)
        return None if found is None else (found.trace, found.details, "traced")


def cover(wanted: Collection[Point], ask: Ask) -> Cover:
    """The traces of the points `wanted`. `ask` traces points; one that cannot be traced is not in its answer."""
    return Cover(ask(sorted(wanted)))
