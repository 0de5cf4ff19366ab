"""A trace of few layers, lengthened to that of many that are alike.

The requests and frees of the middle one of `FEW` layers are noted again for each layer more. A storage is a layer's
whose module, or a part of it, was made or ran when it was asked for, or that the optimizer made of one. A free belongs
with the request before it; but where storages of all layers are freed in a row, each with its own layer.

That it is so is not taken for granted: the trace of one layer more must be what the shorter one becomes when it is
lengthened by one. Only tensors that join one of every parameter, and kernels over such lists, may be larger in it.

Not covered: which trials have such layers, and what traces them (runners/predict/few_layers.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, groupby, repeat
from itertools import count as count_from
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
Layers = Sequence[int | None]  # of storages, or of events: whose they are; None: no layer's


class Unlike(Exception):
    """The layers are not alike; the message says in what."""


@dataclass(frozen=True)
class Layered:
    """A trace, and what was noted beside it to lengthen it: the layers of the storages in GPU and in host memory, what
    kernels over lists of tensors had to go through (by the kernel's number), and the last step's first kernel after its
    backward pass."""

    trace: Trace
    details: dict[str, Any]
    layers: tuple[Layers, Layers]
    lists: dict[int, Lists]
    optimizer: int


@dataclass(frozen=True)
class Lengthened:
    """A trace of more layers, and for GPU and host memory which storage of the shorter trace each storage was."""

    trace: Trace
    details: dict[str, Any]
    was: tuple[list[int], list[int]]


def find_layers(tracer: Tracer, details: dict[str, Any]) -> Layered:
    """Return a finished trace with whose its storages are."""
    trace, books = tracer.trace, tracer.books
    paths = [[trace.makers[origin][0] for origin in trace.origins], [""] * len(trace.host.sizes)]
    for at, of in enumerate(paths):  # a module's parameters are made after it, and before the next
        ends = [*(numbers[at] for _, numbers in tracer.begun[1:]), _count_loaded(books[at].kept)]
        for (path, numbers), end in zip(tracer.begun, ends, strict=False):
            of[numbers[at] : end] = [known or path for known in of[numbers[at] : end]]
    layers: list[list[int | None]] = [[_find_layer(path) for path in of] for of in paths]
    for at, book in enumerate(books):
        for number, sources in enumerate(book.sources):
            joins = not at and trace.makers[trace.origins[number]][1] in JOINING
            if paths[at][number] in ("", OPTIMIZER) and not joins:
                known = (layers[memory][of] for memory, of in sources)
                layers[at][number] = next((layer for layer in known if layer is not None), layers[at][number])
        for number in reversed(range(len(book.sources) - 1)):  # a counter of steps is made before its other state
            if not book.sources[number] and paths[at][number] == OPTIMIZER:
                layers[at][number] = layers[at][number + 1]
    return Layered(trace, details, (layers[0], layers[1]), tracer.lists, tracer.optimizer)


def lengthen(shorter: Layered, longer: Layered, layers: int) -> Lengthened:
    """Return the trace of so many layers, and its details, from those of `FEW` and of one more. Raises Unlike."""
    if shorter.trace.notes or longer.trace.notes:
        raise Unlike("several streams are at work")
    more, memories = layers - FEW, list[_Memory]()
    for old, new, owners in zip(_memories(shorter.trace), _memories(longer.trace), shorter.layers, strict=True):
        repeated, by_one = _repeat(old, owners, more), _repeat(old, owners, 1)
        for number, size in _compare(by_one, new, owners):
            at = repeated.was.index((number, 0))
            repeated.storages.sizes[at] = _extend(old.storages.sizes[number], size, more)
        memories.append(repeated)
    card, host = memories
    makers: dict[Maker, int] = {}
    collectives = shorter.trace.collectives
    trace = Trace(
        **vars(card.storages),
        streams=[shorter.trace.streams[number] for number, _ in card.was],
        origins=[makers.setdefault(maker, len(makers)) for maker in card.makers],
        makers=list(makers),
        kernels=_repeat_kernels(shorter, longer, more),
        collectives=collectives + _find_added(collectives, longer.trace.collectives, more),
        host=HostStorages(**vars(host.storages), pinned=[shorter.trace.host.pinned[number] for number, _ in host.was]),
        stepwise=_repeat_stepwise(shorter, card.was),
    )
    details = {key: _extend(value, longer.details[key], more) for key, value in shorter.details.items()}
    return Lengthened(trace, details, ([number for number, _ in card.was], [number for number, _ in host.was]))


@dataclass(frozen=True)
class _Memory:
    """Storages, each with who asked for it and what else must be the same; and which storage of a shorter record each
    was, and by how many layers it moved."""

    storages: Storages
    makers: list[Maker]
    kinds: list[Any]
    was: list[tuple[int, int]]


def _memories(trace: Trace) -> tuple[_Memory, _Memory]:
    def plain(one: Storages) -> Storages:
        return Storages(one.sizes, one.categories, one.events, one.marks)

    makers, host = [trace.makers[origin] for origin in trace.origins], trace.host
    return (
        _Memory(plain(trace), makers, list(zip(trace.categories, trace.streams, strict=True)), []),
        _Memory(plain(host), [("", "")] * len(host.sizes), list(zip(host.categories, host.pinned, strict=True)), []),
    )


def _repeat(memory: _Memory, layers: Layers, more: int) -> _Memory:
    """The same with `more` layers like the middle one. Raises Unlike."""
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
            raise Unlike(f"{' '.join(memory.makers[storage])} is freed elsewhere")
        new.events.append(event and (numbers[key] + 1 if event > 0 else -(numbers[key] + 1)))

    start, owners = 0, _find_owners(old, layers)
    for end in _ends(old):
        down = False  # as in a backward pass, which comes to the last layer first
        for owner, run in groupby(range(start, end), key=owners.__getitem__):
            if owner is not None and owner != MIDDLE:
                down = owner > MIDDLE
            moves = range(more + 1) if owner == MIDDLE else [more if owner is not None and owner > MIDDLE else 0]
            happened = [old.events[at] for at in run]
            for by in reversed(moves) if down else moves:
                for event in happened:
                    own = layers[abs(event) - 1] if event and owner is None else None
                    note(event, more if own is not None and own > MIDDLE else by)
        start = end
        new.marks += [Mark(len(new.events), mark.step, mark.phase) for mark in old.marks[len(new.marks) :][:1]]
    new.sizes[:] = [old.sizes[number] for number, _ in was]
    new.categories[:] = [old.categories[number] for number, _ in was]
    makers = [(_in_layer(memory.makers[number][0], by), memory.makers[number][1]) for number, by in was]
    return _Memory(new, makers, [memory.kinds[number] for number, _ in was], was)


def _find_keys(memory: _Memory, layers: Layers) -> list[Any]:
    """What tells each storage from the others of its layer: who asks for it in which phase, and the how manieth."""
    phases, start = dict[int, int](), 0
    for number, end in enumerate(_ends(memory.storages)):
        phases |= {event - 1: number for event in memory.storages.events[start:end] if event > 0}
        start = end
    seen, keys = Counter[Any](), list[Any]()
    for storage, (layer, (path, operator)) in enumerate(zip(layers, memory.makers, strict=True)):
        key = (phases.get(storage), path if layer is None else _LAYER.sub("", path, count=1), operator)
        keys.append((*key, seen[layer, key]))
        seen[layer, key] += 1
    return keys


def _find_owners(storages: Storages, layers: Layers) -> list[int | None]:
    """The layer to which each event belongs."""
    events, owners, start = storages.events, list[int | None](), 0
    every, last = {layer for layer in layers if layer is not None}, None
    for end in _ends(storages):
        last = None
        for asks, run in groupby(events[start:end], key=lambda event: event > 0):
            own = [layers[abs(event) - 1] if event else None for event in run]
            owners += own if asks or every <= set(own) else [last] * len(own)
            last = own[-1] if asks else last
        start = end
    return owners


def _compare(mine: _Memory, other: _Memory, layers: Layers) -> Iterator[tuple[int, Any]]:
    """Raise Unlike unless what was lengthened by a layer is what was traced; yield which of the shorter record's
    storages join one of every parameter, and how large they were traced."""
    if len(mine.makers) != len(other.makers):
        mine = _without_firsts(mine, other, layers)
    for name in ("makers", "kinds"):
        if getattr(mine, name) != getattr(other, name):
            raise Unlike(name)
    if (mine.storages.events, mine.storages.marks) != (other.storages.events, other.storages.marks):
        raise Unlike("the order of requests and frees")
    sizes = zip(mine.was, mine.makers, mine.storages.sizes, other.storages.sizes, strict=True)
    for (number, _), (_, operator), size, traced in sizes:
        if expression(size) != expression(traced):
            if operator not in JOINING or layers[number] is not None:
                raise Unlike(f"a size of {operator}")
            yield number, traced


def _without_firsts(mine: _Memory, other: _Memory, layers: Layers) -> _Memory:
    """Without what only the first trace of a process asks for while it loads, as the mesh of ranks, which is kept."""
    kept, loaded = list[int](), _count_loaded(mine.storages)
    for number, maker in enumerate(mine.makers):
        first = number < loaded and layers[mine.was[number][0]] is None
        if not first or other.makers[len(kept) : len(kept) + 1] == [maker]:
            kept.append(number)
    new, old = {number: at for at, number in enumerate(kept)}, mine.storages
    stays = [not event or abs(event) - 1 in new for event in old.events]
    signed = [event and (new[abs(event) - 1] + 1) * (1 if event > 0 else -1) for event in compress(old.events, stays)]
    marks = [mark._replace(end=sum(stays[: mark.end])) for mark in old.marks]
    sizes, categories = [old.sizes[number] for number in kept], [old.categories[number] for number in kept]
    others = ([values[number] for number in kept] for values in (mine.makers, mine.kinds, mine.was))
    return _Memory(Storages(sizes, categories, signed, marks), *others)


def _repeat_kernels(shorter: Layered, longer: Layered, more: int) -> list[tuple[Work, int]]:
    """The kernels of a step. Those of an optimizer have each more tensors to go through, or are more themselves."""
    (a, b), ends = (shorter.trace.kernels, longer.trace.kernels), (shorter.optimizer, longer.optimizer)
    kernels = a[: ends[0]] + _find_added(a[: ends[0]], b[: ends[1]], more)
    if len(a) - ends[0] != len(b) - ends[1]:
        return kernels + a[ends[0] :] + _find_added(a[ends[0] :], b[ends[1] :], more)
    for (one, count), (other, _), *numbers in zip(a[ends[0] :], b[ends[1] :], count_from(ends[0]), count_from(ends[1])):
        mine, theirs = (known.lists.get(at) for known, at in zip((shorter, longer), numbers, strict=True))
        work = Work(*(_extend(value, traced, more) for value, traced in zip(one, other, strict=True)))
        if mine is not None and theirs is not None:
            work = work._replace(launches=launches(Lists(*map(_extend, mine, theirs, repeat(more)))))
        elif one.launches != other.launches:
            raise Unlike("kernels")
        kernels.append((work, count))
    return kernels


def _find_added(calls: list[tuple[Any, int]], longer: list[tuple[Any, int]], more: int) -> list[tuple[Any, int]]:
    """What a layer more adds to the kernels, or to the calls to other ranks, `more` times."""
    counts, named = Counter[Any](), dict[Any, Any]()
    for sign, of in ((-1, calls), (1, longer)):
        for call, count in of:
            key = tuple(map(expression, call))
            counts[key] += sign * count
            named[key] = call
    if min(counts.values(), default=0) < 0:
        raise Unlike("kernels or calls to other ranks")
    return [(named[key], count * more) for key, count in counts.items() if count]


def _repeat_stepwise(shorter: Layered, was: list[tuple[int, int]]) -> list[tuple[int, str, int]]:
    known = {number: (text, of) for number, text, of in shorter.trace.stepwise}
    return [(at, *known[number]) for at, (number, _) in enumerate(was) if number in known]


def _extend(value: Any, longer: Any, more: int) -> Any:
    """A number that each layer adds to, from that of `FEW` layers and of one more; what it does not change."""
    if isinstance(value, dict) and value.keys() == longer.keys():
        return {key: _extend(of, longer[key], more) for key, of in value.items()}
    if expression(value) == expression(longer):
        return value
    if not all(isinstance(one, (int, torch.SymInt)) for one in (value, longer)):
        raise Unlike("what is told of the model")
    return value + (longer - value) * more


def _ends(storages: Storages) -> list[int]:
    """Where phases end, and what follows them."""
    return [*(mark.end for mark in storages.marks), len(storages.events)]


def _count_loaded(storages: Storages) -> int:
    """How many storages were asked for before the first step."""
    end = next((mark.end for mark in storages.marks if mark.step is None), 0)
    return sum(event > 0 for event in storages.events[:end])


def _find_layer(path: str) -> int | None:
    found = _LAYER.search(path)
    return int(found[0]) if found else None


def _in_layer(path: str, by: int) -> str:
    """The path of the same module some layers later."""
    return _LAYER.sub(lambda found: str(int(found[0]) + by), path, count=1) if by else path
