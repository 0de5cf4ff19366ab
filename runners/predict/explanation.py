"""Explanation of a traced run: what each phase holds by category, and why the run does not fit if it does not.

In: a trace, settings of the allocator, a limit. Out: an `Explanation`. All sizes are in bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.allocator.simulator import Simulator
from vramsweep.runners.predict import memory_timeline
from vramsweep.runners.predict.memory_timeline import LARGEST, STEP, Alike, Held, describe_storage, group_alike, holders
from vramsweep.runners.predict.predicted_row import upper_bounds
from vramsweep.runners.predict.replay_trace import Refused, replay
from vramsweep.runners.trace.trace_data import CATEGORIES, Trace

ROUNDING = "rounding"
Parts = dict[str, int]  # bytes by category, and ROUNDING


@dataclass(frozen=True)
class Moment:
    """A phase at the first event after which it has most allocated; `parts` sum to `allocated`.

    `reserved` is the most that the phase reserves, possibly at another moment. `step` is None while loading.
    """

    step: int | None
    phase: str
    allocated: int
    reserved: int
    parts: Parts
    event: int = field(repr=False)  # of the trace


@dataclass(frozen=True)
class Explanation:
    """The phases of loading and of the last step, and the `peak` of the run, which may be of an earlier step.

    `most` is the most that each category holds at any moment of the run. `largest` are the storages that hold most of
    the peak, layers counted as one; `rest` bytes are in `rest_count` others. If memory runs out, `refused` describes
    the request and `asked` the storage that it was for; the other fields describe the run without the limit. Only
    `peak_reserved_most`, the upper bound, is capped at it; None unless another stream uses storages that are freed.
    """

    phases: tuple[Moment, ...]
    peak: Moment
    peak_reserved: int
    peak_reserved_most: int | None
    most: Parts
    largest: tuple[Alike, ...]
    rest: int
    rest_count: int
    refused: Refused | None
    asked: Held | None


def group_storages(trace: Trace, moment: Moment) -> list[dict[str, Any]]:
    """Return all storages that are alive at the moment, grouped by category, module, operator and line.

    Each group has their `count` and the `bytes` of all together, unrounded. Layers are one group: numbers in the
    module's name are "*".
    """
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for one in holders(trace, moment.event + 1):
        maker = one.category, memory_timeline.merge_layers(one.module), one.operator, one.line
        found.setdefault(maker, []).append(one.bytes)
    names = ("category", "module", "operator", "line")
    return [dict(zip(names, key, strict=True), bytes=sum(own), count=len(own)) for key, own in found.items()]


def explanation(trace: Trace, config: AllocatorConfig, limit: int | None) -> Explanation | None:
    """Explain what the trace holds under this setting; return None if nothing was traced.

    Raises UserError for settings that cannot be simulated.
    """
    watch = _Watch(trace)
    whole = replay(trace, config, limit, look=watch.look)
    if (refused := whole.refused) is not None:
        watch = _Watch(trace)
        whole = replay(trace, replace(config, per_process_memory_fraction=1.0), None, look=watch.look)
    if not whole.phases or not watch.moments:
        return None
    reserved = {number: most["reserved"] for number, (_, most) in enumerate(whole.phases)}
    moments = [replace(watch.moments[n], reserved=most) for n, most in reserved.items() if n in watch.moments]
    if not any(one.phase == "backward" for one in moments):  # not seen: then a step is one phase
        moments = [one if one.step is None else replace(one, phase=STEP) for one in moments]
    last = max((one.step for one in moments if one.step is not None), default=None)
    peak = max(reversed(moments), key=lambda one: one.allocated)  # steps are alike, so take the last
    kinds = sorted(group_alike(holders(trace, peak.event + 1)), key=lambda kind: -kind.held.bytes * kind.count)
    rest = kinds[LARGEST:]
    return Explanation(
        phases=tuple(_merged([one for one in moments if one.step in (None, last)])),
        peak=peak,
        peak_reserved=whole.peak["reserved"],
        peak_reserved_most=upper_bounds(trace, config, limit).get("peak_reserved_most_bytes"),
        most=watch.most,
        largest=tuple(kinds[:LARGEST]),
        rest=sum(kind.held.bytes * kind.count for kind in rest),
        rest_count=sum(kind.count for kind in rest),
        refused=refused,
        asked=None if refused is None else describe_storage(trace, refused.storage, refused.mark),
    )


class _Watch:
    """Counter of what is held after each event of a replay, and at the highest event of each of the trace's marks."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.held = dict.fromkeys((*CATEGORIES, ROUNDING), 0)
        self.most = self.held.copy()
        self.moments: dict[int, Moment] = {}  # by the mark's number
        self.allocated = 0
        self._mark = 0

    def look(self, index: int, simulator: Simulator) -> None:
        """Count event `index`, which the simulator has just replayed."""
        while index >= self.trace.marks[self._mark].end:
            self._mark += 1
        if self._mark not in self.moments:  # what a phase begins with counts as its own
            self._take(index - 1)
        event = self.trace.events[index]
        if event:
            number, sign = abs(event) - 1, 1 if event > 0 else -1
            self.held[self.trace.categories[number]] += sign * self.trace.sizes[number]
        self.allocated = simulator.allocated
        self.held[ROUNDING] += self.allocated - sum(self.held.values())
        for name, size in self.held.items():
            if size > self.most[name]:
                self.most[name] = size
        if self.allocated > self.moments[self._mark].allocated:
            self._take(index)

    def _take(self, event: int) -> None:
        mark = self.trace.marks[self._mark]
        self.moments[self._mark] = Moment(mark.step, mark.phase, self.allocated, 0, self.held.copy(), event)


def _merged(moments: Sequence[Moment]) -> Iterator[Moment]:
    """Yield each phase once, at its highest moment, even if a step goes through it several times."""
    for name in dict.fromkeys((one.step, one.phase) for one in moments):
        own = [one for one in moments if (one.step, one.phase) == name]
        highest = max(own, key=lambda one: one.allocated)
        yield replace(highest, reserved=max(one.reserved for one in own))
