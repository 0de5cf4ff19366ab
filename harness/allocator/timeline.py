"""Reserved and allocated memory over the events of a simulation, in bounded space."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from vramsweep.harness.allocator.simulator import Simulator

TIMELINE_POINTS = 2000
_T = TypeVar("_T")


@dataclass(frozen=True)
class Point:
    """The timeline at one stretch of events: the most bytes reserved and allocated in it; `time_us` at its end."""

    event: int
    time_us: int | None
    reserved: int
    allocated: int


class Timeline:
    """Reserved and allocated over the events, at most TIMELINE_POINTS of them, peaks kept.

    Events are handed out in stretches and each stretch becomes a point, so the events themselves cost nothing.
    When the number of events is not known, stretches double whenever the points would become too many.
    """

    def __init__(self, simulator: Simulator, times: Sequence[int] | None) -> None:
        self.events = 0
        self.points: list[Point] = []
        self._simulator = simulator
        self._times = times
        self._allocated = 0  # the peak so far; the simulator's own peak starts anew with each stretch
        self._reserved = 0

    def stretches(self, events: Iterable[_T], total: int | None = None) -> Iterator[list[_T]]:
        length = 1 if total is None else max(1, -(-total // TIMELINE_POINTS))
        source = iter(events)
        self._mark()
        while stretch := list(islice(source, length)):
            yield stretch
            self.events += len(stretch)
            self._mark()
            if len(self.points) > TIMELINE_POINTS + 1:
                self.points = [_merge(self.points[i : i + 2]) for i in range(0, len(self.points), 2)]
                length *= 2

    def close(self) -> None:
        """Add the point at which an out-of-memory error ended the replay."""
        self._mark()

    @property
    def peak_allocated(self) -> int:
        return max(self._allocated, self._simulator.peak_allocated)

    def _mark(self) -> None:
        s = self._simulator
        time = None if self._times is None or self.events == 0 else self._times[min(self.events, len(self._times)) - 1]
        reserved = s.peak_reserved if s.peak_reserved > self._reserved else s.reserved
        self.points.append(Point(self.events, time, reserved, s.peak_allocated))
        self._reserved = s.peak_reserved
        self._allocated = max(self._allocated, s.peak_allocated)
        s.peak_allocated = s.allocated


def _merge(points: Sequence[Point]) -> Point:
    last = points[-1]
    return replace(last, reserved=max(p.reserved for p in points), allocated=max(p.allocated for p in points))
