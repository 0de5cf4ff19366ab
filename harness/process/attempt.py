"""Attempts: start one worker process, wait until it ends or its deadline passes, kill its tree, return the evidence.

An attempt has a folder. The parent writes `spec.json` there, starts a worker, and blocks until the worker ends or the
deadline passes. The worker leaves `result.json` (written aside, then renamed), `steps.jsonl` (a line after each step),
`stdout.log` and `stderr.log`. No part of a result ever travels over stdout.

A worker starts cold or warm, and then runs the same code (runners/worker/worker.py). Cold is a fresh interpreter. Warm
is a fork of a fork server, which has imported everything and never touched the GPU (fork_server.py). Each environment
has its own fork server, because torch reads the allocator's variable when its library loads. CUDA_VISIBLE_DEVICES is
set at fork time, so one fork server serves all GPUs. A runner whose imports start CUDA runs cold.

The worker and the fork server die with their parent (PR_SET_PDEATHSIG). While an attempt lasts, its processes are below
one process of its own (runners/rank/process_end.py). We adopt the orphans of all attempts (PR_SET_CHILD_SUBREAPER) and
kill these, but no other process. orphans.py kills what outlives us. Concurrent attempts run in threads. A thread holds
the lock while it starts and notes a process. Otherwise another thread might take the new process for an orphan. Linux
only.
"""

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
from typing import Any

from vramsweep.harness.files import plain_json
from vramsweep.harness.files.bounded_reads import error_reason, read_content, read_tail
from vramsweep.harness.machine import machine
from vramsweep.harness.machine.gpu_readiness import Occupancy
from vramsweep.harness.messages.console import Activity
from vramsweep.harness.messages.errors import UserError, describe
from vramsweep.harness.process import fork_server, host_memory_guard, orphans, worker_environment
from vramsweep.harness.process.fork_server import ForkServer, ForkServerError, ForkServerPool, Timeouts, WarmWorker
from vramsweep.harness.process.interpreter import build_command
from vramsweep.harness.process.waiting import Logs, Look, last_words, readable
from vramsweep.harness.process.worker_files import ANSWER, ENDED, LOGS, PROGRESS, RESULT, SPEC, STEPS, TRACES
from vramsweep.harness.rows import schema
from vramsweep.harness.rows.outcome import REASON_LENGTH, Evidence, HostMemory, classify

PR_SET_CHILD_SUBREAPER = 36
RECORD_NUMBERS = ("step", "rank")  # keys of records that are whole numbers where they are given
PROGRESS_LIMIT = 4 << 10  # bytes of a worker's reports of its activity; the last line counts
STEPS_LIMIT = 16 << 20  # bytes that are read from the end of the records; a step's record has about 100
RESULT_LIMIT = 64 << 20  # bytes; a result is some kilobytes
RELIEF_S = 2.0  # after an attempt was ended for its memory: the time for that to be freed before another is ended
MOST_THREADS = 1024  # more than a node has slots; a thread is made only when it is needed

# Errors of the folder that is written to. All other refusals of the system (processes, descriptors, memory) may pass,
# and say nothing about the disk.
_WRITING = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG, errno.ENOENT),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.ESTALE, errno.ENODEV),
    *(errno.ENXIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO),
}


def is_write_error(error: OSError) -> bool:
    """Return whether an error says that a file could not be written, not that a process could not be started."""
    return error.errno in _WRITING and error.filename != sys.executable


@dataclass(frozen=True)
class AttemptResult:
    """The evidence of one attempt, and its wall time in seconds, from before its start until its processes are reaped.

    `isolation` says how it really ran, `cold_reason` why it ran cold although warm was requested.
    """

    evidence: Evidence
    duration_s: float
    isolation: str
    cold_reason: str | None = None
    notes: tuple[str, ...] = ()


def attempt_environment(conf: str, device: str, base: Mapping[str, str], gpus: Sequence[str] = ()) -> dict[str, str]:
    """Return a worker's environment: `base` without falsifying variables (worker_environment.py), and the allocator's
    setting.

    PYTORCH_CUDA_ALLOC_CONF is the name that every supported torch reads; torch 2.9.1 ignores settings given under the
    newer PYTORCH_ALLOC_CONF. Only `gpus` (uuids, one per rank) are left visible, because the Trainer would spread a
    batch over all visible GPUs. They are numbered as by NVML, because CUDA by itself puts the fastest first.
    """
    environ = worker_environment.select_variables(base)
    if conf:
        environ["PYTORCH_CUDA_ALLOC_CONF"] = conf
    # without it DeepSpeed's detection would initialise CUDA in the fork server
    environ["DS_ACCELERATOR"] = "cuda" if device == "cuda" else "cpu"
    environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a spinning OpenMP team is 80 times slower on a busy machine
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if device == "cuda":
        environ["CUDA_DEVICE_ORDER"] = machine.NVML_ORDER
    if gpus or device != "cuda":  # cuda without a known GPU (a MIG slice, no NVML) keeps what the user has set
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environ


class ColdWorker:
    """A fresh interpreter that runs the worker, with the methods of a WarmWorker."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        # in a session of its own, like a fork server
        command = build_command("vramsweep.runners.worker.worker", str(folder), str(os.getpid()))
        with (folder / LOGS[0]).open("ab") as out, (folder / LOGS[1]).open("ab") as err:
            self._process = subprocess.Popen(
                command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        self.pid = self._process.pid
        self._descriptor = os.pidfd_open(self.pid)

    def wait(self, seconds: float, look: Look | None = None) -> tuple[bool, int | None]:
        """Return whether the worker ended within `seconds`, and its exit code (negative: the signal)."""
        if not readable([self._descriptor], seconds, look):
            return False, None
        return True, self._process.wait()

    def kill(self) -> None:
        """Kill the worker's process group, if it is still there."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def give_up(self) -> None:
        """Do nothing, because nothing else depends on this process."""

    def close(self) -> None:
        """Close the descriptor that tells when the worker ends."""
        os.close(self._descriptor)


class Launcher(contextlib.AbstractContextManager["Launcher"]):
    """The owner of the fork servers: starts attempts and follows each to its end. Use it as a context manager.

    `isolation` is cold or warm. `logs` is a folder for the output of the fork servers, one file each. `run` marks all
    processes that the launcher starts; `occupancy` knows the GPUs. `threads` run concurrent attempts. The threads last
    as long as the launcher, because a fork server ends with the thread that started it.
    """

    def __init__(self, isolation: str, logs: Path, bounds: Timeouts | None = None) -> None:
        self.isolation = isolation
        self._bounds = bounds or Timeouts()
        self._lock = threading.RLock()
        self.templates = ForkServerPool(logs, self._bounds, self._lock)
        self.cold_reasons = self.templates.cold_reasons
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        (self._kept,) = orphans.trees(os.getpid())
        self._stuck: set[int] = set()
        self._roots: set[int] = set()  # processes of the running attempts
        self._relief_until = 0.0  # monotonic clock: memory of an ended attempt comes back until then
        self.run = uuid.uuid4().hex
        self.occupancy = Occupancy()
        self.threads = ThreadPoolExecutor(MOST_THREADS, "slot")
        self._guard: orphans.Guard | None = None
        self._nvml = contextlib.ExitStack()  # kept open: without persistence mode each opening loads the driver anew
        self._nvml.enter_context(machine.nvml())

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the fork servers, the guard and the threads."""
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
    ) -> AttemptResult:
        """Run one attempt in `folder` to its end. The worker reads `spec`; the folder must not exist yet.

        Meanwhile `look` is called about once a second, to read what the worker has written; an exception of it ends the
        attempt. Raises OSError if the folder cannot be written. If no worker can be started, the evidence says so.
        """
        began = time.monotonic()
        kills = machine.host_oom_kills()
        template: ForkServer | None = None
        environ = {**environ, orphans.MARK: self.run}
        try:
            self._guarded()
            folder.mkdir(parents=True)
            (folder / SPEC).write_text(json.dumps(spec, indent=1))
            template = self.templates.take(runner, environ, look) if self._warm(runner) else None
            began = time.monotonic()
            worker = self._started(template, folder, environ, look)
        except (ForkServerError, OSError) as error:
            if isinstance(error, OSError) and is_write_error(error):
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

        memory = host_memory_guard.HostMemoryGuard(
            lambda: orphans.trees(worker.pid)[0], lambda: orphans.trees(*self._roots - {worker.pid})
        )

        def all_four() -> float:
            relieved = time.monotonic() < self._relief_until
            soon = host_memory_guard.SOONEST_S if relieved else memory.look()
            logs.look()
            self._reap()
            if look is not None:
                look()
            return soon

        try:
            ended, code = worker.wait(deadline_s, all_four)
        except host_memory_guard.HostMemoryExhausted as found:
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
            rank=ended_rank(read_steps(folder)),
        )
        notes = (f"{logs.dropped} bytes of its logs were dropped",) if logs.dropped else ()
        return self._attempted(evidence, began, template is not None, runner, notes)

    def _started(
        self, template: ForkServer | None, folder: Path, environ: Mapping[str, str], look: Look | None
    ) -> ColdWorker | WarmWorker:
        """Start a worker and note it as the root of its attempt's processes. Raises ForkServerError and OSError."""
        if template is not None:
            warm = template.fork(
                folder, {name: environ[name] for name in fork_server.OF_A_WORKER if environ.get(name)}, look
            )
            self._roots.add(warm.pid)
            return warm
        with self._lock:
            cold = ColdWorker(folder, environ)
            self._roots.add(cold.pid)
        return cold

    def _guarded(self) -> None:
        """Start a guard at the first attempt, and again if it has ended."""
        with self._lock:
            if self._guard is None or not self._guard.alive():
                self._guard = orphans.Guard(self.run)
                self._kept.add(self._guard.pid)

    def own_pids(self) -> set[int]:
        """Return this process and those that it started, except those that survived a kill and so still use the device.

        The ids are of no use if NVML does not see into this container: the driver may then give ids from outside.
        """
        return {os.getpid()} | orphans.trees(os.getpid())[0] - self._kept - self._stuck

    def _warm(self, runner: str) -> bool:
        return self.isolation == "warm" and runner not in self.cold_reasons

    def _attempted(
        self, evidence: Evidence, began: float, warm: bool, runner: str, notes: tuple[str, ...] = ()
    ) -> AttemptResult:
        reason = self.cold_reasons.get(runner)
        return AttemptResult(evidence, time.monotonic() - began, "warm" if warm else "cold", reason, notes)

    def _leftovers(self) -> Iterator[tuple[int, bool]]:
        """Yield the orphans of ended attempts, each with whether it has ended: our children that belong to no running
        attempt or server, and all processes below them. Reap the ended ones of these children.

        A child in our session is a program that we called, no orphan. Children in sessions of their own are started and
        noted under the lock. It is taken here after a child was listed, so a child just started is already noted.
        """
        own, session = os.getpid(), os.getsid(0)
        there: dict[int, orphans.Process] = {}
        top = set[int]()
        for pid, one in orphans.list_processes():
            there[pid] = one
            if one.parent == own and one.session != session and pid not in self._waited_for():
                top.add(pid)
                yield pid, one.ended  # now, because it may fork and end before all are listed
        for pid in orphans.processes_below(top, there) - self._stuck:
            yield pid, there[pid].ended
        for pid in top:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _waited_for(self) -> set[int]:
        with self._lock:
            return self._kept | self._roots | self._stuck | self.templates.pids()

    def _reap(self) -> None:
        """Reap adopted processes that have ended, because those of a night would fill the process table."""
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                set(self._leftovers())

    def _end(self) -> None:
        """Kill the orphans of attempts that are over."""
        if stuck := orphans.end_processes(self._leftovers):
            print(orphans.describe_stuck(stuck), file=sys.stderr)
            self._stuck |= stuck


def ask_attempt(
    launcher: Launcher,
    spec: Mapping[str, Any],
    folder: Path,
    environ: Mapping[str, str],
    runner: str,
    deadline_s: float,
    cure: str = "raise timeout_s",
    failed: str = "",
) -> Any:
    """Return the JSON answer of an attempt that answers a question about trials; show its activity meanwhile. The first
    arguments are those of `Launcher.attempt`.

    Raises UserError with the reason if there is no answer. `cure` says what to do after a timeout; `failed` is put
    before the reason if something broke. Raises OSError if the folder cannot be written.
    """
    with Activity("importing torch") as activity:
        evidence = launcher.attempt(
            spec, folder, environ, runner, deadline_s, lambda: activity.update(read_progress(folder)["text"])
        ).evidence
    with contextlib.suppress(OSError, ValueError):  # written aside, so complete even if the worker was killed
        return json.loads(read_content(folder / ANSWER, links=False))
    kind, reason = classify(evidence)
    if kind is schema.Outcome.TIMEOUT:
        raise UserError(f"no answer within {deadline_s:g} s; {cure}")
    reason = reason or "the worker's answer cannot be read"
    raise UserError(reason if kind is schema.Outcome.INVALID else f"{failed}{reason}")


def read_result(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """Return the worker's result, or None and why it cannot be used."""
    try:
        result = json.loads(read_content(folder / RESULT, RESULT_LIMIT, links=False))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{RESULT} cannot be read: {error_reason(error) if isinstance(error, OSError) else error}"
    return check_result(result)


def check_result(result: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Return a worker's parsed result, made encodable, or None and why it cannot be used."""
    result = schema.to_encodable(result)
    if not isinstance(result, dict) or not ({"values", "error"} & set(result)):
        return None, f"{RESULT} has neither values nor an error"
    problem = _misfit(result)
    return (None, f"{RESULT}: {problem}") if problem else (result, None)


def _misfit(result: Mapping[str, Any]) -> str | None:
    """Return why a result would not fit into a row, None if it fits."""
    error = result.get("error")
    told = isinstance(error, dict) and all(isinstance(error.get(name), str) for name in ("type", "message"))
    if error is not None and not told:
        return "its error has no type and message"
    values = result.get("values", {})
    if not isinstance(values, dict):
        return "its values are not an object"
    for name, value in values.items():
        if not plain_json.is_finite(value):
            return f"column {name} has a number that is not finite"
        if name in schema.OF_PARENT:
            return f"a worker must not set column {name}"
    spent = values.get("steps_s")
    if spent is not None and (isinstance(spent, bool) or not isinstance(spent, int | float)):
        return f"steps_s has {describe(spent)}, which is not a number"
    try:
        schema.complete_row({name: value for name, value in values.items() if name != "steps_s"})
    except schema.RowError as problem:
        return str(problem)[:REASON_LENGTH]
    odd = next((name for name, value in values.items() if not schema.is_plausible({name: value})), None)
    return None if odd is None else f"column {odd} has an implausible value"


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the records that a worker wrote after each step, without incomplete ones."""
    with contextlib.suppress(OSError):
        text = read_tail(folder / STEPS, STEPS_LIMIT)
        every = plain_json.read_objects(text)
        whole = (one for one in every if all(isinstance(one.get(key, 0), int) for key in RECORD_NUMBERS))
        return [schema.to_encodable(one) if b"\\u" in text else one for one in whole]
    return []


def read_progress(folder: Path) -> dict[str, Any]:
    """Return the last activity that a prediction's worker reported: its `text`, and whole numbers such as `done`.

    While it waits for processes that trace, the text ends with what one of them reported last.
    """
    found = _last_report(folder / PROGRESS) or {"text": "importing torch"}
    if found["text"].startswith("tracing: ") and (one := _last_report(folder / TRACES)) is not None:
        found["text"] += f"; {one['text']}"
    return found


def _last_report(file: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError):
        for one in reversed(list(plain_json.read_objects(read_tail(file, PROGRESS_LIMIT)))):
            if isinstance(one.get("text"), str):
                return {name: value for name, value in one.items() if name == "text" or type(value) is int}
    return None


def ended_rank(records: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the rank that ended without saying why, as the worker recorded it; None if none did."""
    return next((one["rank"] for one in records if one.get("event") == ENDED and one.get("rank") is not None), None)
