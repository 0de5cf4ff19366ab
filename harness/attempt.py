"""One process: spec in, result out, deadline, kill the tree, evidence.

An attempt has a folder. The parent writes `spec.json` there, starts a worker and blocks until it ends or the deadline
passes; the worker leaves `result.json` (written aside, then renamed), `steps.jsonl` (a line a step, as it goes),
`stdout.log` and `stderr.log`. Nothing of a result ever travels over stdout.

A worker starts in one of two ways that end in the same code (runners/worker.py): cold, a fresh interpreter; or warm,
forked from a template process that has imported everything and never touched the GPU (warm.py). There is one template
for each environment, because torch reads the allocator's variable when its library loads; a runner whose imports start
CUDA goes cold. Whoever's parent dies, dies with it (PR_SET_PDEATHSIG in the worker and the template), and what outlives
a worker is adopted by us (PR_SET_CHILD_SUBREAPER) and ended. Linux only.
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
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import psutil

from vramsweep.harness import machine, row, variables
from vramsweep.harness.outcome import REASON_LENGTH, Evidence
from vramsweep.harness.waiting import Logs, last_line, readable
from vramsweep.harness.warm import Bounds, Lost, Template, room

PR_SET_CHILD_SUBREAPER = 36
END_S = 10.0  # for everything that an attempt leaves behind to end once it is killed
SPEC, RESULT, STEPS, RECORDING = "spec.json", "result.json", "steps.jsonl", "recording.pickle"
PREDICTIONS = "predictions-*.jsonl"  # of an attempt that predicts many trials: answers, a line each
LARGEST = "largest.json"  # what is the largest that fits, of each trial of an attempt
LOGS = ("stdout.log", "stderr.log")
ENDED = "ended"  # the record of a rank that ended without saying why
RESULT_LIMIT = 64 << 20  # bytes; a result is some kilobytes

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

    def wait(self, seconds: float, look: Callable[[], None] | None = None) -> tuple[bool, int | None]:
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
    all that it sees.
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
    if gpus or device != "cuda":  # cuda without a known GPU (a MIG slice, no NVML) keeps what the user has set
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environ


class _Cold:
    """A fresh interpreter running the worker."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "vramsweep.runners.worker", str(folder), str(os.getpid())]
        with (folder / LOGS[0]).open("ab") as out, (folder / LOGS[1]).open("ab") as err:
            self._process = subprocess.Popen(
                command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        self._descriptor = os.pidfd_open(self._process.pid)

    def wait(self, seconds: float, look: Callable[[], None] | None = None) -> tuple[bool, int | None]:
        if not readable([self._descriptor], seconds, look):
            return False, None
        return True, self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def give_up(self) -> None:
        """Nothing else depends on it."""

    def close(self) -> None:
        os.close(self._descriptor)


class Launcher:
    """Starts attempts and sees them through, one at a time; owns the templates. Use it as a context manager.

    `isolation` is cold or warm; `logs` is a folder for what the templates print, a file for each of them.
    """

    def __init__(self, isolation: str, logs: Path, bounds: Bounds | None = None) -> None:
        self.isolation = isolation
        self.cold_reasons: dict[str, str] = {}  # by runner
        self._logs, self._bounds, self._room = logs, bounds or Bounds(), room()
        self._templates: OrderedDict[tuple[str, frozenset[tuple[str, str]]], Template] = OrderedDict()
        self._numbers: dict[tuple[str, frozenset[tuple[str, str]]], int] = {}
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._kept = set(psutil.Process().children(recursive=True))
        self._stuck: set[psutil.Process] = set()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the templates."""
        for template in self._templates.values():
            template.close()
        self._templates.clear()

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
        try:
            folder.mkdir(parents=True)
            (folder / SPEC).write_text(json.dumps(spec, indent=1))
            template = self._template(runner, environ)
            began = time.monotonic()
            worker: Worker = template.fork(folder) if template else _Cold(folder, environ)
        except (Lost, OSError) as error:
            if isinstance(error, OSError) and about_writing(error):
                raise
            self._tidy(template)
            self._end()
            why = f"no worker could be started: {error}"
            return self._attempted(Evidence(start_error=why), began, template is not None or self._warm(runner), runner)
        logs = Logs(*(folder / name for name in LOGS))
        ended, code = False, None

        def both() -> None:
            logs.look()
            if look is not None:
                look()

        try:
            ended, code = worker.wait(deadline_s, both)
        finally:
            worker.kill()
            if not ended and not worker.wait(self._bounds.reap_s)[0]:
                worker.give_up()
            worker.close()
            self._tidy(template)
            self._end()
        logs.look()
        result, problem = read_result(folder)
        evidence = Evidence(
            exit_code=code,
            expired=not ended,
            result=result,
            result_error=problem,
            deadline_s=deadline_s,
            host_oom_kills=machine.host_oom_kills() - kills,
            last_words=last_line(folder / LOGS[1]) if code else None,
            rank=next((record["rank"] for record in steps(folder) if record.get("event") == ENDED), None),
        )
        notes = (f"{logs.dropped} bytes of its logs were dropped",) if logs.dropped else ()
        return self._attempted(evidence, began, template is not None, runner, notes)

    def own_pids(self) -> set[int]:
        """This process and those that it started, but not what outlived being killed: that does use the device.

        Not in a container that NVML does not see into: the driver may give process ids that do not exist here.
        """
        started = set(psutil.Process().children(recursive=True)) - self._kept - self._stuck
        return {os.getpid(), *(process.pid for process in started)}

    def _warm(self, runner: str) -> bool:
        return self.isolation == "warm" and runner not in self.cold_reasons

    def _attempted(
        self, evidence: Evidence, began: float, warm: bool, runner: str, notes: tuple[str, ...] = ()
    ) -> Attempted:
        reason = self.cold_reasons.get(runner)
        return Attempted(evidence, time.monotonic() - began, "warm" if warm else "cold", reason, notes)

    def _template(self, runner: str, environ: Mapping[str, str]) -> Template | None:
        """A template for the runner in this environment, None where it goes cold. Raises Lost or OSError."""
        if not self._warm(runner):
            return None
        key = (runner, frozenset(environ.items()))
        template = self._templates.pop(key, None)
        if template is not None and not template.alive():
            template.close()
            template = None
        if template is None:
            while len(self._templates) >= self._room:
                self._templates.popitem(last=False)[1].close()
            self._logs.mkdir(parents=True, exist_ok=True)
            log = self._logs / f"{runner}-{self._numbers.setdefault(key, len(self._numbers) + 1)}.log"
            template = Template(runner, environ, log, self._bounds)
            try:
                unclean = template.ready(Logs(log).look)
            except BaseException:
                template.close()
                raise
            if unclean is not None:
                template.close()
                self.cold_reasons[runner] = unclean
                print(f"runner={runner} goes cold, a fresh interpreter for each trial: {unclean}", file=sys.stderr)
                return None
        self._templates[key] = template
        return template

    def _tidy(self, template: Template | None) -> None:
        """Part with a template that was lost."""
        if template is not None and template.lost is not None:
            self._templates = OrderedDict((k, t) for k, t in self._templates.items() if t is not template)
            template.close()

    def _end(self) -> None:
        """End whatever is left of an attempt: its descendants and those we adopted."""
        keep = {template.pid for template in self._templates.values()}
        until = time.monotonic() + END_S
        while True:  # a process that forks while it is being ended leaves a child for the next round
            children = set(psutil.Process().children(recursive=True)) - self._kept - self._stuck
            left = [process for process in children if process.pid not in keep]
            if not left:
                return
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if time.monotonic() > until:
                pids = ", ".join(str(process.pid) for process in left)
                print(f"killed, but does not end (a driver may hold it): process {pids}", file=sys.stderr)
                self._stuck.update(left)
                return
            psutil.wait_procs(left, timeout=1)


def read_result(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The worker's result, or None and why it cannot be used."""
    path = folder / RESULT
    try:
        if path.stat().st_size > RESULT_LIMIT:
            return None, f"{RESULT} has {path.stat().st_size} bytes, which is no result"
        result = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{RESULT} cannot be read: {error}"
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
    try:
        row.complete({name: value for name, value in values.items() if name != "steps_s"})
    except row.RowError as problem:
        return str(problem)[:REASON_LENGTH]
    return None


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return not isinstance(value, list) or all(map(_finite, value))


def steps(folder: Path) -> list[dict[str, Any]]:
    """The records a worker left as it went; a torn last line is left out."""
    records = []
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / STEPS).read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return records
