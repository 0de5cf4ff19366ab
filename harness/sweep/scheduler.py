"""Slots for trials: which trials may start now, on which GPUs and CPUs, and the threads that see them through.

A resource is a GPU; without GPUs, a share of the machine's CPUs. A trial takes as many as it has ranks, and gives them
back. One that does not fit yet is passed by: those behind it that do fit go first. A GPU that fails trial after trial
rests, and a trial that has failed on one GPU waits for another (gpu_readiness.py).

Of GPUs that differ, only those of the first one's name are resources, unless a trial needs all of them.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType

from vramsweep.harness.machine import machine
from vramsweep.harness.machine.gpu_readiness import GpuHealth
from vramsweep.harness.process.signals import Finished
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.sweep import row_builder
from vramsweep.harness.sweep.plan import Planned

NAP_S = 0.1  # after which a slot that waits for something other than its worker sees that it is to stop


class Stopped(BaseException):
    """Raised in a slot: the sweep is to stop at once."""


@dataclass(frozen=True)
class Resource:
    """A GPU or a share of the CPUs. `card` is None if there is no GPU, or if it cannot be told from others; `cpus` is
    empty for all CPUs."""

    card: machine.Gpu | None = None
    cpus: tuple[int, ...] = ()


@dataclass
class Slot:
    """The GPUs and CPUs where a trial runs. `beside` are the ids of the trials that ran at the same time, so far.
    `check` raises once the trial is to stop, and `sleep` waits as long as it is not."""

    cards: Sequence[machine.Gpu] = ()
    cpus: tuple[int, ...] = ()
    beside: set[str] = field(default_factory=set)
    sleep: Callable[[float], None] = time.sleep
    check: Callable[[], None] = lambda: None


def list_resources(planned: Iterable[Planned], slots: int | None) -> list[Resource]:
    """Return the resources for these trials: `slots` at most, but as many as the ranks of the largest trial.

    Without `slots`: every GPU, or one resource if there are none.
    """
    ranks = [item.trial.world_size for item in planned if item.trial and item.trial.device.name == "cuda"]
    visible = machine.visible_gpus(os.environ) if ranks else []
    if None in (card.uuid for card in visible):  # such GPUs cannot be shared out
        return [Resource()]
    alike = [card for card in visible if card.name == visible[0].name]
    cards = alike if max(ranks, default=0) <= len(alike) else visible
    count = max(slots or len(cards) or 1, *ranks, 1)
    count = min(count, len(cards)) if cards else count
    shares = _shares(sorted(os.sched_getaffinity(0)), cards[:count], count)
    return [Resource(cards[n] if cards else None, share) for n, share in enumerate(shares)]


def _shares(cpus: Sequence[int], cards: Sequence[machine.Gpu], count: int) -> list[tuple[int, ...]]:
    """Return neighbouring CPUs for each resource, near its GPU if that is known of all GPUs. With one resource, or
    fewer CPUs than resources, each gets all of them (an empty tuple)."""
    if count == 1 or len(cpus) < count:
        return [()] * count
    near = [tuple(cpu for cpu in machine.cpus_near(card) if cpu in cpus) for card in cards] or [()]
    if () in near or sum(map(len, set(near))) > len({cpu for of in near for cpu in of}):  # unknown, or overlapping
        near = [tuple(cpus)] * count
    dealt = {of: iter(_dealt(of, near.count(of))) for of in near}
    return [next(dealt[of]) for of in near]


def _dealt(cpus: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    few, size = len(cpus) < count, len(cpus)
    return [cpus if few else cpus[n * size // count : (n + 1) * size // count] for n in range(count)]


def resources_needed(item: Planned, count: int) -> int:
    """Return how many of `count` resources a trial takes: none if it cannot run. A simulated trial takes one, because
    one rank is simulated for all."""
    if item.trial is None:
        return 0
    return 1 if item.trial.device.name == "simulated" else min(item.trial.world_size, count)


@dataclass(frozen=True)
class _Running:
    item: Planned
    places: tuple[Resource, ...]
    slot: Slot


class Pool(contextlib.AbstractContextManager["Pool"]):
    """The trials that run in `threads` on `places`. Use it as a context manager: if an exception leaves the block, what
    still runs is stopped first. `exclusive`: never two at a time. `asked` raises if no trial is to be tried again.
    `health` is that of the GPUs, which outlives the pool."""

    def __init__(
        self,
        threads: Executor,
        places: Sequence[Resource],
        exclusive: bool,
        asked: Callable[[], None] = lambda: None,
        health: GpuHealth | None = None,
    ) -> None:
        self._threads, self._places, self._free, self._count = threads, places, list(places), len(places)
        self._health = health or GpuHealth(place.card for place in places)
        self._exclusive, self._asked = exclusive, asked
        self._running: dict[Future[Row], _Running] = {}
        self._ended: SimpleQueue[Future[Row]] = SimpleQueue()
        self._stopped = False

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._stopped, left = True, True
        while left:
            with contextlib.suppress(KeyboardInterrupt):  # already stopping
                wait(self._running)
                left = any(not future.done() for future in self._running)

    def __len__(self) -> int:
        return len(self._running)

    def first_fitting(self, waiting: Sequence[Planned]) -> tuple[int, Sequence[Resource]] | None:
        """Return the index of the first of `waiting` that resources are free for, and these; None if there is none."""
        if not self._free or (self._exclusive and self._running):
            return None
        fitting = ((at, self._fitting(item)) for at, item in enumerate(waiting))
        return next(((at, places) for at, places in fitting if places is not None), None)

    def start(self, item: Planned, places: Sequence[Resource], run: Callable[[Slot], Row]) -> None:
        """Run a trial on resources that `first_fitting` returned."""
        taken = tuple(places)
        for place in taken:
            self._free.remove(place)
        slot = self._slot(item, taken)
        for other in [one for one in self._running.values() if taken and one.places]:
            other.slot.beside.add(item.trial_id)
            slot.beside.add(other.item.trial_id)
        future = self._threads.submit(run, slot)
        self._running[future] = _Running(item, taken, slot)
        future.add_done_callback(self._ended.put)

    def wait(self) -> tuple[Planned, Row | None]:
        """Return the next trial that has ended, and its row; no row if it was not tried again, because `asked` raised
        Finished. Raises what running it raised."""
        future = self._ended.get()
        over = self._running.pop(future)
        self._free += over.places
        try:
            row = future.result()
        except Finished:
            return over.item, None
        self._health.add(row, over.slot.cards, time.monotonic())
        return over.item, row

    def _fitting(self, item: Planned) -> list[Resource] | None:
        """Return free resources for a trial, None if there are too few: it waits for those that it should have. It gets
        GPUs of another name than the first only if it needs them, because another GPU is another system. It also avoids
        resting GPUs, and then those on which it has failed."""
        resting = self._health.resting(time.monotonic())

        def avoided(place: Resource) -> tuple[bool, bool, int]:
            card, first = place.card, self._places[0].card
            if card is None or first is None:
                return False, False, 0
            return card.name != first.name, card.uuid in resting, self._health.failures(item.trial_id, card)

        taking = resources_needed(item, self._count)
        wanted = sorted(map(avoided, self._places))[:taking]
        free = sorted((one for one in self._free if avoided(one) <= wanted[-1]), key=avoided) if wanted else []
        return free[:taking] if len(free) >= taking else None

    def _slot(self, item: Planned, taken: Sequence[Resource]) -> Slot:
        cards = [place.card for place in taken if place.card]
        if item.trial and item.trial.device.name != "cuda":
            cards = []
        elif item.trial and not cards:
            cards = row_builder.visible_gpus(item.trial)
        shared = self._count > 1 and not self._exclusive
        cpus = tuple(cpu for place in taken for cpu in place.cpus) if shared else ()
        return Slot(cards, cpus, sleep=self._sleep, check=self._check)

    def _check(self) -> None:
        if self._stopped:
            raise Stopped

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            self._check()
            self._asked()
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, NAP_S))
