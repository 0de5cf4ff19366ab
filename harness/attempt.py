"""One process: spec in, result out, deadline, kill the tree, evidence.

An attempt has a folder. The parent writes `spec.json` there, starts a worker and blocks until it ends or the deadline
passes; the worker leaves `result.json` (written aside, then renamed), `steps.jsonl` (a line a step, as it goes),
`stdout.log` and `stderr.log`. Nothing of a result ever travels over stdout.

A worker starts in one of two ways that end in the same code (runners/worker.py): cold, a fresh interpreter; or warm,
forked from a template process that has imported everything and never touched the GPU (warm.py). There is one template
for each environment, because torch reads the allocator's variable when its library loads; which cards a worker sees it
is told when it is forked, so that all cards share the template. A runner whose imports start CUDA goes cold.

Whoever's parent dies, dies with it (PR_SET_PDEATHSIG in the worker and the template). What an attempt starts lies below
one process of its own (runners/init.py) while it lasts; what outlives it is adopted by us (PR_SET_CHILD_SUBREAPER) and
ended, whoever's it was, and nobody else's ever is; what outlives us, by leftovers.py. Attempts may run beside each
other, each in a thread: whoever starts a process and notes it holds the lock, as else another one might take it for a
leftover. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from vramsweep.harness import leftovers, machine, row, starving, variables
from vramsweep.harness.errors import describe
from vramsweep.harness.files import content, reason, tail
from vramsweep.harness.interpreter import build_command
from vramsweep.harness.occupancy import Occupancy
from vramsweep.harness.outcome import REASON_LENGTH, Evidence, HostMemory
from vramsweep.harness.templates import OF_A_WORKER, Templates
from vramsweep.harness.waiting import Logs, Look, last_words, readable
from vramsweep.harness.warm import Bounds, Lost, Template

PR_SET_CHILD_SUBREAPER = 36
SPEC, RESULT, STEPS, RECORDING = "spec.json", "result.json", "steps.jsonl", "recording.pickle"
PREDICTIONS = "predictions-*.jsonl"  # of an attempt that predicts many trials: answers, a line each
LARGEST = "largest.json"  # what is the largest that fits, of each trial of an attempt
LOGS = ("stdout.log", "stderr.log")
ENDED = "ended"  # the record of a rank that ended without saying why
RECORD_NUMBERS = ("step", "rank", "traced", "of")  # keys of records that are whole numbers where they are given
STEPS_LIMIT = 16 << 20  # bytes of the records' end that are read; a step's is a hundred or so
RESULT_LIMIT = 64 << 20  # bytes; a result is some kilobytes
RELIEF_S = 2.0  # for memory to come back from an attempt that was ended for taking it, before another one is
MOST_THREADS = 1024  # more than a node has places for trials; none is made before it is needed

# What can be wrong with the folder that is written to. Everything else that the system refuses (processes, descriptors,
# memory) is about this moment, and says nothing about the disk.
_WRITING = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG, errno.ENOENT),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.ESTALE, errno.ENODEV),
    *(errno.ENXIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO),
}


def about_writing(error: OSError) -> bool:
    """Whether an error says that a file could not be written, rather than that a process could not be started."""
    return error.errno in _WRITING and error.filename != sys.executable


class Worker(Protocol):
    """A started worker."""

    pid: int

    def wait(self, seconds: float, look: Look | None = None) -> tuple[bool, int | None]:
        """Whether it ended within `seconds`, and its exit code (negative: the signal; None: not known)."""
        ...

    def kill(self) -> None:
        """Kill it and its process group."""
        ...

    def give_up(self) -> None:
        """It does not end though killed."""
        ...

    def close(self) -> None:
        """Forget it."""
        ...


@dataclass(frozen=True)
class Attempted:
    """What one attempt left: the evidence, and the wall time in seconds from before the start to after the reaping.

    `isolation` is how it really ran, `cold_reason` why that is cold where warm was asked for.
    """

    evidence: Evidence
    duration_s: float
    isolation: str
    cold_reason: str | None = None
    notes: tuple[str, ...] = ()


def environment(conf: str, device: str, base: Mapping[str, str], gpus: Sequence[str] = ()) -> dict[str, str]:
    """A worker's environment: `base` without what would falsify (variables.py), and the allocator's setting.

    PYTORCH_CUDA_ALLOC_CONF is the name that every supported torch reads; torch 2.9.1 ignores settings given under the
    newer PYTORCH_ALLOC_CONF. Only `gpus` (uuids, one a rank) are left visible: the Trainer would spread a batch over
    all that it sees. Cards are counted as NVML counts them, where CUDA by itself counts the fastest first.
    """
    environ = variables.passed_on(base)
    if conf:
        environ["PYTORCH_CUDA_ALLOC_CONF"] = conf
    environ["DS_ACCELERATOR"] = (
        "cuda" if device == "cuda" else "cpu"
    )  # otherwise DeepSpeed's detection initialises CUDA in the template
    environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a spinning OpenMP team is 80 times slower on a busy machine
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if device == "cuda":
        environ["CUDA_DEVICE_ORDER"] = machine.NVML_ORDER
    if gpus or device != "cuda":  # cuda without a known GPU (a MIG slice, no NVML) keeps what the user has set
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environ


class _Cold:
    """A fresh interpreter running the worker."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        # in a session of its own, as templates are
        command = build_command("vramsweep.runners.worker", str(folder), str(os.getpid()))
        with (folder / LOGS[0]).open("ab") as out, (folder / LOGS[1]).open("ab") as err:
            self._process = subprocess.Popen(
                command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        self.pid = self._process.pid
        self._descriptor = os.pidfd_open(self.pid)

    def wait(self, seconds: float, look: Look | None = None) -> tuple[bool, int | None]:
        if not readable([self._descriptor], seconds, look):
            return False, None
        return True, self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def give_up(self) -> None:
        """Nothing else depends on it."""

    def close(self) -> None:
        os.close(self._descriptor)


class Launcher:
    """Starts attempts and sees them through; owns the templates. Use it as a context manager.

    `isolation` is cold or warm; `logs` is a folder for what the templates print, a file for each of them; `run` marks
    all processes that it starts, `occupancy` knows the cards. `threads` are for attempts beside each other: a template
    ends with the thread that started it, so that these last as long as it.
    """

    def __init__(self, isolation: str, logs: Path, bounds: Bounds | None = None) -> None:
        self.isolation = isolation
        self._bounds = bounds or Bounds()
        self._lock = threading.RLock()
        self.templates = Templates(logs, self._bounds, self._lock)
        self.cold_reasons = self.templates.cold_reasons
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        (self._kept,) = leftovers.trees(os.getpid())
        self._stuck: set[int] = set()
        self._roots: set[int] = set()  # of the attempts that run
        self._relief_until = 0.0  # by the monotonic clock: an attempt was ended for the host's memory, which comes back
        self.run = uuid.uuid4().hex
        self.occupancy = Occupancy()
        self.threads = ThreadPoolExecutor(MOST_THREADS, "slot")
        self._guard: leftovers.Guard | None = None
        self._nvml = contextlib.ExitStack()  # open as long: without persistence mode each opening loads the driver anew
        self._nvml.enter_context(machine.nvml())

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the templates."""
        self._nvml.close()
        self.templates.close()
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        self.threads.shutdown()

    def attempt(
        self,
        spec: Mapping[str, Any],
        folder: Path,
        environ: Mapping[str, str],
        runner: str,
        deadline_s: float,
        look: Callable[[], None] | None = None,
    ) -> Attempted:
        """Run one attempt in `folder` to its end. `spec` is what the worker reads; the folder must not exist yet.

        `look` is called every second or so meanwhile, to see what there is already; what it raises ends the attempt.
        Raises OSError if the folder cannot be written; a worker that cannot be started is evidence.
        """
        began = time.monotonic()
        kills = machine.host_oom_kills()
        template: Template | None = None
        environ = {**environ, leftovers.MARK: self.run}
        try:
            self._guarded()
            folder.mkdir(parents=True)
            (folder / SPEC).write_text(json.dumps(spec, indent=1))
            template = self.templates.take(runner, environ, look) if self._warm(runner) else None
            began = time.monotonic()
            worker = self._started(template, folder, environ)
        except (Lost, OSError) as error:
            if isinstance(error, OSError) and about_writing(error):
                raise
            self.templates.give_back(template)
            self._end()
            why = f"no worker could be started: {error}"
            return self._attempted(Evidence(start_error=why), began, template is not None or self._warm(runner), runner)
        except BaseException:
            self.templates.give_back(template)
            raise
        logs = Logs(*(folder / name for name in LOGS))
        ended, code = False, None
        starved: HostMemory | None = None

        memory = starving.Watch(
            lambda: leftovers.trees(worker.pid)[0], lambda: leftovers.trees(*self._roots - {worker.pid})
        )

        def all_four() -> float:
            relieved = time.monotonic() < self._relief_until
            soon = starving.SOONEST_S if relieved else memory.look()
            logs.look()
            self._reap()
            if look is not None:
                look()
            return soon

        try:
            ended, code = worker.wait(deadline_s, all_four)
        except starving.Starving as found:
            starved, self._relief_until = found.memory, math.inf
        finally:
            worker.kill()
            if not ended and not worker.wait(self._bounds.reap_s)[0]:
                worker.give_up()
            with self._lock:
                self._roots.discard(worker.pid)
            worker.close()
            self.templates.give_back(template)
            self._end()
            if starved is not None:
                self._relief_until = time.monotonic() + RELIEF_S
        logs.look()
        result, problem = read_result(folder)
        evidence = Evidence(
            exit_code=code,
            expired=not ended,
            result=result,
            result_error=problem,
            deadline_s=deadline_s,
            host_oom_kills=machine.host_oom_kills() - kills,
            last_words=last_words(folder / LOGS[1]) if code else None,
            starved=starved,
            rank=ended_rank(steps(folder)),
        )
        notes = (f"{logs.dropped} bytes of its logs were dropped",) if logs.dropped else ()
        return self._attempted(evidence, began, template is not None, runner, notes)

    def _started(self, template: Template | None, folder: Path, environ: Mapping[str, str]) -> Worker:
        """A worker, noted as the root of what is its attempt's. Raises Lost and OSError."""
        worker: Worker
        if template is not None:
            worker = template.fork(folder, {name: environ[name] for name in OF_A_WORKER if environ.get(name)})
            self._roots.add(worker.pid)
            return worker
        with self._lock:
            worker = _Cold(folder, environ)
            self._roots.add(worker.pid)
        return worker

    def _guarded(self) -> None:
        """Have a guard, from the first attempt on."""
        with self._lock:
            if self._guard is None or not self._guard.alive():
                self._guard = leftovers.Guard(self.run)
                self._kept.add(self._guard.pid)

    def own_pids(self) -> set[int]:
        """This process and those that it started, but not what outlived being killed: that does use the device.

        Not in a container that NVML does not see into: the driver may give process ids that do not exist here.
        """
        return {os.getpid()} | leftovers.trees(os.getpid())[0] - self._kept - self._stuck

    def _warm(self, runner: str) -> bool:
        return self.isolation == "warm" and runner not in self.cold_reasons

    def _attempted(
        self, evidence: Evidence, began: float, warm: bool, runner: str, notes: tuple[str, ...] = ()
    ) -> Attempted:
        reason = self.cold_reasons.get(runner)
        return Attempted(evidence, time.monotonic() - began, "warm" if warm else "cold", reason, notes)

    def _leftovers(self) -> Iterator[tuple[int, bool]]:
        """What has outlived its attempt, and whether it has ended: our own children that are nothing of what runs, and
        what lies below them. Of our own children those that have ended are let go of.

        What is in our session is a program that we ask something. Looked at with the lock that is held where processes
        are started in sessions of their own, and after each has been listed: so one that was just started is noted.
        """
        own, session = os.getpid(), os.getsid(0)
        there: dict[int, leftovers.Process] = {}
        top = set[int]()
        for pid, one in leftovers.listed():
            there[pid] = one
            if one.parent == own and one.session != session and pid not in self._waited_for():
                top.add(pid)
                yield pid, one.ended  # at once, as it may have forked and ended when all are listed
        for pid in leftovers.below(top, there) - self._stuck:
            yield pid, there[pid].ended
        for pid in top:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _waited_for(self) -> set[int]:
        with self._lock:
            return self._kept | self._roots | self._stuck | self.templates.pids()

    def _reap(self) -> None:
        """Let go of what was adopted and has ended: a night's would fill the table of processes."""
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                set(self._leftovers())

    def _end(self) -> None:
        """End whatever is left of attempts that are over."""
        if stuck := leftovers.end(self._leftovers):
            print(leftovers.describe_stuck(stuck), file=sys.stderr)
            self._stuck |= stuck


def read_result(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The worker's result, or None and why it cannot be used."""
    path = folder / RESULT
    try:
        result = json.loads(content(path, RESULT_LIMIT, links=False))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{RESULT} cannot be read: {reason(error) if isinstance(error, OSError) else error}"
    return checked(result)


def checked(result: Any) -> tuple[dict[str, Any] | None, str | None]:
    """What a worker gave as its result, or None and why it cannot be used."""
    result = row.encodable(result)
    if not isinstance(result, dict) or not ({"values", "error"} & set(result)):
        return None, f"{RESULT} holds neither values nor an error"
    problem = _misfit(result)
    return (None, f"{RESULT}: {problem}") if problem else (result, None)


def _misfit(result: Mapping[str, Any]) -> str | None:
    """What of a result would not fit into a row, if anything."""
    error = result.get("error")
    if error is not None:
        told = isinstance(error, dict) and all(isinstance(error.get(name), str) for name in ("type", "message"))
        if not told:
            return "its error has no type and message"
    values = result.get("values", {})
    if not isinstance(values, dict):
        return "its values are no object"
    for name, value in values.items():
        if not _finite(value):
            return f"column {name} holds a number that is not finite"
        if name in row.OF_PARENT:
            return f"column {name} is not for the worker to say"
    spent = values.get("steps_s")
    if spent is not None and (isinstance(spent, bool) or not isinstance(spent, int | float)):
        return f"steps_s holds {describe(spent)}, which is no number"
    try:
        row.complete({name: value for name, value in values.items() if name != "steps_s"})
    except row.RowError as problem:
        return str(problem)[:REASON_LENGTH]
    odd = next((name for name, value in values.items() if not row.believable({name: value})), None)
    return None if odd is None else f"column {odd} holds what no reader of rows would believe"


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return not isinstance(value, list) or all(map(_finite, value))


def steps(folder: Path) -> list[dict[str, Any]]:
    """The records a worker left as it went; what is no whole record is left out."""
    records = []
    with contextlib.suppress(OSError):
        for line in tail(folder / STEPS, STEPS_LIMIT).splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and all(isinstance(record.get(key, 0), int) for key in RECORD_NUMBERS):
                    records.append(row.encodable(record) if b"\\u" in line else record)
    return records


def ended_rank(records: Iterable[Mapping[str, Any]]) -> int | None:
    """The rank that ended without saying why, as the worker recorded it; None where none did."""
    return next((one["rank"] for one in records if one.get("event") == ENDED and one.get("rank") is not None), None)
