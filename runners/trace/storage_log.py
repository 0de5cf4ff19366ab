"""The log of one memory: which storages were requested and freed, in which order, and what each was for.

step_tracer.py writes it; replay_trace.py decides where an allocator puts the storages.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Set
from typing import Any, cast

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramsweep.runners.trace.cuda_allocations import Stepwise
from vramsweep.runners.trace.sdpa_kernels import Freed
from vramsweep.runners.trace.trace_data import CATEGORIES, HOST_CATEGORIES, WORKSPACES, HostStorages, Mark, Storages


class MemoryLog:
    """Log of one memory: which storages are in it now, and what each was for."""

    def __init__(self, kept: Storages, asked: Callable[[], None]) -> None:
        self.kept = kept
        self.numbers: dict[int, int] = {}  # from a storage's address to its number, while it lives
        self.known: dict[str, set[int]] = {name: set() for name in CATEGORIES}
        self._asked = asked  # called for each new storage, to record more about it
        self.sources: list[tuple[tuple[int, int], ...]] = []  # each storage's inputs: memory, number
        self.collected: set[int] = set()  # storages that Python's GC freed, if somebody watches it
        self._references: dict[int, weakref.ref[Any]] = {}
        self._closed = False

    def allocate(self, size: int) -> int:
        """Record a request and return the storage's number."""
        number = len(self.kept.sizes)
        self.kept.sizes.append(size)
        self._asked()
        self.kept.events.append(number + 1)
        return number

    def borrow(self, sizes: list[Any]) -> list[int]:
        """Record what an operator allocates for itself and frees (`cuda_allocations.scratch`); return the numbers."""
        taken: list[int] = []
        given: list[int] = []
        for size in sizes:
            if isinstance(size, Freed):
                given.append(taken[size.which])
                self.kept.events.append(-(given[-1] + 1))
            else:
                taken.append(self.allocate(size.size if isinstance(size, Stepwise) else size))
        self.kept.events += [-(number + 1) for number in reversed(taken) if number not in given]
        return taken

    def room(self) -> int:
        """Return the bytes between what is allocated now and the most that was allocated so far."""
        there = most = 0
        for event in self.kept.events:
            if event:
                there += hint(self.kept.sizes[abs(event) - 1]) * (1 if event > 0 else -1)
                most = max(most, there)
        return most - there

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Record a storage if it is new and not empty, and later its death."""
        key = storage._cdata
        if key in self.numbers or not storage.nbytes():
            return
        self.hold_as(storage, self.allocate(storage.nbytes()))

    def hold_as(self, storage: torch.UntypedStorage, number: int) -> None:
        """Give a storage this number, and later record its death."""
        key = storage._cdata
        self.numbers[key] = number
        self._references[key] = weakref.ref(storage, functools.partial(self.release, key))

    def release(self, key: int, _reference: Any = None) -> None:
        """Record that the storage of this address is freed."""
        number = self.numbers.pop(key)
        del self._references[key]
        if not self._closed:
            self.kept.events.append(-(number + 1))

    def know(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        """Put these tensors into the category, as far as they are in this memory."""
        self.known[category] |= {n for t in tensors if (n := self.number(t)) is not None}

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the storage of this rank's part of a tensor, or None if it is not in this memory."""
        tensor = local_part(tensor)
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return None
        return self.numbers.get(tensor.untyped_storage()._cdata)

    def close(self, again: Set[int] = frozenset()) -> list[str]:
        """Record no more frees, and return each storage's category.

        An activation is made in a forward phase and outlives it. Of the storages made while a backward pass recomputes,
        which are `again`, a recomputed activation is alive when the next other storage is made."""
        self._closed = True
        categories = ["temporaries"] * len(self.kept.sizes)
        made: dict[int, Mark] = {}
        start = 0
        for mark in self.kept.marks:
            for event in self.kept.events[start : mark.end]:
                if event > 0:
                    made[event - 1] = mark
                elif event < 0:
                    made.pop(-event - 1, None)
            for number, origin in made.items():
                if origin is mark and mark.phase == "forward":
                    categories[number] = "activations"
            start = mark.end
        recent: set[int] = set()
        for event in self.kept.events if again else ():
            if event - 1 in again:
                recent.add(event - 1)
            elif event > 0:
                for number in recent:
                    categories[number] = "recomputed_activations"
                recent.clear()
            recent.discard(-event - 1)
        for name in ("communication", "buffers", "optimizer_state", "gradients", "parameters", WORKSPACES):
            for number in self.known[name]:
                categories[number] = name
        return categories


def hint(value: Any) -> Any:
    """Return a number; of a symbol, its value in the trial that was traced. This adds no guard."""
    return int(value.node.hint) if isinstance(value, torch.SymInt) else value


_expand = functools.cache(sympy.expand)


def expression(value: Any) -> Any:
    """Return a value for comparisons; of a symbol, its expanded expression. This adds no guard."""
    return _expand(value.node.expr) if isinstance(value, torch.SymInt) else value


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is sharded over ranks: of FSDP's DTensor, or ZeRO-3's partition."""
    return cast(torch.Tensor, getattr(tensor, "_local_tensor", getattr(tensor, "ds_tensor", tensor)))


def of_host(storages: HostStorages, categories: list[str]) -> list[str]:
    """Return the categories of host memory's storages; a temporary of the first phase belongs to loading."""
    loaded = {event for event in storages.events[: storages.marks[0].end] if event > 0} if storages.marks else set()

    def of(number: int, name: str) -> str:
        if name in HOST_CATEGORIES:
            return name
        return "loading" if name == "temporaries" and number + 1 in loaded else "other"

    return [of(number, name) for number, name in enumerate(categories)]
