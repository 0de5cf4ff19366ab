"""Follow a command through the code: list the functions that are handed a trial, in the order of their calls.

    python benchmarks/structure.py --follow [FOLDER]

A command of `WAYS` runs with this file's `record` in each of its Python processes. `record` notes the first call of
each named function of the product that is handed a trial (planned, resolved, as a row, or a collection whose first is
one). A stay is a stretch of these calls in one module. A return is a stay in a module that had one before. Training is
not followed: a worker trains after it has started, a prediction trains on fake tensors (`trace_trial`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence, ValuesView
from pathlib import Path
from typing import Any, NamedTuple

ROOT, OUT = "VRAMSWEEP_FOLLOWED", "VRAMSWEEP_FOLLOWED_OUT"
PACKAGES = ("harness", "runners", "analysis", "vramsweep", "hydra_plugins")
TRIAL = ["model=tiny", "runner=torch", "micro_batch=1", "isolation=cold", "report=false"]
TRAINING = ("runners/predict/make_trace:trace_trial", "runners/tracing:trace_trial")  # now, and its earlier name


class Way(NamedTuple):
    """A command and the part of its way that is counted: from the first call of `begin` to the first of `end`.

    Both also name the function as it was before the code was split into rooms.
    """

    words: tuple[str, ...]
    begin: tuple[str, ...]
    end: tuple[str, ...]


_RUN = ("harness/sweep/run_trials:run", "harness/sweep:run")
_PREDICT = ("runners/predict/predicted_row:predict", "runners/simulated:predict")
WAYS = {
    "a measured trial, until its worker starts": Way(
        ("sweep", *TRIAL, "device=cpu", "seq_len=32"), _RUN,
        ("harness/process/attempt:ColdWorker.__init__", "harness/attempt:_Cold.__init__"),
    ),
    "a predicted trial, until its trace is replayed": Way(
        ("sweep", *TRIAL, "device=simulated", "seq_len=32"), _RUN, _PREDICT
    ),
    "the first of two trials that are predicted together": Way(
        ("sweep", "-m", *TRIAL, "device=simulated", "seq_len=32,64"), _RUN, _PREDICT
    ),
    "advise, to its end": Way(
        ("advise", *TRIAL, "seq_len=32", "device.gpu=l4-24gb", "--most", "1"),
        ("harness/verbs/advise:main", "harness/advise:main"), (),
    ),
}  # fmt: skip


class Call(NamedTuple):
    """A function's first call, or its first with a trial (`handed`); `module` is a path without `.py`."""

    module: str
    function: str
    handed: bool


def follow(words: Sequence[str], code: Path) -> list[Call]:
    """Run a command of the checkout `code`; return first calls in order of time. Raises SystemExit if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        site, out = Path(folder) / "site", Path(folder) / "out"
        site.mkdir()
        out.mkdir()
        (site / "sitecustomize.py").write_text(
            f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\nimport followed\nfollowed.record()\n"
        )
        paths = os.pathsep.join([str(site), str(code)])
        more = {"PYTHONPATH": paths, ROOT: str(code), OUT: str(out), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "vramsweep", *words, f"results={folder}/results"]
        done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        lines = [line.split(" ", 2) for file in out.iterdir() for line in file.read_text().splitlines()]
    found = sorted((int(at), name, handed == "1") for at, handed, name in lines)
    calls = (Call(name.partition(":")[0], name.partition(":")[2], handed) for _, name, handed in found)
    return list(dict.fromkeys(calls))


def cut(calls: Sequence[Call], way: Way) -> list[Call]:
    """Return the counted part of a way: the calls that were handed a trial, and the end."""
    names = [f"{call.module}:{call.function}" for call in calls]
    begin = next(n for n, name in enumerate(names) if name in way.begin)
    end = next((n for n, name in enumerate(names) if name in way.end), len(names) - 1)
    return [call for call, name in zip(calls[begin : end + 1], names[begin : end + 1], strict=True)
            if call.handed or name in way.end]  # fmt: skip


def count(calls: Sequence[Call]) -> tuple[int, int, int]:
    """Return the numbers of stays, modules and returns."""
    modules = [call.module for call in calls]
    stays = sum(one != before for one, before in zip(modules, [None, *modules], strict=False))
    return stays, len(set(modules)), stays - len(set(modules))


def record() -> None:
    """Note calls in this process and in those that it forks, each in its own file."""
    root, out = os.environ[ROOT], os.environ[OUT]
    modules: dict[Any, str | None] = {}
    files: dict[int, Any] = {}
    seen: set[tuple[str, bool]] = set()
    inside: dict[int, Any] = {}  # by thread: the frame of the training

    def module_of(code: Any) -> str | None:
        path = os.path.realpath(code.co_filename)
        inner = path.removeprefix(f"{root}/")
        ours = inner != path and inner.startswith(tuple(f"{name}/" for name in PACKAGES))
        return inner.removesuffix(".py") if ours and "<" not in code.co_qualname.replace("<locals>", "") else None

    def note(frame: Any, event: str, value: Any) -> None:
        thread = threading.get_ident()
        if event == "return" and inside.get(thread) is frame:
            del inside[thread]
        if event != "call" or thread in inside:
            return
        code = frame.f_code
        if code not in modules:
            modules[code] = module_of(code)
        if (module := modules[code]) is None:
            return
        name, names = f"{module}:{code.co_qualname}", code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if name in TRAINING:
            inside[thread] = frame
        handed = any(is_trial(frame.f_locals.get(one)) for one in names)
        if (name, handed) not in seen:
            seen.add((name, handed))
            if os.getpid() not in files:
                files.clear()
                files[os.getpid()] = Path(out, str(os.getpid())).open("a", buffering=1)  # noqa: SIM115
            files[os.getpid()].write(f"{time.monotonic_ns()} {handed:d} {name}\n")

    threading.setprofile(note)
    sys.setprofile(note)


def is_trial(value: Any, within: bool = False) -> bool:
    """Return whether a value is a trial in some form, or a collection whose first is one."""
    if type(value).__name__ in ("Planned", "Trial"):
        return True
    if isinstance(value, dict):
        own = "trial" in value or "trial_id" in value or {"seq_len", "model"} <= value.keys()
        return own or (not within and bool(value) and is_trial(next(iter(value.values())), within=True))
    several = isinstance(value, list | tuple | ValuesView) and not within and len(value) > 0
    return several and is_trial(next(iter(value)), within=True)
