"""Fork server: a process that has imported everything, never touches the GPU, and forks a worker for each request.

Requests come by a socket, each with a pipe for reports about its worker (messages: harness/process/fork_server.py). It
runs no tensor operation, because a process that has started OpenMP's threads cannot be forked safely. One that has
initialised CUDA cannot be forked at all, because CUDA does not work in a child of a process that has called cuInit. So
before the first request it says whether its imports did, by the driver library that they loaded, if any.
torch.cuda.is_initialized() knows only about torch.
"""

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import select
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vramsweep.harness.machine import machine
from vramsweep.harness.process.worker_files import LOGS, LONGEST_MESSAGE
from vramsweep.harness.spec import runner_table
from vramsweep.runners.measure.patches import Replacement, patched
from vramsweep.runners.rank import process_end
from vramsweep.runners.worker import worker

NOT_INITIALIZED = 3  # CUresult of any call before cuInit


def main(runner: str, requests: int, replies: int, parent: int) -> None:
    """Serve until the parent closes its end of the socket of requests, or dies."""
    process_end.die_with_parent(parent)
    for descriptor in (requests, replies):  # processes that imports start must not hold them open
        os.set_inheritable(descriptor, False)
    waits = runner == runner_table.SIMULATED  # to import, until that is needed
    if not waits:
        _import(runner)
    _say(replies, "ready", unclean=unclean())
    os.close(replies)
    with socket.socket(fileno=requests) as asked:
        _serve(asked, waits)


def _import(runner: str) -> None:
    with _asked_without_cuda():
        worker.preload(runner)
    gc.collect()
    gc.freeze()  # imported objects stay; the collector would copy their pages in every worker


def _serve(asked: socket.socket, waits: bool) -> None:
    """Fork workers on request, and report their ends; any number may run at a time.

    `waits`: what predictions import is imported when the first of them has to trace.
    """
    own = os.getpid()
    running: dict[int, tuple[int, int]] = {}  # by pidfd: the process and the pipe for its reports
    poll = select.poll()
    poll.register(asked, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in running:
                poll.unregister(ready)
                pid, pipe = running.pop(ready)
                _, status = os.waitpid(pid, 0)
                _say(pipe, "ended", status=status)
                os.close(pipe)
                os.close(ready)
                continue
            request, pipes, _, _ = socket.recv_fds(asked, LONGEST_MESSAGE, 1)
            if not request:
                return
            (pipe,) = pipes
            os.set_inheritable(pipe, False)
            if _given_up(pipe):
                os.close(pipe)
                continue
            if waits and worker.needs_imports(Path(json.loads(request)["attempt"])):
                _say(pipe, "importing")
                _import(runner_table.SIMULATED)
                waits = False
            try:
                pid = os.fork()
            except OSError as error:
                _say(pipe, "refused", why=str(error))
                os.close(pipe)
                continue
            if pid == 0:
                asked.close()
                for descriptor in (pipe, *running, *(other for _, other in running.values())):
                    os.close(descriptor)
                _become_worker(own, **json.loads(request))
            descriptor = os.pidfd_open(pid)
            running[descriptor] = pid, pipe
            poll.register(descriptor, select.POLLIN)
            _say(pipe, "forked", pid=pid)


@contextlib.contextmanager
def _asked_without_cuda() -> Iterator[None]:
    """Answer by NVML which compute capability a GPU has, because torch would initialise CUDA to answer.

    bitsandbytes asks while it is imported (cuda_specs.py); transformers.Trainer imports it by way of peft. torchao asks
    too (prototype/mx_formats/kernels.py, by torch.utils._triton.has_triton); transformers' models import it.
    """
    try:
        import torch
    except ModuleNotFoundError:  # its workers will report that
        yield
        return
    known = [card.capability for card in machine.visible_gpus(os.environ)]

    def capability(device: Any) -> tuple[int, int] | None:
        """Return a device's capability; None if unknown. The default device is the first: nobody chose another yet."""
        index = device if isinstance(device, int) else getattr(device, "idx", getattr(device, "index", None))
        index = 0 if device is None else index
        return known[index] if isinstance(index, int) and 0 <= index < len(known) else None

    ask = torch.cuda.get_device_capability
    replaced: list[Replacement] = [
        (torch.cuda, "get_device_capability", lambda device=None: capability(device) or ask(device))
    ]
    if importlib.util.find_spec("torchao") is not None:
        from torch._dynamo.device_interface import CudaInterface

        properties = CudaInterface.Worker.get_device_properties

        def asked(device: Any = None) -> Any:
            found = capability(torch.device(device) if isinstance(device, str) else device)
            return properties(device) if found is None else types.SimpleNamespace(major=found[0], minor=found[1])

        replaced.append((CudaInterface.Worker, "get_device_properties", staticmethod(asked)))
    with patched(replaced):
        yield


def _given_up(pipe: int) -> bool:
    """Check that nobody reads the reports about a worker any more."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))


def _say(pipe: int, event: str, **more: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launcher does not wait for it any more
        os.write(pipe, json.dumps({"event": event, **more}).encode() + b"\n")


def _become_worker(parent: int, attempt: str, environ: dict[str, str]) -> None:
    status = 1
    try:
        os.environ.update(environ)
        for name, descriptor in zip(LOGS, (1, 2), strict=True):
            log = os.open(Path(attempt) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, descriptor)
            os.close(log)
        os.setsid()
        status = worker.main(Path(attempt), parent)
    finally:
        process_end.exit_now(status)


def unclean() -> str | None:
    """Return why workers forked from this process could not use CUDA; None if they can."""
    try:
        state = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW).cuDevicePrimaryCtxGetState
    except OSError:  # nothing has loaded it
        return None
    except AttributeError:
        return "importing it loads a CUDA driver that cannot say whether CUDA was initialised"
    code = state(0, ctypes.byref(ctypes.c_uint()), ctypes.byref(ctypes.c_int()))
    return None if code == NOT_INITIALIZED else f"importing it initialises CUDA (CUresult {code})"


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
