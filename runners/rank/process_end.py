"""The process between an attempt's parent and its worker, as a container's init is one: it adopts what the worker's
processes leave behind, and lets go of it once it has ended.

So whose a process is can be told as long as the attempt lasts, however it came to be: it lies below this one. What
outlives the attempt goes to the launcher, which ends it (harness/attempt.py). Linux only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Callable

PR_SET_CHILD_SUBREAPER = 36


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
