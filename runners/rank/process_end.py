"""Ends of our processes: with the parent, first under the kernel's out-of-memory killer, and the error they report.

Between an attempt's parent and its worker is a process (`above`), like a container's init. It adopts orphans of the
worker's processes, and ends when the worker has ended. So during the attempt every process below that one is its
own, however it started. Later orphans go to the launcher, which kills them (harness/process/attempt.py). Linux only.
"""

import contextlib
import ctypes
import operator
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.schema import Outcome

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# files of ours, torch's or Python's, which also raise what a mistake of the user's or a library's code leads to
CALLED = re.compile(r"<|.*/(vramsweep/(harness|runners)|\w+-packages/torch|lib/python3\.\d+(?!/\w+-packages))/")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; end at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def be_first_oom_victim() -> None:
    """Let the kernel's out-of-memory killer take this process, and what it starts, before all others."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def exit_now(status: int) -> NoReturn:
    """End without interpreter teardown, because DeepSpeed and NCCL sometimes abort there after the work is done."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, or a stream that the trial has closed
            stream.flush()
    os._exit(status)


def above(worker: Callable[[int], None]) -> int:
    """Run `worker`, which gets its parent's process id and does not return, in a child process.

    Return the child's exit status, or end by the same signal as the child.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setsid()  # signals that it sends its process group must not reach this one
        worker(own)
    ended, status = os.wait()
    while ended != pid:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        end_by(-code)
    return code


def end_by(number: int) -> None:
    """End this process by the signal that ended the process it speaks for, without a second core dump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def run_and_exit(job: Callable[[], int | None], parent: int) -> NoReturn:
    """Run the job and end this process with the status that it returns, 0 for None. The process dies with `parent`.

    If the job raises or returns no status, end with 1 and a traceback in the log.
    """
    status = 1
    try:
        die_with_parent(parent)
        found = job()
        status = 0 if found is None else operator.index(found)
    except BaseException:
        print_traceback()
    finally:
        exit_now(status)


def print_traceback() -> None:
    """Print the exception being handled to the log, unless the disk is full or the trial has closed the stream."""
    with contextlib.suppress(OSError, ValueError):
        traceback.print_exc()


def may_pass(error: BaseException) -> bool:
    """Check that an error or its cause is a transient failure of the machine: memory, a disk, threads, a device."""
    found = outcome.find_fault(str(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    passing = found is not None and found.outcome in (Outcome.HOST_OOM, Outcome.ENVIRONMENT)
    return passing or isinstance(error, MemoryError | OSError) or (before is not None and may_pass(before))


def error_result(error: BaseException) -> dict[str, Any]:
    """Return a result that reports an error, its line in code of the user or a library, and what the row can report."""
    kind, frames = type(error), traceback.extract_tb(error.__traceback__)
    values = {"values": known} if isinstance(known := getattr(error, "columns", None), dict) else {}
    at = [f"{Path(one.filename).name}:{one.lineno}" for one in frames if not CALLED.match(one.filename)]
    pinning = any(frame.name == "pin_memory" for frame in frames)
    said = f"pin_memory: {error}" if pinning else str(error)  # CUDA's message is the same for host and GPU memory
    memory = {"card_memory": known} if (known := getattr(error, "card_memory", None)) is not None else {}
    told = {"type": f"{kind.__module__}.{kind.__qualname__}", "message": said, "at": at[-1:]}
    return {"error": told | memory} | values
