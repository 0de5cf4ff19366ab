"""Whether GPUs are ready for a trial: ours alone, with the last trial's memory back, and not failing trial after trial.

Locks let one trial at a time use a GPU, over all sweeps that this user runs on the machine. Within a sweep its slots
ensure this (scheduler.py). Two sweeps can share a node, for example shards started by hand. Then each trial holds the
locks of its GPUs while it runs. A trial waits for them before it measures anything. Otherwise it could find the other
sweep's process there in the middle of its run. Sweeps of other users and other programs have no such locks; here their
processes are found.

A driver frees a killed process's memory some time after the process has gone, and never frees that of an orphan. The
next trial would run out of memory too early. So the memory in use must be down to the least seen on the GPU between
trials of this sweep. Otherwise we wait for it, then report which processes hold it.

A GPU that fails trial after trial rests while others work, and is retried now and then. It is blamed if a fault of the
machine or of CUDA ended a trial on it alone. For several ranks, the GPU of the rank that the reason names is blamed, if
it names one. A trial that works on a GPU clears its blame. A trial with CUDA errors on several GPUs is itself to blame
until it works somewhere; its failures count a third each. If every GPU fails, none rests and the breaker decides
(trial_loop.py). GPUs of another model than the first are ignored; trials seldom get them.

Memory in use before the sweep began is the flag high_baseline's (harness/rows/quality_flags.py).
"""

import contextlib
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from vramsweep.harness.machine import machine
from vramsweep.harness.messages.units import format_size
from vramsweep.harness.rows.schema import Outcome, Row

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


FAULTS = (Outcome.ENVIRONMENT, Outcome.CUDA_ERROR, Outcome.CONTENDED)
IN_A_ROW = 2  # failed trials before a GPU rests
REST_S = 900.0  # until it gets another trial, doubled at each failure: five trials in a night of ten hours


class GpuHealth:
    """Outcomes of trials on the GPUs of a sweep, and which of these GPUs should rest."""

    def __init__(self, cards: Iterable[machine.Gpu | None]) -> None:
        known = [card for card in cards if card]
        self._cards = {card.uuid: card for card in known if card.name == known[0].name}
        self._failed: dict[str | None, list[tuple[Row, float]]] = {uuid: [] for uuid in self._cards}
        self._errors_on = defaultdict[str, set[str | None]](set)  # by trial that only met CUDA errors: its GPUs

    def add(self, row: Row, cards: Sequence[machine.Gpu], now_s: float) -> None:
        """Count the end of a trial for or against its GPUs, which are in the order of the ranks."""
        uuids = [card.uuid for card in cards if card.uuid in self._cards]
        if row.get("outcome") in (Outcome.OK, Outcome.OOM):
            self._errors_on.pop(row["trial_id"], None)
            for uuid in uuids:
                self._failed[uuid].clear()
        if row.get("outcome") in FAULTS:
            rank = re.match(r"rank (\d+)\b", str(row["reason"]))
            blamed = cards if len(cards) == 1 else cards[int(rank[1]) : int(rank[1]) + 1] if rank else []
            for uuid in (card.uuid for card in blamed if card.uuid in self._cards):
                self._failed[uuid].append((row, now_s))
                if row["outcome"] == Outcome.CUDA_ERROR:
                    self._errors_on[row["trial_id"]].add(uuid)

    def failures(self, trial_id: str, card: machine.Gpu | None) -> int:
        """Count how often a trial has failed on a GPU since a trial last worked there."""
        failed = self._failed.get(card.uuid, []) if card else []
        return sum(row["trial_id"] == trial_id for row, _ in failed)

    def explains(self, row: Row) -> bool:
        """Return whether a GPU is to blame for the end of this trial, while others may work."""
        failed = any(self.failures(row["trial_id"], card) for card in self._cards.values())
        others = row["world_size"] < len(self._cards) and any(self._count(uuid) < IN_A_ROW for uuid in self._cards)
        return failed and others and not self._is_bad(row)

    def resting(self, now_s: float) -> set[str | None]:
        """Return the uuids of the GPUs that get no trial now."""
        wait = {uuid: REST_S * 2 ** (self._count(uuid) - IN_A_ROW) for uuid in self._failing()}
        return {uuid for uuid, seconds in wait.items() if now_s < self._failed[uuid][-1][1] + seconds}

    def warnings(self) -> list[str]:
        """Describe each GPU that fails while others work, and what to do."""
        found = []
        for card, failed in ((self._cards[uuid], self._failed[uuid]) for uuid in self._failing()):
            number, row = card.index if card.index >= 0 else card.uuid, failed[-1][0]
            why = f"so it gets few trials ({row['outcome']}: {row['reason']}); check it with nvidia-smi -i {number}"
            name = f"GPU {number} ({str(card.uuid)[:12]}, {card.name})"
            found.append(f"{name} failed {len(failed)} times in a row while other GPUs work, {why}")
        return found

    def _failing(self) -> list[str | None]:
        found = [uuid for uuid in self._cards if self._count(uuid) >= IN_A_ROW]
        return found if len(found) < len(self._cards) else []

    def _count(self, uuid: str | None) -> int:
        bad = sum(self._is_bad(row) for row, _ in self._failed[uuid])
        return len(self._failed[uuid]) - bad + bad // 3

    def _is_bad(self, row: Row) -> bool:
        return len(self._errors_on.get(row["trial_id"], ())) > 1
