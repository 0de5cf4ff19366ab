"""Locks that let one trial at a time use a GPU, over all sweeps that this user runs on the machine.

Within a sweep its slots ensure this (scheduler.py). Two sweeps can share a node, for example shards started by hand.
Then each trial holds the locks of its GPUs while it runs. A trial waits for them before it measures anything. Otherwise
it could find the other sweep's process there in the middle of its run. Sweeps of other users and other programs are not
covered; gpu_occupancy.py finds their processes.
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
