"""Symbolic traces that are not confirmed yet: writing, reading, and confirming them by direct traces; without torch.

symbolic_shapes.py makes them.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from vramsweep.runners.predict import trace_cache
from vramsweep.runners.trace.symbolic_trace import Point, SymbolicTrace, compiled, difference, following, put
from vramsweep.runners.trace.trace_data import AS_WRITTEN, Mark, Storages, Trace


@dataclass(frozen=True)
class Refused:
    """The reason why there is no symbolic trace."""

    __pydantic_config__ = AS_WRITTEN
    reason: str


@dataclass(frozen=True)
class Candidate:
    """A symbolic trace that is not confirmed yet.

    `collected` and `host_collected` are the numbers of storages that the garbage collector freed. The traced code does
    not decide when the collector runs, and symbols make it run at other times.
    """

    __pydantic_config__ = AS_WRITTEN
    symbolic: SymbolicTrace
    collected: tuple[int, ...]
    host_collected: tuple[int, ...]


_FOUND: TypeAdapter[Candidate | Refused] = TypeAdapter(Candidate | Refused)


def from_plain(values: Mapping[str, Any]) -> Candidate | Refused:
    """Return the object from the values of `plain`. Raises ValueError, KeyError or TypeError for anything else."""
    found = _FOUND.validate_json(json.dumps(values))
    if isinstance(found, Refused):
        return found
    symbolic = found.symbolic
    template, formulas = symbolic.template, len(symbolic.formulas)
    for text in (*symbolic.formulas, *symbolic.guards):
        compiled(text)
    trace_cache.check(template, sized=False)
    numbers = [*symbolic.sizes, *symbolic.host, *(number for _, number in symbolic.varying)]
    numbers += [number for _, flops, nbytes, launches, _ in symbolic.kernels for number in (flops, nbytes, launches)]
    numbers += [number for _, number, _ in symbolic.collectives]
    numbers += [number for _, _, number in symbolic.stepwise]
    if not all(number < formulas for number in numbers):
        raise ValueError("a number has no formula")
    if (len(symbolic.sizes), len(symbolic.host)) != (len(template.categories), len(template.host.categories)):
        raise ValueError("there is not one size for each storage")
    for storage, text, number in symbolic.stepwise:
        if storage >= len(symbolic.sizes):
            raise ValueError("a size that depends on a number belongs to no storage")
        compiled(following(text, symbolic.formulas[number]))
    for path, _ in symbolic.varying:
        put(symbolic.details, path, 0)
    return found


def read(content: bytes) -> Candidate | Refused | None:
    """Return the candidate or refusal in a file's content (trace_cache.serialize); None for anything else."""
    try:
        return from_plain(json.loads(trace_cache.checked(content)))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def verified(found: Candidate, direct: Mapping[Point, tuple[Trace, dict[str, Any]]]) -> SymbolicTrace | Refused:
    """Return the symbolic trace if it gives all these direct traces with their details; its events are theirs.

    Otherwise return the reason. The direct traces should be far apart, and differ in the divisors of their lengths.
    Raises ValueError for fewer than two.
    """
    if len(direct) < 2:
        raise ValueError("a symbolic trace needs direct traces of two points to confirm it")
    own, template = found.symbolic.template, next(iter(direct.values()))[0]
    few = {"layers_traced": next(iter(direct.values()))[1].get("layers_traced")}  # of the template
    symbolic = replace(found.symbolic, template=template, details={**found.symbolic.details, **few}, basis="symbolic")
    for point, (traced, details) in direct.items():
        at = f"at seq_len {point.seq_len}, micro_batch {point.micro_batch}"
        if not symbolic.holds(point):
            return Refused(f"its guards do not hold {at}")
        books = ((own, traced, found.collected), (own.host, traced.host, found.host_collected))
        if any(_uncollected(one, collected) != _uncollected(other, collected) for one, other, collected in books):
            return Refused(f"the code behaves differently with symbols; its events differ from those traced {at}")
        try:
            what = difference(symbolic.at(point), (traced, details | few))
        except ValueError as error:
            return Refused(str(error))
        if what is not None:
            return Refused(f"its {what} differ from those traced {at}")
    return symbolic


def _uncollected(storages: Storages, freed: Collection[int]) -> tuple[Any, ...]:
    """Return events, marks, notes and categories without what the garbage collector did."""
    events, before, collected = [], [0], {*freed}
    for event in storages.events:
        if -event - 1 not in collected:
            events.append(event)
        before.append(len(events))
    marks = [Mark(before[mark.end], mark.step, mark.phase) for mark in storages.marks]
    notes = [(before[note[0]], *note[1:]) for note in storages.notes] if isinstance(storages, Trace) else []
    return events, marks, notes, [c for i, c in enumerate(storages.categories) if i not in collected]
