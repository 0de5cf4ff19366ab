"""Warm starts, the launcher's side: fork servers and the messages exchanged with them.

A fork server (runners/worker/serve_forks.py) is a process that has imported everything for one runner and one
environment and has never touched the GPU. It forks a worker on request, several for concurrent trials. A request is a
datagram that brings a pipe, on which all is reported about that worker. Messages are JSON objects, one a line:

    to the fork server  {"attempt": folder, "environ": variables of this worker alone}
    from it, once       {"event": "ready", "unclean": null or why its workers could not use CUDA}
    about a worker      {"event": "importing"}                   first, if the imports are done only now
                        {"event": "forked", "pid": process id}
                        {"event": "refused", "why": text}      instead, if the system gives no process
                        {"event": "ended", "status": wait status}

Every wait for a message has a bound. A process id is believed only of a child of the fork server. A fork server that
says anything else, or nothing in time, is lost: it gives no more workers. It is killed once no attempt has one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vramsweep.harness.machine import host_memory
from vramsweep.harness.messages.errors import describe
from vramsweep.harness.process.interpreter import build_command
from vramsweep.harness.process.waiting import Logs, Look, last_words, readable
from vramsweep.harness.process.worker_files import LONGEST_MESSAGE

COMMAND = tuple(build_command("vramsweep.runners.worker.serve_forks"))

LEAST = 8  # fork servers that may always be alive
SHARE = 8  # all of them may hold 1/SHARE of the host's memory
TEMPLATE_BYTES = 512 << 20  # of one fork server, most of them not shared
OF_A_WORKER = ("CUDA_VISIBLE_DEVICES",)  # variables that each worker gets when it is forked

Message = dict[str, Any]
_Key = tuple[str, frozenset[tuple[str, str]]]  # runner and environment


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a fork server may take: to import, to fork, to report the end of a worker that has ended."""

    start_s: float = 300.0
    fork_s: float = 30.0
    reap_s: float = 10.0


class ForkServerError(Exception):
    """A fork server cannot give a worker; the text says why."""


class Replies:
    """A fork server's messages, from the reading end of a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._buffer = b""

    def take(self) -> Message | None:
        """Return the next complete message, None if none has arrived. Raises ForkServerError if it is none of ours."""
        line, end, rest = self._buffer.partition(b"\n")
        if not end:
            if len(line) > LONGEST_MESSAGE:
                raise ForkServerError(f"wrote {len(line)} bytes that are not a message")
            return None
        self._buffer = rest
        message = None
        with contextlib.suppress(ValueError):
            message = json.loads(line)
        if not isinstance(message, dict) or "event" not in message:
            raise ForkServerError(f"wrote {line[:80]!r}, which is not a message")
        return message

    def fill(self) -> None:
        """Read the bytes that are there; call it when there are some. Raises ForkServerError at the pipe's end."""
        data = os.read(self.descriptor, 4096)
        if not data:
            raise ForkServerError("ended")
        self._buffer += data


def number(message: Message, name: str) -> int:
    """Return a field that holds a count or an id. Raises ForkServerError if it does not."""
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ForkServerError(f"gave {describe(value)} as {name}")
    return value


class ForkServer:
    """A fork server process. `lost` says why it must not be used any more. `users` counts the attempts that have a
    worker of it, or are about to have one."""

    def __init__(self, runner: str, environ: Mapping[str, str], log: Path, bounds: Timeouts) -> None:
        self.bounds, self.log = bounds, log
        self.lost: str | None = None
        self.users = 0
        self._turn = threading.Lock()
        log.unlink(missing_ok=True)  # a lost fork server may still write into the old file
        with contextlib.ExitStack() as given, contextlib.ExitStack() as ours:
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            given.callback(theirs.close)
            ours.callback(self._requests.close)
            descriptor, answers = os.pipe()
            given.callback(os.close, answers)
            ours.callback(os.close, descriptor)
            with log.open("ab") as err:
                self._process = subprocess.Popen(
                    [*COMMAND, runner, str(theirs.fileno()), str(answers), str(os.getpid())], env=dict(environ),
                    stdin=subprocess.DEVNULL, stdout=err, stderr=err, pass_fds=(theirs.fileno(), answers),
                    start_new_session=True,
                )  # fmt: skip
            self._end = os.pidfd_open(self._process.pid)
            ours.callback(os.close, self._end)
            self._requests.setblocking(False)
            self._open = ours.pop_all()
        self._replies = Replies(descriptor)
        self.pid = self._process.pid

    def claim(self) -> bool:
        """Add a user unless the fork server is lost; return whether it was added."""
        with self._turn:
            self.users += self.lost is None
            return self.lost is None

    def give_back(self) -> None:
        """Remove a user."""
        with self._turn:
            self.users -= 1

    def lose(self, why: str) -> bool:
        """Allow no more users from now on; return whether the caller is the only one left."""
        with self._turn:
            self.lost = why
            return self.users <= 1

    def ready(self, look: Look) -> str | None:
        """Wait for the imports; return why its workers could not use CUDA, or None. Raises ForkServerError with its
        log's last line."""
        try:
            message = self.expect(self._replies, self.bounds.start_s, look=look)
            if message is None:
                raise ForkServerError(f"was not ready within {self.bounds.start_s:g} s")
            if message["event"] != "ready" or not isinstance(message.get("unclean"), str | None):
                raise ForkServerError(f"sent {message} instead of 'ready'")
        except ForkServerError as lost:
            self.close()
            what = f"it {lost}"
            if what == "it ended":
                code = self._process.returncode or 0
                what = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            said = last_words(self.log)
            raise ForkServerError(f"the fork server did not start ({what})" + (f": {said}" if said else "")) from None
        unclean: str | None = message["unclean"]
        return unclean

    def fork(self, folder: Path, environ: Mapping[str, str], look: Look | None = None) -> WarmWorker:
        """Fork a worker for the attempt in `folder`, adding variables to the server's. Raises ForkServerError."""
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
                    raise ForkServerError(f"sent {describe(message['event'])} instead of 'forked'")
                pid = number(message, "pid")
                return WarmWorker(self, replies, pid, self._child(pid))
        except ForkServerError as lost:
            os.close(ours)
            self.lost = str(lost)
            raise ForkServerError(f"the fork server {lost}") from None
        except BaseException:
            os.close(ours)
            raise
        os.close(ours)
        raise ForkServerError(f"the fork server could not fork: {message.get('why')}")  # only now; it is still good

    def _child(self, pid: int) -> int | None:
        """Return a descriptor of our worker `pid`, None if it has been reaped already. Raises ForkServerError if the
        process is not ours."""
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
        """Return the next message; None if none comes within `seconds`, or before `until` is readable.

        Raises ForkServerError if the fork server has ended or writes something else.
        """
        deadline = time.monotonic() + seconds
        # the process's end is watched too, because others may hold the pipe open
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
        """Return whether the process still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Kill the fork server; a worker that it still has dies with it. If it does not die in time, it is left."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.bounds.reap_s)
        self._open.close()


def room(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many fork servers may be alive, by the memory of the machine or our smallest cgroup."""
    return max(LEAST, host_memory.memory_here(own, root) // SHARE // TEMPLATE_BYTES)


class WarmWorker:
    """A worker forked from a fork server, which is its parent and reports how it ended.

    `descriptor` is the worker's pidfd; None if the worker was gone before we looked.
    """

    def __init__(self, template: ForkServer, replies: Replies, pid: int, descriptor: int | None) -> None:
        self.pid = pid
        self._template, self._replies, self._descriptor = template, replies, descriptor

    def wait(self, seconds: float, look: Look | None = None) -> tuple[bool, int | None]:
        """Return whether the worker ended within `seconds`, and its exit code (negative: the signal; None: unknown)."""
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
                raise ForkServerError(f"sent {describe(message['event'])} instead of 'ended'")
            try:
                return True, os.waitstatus_to_exitcode(number(message, "status"))
            except ValueError:
                raise ForkServerError(f"gave {describe(message['status'])} as a wait status") from None
        except ForkServerError as lost:
            over = self._over()
            if not template.lose(str(lost)):  # other attempts have workers of it, which would die with it
                self.kill()
                if self._descriptor is not None:
                    readable([self._descriptor], bound)
                return True, None
            template.close()
            return True, self._adopted() if over else None

    def kill(self) -> None:
        """Kill the worker, and its process group if it leads one."""
        if self._descriptor is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def give_up(self) -> None:
        """Mark the fork server as lost, because its worker does not end though killed."""
        self._template.lost = f"cannot end its worker {self.pid}"

    def close(self) -> None:
        """Close the worker's descriptors."""
        os.close(self._replies.descriptor)
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _over(self) -> bool:
        return self._descriptor is None or bool(readable([self._descriptor], 0))

    def _adopted(self) -> int | None:
        """Return the exit code of a worker that ended before its server: our child now (PR_SET_CHILD_SUBREAPER)."""
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            return os.waitstatus_to_exitcode(status) if pid else None
        return None


class ForkServerPool:
    """The fork servers of a launcher: one for each runner and environment, as many as memory allows, for concurrent
    attempts to share. `logs` is a folder for their output, one file each.

    A fork server that is lost, or has to make room for another, gets no new users. It ends with the last attempt that
    has a worker of it.

    The code that starts a process and notes it holds `lock`. `cold_reasons` has the reason for each runner that must
    run cold.
    """

    def __init__(self, logs: Path, bounds: Timeouts, lock: threading.RLock) -> None:
        self.cold_reasons: dict[str, str] = {}
        self._logs, self._bounds, self._lock, self._room = logs, bounds, lock, room()
        self._alive: OrderedDict[_Key, ForkServer] = OrderedDict()  # the most recently used is the last
        self._parted: list[ForkServer] = []  # retired, with users left
        self._starting: defaultdict[_Key, threading.Lock] = defaultdict(threading.Lock)
        self._numbers: dict[_Key, int] = {}

    def take(self, runner: str, environ: Mapping[str, str], look: Look | None = None) -> ForkServer | None:
        """Return a fork server of the runner in this environment, with one more user; None if it must run cold.

        `look` is called about once a second while it starts. Raises ForkServerError, OSError and what `look` raises.
        """
        given = {name: value for name, value in environ.items() if name not in OF_A_WORKER or not value}
        given |= {name: os.environ[name] for name in OF_A_WORKER if environ.get(name) and name in os.environ}
        key = (runner, frozenset(given.items()))
        with self._starting[key]:  # an attempt that needs it meanwhile waits
            if look is not None:
                look()
            if runner in self.cold_reasons:
                return None
            with self._lock:
                template = self._alive.pop(key, None)
                if template is not None and template.alive() and template.claim():
                    self._alive[key] = template
                    return template
                if template is not None:
                    self._part(template)
                template = self._alive[key] = self._new(key, given)
            return self._ready(template, runner, look)

    def give_back(self, template: ForkServer | None) -> None:
        """Remove a user whose attempt is over. A fork server that is lost or retired ends with its last user."""
        if template is None:
            return
        with self._lock:
            template.give_back()
            if template.lost is not None and template in self._alive.values():
                self._alive = OrderedDict((key, one) for key, one in self._alive.items() if one is not template)
                self._parted.append(template)
            if template in self._parted and not template.users:
                self._parted.remove(template)
                template.close()

    def pids(self) -> set[int]:
        """Return the process ids of all fork servers."""
        with self._lock:
            return {template.pid for template in (*self._alive.values(), *self._parted)}

    def close(self) -> None:
        """End all fork servers."""
        for template in (*self._alive.values(), *self._parted):
            template.close()
        self._alive.clear()
        self._parted.clear()

    def _new(self, key: _Key, environ: Mapping[str, str]) -> ForkServer:
        """Start a fork server, which begins to import, and add its first user. Idle ones make room; if all are in use,
        there are more for a while."""
        while len(self._alive) + len(self._parted) >= self._room:
            idle = next((other for other, one in self._alive.items() if not one.users), None)
            if idle is None:
                break
            self._part(self._alive.pop(idle))
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{key[0]}-{self._numbers.setdefault(key, len(self._numbers) + 1)}.log"
        template = ForkServer(key[0], environ, log, self._bounds)
        template.claim()
        return template

    def _ready(self, template: ForkServer, runner: str, look: Look | None) -> ForkServer | None:
        """Return the fork server once it has imported everything; None if its workers could not use CUDA after that."""
        logs = Logs(template.log)

        def both() -> None:
            logs.look()
            if look is not None:
                look()

        try:
            unclean = template.ready(both)
        except BaseException:
            template.lose("it did not start")
            self.give_back(template)
            raise
        if unclean is None:
            return template
        template.lose(unclean)
        self.give_back(template)
        self.cold_reasons[runner] = unclean
        print(f"runner={runner} starts cold (a fresh interpreter for each trial), because {unclean}", file=sys.stderr)
        return None

    def _part(self, template: ForkServer) -> None:
        """Retire a fork server: no attempt gets a worker from it any more."""
        if template.users:
            self._parted.append(template)
        else:
            template.close()
