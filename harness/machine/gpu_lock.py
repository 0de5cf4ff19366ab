"""One trial at a time on a card, of all sweeps that this user runs on the machine.

Within a sweep its places see to that (scheduler.py). Of two sweeps on one node, two shards that were started by hand
say, each trial holds the locks of its cards while it runs, and one that has to wait does so before anything is
measured, rather than to find the other's process in the middle of a trial. Not covered: other users' sweeps, and other
programs: those are seen as foreign processes (gpu_occupancy.py).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vramsweep.harness.machine import machine

POLL_S = 1.0
PLACE = Path(tempfile.gettempdir()) / f"vramsweep-{os.getuid() if hasattr(os, 'getuid') else ''}"


@contextlib.contextmanager
def lock_gpus(
    cards: Sequence[machine.Gpu], sleep: Callable[[float], None], patience_s: float, folder: Path | None = None
) -> Iterator[str | None]:
    """The locks of these cards for the block; or, after waiting for `patience_s`, in words whose they are."""
    named = {card.uuid: card for card in cards if card.uuid is not None}
    with contextlib.ExitStack() as locks:  # by name, so that two trials of several cards do not wait for each other
        taken = (_taken(named[uuid], folder or PLACE, sleep, patience_s, locks) for uuid in sorted(named))
        yield next(filter(None, taken), None)


def _taken(
    card: machine.Gpu, place: Path, sleep: Callable[[float], None], patience_s: float, locks: contextlib.ExitStack
) -> str | None:
    """First the place at the head of the queue, which is given up once the card is had: who has just had the card
    queues behind those who wait."""
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        name = str(card.uuid).replace("/", "_")
        own = os.open(place / f"{name}.lock", flags, 0o600)
        locks.callback(os.close, own)
        head = os.open(place / f"{name}.next", flags, 0o600)
    except OSError:  # no folder for it: then as without locks
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
    """Whether a lock was had; True too where the file system has none."""
    import fcntl  # here: who only reads rows (status) imports this module too, and Windows has none

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True
