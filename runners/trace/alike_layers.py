"""A trace of few layers, lengthened to that of many layers that are alike.

Each storage is assigned to a layer: the one whose module requested it, or was made just before it, or whose parameter
the optimizer made it from. Requests and frees of the middle one of `FEW` layers are then recorded again for each
further layer. A free belongs to the layer of the request before it. If storages of all layers are freed in a row, each
belongs to its own layer.

This is checked: the shorter trace, lengthened by one layer, must equal the trace of one layer more. Only what has a
part for every parameter may be larger there: the stack of all gradients' norms, say, and kernels over lists of all
parameters. runners/predict/make_trace.py decides which trials have such layers, and traces them.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise, repeat
from typing import Any

import torch

from vramsweep.harness.hardware.roofline import Work
from vramsweep.runners.trace.operator_cost import Lists, launches
from vramsweep.runners.trace.step_tracer import Tracer
from vramsweep.runners.trace.storage_log import expression
from vramsweep.runners.trace.storage_origins import OPTIMIZER
from vramsweep.runners.trace.trace_data import HostStorages, Maker, Mark, Storages, Trace

FEW, MIDDLE = 3, 1  # layers of the shorter trace, and the one that stands for all between the first and the last
JOINING = ("aten.cat", "aten.stack")
_LAYER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
Layers = Sequence[int | None]  # the layer of each storage, or of each event; None: no layer's


class Unlike(Exception):
    """Raised if the layers are not alike; the message says in what they differ."""


@dataclass(frozen=True)
class Layered:
    """A trace, and what is needed to lengthen it.

    `layers` are those of the storages in GPU and in host memory. `joined` are the storages in GPU memory with a part
    for every parameter, `wholes` the kernels that go through every parameter. `lists` has, by kernel number,
    what kernels over lists of tensors go through.
    """

    trace: Trace
    details: dict[str, Any]
    layers: tuple[Layers, Layers]
    joined: Set[int]
    wholes: Set[int]
    lists: dict[int, Lists]


@dataclass(frozen=True)
class Lengthened:
    """A trace of more layers; `was` has, for GPU and host memory, each storage's number in the shorter trace."""

    trace: Trace
    details: dict[str, Any]
    was: tuple[list[int], list[int]]


def find_layers(tracer: Tracer, details: dict[str, Any]) -> Layered:
    """Return a finished trace with the layers of its storages."""
    trace, books = tracer.trace, tracer.books
    makers = [trace.makers[origin] for origin in trace.origins]
    paths = [[maker.module for maker in of] for of in (makers, tracer.host_makers)]
    for at, of in enumerate(paths):  # a module's parameters are made after it, and before the next
        for (path, parameters, numbers), (_, _, ends) in pairwise(tracer.begun):
            if ends[at] - numbers[at] <= parameters:
                of[numbers[at] : ends[at]] = [known or path for known in of[numbers[at] : ends[at]]]
    layers: list[list[int | None]] = [[_find_layer(path) for path in of] for of in paths]
    nameless = [[path in ("", OPTIMIZER) for path in of] for of in paths]
    every = set(range(max((layer for layer in layers[0] if layer is not None), default=0) + 1))
    joined = set[int]()
    made = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for further in (False, True):
        for at, book in enumerate(books):
            for number, sources in enumerate(book.sources):
                known = [layers[memory][of] for memory, of in sources]
                if not at and every <= set(known) and makers[number].operator in JOINING:
                    joined.add(number)
                elif nameless[at][number] and layers[at][number] is None:
                    layers[at][number] = next((layer for layer in known if layer is not None), None)
                for source in sources:
                    made[source].append((at, number))
        for at, book in enumerate(books) if not further else ():
            loaded, following = _count_loaded(book.kept), None
            for number in reversed(range(len(book.sources))):
                own, others = layers[at][number], {layers[memory][of] for memory, of in made[at, number]} - {None}
                if own is None and nameless[at][number]:
                    if number < loaded and len(others) == 1:
                        [own] = others
                    if own is None and not book.sources[number] and (number < loaded or paths[at][number] == OPTIMIZER):
                        own = following  # a weight's scales, an optimizer's counter of steps
                following = layers[at][number] = own
    for at, book in enumerate(books):
        for number in range(1, _count_loaded(book.kept) - 1):  # copies of what all weights share
            if nameless[at][number] and layers[at][number - 1] == layers[at][number + 1] is not None:
                layers[at][number] = layers[at][number - 1]
    wholes = frozenset(
        kernel
        for kernel, touched in enumerate(tracer.touched)
        if joined & {*touched}
        or (kernel in tracer.lists and every <= {layers[0][number] for number in touched if number is not None})
    )
    return Layered(trace, details, (layers[0], layers[1]), joined, wholes, tracer.lists)


def lengthen(shorter: Layered, longer: Layered, layers: int) -> Lengthened:
    """Return the trace of this many layers, and its details, from those of `FEW` and of one more. Raises Unlike."""
    if shorter.trace.notes or longer.trace.notes:
        raise Unlike("several streams are used")
    more, memories = layers - FEW, list[_Memory]()
    pairs = zip(_memories(shorter.trace), _memories(longer.trace), shorter.layers, (shorter.joined, set()), strict=True)
    for old, new, owners, joined in pairs:
        repeated = _repeat(old, owners, more)
        for number, size in _compare(_repeat(old, owners, 1), new, joined):
            at = repeated.was.index((number, 0))
            repeated.storages.sizes[at] = _extend(old.storages.sizes[number], size, more)
        memories.append(repeated)
    card, host = memories
    makers: dict[Maker, int] = {}
    stepwise = {number: (text, of) for number, text, of in shorter.trace.stepwise}
    trace = Trace(
        **vars(card.storages),
        streams=[shorter.trace.streams[number] for number, _ in card.was],
        origins=[makers.setdefault(maker, len(makers)) for maker in card.makers],
        makers=list(makers),
        kernels=_repeat_kernels(shorter, longer, more),
        collectives=_repeat_calls(shorter.trace.collectives, longer.trace.collectives, more),
        host=HostStorages(**vars(host.storages), pinned=[shorter.trace.host.pinned[number] for number, _ in host.was]),
        not_covered=shorter.trace.not_covered,
        stepwise=[(at, *stepwise[number]) for at, (number, _) in enumerate(card.was) if number in stepwise],
    )
    details = {key: _extend(value, longer.details[key], more) for key, value in shorter.details.items()}
    details["layers_traced"] = FEW
    return Lengthened(trace, details, ([number for number, _ in card.was], [number for number, _ in host.was]))


@dataclass(frozen=True)
class _Memory:
    """Storages of one memory, each with its maker and what else must be equal (`kinds`). `was` has each one's number in
    the shorter record, and by how many layers it moved."""

    storages: Storages
    makers: list[Maker]
    kinds: list[Any]
    was: list[tuple[int, int]]


def _memories(trace: Trace) -> tuple[_Memory, _Memory]:
    def describe(one: Storages, makers: list[Maker], *kinds: Sequence[Any]) -> _Memory:
        own = Storages(one.sizes, one.categories, one.events, one.marks)
        return _Memory(own, makers, list(zip(one.categories, *kinds, strict=True)), [])

    stepwise = {number: (text, expression(of)) for number, text, of in trace.stepwise}
    following = [stepwise.get(number) for number in range(len(trace.sizes))]
    return (
        describe(trace, [trace.makers[origin] for origin in trace.origins], trace.streams, following),
        describe(trace.host, [Maker("", "", "")] * len(trace.host.sizes), trace.host.pinned),
    )


def _repeat(memory: _Memory, layers: Layers, more: int) -> _Memory:
    """Return the memory with `more` further layers like the middle one. Raises Unlike."""
    old, keys = memory.storages, _find_keys(memory, layers)
    new, was, numbers = Storages([], [], [], []), list[tuple[int, int]](), dict[Any, int]()

    def note(event: int, by: int) -> None:
        storage = abs(event) - 1
        layer = layers[storage] if event else None
        key = (None if layer is None else layer + by, keys[storage])
        if event > 0:
            numbers[key] = len(was)
            was.append((storage, 0 if layer is None else by))
        elif event and key not in numbers:
            raise Unlike(f"{' '.join(memory.makers[storage][:2])} is freed elsewhere")
        new.events.append(event and (numbers[key] + 1 if event > 0 else -(numbers[key] + 1)))

    start, owners = 0, _find_owners(old, layers)
    for end in _ends(old):
        down = False  # as in a backward pass, which starts at the last layer
        for owner, run in groupby(range(start, end), key=owners.__getitem__):
            if owner is not None and owner != MIDDLE:
                down = owner > MIDDLE
            moves = range(more + 1) if owner == MIDDLE else [more if owner is not None and owner > MIDDLE else 0]
            happened = [old.events[at] for at in run]
            for by in reversed(moves) if down else moves:
                for event in happened:
                    own = layers[abs(event) - 1] if event else None
                    if own is not None and (owner is None or (owner - MIDDLE) * (own - MIDDLE) < 0):
                        note(event, more if own > MIDDLE else 0)  # of the model's other end
                    else:
                        note(event, by)
        start = end
        new.marks += [Mark(len(new.events), mark.step, mark.phase) for mark in old.marks[len(new.marks) :][:1]]
    new.sizes[:] = [old.sizes[number] for number, _ in was]
    new.categories[:] = [old.categories[number] for number, _ in was]
    makers = ((memory.makers[number], by) for number, by in was)
    moved = [maker._replace(module=_in_layer(maker.module, by)) for maker, by in makers]
    return _Memory(new, moved, [memory.kinds[number] for number, _ in was], was)


def _find_keys(memory: _Memory, layers: Layers) -> list[Any]:
    """Return a key that is unique in a storage's layer: phase, the path in the layer, operator, rank among equals."""
    phases, start = dict[int, int](), 0
    for number, end in enumerate(_ends(memory.storages)):
        phases |= {event - 1: number for event in memory.storages.events[start:end] if event > 0}
        start = end
    seen, keys = Counter[Any](), list[Any]()
    for storage, (layer, (path, operator, _)) in enumerate(zip(layers, memory.makers, strict=True)):
        key = (phases.get(storage), path if layer is None else _LAYER.sub("", path, count=1), operator)
        keys.append((*key, seen[layer, key]))
        seen[layer, key] += 1
    return keys


def _find_owners(storages: Storages, layers: Layers) -> list[int | None]:
    """Return the layer to which each event belongs. Another layer's events amid a layer's own belong to the latter."""
    events, owners, start = storages.events, list[int | None](), 0
    every = {layer for layer in layers if layer is not None}
    phases = [*(mark.phase for mark in storages.marks), "optimizer"]
    for phase, end in zip(phases, _ends(storages), strict=True):
        last, found = None, list[int | None]()
        for asks, run in groupby(events[start:end], key=lambda event: event > 0):
            own = [layers[abs(event) - 1] if event else None for event in run]
            found += own if asks or every <= set(own) else [last] * len(own)
            last = own[-1] if asks else last
        runs = [(owner, len([*run])) for owner, run in groupby(found)]
        for at in range(1, len(runs) - 1) if phase in ("forward", "backward") else ():
            if runs[at - 1][0] == runs[at + 1][0] is not None and runs[at][0] is not None:
                runs[at] = runs[at - 1][0], runs[at][1]
        owners += [owner for owner, count in runs for _ in range(count)]
        start = end
    return owners


def _compare(mine: _Memory, other: _Memory, joined: Set[int]) -> Iterator[tuple[int, Any]]:
    """Raise Unlike unless `mine`, lengthened by a layer, equals the traced `other`. Yield the shorter record's storages
    whose sizes differ because they have a part for every parameter, each with its size in `other`."""
    for name in ("makers", "kinds"):
        if getattr(mine, name) != getattr(other, name):
            raise Unlike(f"the {name} of storages differ")
    if (mine.storages.events, mine.storages.marks) != (other.storages.events, other.storages.marks):
        raise Unlike("requests and frees are in another order")
    sizes = zip(mine.was, mine.makers, mine.storages.sizes, other.storages.sizes, strict=True)
    for (number, _), (_, operator, _), size, traced in sizes:
        if expression(size) != expression(traced):
            if number not in joined:
                raise Unlike(f"a size of {operator} differs")
            yield number, traced


def _repeat_kernels(shorter: Layered, longer: Layered, more: int) -> list[tuple[Work, int]]:
    """Return a step's kernels with those of `more` layers; one that goes through every parameter grows with each."""
    known = (shorter, longer)
    parts = [[kernel for at, kernel in enumerate(one.trace.kernels) if at not in one.wholes] for one in known]
    made = _repeat_calls(parts[0], parts[1], more)
    if len(shorter.wholes) != len(longer.wholes):
        raise Unlike("kernels differ")
    for numbers in zip(*(sorted(one.wholes) for one in known), strict=True):
        (one, count), (other, _) = (of.trace.kernels[at] for of, at in zip(known, numbers, strict=True))
        work = Work(*(_extend(value, traced, more) for value, traced in zip(one, other, strict=True)))
        mine, theirs = (of.lists.get(at) for of, at in zip(known, numbers, strict=True))
        if mine is not None and theirs is not None:
            work = work._replace(launches=launches(Lists(*map(_extend, mine, theirs, repeat(more)))))
        elif one.launches != other.launches:
            raise Unlike("kernels differ")
        made.append((work, count))
    return made


def _repeat_calls(calls: list[Any], longer: list[Any], more: int) -> list[Any]:
    """Return kernels, or calls to other ranks, with those that `more` layers add."""
    counts = [Counter[Any](), Counter[Any]()]
    for of, counted in zip((calls, longer), counts, strict=True):
        for call, count in of:
            counted[tuple(map(expression, call))] += count
    mine, theirs = counts
    if mine - theirs or mine.keys() != theirs.keys():
        raise Unlike("kernels or calls to other ranks differ")
    named = {tuple(map(expression, call)): call for call, _ in calls}
    return calls + [(named[key], count * more) for key, count in (theirs - mine).items()]


def _extend(value: Any, longer: Any, more: int) -> Any:
    """Return a number to which each layer adds, from those of `FEW` layers and of one more; equal values stay."""
    if isinstance(value, dict) and value.keys() == longer.keys():
        return {key: _extend(of, longer[key], more) for key, of in value.items()}
    if expression(value) == expression(longer):
        return value
    if not all(isinstance(one, (int, torch.SymInt)) for one in (value, longer)):
        raise Unlike("the details of the model differ")
    return value + (longer - value) * more


def _ends(storages: Storages) -> list[int]:
    """Return where each phase ends, and where the events after the last phase end."""
    return [*(mark.end for mark in storages.marks), len(storages.events)]


def _count_loaded(storages: Storages) -> int:
    """Return how many storages were requested before the first step."""
    end = next((mark.end for mark in storages.marks if mark.step is None), 0)
    return sum(event > 0 for event in storages.events[:end])


def _find_layer(path: str) -> int | None:
    found = _LAYER.search(path)
    return int(found[0]) if found else None


@lru_cache(maxsize=1 << 16)
def _in_layer(path: str, by: int) -> str:
    """Return the path of the same module `by` layers later."""
    return _LAYER.sub(lambda found: str(int(found[0]) + by), path, count=1) if by else path
