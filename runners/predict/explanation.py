"""Explanation of a traced run: what each phase holds by category, and why the run does not fit if it does not.

In: a trace, settings of the allocator, a limit. Out: an `Explanation`. All sizes are in bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.runners.predict import memory_timeline
from vramsweep.runners.predict.memory_timeline import LARGEST, STEP, Alike, Held, describe_storage, group_alike, holders
from vramsweep.runners.predict.predicted_row import upper_bounds
from vramsweep.runners.predict.replay_trace import Refused
from vramsweep.runners.trace.trace_data import Trace

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
    limited, whole, states, _ = memory_timeline.replay_whole(trace, config, limit)
    held, refused = memory_timeline.count_held(trace, states), limited.refused
    moments, begin = list[Moment](), 0
    for mark, most in whole.phases:
        if mark.end > begin:  # the events that a phase begins after count as its own moment
            at = begin + int(np.argmax([allocated for allocated, _, _ in states[begin : mark.end + 1]]))
            parts = {name: int(sizes[at]) for name, sizes in held.items()}
            moments.append(Moment(mark.step, mark.phase, states[at][0], most["reserved"], parts, at - 1))
        begin = mark.end
    if not moments:
        return None
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
        most={name: int(sizes.max()) for name, sizes in held.items()},
        largest=tuple(kinds[:LARGEST]),
        rest=sum(kind.held.bytes * kind.count for kind in rest),
        rest_count=sum(kind.count for kind in rest),
        refused=refused,
        asked=None if refused is None else describe_storage(trace, refused.storage, refused.mark),
    )


def _merged(moments: Sequence[Moment]) -> Iterator[Moment]:
    """Yield each phase once, at its highest moment, even if a step goes through it several times."""
    for name in dict.fromkeys((one.step, one.phase) for one in moments):
        own = [one for one in moments if (one.step, one.phase) == name]
        highest = max(own, key=lambda one: one.allocated)
        yield replace(highest, reserved=max(one.reserved for one in own))
