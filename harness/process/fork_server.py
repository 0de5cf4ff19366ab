"""The warm way, our side: templates and what we say to each other.

A template (runners/worker/serve_forks.py) is a process that has imported everything for one runner and one environment,
has never touched the GPU, and forks a worker on request, several at a time for trials that run beside each other. A
request is a datagram and brings a pipe with it, on which all is told of that worker; messages are JSON objects, a line
each:

    to the template   {"attempt": folder, "environ": variables of this worker alone}
    from it, once     {"event": "ready", "unclean": null or why its workers could not use CUDA}
    of a worker       {"event": "importing"}                   first, where that is done only now
                      {"event": "forked", "pid": process id}
                      {"event": "refused", "why": text}      instead, if the system gives no process
                      {"event": "ended", "status": wait status}

Every wait for one has a bound. A process id is believed only of a child of the template. A template that says anything
else, or nothing in time, is lost: no attempt gets a worker from it any more, and it is killed once nobody has one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vramsweep.harness.machine import host_memory
from vramsweep.harness.messages.errors import describe
from vramsweep.harness.process.interpreter import build_command
from vramsweep.harness.process.waiting import Look, last_words, readable
from vramsweep.harness.process.worker_files import LONGEST_MESSAGE

COMMAND = tuple(build_command("vramsweep.runners.worker.serve_forks"))

LEAST = 8  # templates that there is always room for
SHARE = 8  # all of them may hold this part of the host's memory
TEMPLATE_BYTES = 512 << 20  # what one holds, most of it shared with nobody

Message = dict[str, Any]


@dataclass(frozen=True)
class Timeouts:
    """How long a template may take, in seconds: to import, to fork, to report the end of a worker that has ended."""

    start_s: float = 300.0
    fork_s: float = 30.0
    reap_s: float = 10.0


class ForkServerError(Exception):
    """No worker can be had from a template; the text says why."""


class Replies:
    """A template's messages, from the reading end of a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._buffer = b""

    def take(self) -> Message | None:
        """The next message that has arrived as a whole. Raises ForkServerError if it is none of ours."""
        line, end, rest = self._buffer.partition(b"\n")
        if not end:
            if len(line) > LONGEST_MESSAGE:
                raise ForkServerError(f"wrote {len(line)} bytes that are no message")
            return None
        self._buffer = rest
        message = None
        with contextlib.suppress(ValueError):
            message = json.loads(line)
        if not isinstance(message, dict) or "event" not in message:
            raise ForkServerError(f"wrote {line[:80]!r}, which is no message")
        return message

    def fill(self) -> None:
        """Read what there is; call it when there is something. Raises ForkServerError at the pipe's end."""
        data = os.read(self.descriptor, 4096)
        if not data:
            raise ForkServerError("ended")
        self._buffer += data


def number(message: Message, name: str) -> int:
    """A field that holds a count or an id. Raises ForkServerError if it does not."""
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ForkServerError(f"gave {describe(value)} as {name}")
    return value


class ForkServer:
    """A template process. `lost` says why it must not be used any more; `users` counts the attempts that have, or are
    about to have, a worker of it."""

    def __init__(self, runner: str, environ: Mapping[str, str], log: Path, bounds: Timeouts) -> None:
        self.bounds, self.log = bounds, log
        self.lost: str | None = None
        self.users = 0
        self._turn = threading.Lock()
        log.unlink(missing_ok=True)  # one that was lost may still write into the last one
        with contextlib.ExitStack() as given, contextlib.ExitStack() as ours:
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            given.callback(theirs.close)
            ours.callback(self._requests.close)
            descriptor, answers = os.pipe()
            given.callback(os.close, answers)
            ours.callback(os.close, descriptor)
            with log.open("ab") as err:
                self._process = subprocess.Popen(
                    [*COMMAND, runner, str(theirs.fileno()), str(answers), str(os.getpid())],
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=err,
                    stderr=err,
                    pass_fds=(theirs.fileno(), answers),
                    start_new_session=True,
                )
            self._end = os.pidfd_open(self._process.pid)
            ours.callback(os.close, self._end)
            self._requests.setblocking(False)
            self._open = ours.pop_all()
        self._replies = Replies(descriptor)
        self.pid = self._process.pid

    def claim(self) -> bool:
        """One more user, unless it is lost."""
        with self._turn:
            self.users += self.lost is None
            return self.lost is None

    def give_back(self) -> None:
        """One user less."""
        with self._turn:
            self.users -= 1

    def lose(self, why: str) -> bool:
        """No more users from now on; whether there is none but the one who says so."""
        with self._turn:
            self.lost = why
            return self.users <= 1

    def ready(self, look: Look) -> str | None:
        """Wait for the imports; why its workers could not use CUDA, or None. Raises ForkServerError with its log's last
        line."""
        try:
            message = self.expect(self._replies, self.bounds.start_s, look=look)
            if message is None:
                raise ForkServerError(f"was not ready within {self.bounds.start_s:g} s")
            if message["event"] != "ready" or not isinstance(message.get("unclean"), str | None):
                raise ForkServerError(f"said {message} in place of being ready")
        except ForkServerError as lost:
            self.close()
            what = f"it {lost}"
            if what == "it ended":
                code = self._process.returncode or 0
                what = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            said = last_words(self.log)
            raise ForkServerError(
                f"the template process did not start ({what})" + (f": {said}" if said else "")
            ) from None
        unclean: str | None = message["unclean"]
        return unclean

    def fork(self, folder: Path, environ: Mapping[str, str], look: Look | None = None) -> WarmWorker:
        """A worker for the attempt in `folder`, with these variables beside the template's. Raises ForkServerError."""
        ours, theirs = os.pipe()
        try:
            request = json.dumps({"attempt": str(folder), "environ": dict(environ)}).encode()
            try:
                socket.send_fds(self._requests, [request], [theirs])
            except OSError:
                raise ForkServerError("takes no requests") from None
            finally:
                os.close(theirs)
            replies = Replies(ours)
            message = self.expect(replies, self.bounds.fork_s, look=look)
            if message is not None and message["event"] == "importing":
                message = self.expect(replies, self.bounds.start_s, look=look)
            if message is None:
                raise ForkServerError(f"forked no worker within {self.bounds.fork_s:g} s")
            if message["event"] != "refused":
                if message["event"] != "forked":
                    raise ForkServerError(f"said {describe(message['event'])} in place of having forked")
                pid = number(message, "pid")
                return WarmWorker(self, replies, pid, self._child(pid))
        except ForkServerError as lost:
            os.close(ours)
            self.lost = str(lost)
            raise ForkServerError(f"the template process {lost}") from None
        except BaseException:
            os.close(ours)
            raise
        os.close(ours)
        raise ForkServerError(f"the template could not fork: {message.get('why')}")  # now; it is as good as before

    def _child(self, pid: int) -> int | None:
        """A descriptor of our worker `pid`, None if it has been reaped already. Raises ForkServerError if it is not
        ours."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        except OSError:  # 0 is no process
            raise ForkServerError(f"gave {pid} as its worker") from None
        try:
            if psutil.Process(pid).ppid() == self.pid:
                return descriptor
        except psutil.NoSuchProcess:
            os.close(descriptor)
            return None
        os.close(descriptor)
        raise ForkServerError(f"gave process {pid} as its worker, which is not its child")

    def expect(
        self, replies: Replies, seconds: float, until: int | None = None, look: Look | None = None
    ) -> Message | None:
        """The next message; None if there is none within `seconds`, or before `until` is readable.

        Raises ForkServerError when the template has ended or writes something else.
        """
        deadline = time.monotonic() + seconds
        # its own end is watched too: others may hold the pipe open
        watched = [replies.descriptor, self._end] + ([] if until is None else [until])
        while True:
            if (message := replies.take()) is not None:
                return message
            found = readable(watched, deadline - time.monotonic(), look)
            if replies.descriptor in found:
                replies.fill()
            elif self._end in found:
                raise ForkServerError("ended")
            else:
                return None

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the template; a worker that it still has dies with it. What does not die in time is left behind."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.bounds.reap_s)
        self._open.close()


def room(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """How many templates may be alive at once: by the memory of the machine, or of the least of our cgroups."""
    return max(LEAST, host_memory.memory_here(own, root) // SHARE // TEMPLATE_BYTES)


class WarmWorker:
    """A worker forked from a template, which is its parent and tells us how it ended.

    `descriptor` is the worker's (a pidfd); None if it was gone before we looked.
    """

    def __init__(self, template: ForkServer, replies: Replies, pid: int, descriptor: int | None) -> None:
        self.pid = pid
        self._template, self._replies, self._descriptor = template, replies, descriptor

    def wait(self, seconds: float, look: Look | None = None) -> tuple[bool, int | None]:
        """Whether it ended within `seconds`, and its exit code (negative: the signal; None: not known)."""
        template = self._template
        bound = template.bounds.reap_s
        try:
            message = None if self._over() else template.expect(self._replies, seconds, self._descriptor, look)
            if message is None:
                if not self._over():
                    return False, None
                message = template.expect(self._replies, bound)
            if message is None:
                raise ForkServerError(f"did not report the end of its worker within {bound:g} s")
            if message["event"] != "ended":
                raise ForkServerError(f"said {describe(message['event'])} in place of how its worker ended")
            try:
                return True, os.waitstatus_to_exitcode(number(message, "status"))
            except ValueError:
                raise ForkServerError(f"gave {describe(message['status'])} as a wait status") from None
        except ForkServerError as lost:
            over = self._over()
            if not template.lose(str(lost)):  # others have workers of it, which would die with it
                self.kill()
                if self._descriptor is not None:
                    readable([self._descriptor], bound)
                return True, None
            template.close()
            return True, self._adopted() if over else None

    def kill(self) -> None:
        """Kill it and its process group, where it leads one."""
        if self._descriptor is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def give_up(self) -> None:
        """It does not end though killed: so its template must not be used any more."""
        self._template.lost = f"cannot end its worker {self.pid}"

    def close(self) -> None:
        """Forget it."""
        os.close(self._replies.descriptor)
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _over(self) -> bool:
        return self._descriptor is None or bool(readable([self._descriptor], 0))

    def _adopted(self) -> int | None:
        """The exit code of a worker that ended before its template, and is our child now (PR_SET_CHILD_SUBREAPER)."""
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            return os.waitstatus_to_exitcode(status) if pid else None
        return None
