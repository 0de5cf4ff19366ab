"""The warm way: a process that has imported everything, never touches the GPU, and forks a worker for each request.

It reads requests from one pipe and answers on another (the messages: harness/warm.py). It runs no tensor operation: a
process that has started OpenMP's threads cannot be forked safely, and one that has initialised CUDA cannot be forked at
all, so before the first request it says whether its imports did (driver.py).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from vramsweep.harness import machine
from vramsweep.harness.attempt import LOGS
from vramsweep.runners import driver, worker


def main(runner: str, requests: int, replies: int, parent: int) -> None:
    """Serve until the parent closes the request pipe or dies."""
    worker.die_with(parent)
    for descriptor in (requests, replies):  # what the imports start must not hold them open
        os.set_inheritable(descriptor, False)
    with _asked_without_cuda():
        worker.preload(runner)
    gc.collect()
    gc.freeze()  # the imported objects are for ever: keep the collector from copying their pages in every worker
    _say(replies, None, "ready", unclean=driver.unclean())
    own = os.getpid()
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            attempt = json.loads(line)["attempt"]
            try:
                pid = os.fork()
            except OSError as error:
                _say(replies, attempt, "refused", why=str(error))
                continue
            if pid == 0:
                os.close(replies)
                os.close(requests)
                _become_worker(Path(attempt), own)
            _say(replies, attempt, "forked", pid=pid)
            _, status = os.waitpid(pid, 0)
            _say(replies, attempt, "ended", status=status)


@contextlib.contextmanager
def _asked_without_cuda() -> Iterator[None]:
    """NVML says what a card's compute capability is: torch would initialise CUDA to tell.

    bitsandbytes asks while it is imported (cuda_specs.py), which transformers.Trainer does by way of peft.
    """
    try:
        import torch
    except ModuleNotFoundError:  # its workers will say so
        yield
        return
    ask = torch.cuda.get_device_capability
    known = [card.capability for card in machine.visible_gpus(os.environ)]

    def capability(device: Any = None) -> tuple[int, int]:
        index = device if isinstance(device, int) else getattr(device, "idx", getattr(device, "index", None))
        found = known[index] if isinstance(index, int) and 0 <= index < len(known) else None
        return ask(device) if found is None else found

    with mock.patch.object(torch.cuda, "get_device_capability", capability):
        yield


def _say(replies: int, attempt: str | None, event: str, **more: object) -> None:
    os.write(replies, json.dumps({"attempt": attempt, "event": event, **more}).encode() + b"\n")


def _become_worker(folder: Path, parent: int) -> None:
    status = 1
    try:
        os.setsid()
        for name, descriptor in zip(LOGS, (1, 2), strict=True):
            log = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, descriptor)
            os.close(log)
        status = worker.main(folder, parent)
    finally:
        worker.leave(status)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
