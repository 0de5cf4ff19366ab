"""How a process of ours ends: with its parent, before others under the kernel's killer, and what it says of an error.

Between an attempt's parent and its worker is a process (`above`) as a container's init is one: it adopts what the
worker's processes leave behind, and lets go of it once it has ended. So whose a process is can be told as long as the
attempt lasts, however it came to be: it lies below that one. What outlives the attempt goes to the launcher, which ends
it (harness/process/attempt.py). Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from vramsweep.harness.rows import error_patterns
from vramsweep.harness.rows.schema import Outcome

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


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
    """End without interpreter teardown, where DeepSpeed and NCCL now and then abort after the work is done."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, or a stream that the trial has closed
            stream.flush()
    os._exit(status)


def above(worker: Callable[[int], None]) -> int:
    """Run `worker`, which gets its parent's process id and does not return, in a process below this one.

    Returns its exit status, or ends as it did, by the same signal.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setsid()  # what it does to its process group is not done to this one
        worker(own)
    ended, status = os.wait()
    while ended != pid:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        end_by(-code)
    return code


def end_by(number: int) -> None:
    """End this process by a signal, as another one has ended that it speaks for; without a second core dump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def run_and_exit(job: Callable[[], int | None], parent: int) -> NoReturn:
    """End this process with the status that the job returns, 0 where that is None, 1 where it raises or returns what is
    no status: then with a traceback in the log. It dies with `parent`."""
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
    """To the log, for whoever wants to know more; the disk may be full, or the trial have closed the stream."""
    with contextlib.suppress(OSError, ValueError):
        traceback.print_exc()


def may_pass(error: BaseException) -> bool:
    """Whether an error, or one that it came of, is of the machine as it is now: memory, a disk, threads, a device."""
    found, before = (
        error_patterns.find(str(error)),
        error.__cause__ or (None if error.__suppress_context__ else error.__context__),
    )
    passing = found is not None and found.outcome in (Outcome.HOST_OOM, Outcome.ENVIRONMENT)
    return passing or isinstance(error, MemoryError | OSError) or (before is not None and may_pass(before))


def error_result(error: BaseException) -> dict[str, Any]:
    """A result that tells of an error, with the columns that the row can say all the same."""
    kind = type(error)
    known = getattr(error, "columns", None)
    values = {"values": known} if isinstance(known, dict) else {}
    pinning = any(frame.name == "pin_memory" for frame in traceback.extract_tb(error.__traceback__))
    said = f"pin_memory: {error}" if pinning else str(error)  # CUDA says the same of the host's memory as of a card's
    memory = {"card_memory": known} if (known := getattr(error, "card_memory", None)) is not None else {}
    return {"error": {"type": f"{kind.__module__}.{kind.__qualname__}", "message": said} | memory} | values
