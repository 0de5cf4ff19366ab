"""Timeline of a traced step: what it holds after each event, and the storages that hold its peak.

In: a trace, settings of the allocator, a limit. Out: the data of a figure, from a replay. All sizes are in bytes.
"""

import itertools
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.allocator.simulator import Simulator
from vramsweep.harness.allocator.snapshot import RecordingSimulator
from vramsweep.runners.predict.replay_trace import Prediction, replay
from vramsweep.runners.trace.allocation_program import IntArray, build_program
from vramsweep.runners.trace.trace_data import CATEGORIES, Maker, Mark, Trace

POINTS = 2000  # a figure cannot show more apart
LARGEST = 10
_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a path that is a number
STEP = "step"  # the one phase of a step whose backward pass was not seen
ROUNDING = "rounding"


@dataclass(frozen=True)
class Phase:
    """Events `begin` to `end` of the step (the first is number 1), and the phase that they belong to."""

    phase: str
    begin: int
    end: int


@dataclass(frozen=True)
class Held:
    """A storage alive at the peak: its size, its category, the module, operator and line that requested it, and when.

    `step` is None for storages made while loading.
    """

    bytes: int
    category: str
    module: str
    operator: str
    line: str
    step: int | None
    phase: str


@dataclass(frozen=True)
class Alike:
    """All `count` storages alive at the peak that differ only in their layer's number, each of `held.bytes`.

    Numbers in the module's name are "*" if the storages are of several layers.
    """

    held: Held
    count: int


@dataclass(frozen=True)
class Peak:
    """The first event after which the step has most allocated. `largest`, `rest` and `rounding` sum to `allocated`.

    `alike` counts layers as one: the ten groups with the largest storages, which hold those of `largest`, and more.
    """

    event: int
    phase: str
    allocated: int
    largest: tuple[Held, ...]
    rest: int
    rest_count: int
    rounding: int
    alike: tuple[Alike, ...]


@dataclass(frozen=True)
class Failure:
    """The request that does not fit under the limit; the figure shows the step without a limit."""

    event: int
    phase: str
    request: int


@dataclass(frozen=True)
class Timeline:
    """One step of a trace under one setting of the allocator; `step` is None for loading.

    Point i is what was held after event `event[i]` of the step (0: before the first). The values of `parts` there, by
    category and "rounding", sum to `allocated[i]`.
    """

    step: int | None
    events: int
    event: tuple[int, ...]
    allocated: tuple[int, ...]
    active: tuple[int, ...]
    reserved: tuple[int, ...]
    parts: dict[str, tuple[int, ...]]
    phases: tuple[Phase, ...]
    peak: Peak
    peak_reserved: int
    limit: int | None
    failure: Failure | None


State = tuple[int, int, int]  # allocated, active, reserved


def timeline(trace: Trace, config: AllocatorConfig, limit: int | None) -> Timeline | None:
    """Return the timeline of the last step; if memory runs out, of the step in which it does, without the limit.

    None if nothing was traced. Raises UserError for settings that cannot be simulated.
    """
    limited, _, states, failed = replay_whole(trace, config, limit)
    if not limited.phases:
        return None
    step = limited.phases[-1][0].step
    own = [(begin, mark) for begin, mark in _spans(trace.marks) if mark.step == step]
    first, last = own[0][0], own[-1][1].end
    told = step is None or any(mark.phase == "backward" for _, mark in own)
    phases = [Phase(mark.phase, begin - first, mark.end - first) for begin, mark in own if mark.end > begin]
    phases = phases if told else [Phase(STEP, 0, last - first)]
    moments = _moments(states[first : last + 1])
    shown = [states[first + moment] for moment in moments]
    held = count_held(trace, states)
    peak = max(range(len(shown)), key=lambda i: shown[i][0])
    at, failure = moments[peak], None
    if failed is not None and limited.refused is not None:
        failure = Failure(failed + 1 - first, _phase(phases, failed + 1 - first), limited.refused.request)
    return Timeline(
        step=step,
        events=last - first,
        event=tuple(moments),
        allocated=tuple(allocated for allocated, _, _ in shown),
        active=tuple(active for _, active, _ in shown),
        reserved=tuple(reserved for _, _, reserved in shown),
        parts={name: tuple(sizes[[first + moment for moment in moments]].tolist()) for name, sizes in held.items()},
        phases=tuple(phases),
        peak=_peak(trace, first + at, at, phases, shown[peak][0], int(held[ROUNDING][first + at])),
        peak_reserved=max(reserved for _, _, reserved in states[first : last + 1]),
        limit=limit,
        failure=failure,
    )


def snapshot(trace: Trace, config: AllocatorConfig, limit: int | None) -> dict[str, Any] | None:
    """Return the replay as a snapshot of all its steps, up to the request that does not fit; None for an empty trace.

    Its origins are numbers of `makers`, a list of pairs: the maker and the category. Raises UserError.
    """
    makers: dict[tuple[Maker, str], int] = {}

    def origin(number: int) -> int:
        return makers.setdefault((trace.makers[trace.origins[number]], trace.categories[number]), len(makers))

    simulator = RecordingSimulator(config, limit, origin)
    replay(trace, config, limit, simulator=simulator)
    return simulator.snapshot() | {"makers": list(makers)} if simulator.events else None


def _spans(marks: Sequence[Mark]) -> Iterator[tuple[int, Mark]]:
    """Pair each mark with the index of its first event."""
    return zip(itertools.chain([0], (mark.end for mark in marks)), marks, strict=False)


def _phase(phases: Sequence[Phase], event: int) -> str:
    return next((p.phase for p in phases if event <= p.end), phases[-1].phase if phases else STEP)


def _moments(states: Sequence[State]) -> list[int]:
    """Choose about POINTS states at most that keep the picture: extremes of each stretch, and both ends; by index."""
    if len(states) <= POINTS:
        return list(range(len(states)))
    length = -(-len(states) // (POINTS // 4))
    kept = {0, len(states) - 1}
    for start in range(0, len(states), length):
        stretch = range(start, min(start + length, len(states)))
        kept |= {max(stretch, key=lambda i, which=which: states[i][which]) for which in range(3)}  # type: ignore[misc]
        kept.add(min(stretch, key=lambda i: states[i][0]))
    return sorted(kept)


def replay_whole(
    trace: Trace, config: AllocatorConfig, limit: int | None
) -> tuple[Prediction, Prediction, list[State], int | None]:
    """Replay the trace within the limit and, if a request does not fit, without it.

    Return both predictions (one, if all fits), the states before and after each event of the latter, and the index of
    the event that does not fit, or None.
    """
    states: list[State] = [(0, 0, 0)]

    def look(index: int, simulator: Simulator) -> None:
        states.append((simulator.allocated, simulator.active, simulator.reserved))

    limited = replay(trace, config, limit, look=look)
    if limited.refused is None:
        return limited, limited, states, None
    failed = len(states) - 1
    del states[1:]
    return limited, replay(trace, replace(config, per_process_memory_fraction=1.0), None, look=look), states, failed


def count_held(trace: Trace, states: Sequence[State]) -> dict[str, IntArray]:
    """Return by category the bytes held in each of these states; `ROUNDING` fills up to the bytes allocated."""
    events = np.array(trace.events[: len(states) - 1], dtype=np.int64)
    numbers = np.abs(events) - 1  # of event 0, which frees no storage: -1
    changes = np.sign(events) * np.array([*trace.sizes, 0], dtype=np.int64)[numbers]
    kinds = np.array([*trace.categories, ""])[numbers]
    held = {name: np.append(0, np.cumsum(np.where(kinds == name, changes, 0))) for name in CATEGORIES}
    return held | {ROUNDING: np.array([allocated for allocated, _, _ in states]) - sum(held.values())}


def _peak(trace: Trace, until: int, event: int, phases: Sequence[Phase], allocated: int, rounding: int) -> Peak:
    every = holders(trace, until)
    return Peak(
        event,
        _phase(phases, event),
        allocated,
        tuple(every[:LARGEST]),
        sum(one.bytes for one in every[LARGEST:]),
        len(every[LARGEST:]),
        rounding,
        group_alike(every)[:LARGEST],
    )


def holders(trace: Trace, until: int) -> list[Held]:
    """Return the storages that are alive after the first `until` events, the largest first."""
    order, ends = build_program(trace), [mark.end for mark in trace.marks]
    alive = np.flatnonzero((order.born < until) & (order.gone >= until)).tolist()
    largest = sorted(alive, key=lambda number: -trace.sizes[number])
    marks = (trace.marks[bisect_right(ends, order.born[number])] for number in largest)
    return [describe_storage(trace, number, mark) for number, mark in zip(largest, marks, strict=True)]


def describe_storage(trace: Trace, number: int, mark: Mark) -> Held:
    """Describe a storage that was requested in this phase."""
    maker = trace.makers[trace.origins[number]]
    return Held(trace.sizes[number], trace.categories[number], *maker, mark.step, mark.phase)


def group_alike(every: Sequence[Held]) -> tuple[Alike, ...]:
    """Group storages that differ only in their layer, in the order given."""
    kinds: dict[Held, list[Held]] = {}
    for one in every:
        kinds.setdefault(replace(one, module=merge_layers(one.module)), []).append(one)
    return tuple(Alike(own[0] if len(set(own)) == 1 else kind, len(own)) for kind, own in kinds.items())


def merge_layers(module: str) -> str:
    """Return a module's path with "*" for each number, one name for a module of all layers."""
    return _LAYER.sub("*", module)
