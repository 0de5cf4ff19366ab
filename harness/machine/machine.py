"""Facts about this machine from NVML, /proc, git and installed packages; starts nothing on a GPU.

A reading that this machine does not give is None. runners/measure/step_meter.py reads what torch sees.
"""

import contextlib
import importlib
import importlib.util
import itertools
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from vramsweep.harness.messages import suggestions
from vramsweep.harness.spec.shardings import ZERO
from vramsweep.harness.spec.techniques.catalog import version as version
from vramsweep.version import __version__

# a light install, which only reads rows, lacks it
pynvml: Any = importlib.import_module("pynvml") if importlib.util.find_spec("pynvml") else None

GIB = 1 << 30
# Names that we use of pynvml, among them the newest; older modules of that name lack some.
_NEEDED = ("NVMLError", "nvmlInit", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetCurrentClocksEventReasons")
_NVML_ERROR: type[Exception] = getattr(pynvml, "NVMLError", OSError)


@dataclass(frozen=True)
class Gpu:
    """One GPU or MIG slice as NVML reports it; memory in bytes; None where NVML does not say.

    `processes` are the ids of compute processes on it, `capability` is the CUDA compute capability. `problem` says why
    something is None, for a GPU that is lost or that a container may not query. `slices` are the uuids of its MIG
    slices; None for a GPU that is not in MIG mode, and for a slice.
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
    """Return why pynvml is not NVIDIA's own module, with the cure; None if it is.

    Without that module we see no GPU. The distributions `pynvml` (before 12) and `nvidia-ml-py3` install a module of
    the same name with older functions.
    """
    if pynvml is None:
        return suggestions.missing_package("pynvml")
    missing = [name for name in _NEEDED if not hasattr(pynvml, name)]
    if not missing:
        return None
    return (
        f"an outdated package shadows nvidia-ml-py: its pynvml has no {missing[0]}; "
        "pip uninstall -y pynvml nvidia-ml-py3 && pip install --force-reinstall nvidia-ml-py"
    )


@contextlib.contextmanager
def nvml() -> Iterator[bool]:
    """Initialise NVML for the block; yield whether there is a driver to query."""
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
    """Call an NVML function by its name. Return its answer and None, or None and the reason."""
    if nvml_problem():  # those older modules take and return bytes
        arguments = tuple(a.encode() if isinstance(a, str) else a for a in arguments)
    try:
        answer = getattr(pynvml, name)(*arguments)
        return answer.decode() if isinstance(answer, bytes) else answer, None  # older bindings return bytes
    except AttributeError:
        return None, nvml_problem() or f"pynvml has no {name}"
    except _NVML_ERROR as error:
        return None, str(error)


def gpus() -> list[Gpu]:
    """Return the machine's GPUs in NVML's order, also those that cannot be queried; empty without a driver."""
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
    """Return the uuids of a GPU's MIG slices; None if it is not in MIG mode."""
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
    # a GPU without compute capability or list of processes can still be used; one without memory size is incomplete
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
    """Return the GPUs and MIG slices that CUDA_VISIBLE_DEVICES leaves to a process, in its order.

    Of a GPU in MIG mode CUDA sees the first slice, or the one named "MIG-<uuid>". A named slice that NVML cannot query
    is listed with values None, because its user means to use it. A GPU without a uuid is lost; it is left out if others
    have one.
    """
    found = gpus()
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return _one_slice([_used(card, found) for card in found])
    chosen = (_named(entry.strip(), found) for entry in value.split(","))
    # as CUDA does: everything after an unknown entry is invisible
    return _one_slice([card for card in itertools.takewhile(bool, chosen) if card])


NVML_ORDER = "PCI_BUS_ID"  # the CUDA_DEVICE_ORDER that is NVML's


def counted_otherwise(environ: Mapping[str, str]) -> str | None:
    """Return a note if GPUs of several models are chosen by index or not at all, else None. By default CUDA counts the
    fastest first, by a rule that it does not publish; workers count as NVML does."""
    value, found = environ.get("CUDA_VISIBLE_DEVICES"), gpus()
    indexed = value is None or any(entry.strip().isdigit() for entry in value.split(","))
    if len({card.name for card in found}) < 2 or not indexed or environ.get("CUDA_DEVICE_ORDER") == NVML_ORDER:
        return None
    listed = ", ".join(f"{card.index} is {card.name or 'unknown'} ({card.uuid or 'no uuid'})" for card in found)
    return (
        f"these different GPUs are numbered as in nvidia-smi, not by CUDA's default (fastest first): {listed}; "
        f"confirm this with CUDA_DEVICE_ORDER={NVML_ORDER} or with uuids in CUDA_VISIBLE_DEVICES"
    )


def is_same_gpu(name: str, uuid: str) -> bool | None:
    """Return whether CUDA's `uuid` is that of the GPU or slice `name` (GPU-..., MIG-..., or its beginning); None if
    unknown. For a slice CUDA may report the slice's own uuid or the GPU's."""
    name, uuid = name.lower(), uuid.lower()
    if not uuid.strip("0-"):
        return None
    if name.startswith(("gpu-", "mig-gpu-")):
        return uuid.startswith(name.removeprefix("mig-").removeprefix("gpu-").partition("/")[0])
    owner = next((str(card.uuid).lower() for card in gpus() if name in map(str.lower, card.slices or ())), None)
    return uuid.startswith(name.removeprefix("mig-")) or (None if owner is None else owner == f"gpu-{uuid}")


def _one_slice(cards: list[Gpu]) -> list[Gpu]:
    """Return only the first MIG slice if there is one, because a CUDA process then sees nothing else; else the GPUs."""
    whole = [card for card in cards if card.uuid is not None] or cards
    return next(([card] for card in whole if str(card.uuid).startswith("MIG-")), whole)


def _named(entry: str, cards: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU or slice that an entry of CUDA_VISIBLE_DEVICES names by index or start of its uuid, or None."""
    if entry.startswith("MIG-"):
        return _slice(entry, cards)
    hits = [card for card in cards if entry == str(card.index)]
    hits += [card for card in cards if entry and card.uuid is not None and card.uuid.startswith(entry)]
    return _used(hits[0], cards) if hits else None


def _used(card: Gpu, cards: Sequence[Gpu]) -> Gpu:
    """Return what CUDA uses if this GPU is named: its first slice if it has any, else the GPU."""
    return (_slice(card.slices[0], cards) if card.slices else None) or card


def _slice(entry: str, cards: Sequence[Gpu]) -> Gpu | None:
    """Return the MIG slice "MIG-<uuid>" (older drivers: "MIG-GPU-<uuid>/<gi>/<ci>"); None if there are no GPUs."""
    if not cards:
        return None
    with nvml() as present:
        handle, problem = ask_nvml("nvmlDeviceGetHandleByUUID", entry) if present else (None, "NVML is not available")
        if handle is None:
            why = f"the MIG slice cannot be queried: {problem}"
            return Gpu(-1, None, entry, cards[0].driver, None, None, None, problem=why)
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
    """Query these GPUs and slices anew; return them without those that are gone."""
    found = gpus()
    known = [card.uuid for card in cards if card.uuid is not None]
    slices = (_slice(uuid, found) for uuid in known if uuid.startswith("MIG-"))
    return [card for card in found if card.uuid in known] + [one for one in slices if one is not None]


@dataclass(frozen=True)
class Holder:
    """A process that holds memory on a GPU: its bytes (None if NVML has none), whether it computes or only draws."""

    pid: int
    bytes: int | None
    computes: bool


def holders(card: Gpu) -> list[Holder]:
    """Return the processes that hold memory on a GPU or slice, the largest first."""
    draw, compute = (query_gpu(card, f"{kind}RunningProcesses") or [] for kind in ("Graphics", "Compute"))
    found = {p.pid: Holder(p.pid, getattr(p, "usedGpuMemory", None), p in compute) for p in (*draw, *compute)}
    return sorted(found.values(), key=lambda one: -(one.bytes or 0))


def query_gpu(card: Gpu, query: str, *arguments: int) -> Any:
    """Return the answer of NVML's nvmlDeviceGet`query` about a GPU or slice; None if it has none."""
    with nvml() as present:
        handle, _ = ask_nvml("nvmlDeviceGetHandleByUUID", card.uuid) if present and card.uuid else (None, None)
        return None if handle is None else ask_nvml(f"nvmlDeviceGet{query}", handle, *arguments)[0]


def cpus_near(card: Gpu, query: str = "CpuAffinity", *scope: int) -> tuple[int, ...]:
    """Return the CPUs next to a GPU, or with "MemoryAffinity", 0 its NUMA nodes; empty if NVML does not say."""
    words = query_gpu(card, query, 64, *scope) or ()  # 64 words of 64 bits are more CPUs than a machine has
    return tuple(64 * n + bit for n, word in enumerate(words) for bit in range(64) if word >> bit & 1)


def uuids(cards: Sequence[Gpu]) -> list[str]:
    """Return the uuids for CUDA_VISIBLE_DEVICES that leave just these GPUs; empty (do not set it) if one is unknown."""
    known = [card.uuid for card in cards if card.uuid is not None]
    return known if len(known) == len(cards) else []


def too_many_ranks(visible: int, world_size: int) -> str | None:
    """Return why a trial of `world_size` ranks cannot run if a process sees `visible` GPUs, or None if it can.

    Also None without any visible GPU, because that is a fault of the machine and not of the trial.
    """
    if visible == 0 or world_size <= visible:
        return None
    return (
        f"world_size={world_size} needs {world_size} GPUs, but {visible} {'is' if visible == 1 else 'are'} visible; "
        f"use world_size={visible} or fewer, or a larger node"
    )


def host_oom_kills() -> int:
    """Return how often the kernel's out-of-memory killer killed a process since boot; 0 if it is not counted."""
    return int(_find_in(Path("/proc/vmstat"), r"^oom_kill (\d+)$") or 0)


@cache
def cpu_name() -> str | None:
    """Return the processor's name; None if unknown."""
    return _find_in(Path("/proc/cpuinfo"), r"^model name\s*: (.+)$") or platform.processor() or None


def _find_in(file: Path, pattern: str) -> str | None:
    """Return the group of the first line that the pattern fits; None if there is none, or no such file."""
    with contextlib.suppress(OSError):
        match = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
        return match[1] if match else None
    return None


@cache
def git_commit() -> str | None:
    """Return the commit of this checkout, with "+dirty" if tracked files were changed; None outside one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed, perhaps in a checkout of the user's
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
    """Return the value of `name` in torch/version.py without importing torch; None if there is none."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            return _find_in(Path(folder) / "version.py", rf"^{name}\b[^=\n]*= *['\"]([^'\"]+)['\"]")
    return None


def deepspeed_version(sharding: str) -> str | None:
    """Return the installed version of DeepSpeed if the sharding uses it, else None."""
    return version("deepspeed") if sharding in ZERO else None


def torch_version() -> str | None:
    """Return torch.__version__ ("2.13.0+cu130") without importing torch; None if it is not installed.

    The installed distribution's version may lack the part behind "+", which says what it was built for.
    """
    return _stated("__version__") or version("torch")


def torch_cuda() -> str | None:
    """Return the CUDA version torch was built with ("12.8") without importing it; None for a CPU build or no torch."""
    return _stated("cuda")


def choose_device(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the device that `device=auto` stands for, cuda or simulated, and why, in words."""
    seen, built = visible_gpus(environ), torch_cuda()
    if seen and built is not None:
        names = ", ".join(card.name or card.uuid or "unknown GPU" for card in seen)
        return "cuda", f"{names}; torch is built with CUDA {built}"
    if seen:
        return "simulated", "torch is built without CUDA" if torch_version() else "torch is not installed"
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is not None and gpus():
        return "simulated", f"CUDA_VISIBLE_DEVICES={value!r} leaves no GPU"
    return "simulated", "there is no NVIDIA driver or GPU"


def host_load() -> float | None:
    """Return the load average over a minute, per core; None if there is none."""
    with contextlib.suppress(OSError):
        return psutil.getloadavg()[0] / (psutil.cpu_count() or 1)
    return None


def operating_system() -> str:
    """Return the kernel with its release, and the distribution if its file names it."""
    with contextlib.suppress(OSError):
        return f"{platform.system()} {platform.release()}, {platform.freedesktop_os_release()['PRETTY_NAME']}"
    return f"{platform.system()} {platform.release()}"


def machine_facts() -> dict[str, Any]:
    """Return the provenance columns that do not depend on the worker."""
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
