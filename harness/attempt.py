"""One process: spec in, result out, deadline, kill the tree, evidence.

An attempt has a folder. The parent writes `spec.json` there, starts a worker and blocks until it ends or the deadline
passes; the worker leaves `result.json` (written aside, then renamed), `steps.jsonl` (a line a step, as it goes),
`stdout.log` and `stderr.log`. Nothing of a result ever travels over stdout.

A worker starts in one of two ways that end in the same code (runners/worker.py): cold, a fresh interpreter; or warm,
forked from a template process that has imported everything and never touched the GPU. There is one template for each
environment, because torch reads the allocator's variable when its library loads. Whoever's parent dies, dies with it
(PR_SET_PDEATHSIG in the worker and the template), and what outlives a worker is adopted by us (PR_SET_CHILD_SUBREAPER)
and ended. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import psutil

from vramsweep.harness import machine
from vramsweep.harness.errors import UserError
from vramsweep.harness.outcome import Evidence

PR_SET_CHILD_SUBREAPER = 36
TEMPLATES = 8  # kept alive at once; each holds about a third of a GiB, most of it shared with nobody
SPEC, RESULT, STEPS, RECORDING = "spec.json", "result.json", "steps.jsonl", "recording.pickle"


class Worker(Protocol):
    """A started worker: its process id, and a wait that blocks without spinning."""

    pid: int

    def wait(self, seconds: float) -> tuple[bool, int | None]:
        """Whether it ended within `seconds`, and its exit code (negative: the signal; None: not known)."""
        ...


@dataclass(frozen=True)
class Attempted:
    """What one attempt left: the evidence, and the wall time in seconds from before the start to after the reaping."""

    evidence: Evidence
    duration_s: float


def environment(conf: str, device: str, base: Mapping[str, str], gpus: Sequence[str] = ()) -> dict[str, str]:
    """A worker's environment: `base` with the allocator's setting in place of any that is there.

    PYTORCH_CUDA_ALLOC_CONF is the name that every supported torch reads; the newer PYTORCH_ALLOC_CONF is cleared, since
    torch 2.9.1 ignores settings given under it. Only `gpus` (uuids, one a rank) are left visible: the Trainer would
    spread a batch over all that it sees.
    """
    environ = {k: v for k, v in base.items() if k not in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")}
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
        with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
            self._process = subprocess.Popen(
                command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        self.pid = self._process.pid

    def wait(self, seconds: float) -> tuple[bool, int | None]:
        descriptor = os.pidfd_open(self.pid)
        try:
            ended = _readable(descriptor, seconds)
        finally:
            os.close(descriptor)
        return (True, self._process.wait()) if ended else (False, None)


class Template:
    """A process that has imported everything for one runner and one environment, and forks a worker on request.

    We send it the folder of an attempt, it answers with the worker's process id and, later, its wait status.
    """

    def __init__(self, runner: str, environ: Mapping[str, str], log: Path) -> None:
        to_template, self._requests = os.pipe()
        self._replies, from_template = os.pipe()
        command = [sys.executable, "-m", "vramsweep.runners.template", runner, str(to_template), str(from_template)]
        with log.open("ab") as err:
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                pass_fds=(to_template, from_template),
                start_new_session=True,
            )
        os.close(to_template)
        os.close(from_template)
        self._buffer = b""
        self.pid = self._process.pid

    def fork(self, folder: Path) -> _Warm | None:
        """A worker for the attempt in `folder`, or None if the template is dead."""
        try:
            os.write(self._requests, str(folder).encode() + b"\n")
        except BrokenPipeError:
            return None
        line = self.reply(None)
        return _Warm(self, int(line)) if line else None

    def reply(self, seconds: float | None) -> str | None:
        """The template's next line; "" once it is dead, None if there was none within `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not _readable(self._replies, None if deadline is None else max(0.0, deadline - time.monotonic())):
                return None
            data = os.read(self._replies, 4096)
            if not data:
                return ""
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode()

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the template; a worker it still has dies with it."""
        self._process.kill()
        self._process.wait()
        os.close(self._requests)
        os.close(self._replies)


class _Warm:
    """A worker forked from a template."""

    def __init__(self, template: Template, pid: int) -> None:
        self._template = template
        self.pid = pid

    def wait(self, seconds: float) -> tuple[bool, int | None]:
        line = self._template.reply(seconds)
        if line is None:
            return False, None
        return True, os.waitstatus_to_exitcode(int(line)) if line else None


class Launcher:
    """Starts attempts and sees them through, one at a time; owns the templates. Use it as a context manager.

    `isolation` is cold or warm; `log` takes what the templates print while they import.
    """

    def __init__(self, isolation: str, log: Path) -> None:
        self.isolation = isolation
        self._log = log
        self._templates: OrderedDict[tuple[str, frozenset[tuple[str, str]]], Template] = OrderedDict()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._kept = {child.pid for child in psutil.Process().children(recursive=True)}

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for template in self._templates.values():
            template.close()
        self._templates.clear()

    def attempt(
        self, spec: Mapping[str, Any], folder: Path, environ: Mapping[str, str], runner: str, deadline_s: float
    ) -> Attempted:
        """Run one attempt in `folder` to its end. `spec` is what the worker reads; the folder must not exist yet."""
        folder.mkdir(parents=True)
        (folder / SPEC).write_text(json.dumps(spec, indent=1))
        kills = machine.host_oom_kills()
        template = self._template(runner, environ) if self.isolation == "warm" else None
        began = time.monotonic()
        worker: Worker | None = template.fork(folder) if template else _Cold(folder, environ)
        ended, code = False, None
        try:
            ended, code = worker.wait(deadline_s) if worker else (True, None)
        finally:
            self._end(worker, ended)
        duration = time.monotonic() - began
        result, problem = read_result(folder)
        evidence = Evidence(
            exit_code=code,
            expired=not ended,
            result=result,
            result_error=problem,
            deadline_s=deadline_s,
            host_oom_kills=machine.host_oom_kills() - kills,
        )
        return Attempted(evidence, duration)

    def _template(self, runner: str, environ: Mapping[str, str]) -> Template:
        key = (runner, frozenset(environ.items()))
        template = self._templates.pop(key, None)
        if template is None or not template.alive():
            if template is not None:
                template.close()
            template = Template(runner, environ, self._log)
            if template.reply(None) == "":
                template.close()
                raise UserError(f"the template process for runner={runner} did not start; see {self._log}")
        self._templates[key] = template
        while len(self._templates) > TEMPLATES:
            self._templates.popitem(last=False)[1].close()
        return template

    def _end(self, worker: Worker | None, ended: bool) -> None:
        """End whatever is left of an attempt: its process group, its descendants and those we adopted."""
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            if not ended:
                worker.wait(5)  # reaps it, and takes the template's answer off the pipe
        keep = self._kept | {template.pid for template in self._templates.values()}
        for _ in range(5):  # a process that forks while it is being ended leaves a child for the next round
            left = [p for p in psutil.Process().children(recursive=True) if p.pid not in keep]
            if not left:
                return
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=5)


def read_result(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The worker's result, or None and why it could not be read."""
    path = folder / RESULT
    try:
        result = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        return None, f"{RESULT} cannot be read: {error}"
    if not isinstance(result, dict) or not ({"values", "error"} & set(result)):
        return None, f"{RESULT} holds neither values nor an error"
    return result, None


def steps(folder: Path) -> list[dict[str, Any]]:
    """The records a worker left as it went; a torn last line is left out."""
    records = []
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / STEPS).read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return records


def _readable(descriptor: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))
