"""Targets of the custom runner for the torture: each does one thing that no worker should do."""

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from vramsweep.harness.process.worker_files import RESULT


def good(trial: Any, pause_s: float = 0.005) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(batch: Any) -> torch.Tensor:
        if pause_s:
            time.sleep(pause_s)
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return net, optimizer, step, lambda index: torch.ones(4, 8)


def does_not_sleep(trial: Any) -> Any:
    """Train without sleeping, because faketime gives the kernel wrong moments to sleep until."""
    return good(trial, 0)


def hangs_in_c(trial: Any) -> Any:
    """Hang in a C call that holds the interpreter's lock, so that no Python code of this process runs any more."""
    ctypes.PyDLL(None).pause()


def hangs_in_python(trial: Any) -> Any:
    while True:
        pass


def hangs_in_import(trial: Any) -> Any:
    sys.path.insert(0, str(Path(__file__).parent))
    import hanging

    return hanging


def hangs_at_the_end(trial: Any) -> Any:
    """Hang after the result is written, when the worker flushes its streams."""

    class Stuck:
        def flush(self) -> None:
            time.sleep(3600)

        def write(self, text: str) -> int:
            return len(text)

    sys.stdout = Stuck()  # type: ignore[assignment]
    return good(trial)


def ignores_signals(trial: Any) -> Any:
    import signal

    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
            signal.signal(number, signal.SIG_IGN)
    time.sleep(3600)


def floods(trial: Any) -> Any:
    """Write 2 GiB to stdout and 2 GiB to stderr."""
    block = b"x" * (1 << 20)
    for _ in range(2048):
        os.write(1, block)
        os.write(2, block)
    return good(trial)


def forks_daemons(trial: Any) -> Any:
    """Start three daemons in their own sessions: a plain one, one with an empty environment, one as a grandchild."""
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleeper, start_new_session=True)
    subprocess.Popen(sleeper, start_new_session=True, env={})
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sleeper[0], sleeper)
        os._exit(0)
    return good(trial)


def forks_for_ever(trial: Any) -> Any:
    """Start four chains of processes; each process starts the next in its own session and ends, for 20 s at most."""
    code = (
        "import os, time\nend = time.monotonic() + 20\nwhile time.monotonic() < end:\n os.fork() and os._exit(0)\n"
        " os.setsid()\n time.sleep(0.05)"
    )
    for _ in range(4):
        subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    return good(trial)


def exits_without_a_result(trial: Any) -> Any:
    os._exit(0)


def _leaves(trial: Any, content: bytes) -> Any:
    """Write a result in the worker's name, into the folder of its log, and end the process."""
    folder = Path("/proc/self/fd/1").readlink().parent
    (folder / RESULT).write_bytes(content)
    os._exit(0)


def writes_garbage(trial: Any) -> Any:
    _leaves(trial, os.urandom(1 << 16))


def writes_nan(trial: Any) -> Any:
    _leaves(trial, b'{"values": {"loss_last": NaN, "peak_allocated_bytes": Infinity}, "complete": true}')


def writes_too_much(trial: Any) -> Any:
    _leaves(trial, b'{"values": {"notes": ["' + b"x" * (100 << 20) + b'"]}}')


def writes_the_row_of_another(trial: Any) -> Any:
    _leaves(trial, json.dumps({"values": {"trial_id": "somebody", "outcome": "ok", "terminal": True}}).encode())


def closes_its_pipes(trial: Any) -> Any:
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    return good(trial)


def closes_every_file(trial: Any) -> Any:
    """Close every file, ours included: the trial is then not measured, and its row says so."""
    os.closerange(0, 1024)
    return good(trial)


def starts_threads_that_stay(trial: Any) -> Any:
    for _ in range(4):
        threading.Thread(target=time.sleep, args=(3600,)).start()
    return good(trial)


def fills_memory(trial: Any) -> Any:
    """Fill memory and touch every page, as fast as all cores can."""
    held = []
    while True:
        held.append(torch.ones(64 << 20))


WAYS = ("RuntimeError", "OutOfMemoryError", "AcceleratorError", "abort")


def raises(trial: Any) -> Any:
    """Fail with a text that CUDA, its libraries or the system report, in one of WAYS.

    The texts are those of tests/harness/rows/test_error_patterns.py. `seed` counts texts and, fastest, ways.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness" / "rows"))
    import test_error_patterns

    text, way = test_error_patterns.TEXTS[trial.seed // len(WAYS)][1], WAYS[trial.seed % len(WAYS)]
    if way == "abort" and "\n" not in text:  # C++ prints only texts of one line
        said = f"terminate called after throwing an instance of 'c10::Error'\n  what():  {text}\n"
        os.write(2, said.encode() + b"".join(b"frame #%d: main + 0x1f (0x7f in python)\n" % n for n in range(30)))
        os.abort()
    raise getattr(torch, way, RuntimeError)(text)
