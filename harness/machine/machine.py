"""What machine this is; is it healthy and ours alone. Reads NVML, /proc and git; starts nothing on a GPU.

Every reading that this machine does not give is None. Not covered: what torch sees (runners/measure/step_meter.py).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from vramsweep.harness.messages import optional_dependencies
from vramsweep.harness.spec.shardings import ZERO
from vramsweep.harness.spec.techniques.catalog import version as version
from vramsweep.version import __version__

# a light install, which reads rows, has none
pynvml: Any = importlib.import_module("pynvml") if importlib.util.find_spec("pynvml") else None

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

    Without it no GPU is seen. The distributions `pynvml` (before 12) and `nvidia-ml-py3` install a module of the same
    name with older functions.
    """
    if pynvml is None:
        return optional_dependencies.missing_package("pynvml")
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


def ask_nvml(name: str, *arguments: Any) -> tuple[Any, str | None]:
    """One NVML query by its name: the answer, or None and why there is none."""
    if nvml_problem():  # those old modules take and give bytes
        arguments = tuple(a.encode() if isinstance(a, str) else a for a in arguments)
    try:
        answer = getattr(pynvml, name)(*arguments)
        return answer.decode() if isinstance(answer, bytes) else answer, None  # older bindings give bytes
    except AttributeError:
        return None, nvml_problem() or f"pynvml has no {name}"
    except _NVML_ERROR as error:
        return None, str(error)


def gpus() -> list[Gpu]:
    """The machine's GPUs in NVML's order; empty without a driver. One that cannot be asked is listed all the same."""
    with nvml() as present:
        if not present:
            return []
        count, _ = ask_nvml("nvmlDeviceGetCount")
        driver, _ = ask_nvml("nvmlSystemGetDriverVersion")
        found = []
        for index in range(count or 0):
            handle, problem = ask_nvml("nvmlDeviceGetHandleByIndex", index)
            empty = Gpu(index, None, None, driver, None, None, None, problem=problem)
            found.append(empty if handle is None else replace(_gpu(index, handle, driver), slices=_slices(handle)))
        return found


def _slices(handle: Any) -> tuple[str, ...] | None:
    """The uuids of a card's MIG slices; None if it is not in MIG mode."""
    mode, _ = ask_nvml("nvmlDeviceGetMigMode", handle)
    if mode is None or mode[0] != 1:
        return None
    count, _ = ask_nvml("nvmlDeviceGetMaxMigDeviceCount", handle)
    found = (ask_nvml("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)[0] for number in range(count or 0))
    named = (ask_nvml("nvmlDeviceGetUUID", one)[0] for one in found if one is not None)
    return tuple(uuid for uuid in named if uuid is not None)


def _gpu(index: int, handle: Any, driver: str | None) -> Gpu:
    queries = ("Name", "UUID", "MemoryInfo", "ComputeRunningProcesses", "CudaComputeCapability")
    answers, reasons = zip(*(ask_nvml(f"nvmlDeviceGet{query}", handle) for query in queries), strict=True)
    # a card without a compute capability or a list of processes can still be used; one without a memory is not whole
    problem = next(filter(None, reasons[:3]), None)
    name, uuid, memory, processes, capability = answers
    return Gpu(
        index,
        name,
        uuid,
        driver,
        None if memory is None else int(memory.total),
        None if memory is None else int(memory.used),
        None if processes is None else tuple(p.pid for p in processes),
        None if capability is None else (int(capability[0]), int(capability[1])),
        problem,
    )


def visible_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs and MIG slices that CUDA_VISIBLE_DEVICES leaves to a process, in its order.

    Of a card in MIG mode CUDA sees its first slice, or the one that is named "MIG-<uuid>". A slice that NVML may not be
    asked about is there all the same, its values None: what is named is meant to be used. A card that has no uuid
    beside others that do is lost, and left out.
    """
    found = gpus()
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return _one_slice([_used(card, found) for card in found])
    chosen = []
    for entry in (entry.strip() for entry in value.split(",")):
        card = _named(entry, found)
        if card is None:  # as CUDA does: everything after an unknown entry is invisible
            break
        chosen.append(card)
    return _one_slice(chosen)


NVML_ORDER = "PCI_BUS_ID"  # CUDA_DEVICE_ORDER for NVML's own


def counted_otherwise(environ: Mapping[str, str]) -> str | None:
    """What to know where cards that are not alike are told apart by an index, or by none: CUDA alone begins with the
    fastest, by a rule that it does not tell, and workers are told to count as NVML does. Else None."""
    value, found = environ.get("CUDA_VISIBLE_DEVICES"), gpus()
    indexed = value is None or any(entry.strip().isdigit() for entry in value.split(","))
    if len({card.name for card in found}) < 2 or not indexed or environ.get("CUDA_DEVICE_ORDER") == NVML_ORDER:
        return None
    listed = ", ".join(f"{card.index} is {card.name or 'unknown'} ({card.uuid or 'no uuid'})" for card in found)
    return (
        f"GPUs that are not alike are counted as nvidia-smi does, not CUDA's fastest first: {listed}; "
        f"CUDA_DEVICE_ORDER={NVML_ORDER} or a uuid in CUDA_VISIBLE_DEVICES says that this is meant"
    )


def is_same_gpu(name: str, uuid: str) -> bool | None:
    """Whether CUDA means the card or slice of this name (GPU-..., MIG-..., or how it begins) by this uuid; None where
    that cannot be told. Of a slice it may say the slice's own or the card's."""
    name, uuid = name.lower(), uuid.lower()
    if not uuid.strip("0-"):
        return None
    if name.startswith(("gpu-", "mig-gpu-")):
        return uuid.startswith(name.removeprefix("mig-").removeprefix("gpu-").partition("/")[0])
    owner = next((str(card.uuid).lower() for card in gpus() if name in map(str.lower, card.slices or ())), None)
    return uuid.startswith(name.removeprefix("mig-")) or (None if owner is None else owner == f"gpu-{uuid}")


def _one_slice(cards: list[Gpu]) -> list[Gpu]:
    """A CUDA process sees one MIG slice at most, and then nothing else."""
    whole = [card for card in cards if card.uuid is not None] or cards
    return next(([card] for card in whole if str(card.uuid).startswith("MIG-")), whole)


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
        handle, problem = ask_nvml("nvmlDeviceGetHandleByUUID", entry) if present else (None, "NVML is gone")
        if handle is None:
            unknown = Gpu(-1, None, entry, cards[0].driver, None, None, None)
            return replace(unknown, problem=f"the MIG slice cannot be asked: {problem}")
        parent, _ = ask_nvml("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        index, _ = ask_nvml("nvmlDeviceGetIndex", parent) if parent is not None else (None, None)
        found = _gpu(-1 if index is None else int(index), handle, cards[0].driver)
        capability, _ = ask_nvml("nvmlDeviceGetCudaComputeCapability", parent if parent is not None else handle)
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


@dataclass(frozen=True)
class Holder:
    """A process that holds memory on a card, its bytes where NVML says them, and whether it computes or only draws."""

    pid: int
    bytes: int | None
    computes: bool


def holders(card: Gpu) -> list[Holder]:
    """The processes that hold memory on a card or slice, the largest first."""
    draw, compute = (query_gpu(card, f"{kind}RunningProcesses") or [] for kind in ("Graphics", "Compute"))
    found = {p.pid: Holder(p.pid, getattr(p, "usedGpuMemory", None), p in compute) for p in (*draw, *compute)}
    return sorted(found.values(), key=lambda one: -(one.bytes or 0))


def query_gpu(card: Gpu, query: str, *arguments: int) -> Any:
    """One of NVML's queries about a card or slice, by its name; None where it does not say."""
    with nvml() as present:
        handle, _ = ask_nvml("nvmlDeviceGetHandleByUUID", card.uuid) if present and card.uuid else (None, None)
        return None if handle is None else ask_nvml(f"nvmlDeviceGet{query}", handle, *arguments)[0]


def cpus_near(card: Gpu, query: str = "CpuAffinity", *scope: int) -> tuple[int, ...]:
    """The CPUs next to a card, or with "MemoryAffinity", 0 its NUMA nodes; none where NVML does not say."""
    words = query_gpu(card, query, 64, *scope) or ()  # of 64 bits: more CPUs than a machine has
    return tuple(64 * n + bit for n, word in enumerate(words) for bit in range(64) if word >> bit & 1)


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
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed, perhaps within a checkout of the user's own
        return None

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if (commit := git("rev-parse", "--short=12", "HEAD")) is None:
        return None
    return commit + "+dirty" if git("status", "--porcelain", "--untracked-files=no") else commit


def _stated(name: str) -> str | None:
    """What torch/version.py says of it, found without importing torch; None without torch."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            text = (Path(folder) / "version.py").read_text(encoding="utf-8")
            match = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
            return match[1] if match else None
    return None


def deepspeed_version(sharding: str) -> str | None:
    """The installed version of DeepSpeed where it divides the work; None where it is not used."""
    return version("deepspeed") if sharding in ZERO else None


def torch_version() -> str | None:
    """torch.__version__ ("2.13.0+cu130"), without importing torch; None where it is not installed.

    The installed distribution's version may lack the part behind "+", which says what it was built for.
    """
    return _stated("__version__") or version("torch")


def torch_cuda() -> str | None:
    """The CUDA version that torch was built with ("12.8"), without importing it; None for a CPU build or no torch."""
    return _stated("cuda")


def choose_device(environ: Mapping[str, str]) -> tuple[str, str]:
    """The device that `device=auto` stands for, cuda or simulated, and why, in words."""
    seen, built = visible_gpus(environ), torch_cuda()
    if seen and built is not None:
        names = ", ".join(card.name or card.uuid or "unknown GPU" for card in seen)
        return "cuda", f"{names}; torch is built with CUDA {built}"
    if seen:
        return "simulated", "torch is a build for CPUs" if torch_version() else "torch is not installed"
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is not None and gpus():
        return "simulated", f"CUDA_VISIBLE_DEVICES={value!r} leaves no GPU"
    return "simulated", "there is no NVIDIA driver or GPU"


def host_load() -> float | None:
    """The load average over a minute, per core; None where there is none."""
    with contextlib.suppress(OSError):
        return psutil.getloadavg()[0] / (psutil.cpu_count() or 1)
    return None


def operating_system() -> str:
    """Return the kernel with its release, and the distribution where its file says it."""
    with contextlib.suppress(OSError):
        return f"{platform.system()} {platform.release()}, {platform.freedesktop_os_release()['PRETTY_NAME']}"
    return f"{platform.system()} {platform.release()}"


def machine_facts() -> dict[str, Any]:
    """The provenance columns that do not depend on the worker."""
    return {
        "host": platform.node(),
        "cpu_name": cpu_name(),
        "python_version": platform.python_version(),
        "operating_system": operating_system(),
        "git_commit": git_commit(),
        "vramsweep_version": __version__,
        "torch_version": torch_version(),
        "transformers_version": version("transformers"),
    }
