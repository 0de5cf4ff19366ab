"""The check before a trial that its GPUs are ours alone, and that they have the last trial's memory back.

Locks let one trial at a time use a GPU, over all sweeps that this user runs on the machine. Within a sweep its slots
ensure this (scheduler.py). Two sweeps can share a node, for example shards started by hand. Then each trial holds the
locks of its GPUs while it runs. A trial waits for them before it measures anything. Otherwise it could find the other
sweep's process there in the middle of its run. Sweeps of other users and other programs have no such locks; here their
processes are found.

A driver frees a killed process's memory some time after the process has gone, and never frees that of an orphan. The
next trial would run out of memory too early. So the memory in use must be down to the least seen on the GPU between
trials of this sweep. Otherwise we wait for it, then report which processes hold it.

Memory in use before the sweep began is the flag high_baseline's (harness/rows/quality_flags.py).
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from vramsweep.harness.machine import machine
from vramsweep.harness.messages.units import format_size

MIB, GIB = 1 << 20, 1 << 30
BACK_BYTES = 256 * MIB  # less than a CUDA context takes, so that an orphan's is noticed
PROCESSES_S = (0.2, 0.5, 1.0)  # between checks of processes, because those of the last trial may take a moment to end
MEMORY_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)  # and of memory, because a driver clears tens of GiB
POLL_S = 1.0
PLACE = Path(tempfile.gettempdir()) / f"vramsweep-{os.getuid() if hasattr(os, 'getuid') else ''}"


@dataclass(frozen=True)
class GpuTaken:
    """Why a trial cannot have its GPUs now: ids of other processes there, or a text on who holds their memory."""

    processes: tuple[int, ...] = ()
    held: str | None = None


class Occupancy:
    """The least memory in use on each GPU while none of our trials ran, by uuid, and a wait until it is back there."""

    def __init__(self) -> None:
        self._least: dict[str, int] = {}

    def taken(
        self, cards: Sequence[machine.Gpu], own: Callable[[], set[int]], sleep: Callable[[float], None]
    ) -> GpuTaken | None:
        """Wait until the GPUs are free. Return None, or why they are not. `own` returns our processes' ids."""
        if not cards:
            return None
        waits = iter(PROCESSES_S)
        while seen := [pid for card in machine.again(cards) for pid in card.processes or ()]:
            ours = own()
            if not (foreign := tuple(pid for pid in seen if pid not in ours)):
                break
            wait = next(waits, None)
            if wait is None:
                return GpuTaken(processes=foreign)
            sleep(wait)
        waits = iter(MEMORY_S)
        while (card := self._not_back(machine.again(cards))) is not None:
            wait = next(waits, None)
            if wait is None:
                return GpuTaken(held=self._said(card))
            sleep(wait)
        return None

    def _not_back(self, cards: Sequence[machine.Gpu]) -> machine.Gpu | None:
        """Return the first GPU with more memory in use than before, if any; update the least seen on each."""
        for card in cards:
            if card.uuid is None or card.memory_used is None:
                continue
            used = _computing(card)
            least = self._least[card.uuid] = min(used, self._least.get(card.uuid, used))
            if used > least + BACK_BYTES:
                return card
        return None

    def _said(self, card: machine.Gpu) -> str:
        assert card.memory_used is not None and card.uuid is not None
        more = (_computing(card) - self._least[card.uuid]) / GIB
        holders = [_holder(one.pid, one.bytes) for one in machine.holders(card) if one.computes]
        who = ", ".join(holders) or "no visible process (one in another container, or the driver itself)"
        return f"{more:.1f} GiB more than before are in use on GPU {card.index}, held by {who}"


def _computing(card: machine.Gpu) -> int:
    """Return the bytes in use on a GPU, without processes that only draw, because a desktop's windows come and go."""
    assert card.memory_used is not None
    return card.memory_used - sum(one.bytes or 0 for one in machine.holders(card) if not one.computes)


def _holder(pid: int, size: int | None) -> str:
    name = ""
    with contextlib.suppress(psutil.Error):
        name = f" {psutil.Process(pid).name()}"
    return f"process {pid}{name}" + ("" if size is None else f" ({format_size(size)})")


@contextlib.contextmanager
def lock_gpus(
    cards: Sequence[machine.Gpu], sleep: Callable[[float], None], patience_s: float, folder: Path | None = None
) -> Iterator[str | None]:
    """Hold the locks of these GPUs for the block. Yield None, or their holder after `patience_s` seconds of waiting."""
    named = {card.uuid: card for card in cards if card.uuid is not None}
    with contextlib.ExitStack() as locks:  # in order, so that two trials of several GPUs cannot deadlock
        taken = (_taken(named[uuid], folder or PLACE, sleep, patience_s, locks) for uuid in sorted(named))
        yield next(filter(None, taken), None)


def _taken(
    card: machine.Gpu, place: Path, sleep: Callable[[float], None], patience_s: float, locks: contextlib.ExitStack
) -> str | None:
    """Take the head of a GPU's queue, then the GPU, and release the head. So a process that has just released the GPU
    queues behind those that wait. Return None, or why the GPU is not ours."""
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        name = str(card.uuid).replace("/", "_")
        own = os.open(place / f"{name}.lock", flags, 0o600)
        locks.callback(os.close, own)
        head = os.open(place / f"{name}.next", flags, 0o600)
    except OSError:  # without a folder go on without locks
        return None
    waited = 0.0
    try:
        for descriptor in (head, own):
            while not _locked(descriptor):
                if waited >= patience_s:
                    who = os.pread(own, 20, 0).decode(errors="replace").strip()
                    return f"GPU {card.index} is used by another sweep{f', process {who}' if who.isdecimal() else ''}"
                sleep(POLL_S)
                waited += POLL_S
        with contextlib.suppress(OSError):  # only a label
            os.ftruncate(own, 0)
            os.pwrite(own, str(os.getpid()).encode(), 0)
        return None
    finally:
        os.close(head)


def _locked(descriptor: int) -> bool:
    """Try to lock the file; return whether that worked. Also True if the file system has no locks."""
    import fcntl  # here, because commands that only read rows (status) import this module too, and Windows has none

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True
