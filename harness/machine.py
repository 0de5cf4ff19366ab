"""What machine this is; is it healthy and ours alone. Reads NVML, /proc and git; starts nothing on a GPU.

Every reading that this machine does not give is None. Not covered: what torch sees (runners/measure.py).
"""

from __future__ import annotations

import contextlib
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pynvml

from vramsweep import __version__

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML reports it; memory in bytes. `processes` are the ids of compute processes on it."""

    index: int
    name: str
    uuid: str
    driver: str
    memory_total: int
    memory_used: int
    processes: tuple[int, ...]


@contextlib.contextmanager
def nvml() -> Iterator[bool]:
    """Initialise NVML for the block; yields whether there is a driver to ask."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def gpus() -> list[Gpu]:
    """The machine's GPUs in NVML's order; empty without a driver."""
    with nvml() as present:
        if not present:
            return []
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(
                Gpu(
                    index,
                    str(pynvml.nvmlDeviceGetName(handle)),
                    str(pynvml.nvmlDeviceGetUUID(handle)),
                    driver,
                    int(memory.total),
                    int(memory.used),
                    tuple(p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
                )
            )
        return found


def visible_gpus(environ: dict[str, str]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to a process, in its order."""
    found = gpus()
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return found
    chosen = []
    for entry in value.split(","):
        hits = [g for g in found if entry.strip() in (str(g.index), g.uuid) or g.uuid.startswith(entry.strip() or "?")]
        if not hits:  # as CUDA does: everything after an unknown entry is invisible
            break
        chosen.append(hits[0])
    return chosen


def host_oom_kills() -> int:
    """How often the kernel's out-of-memory killer has struck since boot; 0 where it is not counted."""
    with contextlib.suppress(OSError):
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
        if match:
            return int(match[1])
    return 0


@cache
def cpu_name() -> str | None:
    """The processor's name."""
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or None


@cache
def git_commit() -> str | None:
    """The commit of this checkout, with "+dirty" if tracked files were changed; None outside one."""

    def git(*arguments: str) -> str | None:
        root = Path(__file__).resolve().parents[1]
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    return commit + "+dirty" if git("status", "--porcelain", "--untracked-files=no") else commit


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Check:
    """One line of `doctor`: `level` is ok, note or problem."""

    name: str
    level: str
    text: str


def doctor(results: Path) -> list[Check]:
    """What a user should know before a night's sweep."""
    checks = [Check("python", "ok", platform.python_version())]
    for package in ("torch", "transformers", "deepspeed"):
        found = version(package)
        checks.append(Check(package, "ok" if found else "problem", found or f"not installed: pip install {package}"))
    cards = gpus()
    if not cards:
        checks.append(Check("gpu", "note", "no NVIDIA driver or GPU: sweeps run on device=cpu"))
    for card in cards:
        text = f"{card.name}, {card.memory_total / GIB:.1f} GiB, driver {card.driver}"
        checks.append(Check(f"gpu {card.index}", "ok", text))
        if card.processes:
            pids = ", ".join(map(str, card.processes))
            checks.append(Check(f"gpu {card.index}", "problem", f"other processes use it: pid {pids}; end them first"))
        elif card.memory_used > GIB:
            text = f"{card.memory_used / GIB:.1f} GiB in use though no process is listed; nvidia-smi may tell more"
            checks.append(Check(f"gpu {card.index}", "problem", text))
    if cards and "+cpu" in (version("torch") or ""):
        checks.append(Check("torch", "problem", "this is a CPU build, it will not see the GPU; install a CUDA build"))
    folder = results if results.exists() else results.resolve().parent
    free = shutil.disk_usage(folder).free / GIB
    checks.append(Check("disk", "ok" if free > 5 else "problem", f"{free:.1f} GiB free for {results}"))
    available = psutil.virtual_memory().available / GIB
    checks.append(
        Check("memory", "ok" if available > 4 else "problem", f"{available:.1f} GiB of host memory available")
    )
    load = psutil.getloadavg()[0]
    cores = psutil.cpu_count() or 1
    text = f"load {load:.1f} on {cores} cores"
    checks.append(Check("load", "ok" if load < 0.5 * cores else "note", text))
    return checks


def host_load() -> float | None:
    """The load average over a minute, per core; None where there is none."""
    with contextlib.suppress(OSError):
        return psutil.getloadavg()[0] / (psutil.cpu_count() or 1)
    return None


def facts() -> dict[str, Any]:
    """The provenance columns that do not depend on the worker."""
    return {
        "host": platform.node(),
        "cpu_name": cpu_name(),
        "python_version": platform.python_version(),
        "git_commit": git_commit(),
        "vramsweep_version": __version__,
        "torch_version": version("torch"),
        "transformers_version": version("transformers"),
    }
