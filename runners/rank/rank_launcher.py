"""Launcher of one attempt's ranks on this machine, like torchrun's agent: a process each, its environment, its store.

Differences from `torchrun --standalone --nproc-per-node=N`:
- Ranks are forked, so that a warm fork server serves them. Nothing is started again.
- The first that fails ends the others at once; torchrun looks every 0.1 s and then sends SIGTERM.
- A rank that ends with status 0 in the middle has failed; torchrun takes it for done.
- Others cannot take the port, because the socket listens before the first rank exists.
- The store in which all ranks meet is ours, not rank 0's.

Source of the variables: torch.distributed.elastic.agent.server.local_elastic_agent and torch.distributed.run
(OMP_NUM_THREADS); tests/runners/rank/test_rank_launcher.py compares them with a real torchrun's.
"""

import datetime
import os
import signal
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from vramsweep.runners.rank.result_file import DONE, TOLD

ADDRESS = "127.0.0.1"
MEETING = datetime.timedelta(minutes=30)  # the attempt's deadline comes first


@dataclass(frozen=True)
class Ended:
    """The rank that failed first and its exit code (negative for a signal); rank None and code 0 if none failed.

    A rank that exits with status 0 before `main` has returned has failed.
    """

    rank: int | None = None
    code: int = 0


def ranks(world_size: int, main: Callable[[int], int]) -> Ended:
    """Fork `world_size` ranks that run `main(rank)` and end with its status; wait for all, return the first failure."""
    own, run_id = os.getpid(), str(uuid.uuid4())
    with socket.socket() as listening:
        listening.bind((ADDRESS, 0))
        listening.listen(128)
        port = listening.getsockname()[1]
        pids: dict[int, int] = {}
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                listening.close()
                os.environ.update(environment(rank, world_size, port, run_id, os.environ.get("OMP_NUM_THREADS")))
                _end(main, rank, own)
            pids[pid] = rank
        store = _store(listening.detach(), port)  # only now, because forks would lose its threads
    first = Ended()
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid, -1)
        code = os.waitstatus_to_exitcode(status)
        if rank >= 0 and code != DONE and first.rank is None:
            first = _first(Ended(rank, code), pids)
            for other in pids:  # they would wait for the failed rank for ever
                os.kill(other, signal.SIGKILL)
    del store
    return first


def _first(seen: Ended, pids: dict[int, int]) -> Ended:
    """Return the failure to blame: `seen`, or one of `pids` that have ended too. Remove those from `pids`.

    A rank that reports why may have failed because another no longer answers, which was killed and reports nothing.
    """
    ended = [seen]
    for pid in list(pids):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended.append(Ended(pids.pop(pid), os.waitstatus_to_exitcode(status)))
    return next((one for one in ended if one.code not in (DONE, *TOLD)), seen)


def environment(rank: int, world_size: int, port: int, run_id: str, threads: str | None) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank of a single node; `threads` is the user's OMP_NUM_THREADS."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world_size)),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": threads or "1",
    }


def _end(main: Callable[[int], int], rank: int, parent: int) -> None:
    """Run a rank, and end its process without interpreter teardown."""
    from vramsweep.runners.rank import process_end

    process_end.die_with_parent(parent)
    process_end.exit_now(main(rank) or DONE)


def _store(descriptor: int, port: int) -> object:
    """Return the key-value store in which the ranks meet, served by this process's threads as long as it is held."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(ADDRESS, port, None, True, MEETING, wait_for_workers=False, master_listen_fd=descriptor)
