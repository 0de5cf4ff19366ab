"""The fork servers of a launcher: one for each runner and environment, as many as memory allows.

Concurrent attempts share them. A fork server that is lost, or has to make room for another, gets no new users. It ends
with the last attempt that has a worker of it.
"""

import os
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path

from vramsweep.harness.process.fork_server import ForkServer, Timeouts, room
from vramsweep.harness.process.waiting import Logs, Look

OF_A_WORKER = ("CUDA_VISIBLE_DEVICES",)  # variables that each worker gets when it is forked

_Key = tuple[str, frozenset[tuple[str, str]]]  # runner and environment


class ForkServerPool:
    """The fork servers of a launcher. `logs` is a folder for their output, one file each.

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
