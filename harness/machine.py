"""What machine this is; is it healthy and ours alone. Reads NVML, /proc and git; starts nothing on a GPU.

Every reading that this machine does not give is None. Not covered: what torch sees (runners/measure.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pynvml

GIB = 1 << 30
# What is used of pynvml and the newest of it: older modules of that name lack some.
_NEEDED = ("NVMLError", "nvmlInit", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetCurrentClocksEventReasons")
_NVML_ERROR: type[Exception] = getattr(pynvml, "NVMLError", OSError)


@dataclass(frozen=True)
class Gpu:
    """One GPU or MIG slice as NVML reports it; memory in bytes; None where NVML does not say.

    `processes` are the ids of compute processes on it, `capability` is the CUDA compute capability. `problem` says why
    something is None, for a card that is lost or that a container may not ask. `slices` are the uuids of its MIG
    slices; None for a card that is not in MIG mode, and for a slice.
    """

    index: int
    name: str | None
    uuid: str | None
    driver: str | None
    memory_total: int | None
    memory_used: int | None
    processes: tuple[int, ...] | None
    capability: tuple[int, int] | None = None
    problem: str | None = None
    slices: tuple[str, ...] | None = None


def nvml_problem() -> str | None:
    """What keeps pynvml from being NVIDIA's own module, with the cure; None when it is.

    The distributions `pynvml` (before 12) and `nvidia-ml-py3` install a module of the same name with older functions.
    """
    missing = [name for name in _NEEDED if not hasattr(pynvml, name)]
    if not missing:
        return None
    return (
        f"an outdated package shadows nvidia-ml-py: its pynvml has no {missing[0]}; "
        "pip uninstall -y pynvml nvidia-ml-py3 && pip install --force-reinstall nvidia-ml-py"
    )


@contextlib.contextmanager
def nvml() -> Iterator[bool]:
    """Initialise NVML for the block; yields whether there is a driver to ask."""
    try:
        pynvml.nvmlInit()
    except (_NVML_ERROR, AttributeError):
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(_NVML_ERROR):
            pynvml.nvmlShutdown()


def ask(name: str, *arguments: Any) -> tuple[Any, str | None]:
    """One NVML query by its name: the answer, or None and why there is none."""
    try:
        return getattr(pynvml, name)(*arguments), None
    except AttributeError:
        return None, nvml_problem() or f"pynvml has no {name}"
    except _NVML_ERROR as error:
        return None, str(error)


def gpus() -> list[Gpu]:
    """The machine's GPUs in NVML's order; empty without a driver. One that cannot be asked is listed all the same."""
    with nvml() as present:
        if not present:
            return []
        count, _ = ask("nvmlDeviceGetCount")
        driver = _text(ask("nvmlSystemGetDriverVersion")[0])
        found = []
        for index in range(count or 0):
            handle, problem = ask("nvmlDeviceGetHandleByIndex", index)
            empty = Gpu(index, None, None, driver, None, None, None, problem=problem)
            found.append(empty if handle is None else replace(_gpu(index, handle, driver), slices=_slices(handle)))
        return found


def _slices(handle: Any) -> tuple[str, ...] | None:
    """The uuids of a card's MIG slices; None if it is not in MIG mode."""
    mode, _ = ask("nvmlDeviceGetMigMode", handle)
    if mode is None or mode[0] != 1:
        return None
    count, _ = ask("nvmlDeviceGetMaxMigDeviceCount", handle)
    found = (ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)[0] for number in range(count or 0))
    named = (_text(ask("nvmlDeviceGetUUID", one)[0]) for one in found if one is not None)
    return tuple(uuid for uuid in named if uuid is not None)


def _gpu(index: int, handle: Any, driver: str | None) -> Gpu:
    answers = {
        name: ask(f"nvmlDeviceGet{name}", handle)
        for name in ("Name", "UUID", "MemoryInfo", "ComputeRunningProcesses", "CudaComputeCapability")
    }
    value = {name: answer for name, (answer, _) in answers.items()}
    # a card without a compute capability or a list of processes can still be used; one without a memory is not whole
    problem = next((why for name in ("Name", "UUID", "MemoryInfo") if (why := answers[name][1])), None)
    memory, processes, capability = (
        value[n] for n in ("MemoryInfo", "ComputeRunningProcesses", "CudaComputeCapability")
    )
    return Gpu(
        index,
        _text(value["Name"]),
        _text(value["UUID"]),
        driver,
        None if memory is None else int(memory.total),
        None if memory is None else int(memory.used),
        None if processes is None else tuple(p.pid for p in processes),
        None if capability is None else (int(capability[0]), int(capability[1])),
        problem,
    )


def _text(value: Any) -> str | None:
    """NVML's text; older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else None if value is None else str(value)


def visible_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs and MIG slices that CUDA_VISIBLE_DEVICES leaves to a process, in its order.

    Of a card in MIG mode CUDA sees its first slice, or the one that is named "MIG-<uuid>". A slice that NVML may not be
    asked about is there all the same, its values None: what is named is meant to be used.
    """
    found = gpus()
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return [_used(card, found) for card in found]
    chosen = []
    for entry in (entry.strip() for entry in value.split(",")):
        card = _named(entry, found)
        if card is None:  # as CUDA does: everything after an unknown entry is invisible
            break
        chosen.append(card)
    return chosen


def _named(entry: str, cards: Sequence[Gpu]) -> Gpu | None:
    """The card or slice that one entry of CUDA_VISIBLE_DEVICES names: an index, or how a uuid begins."""
    if entry.startswith("MIG-"):
        return _slice(entry, cards)
    hits = [card for card in cards if entry == str(card.index)]
    hits += [card for card in cards if entry and card.uuid is not None and card.uuid.startswith(entry)]
    return _used(hits[0], cards) if hits else None


def _used(card: Gpu, cards: Sequence[Gpu]) -> Gpu:
    """What CUDA uses where this card is named: the card, or its first slice."""
    return (_slice(card.slices[0], cards) if card.slices else None) or card


def _slice(entry: str, cards: Sequence[Gpu]) -> Gpu | None:
    """The MIG slice "MIG-<uuid>", or in an older driver's words "MIG-GPU-<uuid>/<gi>/<ci>"; None without a driver."""
    if not cards:
        return None
    with nvml() as present:
        handle, problem = ask("nvmlDeviceGetHandleByUUID", entry) if present else (None, "NVML is gone")
        if handle is None:
            unknown = Gpu(-1, None, entry, cards[0].driver, None, None, None)
            return replace(unknown, problem=f"the MIG slice cannot be asked: {problem}")
        parent, _ = ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        index, _ = ask("nvmlDeviceGetIndex", parent) if parent is not None else (None, None)
        found = _gpu(-1 if index is None else int(index), handle, cards[0].driver)
        capability, _ = ask("nvmlDeviceGetCudaComputeCapability", parent if parent is not None else handle)
        return replace(
            found,
            uuid=found.uuid or entry,
            capability=found.capability or (None if capability is None else (int(capability[0]), int(capability[1]))),
        )


def again(cards: Sequence[Gpu]) -> list[Gpu]:
    """The same cards and slices, asked anew; without those that are gone."""
    found = gpus()
    known = [card.uuid for card in cards if card.uuid is not None]
    slices = (_slice(uuid, found) for uuid in known if uuid.startswith("MIG-"))
    return [card for card in found if card.uuid in known] + [one for one in slices if one is not None]


def uuids(cards: Sequence[Gpu]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES must name to leave just these; empty (leave it as it is) where one is not known."""
    known = [card.uuid for card in cards if card.uuid is not None]
    return known if len(known) == len(cards) else []


def too_many_ranks(visible: int, world_size: int) -> str | None:
    """Why a trial of `world_size` ranks cannot run where a process sees `visible` GPUs, or None if it can.

    Without any GPU to see nothing is known of the trial: that is a fault of the machine.
    """
    if visible == 0 or world_size <= visible:
        return None
    return (
        f"world_size={world_size} needs {world_size} GPUs and {visible} {'is' if visible == 1 else 'are'} visible: "
        f"use world_size={visible} or fewer, or a larger node"
    )


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


def _torch_file() -> str:
    """The text of torch/version.py, found without importing torch; "" without torch."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            return (Path(folder) / "version.py").read_text()
    return ""


def _stated(name: str) -> str | None:
    match = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]+)['\"]", _torch_file(), re.MULTILINE)
    return match[1] if match else None


def torch_version() -> str | None:
    """torch.__version__ ("2.13.0+cu130"), without importing torch; None where it is not installed.

    The installed distribution's version may lack the part behind "+", which says what it was built for.
    """
    return _stated("__version__") or version("torch")


def torch_cuda() -> str | None:
    """The CUDA version that torch was built with ("12.8"), without importing it; None for a CPU build or no torch."""
    return _stated("cuda")


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


# Oldest driver branch for each CUDA major version ("Minor Version Compatibility", CUDA Compatibility, NVIDIA).
DRIVERS = {11: 450, 12: 525, 13: 580}
FALSIFYING = {
    "CUDA_LAUNCH_BLOCKING": "makes every kernel wait for the one before, so speed is not that of training",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "switches off the caching allocator, so its counters mean nothing",
    "NVIDIA_TF32_OVERRIDE": "overrides the precision that a trial asks for",
}
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def doctor(results: Path, environ: Mapping[str, str] = os.environ) -> list[Check]:
    """What a user should know before a night's sweep."""
    checks = [Check("python", "ok", platform.python_version())]
    for package in ("torch", "transformers", "deepspeed"):
        found = torch_version() if package == "torch" else version(package)
        checks.append(Check(package, "ok" if found else "problem", found or f"not installed: pip install {package}"))
    shadowed = nvml_problem()
    if shadowed:
        checks.append(Check("nvml", "problem", shadowed))
    cards = gpus()
    if not cards:
        checks.append(Check("gpu", "note", "no NVIDIA driver or GPU: sweeps run on device=simulated"))
    for card in cards:
        checks += _card(card)
    if cards:
        checks += _visible(environ)
        with nvml():
            driver_cuda, _ = ask("nvmlSystemGetCudaDriverVersion_v2")
        checks += compatible(cards[0].driver, driver_cuda, torch_version(), torch_cuda(), cards)
    checks += _environment(environ)
    checks.append(_disk(results))
    checks += _host()
    return checks


def _card(card: Gpu) -> list[Check]:
    name = f"gpu {card.index}"
    size = "unknown memory" if card.memory_total is None else f"{card.memory_total / GIB:.1f} GiB"
    checks = [Check(name, "ok", f"{card.name or 'unknown card'}, {size}, driver {card.driver or 'unknown'}")]
    if card.problem is not None:
        if "permission" in card.problem.lower():
            said = f"not all of it may be read here ({card.problem}), as in a container that has a MIG slice"
            checks = [Check(name, "note", f"{checks[0].text}; {said}")]
        else:
            said = f"NVML says: {card.problem}; leave it out with CUDA_VISIBLE_DEVICES, or reset it or reboot the node"
            checks = [Check(name, "problem", f"{checks[0].text}; {said}")]
    if card.slices is not None:
        said = f"in MIG mode with {len(card.slices)} slice(s)"
        how = f"choose one with CUDA_VISIBLE_DEVICES={card.slices[0]}" if card.slices else "it has none: nvidia-smi mig"
        checks.append(Check(name, "note", f"{said}; {how}"))
    elif card.processes:
        pids = ", ".join(map(str, card.processes))
        checks.append(Check(name, "problem", f"other processes use it: pid {pids}; end them first"))
    elif card.memory_used is not None and card.memory_used > GIB:
        text = f"{card.memory_used / GIB:.1f} GiB in use though no process is listed; nvidia-smi may tell more"
        checks.append(Check(name, "problem", text))
    return checks


def _visible(environ: Mapping[str, str]) -> list[Check]:
    """What CUDA_VISIBLE_DEVICES leaves, where it is set."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return []
    seen = visible_gpus(environ)
    if not seen:
        text = f"CUDA_VISIBLE_DEVICES={value!r} leaves no GPU: unset it, or name one by index or uuid"
        return [Check("visible", "problem", text)]
    names = ", ".join(
        (card.name or card.uuid or "unknown card") + (f" ({card.problem})" if card.problem else "") for card in seen
    )
    return [Check("visible", "ok", f"CUDA_VISIBLE_DEVICES leaves {names}")]


def compatible(
    driver: str | None, driver_cuda: int | None, torch: str | None, cuda: str | None, cards: Sequence[Gpu]
) -> list[Check]:
    """Whether this driver and these cards can run this torch, which was built with CUDA `cuda` (None: for CPUs).

    `driver_cuda` is the newest CUDA that the driver library knows, as NVML gives it (12080 is 12.8). Within a major
    version any driver of it will do.
    """
    if torch is None:
        return []
    if cuda is None:
        return [Check("torch", "problem", f"{torch} is a CPU build, it will not see the GPU; install a CUDA build")]
    need = _numbers(cuda)
    has = None if driver_cuda is None else (driver_cuda // 1000, driver_cuda % 1000 // 10)
    branch = None if driver is None else _numbers(driver)[0]
    oldest = DRIVERS.get(need[0])
    checks = []
    too_old_branch = branch is not None and oldest is not None and branch < oldest
    old = too_old_branch if has is None else has[0] < need[0]
    said = f"driver {driver}" + ("" if has is None else f" (up to CUDA {has[0]}.{has[1]})")
    if old:
        wanted = "a newer driver" if oldest is None else f"driver {oldest} or newer"
        other = f"a torch built for CUDA {has[0]}" if has is not None else "a torch built for an older CUDA"
        checks.append(
            Check("cuda", "problem", f"torch is built with CUDA {cuda}, {said}: install {wanted}, or {other}")
        )
    else:
        newer = has is not None and has < need[:2]
        note = "; older than torch's within one major version, which works for compiled kernels only" if newer else ""
        checks.append(Check("cuda", "note" if newer else "ok", f"torch is built with CUDA {cuda}, {said}{note}"))
    low, high = capabilities(torch, cuda)
    for card in cards:
        if card.capability is not None and not low <= card.capability < high:
            has_text, where = ".".join(map(str, card.capability)), f"gpu {card.index}"
            cure = "CUDA 12.8 or newer" if card.capability >= high else "CUDA 12.6"
            text = f"compute capability {has_text}: torch {torch} has no kernels for it; install one built with {cure}"
            checks.append(Check(where, "problem", text))
    return checks


def capabilities(torch: str, cuda: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """The lowest compute capability that PyTorch's own builds have kernels for, and the first that they have none for.

    Source: "PyTorch CUDA Support Matrix" in its RELEASE.md, and pytorch/pytorch#172352 (no Volta from 2.11 and CUDA
    12.8 on). CUDA 13 cannot build for anything before Turing; Blackwell begins with CUDA 12.8.
    """
    built, release = _numbers(cuda)[:2], _numbers(torch)[:2]
    if built >= (13, 0) or (built >= (12, 8) and release >= (2, 11)):
        low = (7, 5)
    else:
        low = (7, 0) if built >= (12, 8) else (5, 0)
    return low, ((99, 0) if built >= (12, 8) else (10, 0))


def _numbers(text: str) -> tuple[int, ...]:
    """The first two numbers of a version, 0 where there is none."""
    found = [int(n) for n in re.findall(r"\d+", text.split("+")[0])]
    return tuple([*found, 0, 0][:2])


def _environment(environ: Mapping[str, str]) -> list[Check]:
    """Variables that would falsify what is measured, or that an outer launcher left."""
    checks = [
        Check("environment", "problem", f"{name}={environ[name]} {why}: unset it")
        for name, why in FALSIFYING.items()
        if name in environ and not (name == "CUDA_LAUNCH_BLOCKING" and environ[name] in ("", "0"))
    ]
    ranks = [name for name in RANK_VARIABLES if name in environ]
    if ranks:
        said = (
            f"{', '.join(ranks)} set by an outer launcher; workers start their own ranks: run the sweep outside of it"
        )
        checks.append(Check("environment", "note", said))
    return checks


def _disk(results: Path) -> Check:
    """Room where the rows will go: on the nearest folder above that exists."""
    try:
        place = results.resolve()
        folder = next((folder for folder in (place, *place.parents) if folder.exists()), Path("/"))
        free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        return Check("disk", "problem", f"{results} cannot be looked at: {error.strerror}; name another --results")
    return Check("disk", "ok" if free > 5 else "problem", f"{free:.1f} GiB free for {results}")


def _host() -> list[Check]:
    checks = []
    with contextlib.suppress(OSError, psutil.Error):
        available = psutil.virtual_memory().available / GIB
        level = "ok" if available > 4 else "problem"
        checks.append(Check("memory", level, f"{available:.1f} GiB of host memory available"))
    with contextlib.suppress(OSError, psutil.Error):
        load, cores = psutil.getloadavg()[0], psutil.cpu_count() or 1
        checks.append(Check("load", "ok" if load < 0.5 * cores else "note", f"load {load:.1f} on {cores} cores"))
    return checks


def facts() -> dict[str, Any]:
    """The provenance columns that do not depend on the worker."""
    return {
        "host": platform.node(),
        "cpu_name": cpu_name(),
        "python_version": platform.python_version(),
        "git_commit": git_commit(),
        "torch_version": torch_version(),
        "transformers_version": version("transformers"),
    }
