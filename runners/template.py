"""The warm way: a process that has imported everything, never touches the GPU, and forks a worker for each request.

It reads the folder of an attempt from one pipe, answers with the worker's process id on another, waits for the worker
and answers with its wait status. It runs no tensor operation: a process that has started OpenMP's threads cannot be
forked safely, and one that has initialised CUDA cannot be forked at all.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from vramsweep.runners import worker


def main(runner: str, requests: int, replies: int, parent: int) -> None:
    """Serve until the parent closes the request pipe or dies."""
    worker.die_with(parent)
    worker.preload(runner)
    gc.collect()
    gc.freeze()  # the imported objects are for ever: keep the collector from copying their pages in every worker
    os.write(replies, b"ready\n")
    own = os.getpid()
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            pid = os.fork()
            if pid == 0:
                os.close(replies)
                _become_worker(Path(os.fsdecode(line.rstrip(b"\n"))), own)
            os.write(replies, f"{pid}\n".encode())
            _, status = os.waitpid(pid, 0)
            os.write(replies, f"{status}\n".encode())


def _become_worker(folder: Path, parent: int) -> None:
    status = 1
    try:
        os.setsid()
        for name, descriptor in (("stdout.log", 1), ("stderr.log", 2)):
            log = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, descriptor)
            os.close(log)
        status = worker.main(folder, parent)
    finally:
        worker.leave(status)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
