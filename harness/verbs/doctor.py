"""`doctor`: checks of this machine before a night's sweep: driver, torch, GPUs, disk, memory, load.

It lists environment variables that would falsify results. It reads what machine.py reads; it starts nothing on a GPU.
"""

import contextlib
import json
import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from vramsweep.harness.config import settings_reference
from vramsweep.harness.machine import machine
from vramsweep.harness.machine.machine import GIB, Gpu
from vramsweep.harness.process import worker_environment
from vramsweep.harness.verbs.cli import read_parser


@dataclass(frozen=True)
class Check:
    """One line of `doctor`: `level` is ok, note or problem."""

    name: str
    level: str
    text: str


# Oldest driver branch for each CUDA major version ("Minor Version Compatibility", CUDA Compatibility, NVIDIA).
DRIVERS = {11: 450, 12: 525, 13: 580}


def doctor(results: Path, environ: Mapping[str, str] = os.environ) -> list[Check]:
    """Return the checks that a user should read before a night's sweep."""
    checks = [Check("python", "ok", platform.python_version())]
    for package in ("torch", "transformers", "deepspeed"):
        found = machine.torch_version() if package == "torch" else machine.version(package)
        checks.append(Check(package, "ok" if found else "problem", found or f"not installed: pip install {package}"))
    if shadowed := machine.nvml_problem():
        checks.append(Check("nvml", "problem", shadowed))
    with machine.nvml():  # once, because without persistence mode each start loads the driver anew
        cards = machine.gpus()
        if not cards:
            checks.append(Check("gpu", "note", "no NVIDIA driver or GPU"))
        for card in cards:
            checks += _card(card)
        if cards:
            checks += _visible(environ)
            driver_cuda, _ = machine.ask_nvml("nvmlSystemGetCudaDriverVersion_v2")
            checks += compatible(cards[0].driver, driver_cuda, machine.torch_version(), machine.torch_cuda(), cards)
    checks += _auto(environ)
    checks += [Check("environment", "note", line) for line in worker_environment.describe_dropped(environ)]
    checks.append(_disk(results))
    checks += _host()
    return checks


def _auto(environ: Mapping[str, str]) -> list[Check]:
    """Return what device=auto and sweep=auto stand for here, and why."""
    device, why = machine.choose_device(environ)
    if device == "cuda":
        said = f"device=cuda, measured: {why}"
    else:
        card = settings_reference.of_option("device", device)["device.gpu"]
        said = f"device=simulated, predicted for {card} (gpu=NAME for another), because {why}"
    preset = settings_reference.option("sweep", device)
    return [
        Check("device=auto", "ok" if device == "cuda" else "note", said),
        Check("sweep=auto", "ok", f"sweep={device}: {preset.line}"),
    ]


def _card(card: Gpu) -> list[Check]:
    name = f"gpu {card.index}"
    size, driver = _size(card), card.driver or "unknown"
    level, said = "ok", ""
    if card.problem is not None and "permission" in card.problem.lower():
        where = "as is usual in a container with a MIG slice"
        level, said = "note", f"; some values cannot be read here ({card.problem}), {where}"
    elif card.problem is not None:
        cure = "exclude it with CUDA_VISIBLE_DEVICES, reset it, or reboot the node"
        level, said = "problem", f"; NVML reports: {card.problem}; {cure}"
    checks = [Check(name, level, f"{card.name or 'unknown GPU'}, {size}, driver {driver}{said}")]
    if card.uuid is not None:
        checks.append(_state(card))
    if card.slices is not None:
        slices = machine.again([replace(card, uuid=uuid) for uuid in card.slices])
        parts = [f"{one.name or one.uuid} of {_size(one)}" for one in slices]
        said = f"in MIG mode with {len(card.slices)} slice(s){': ' * bool(parts)}{', '.join(parts)}"
        how = f"choose one with CUDA_VISIBLE_DEVICES={card.slices[0]}" if card.slices else "create one: nvidia-smi mig"
        checks.append(Check(name, "note", f"{said}; {how}"))
    elif card.processes:
        pids = ", ".join(map(str, card.processes))
        checks.append(Check(name, "problem", f"other processes use it: pid {pids}; end them first"))
    elif card.memory_used is not None and card.memory_used > GIB:
        text = f"{card.memory_used / GIB:.1f} GiB in use although no process is listed; nvidia-smi may show more"
        checks.append(Check(name, "problem", text))
    return checks


def _state(card: Gpu) -> Check:
    """Check for what may spoil a night: a driver that is loaded again and again, memory errors. A value that NVML does
    not report is unknown, which is no problem."""
    queries = (("PersistenceMode",), ("EccMode",), ("TotalEccErrors", 1, 0), ("RemappedRows",))
    kept, ecc, errors, rows = (machine.query_gpu(card, *query) for query in queries)
    mode, nodes = {0: "off", 1: "on"}, ",".join(map(str, machine.cpus_near(card, "MemoryAffinity", 0)))
    state = {
        "persistence mode": mode.get(kept),
        "ECC": ecc and mode[ecc[0]] + (f" ({mode[ecc[1]]} after a reboot)" if ecc[0] != ecc[1] else ""),
        "uncorrected errors": errors,
        "row remaps pending": rows and ("no", "yes")[rows[2]],
        "row remaps failed": rows and ("no", "yes")[rows[3]],
        "NUMA node": nodes or None,
    }
    said = ", ".join(f"{name} {'unknown' if value is None else value}" for name, value in state.items())
    if errors or (rows and (rows[2] or rows[3])):
        return Check(f"gpu {card.index} state", "problem", f"{said}; reset the GPU, or have it replaced")
    cure = "; sudo nvidia-smi -pm 1 keeps the driver loaded" if kept == 0 else ""
    return Check(f"gpu {card.index} state", "note" if cure or (ecc and ecc[0] != ecc[1]) else "ok", said + cure)


def _size(card: Gpu) -> str:
    return "unknown memory" if card.memory_total is None else f"{card.memory_total / GIB:.1f} GiB"


def _visible(environ: Mapping[str, str]) -> list[Check]:
    """Check the GPUs that CUDA_VISIBLE_DEVICES leaves, if it is set, and the order in which they count."""
    value, otherwise = environ.get("CUDA_VISIBLE_DEVICES"), machine.counted_otherwise(environ)
    notes = [Check("order", "note", otherwise)] if otherwise else []
    if value is None:
        return notes
    if not (seen := machine.visible_gpus(environ)):
        text = f"CUDA_VISIBLE_DEVICES={value!r} leaves no GPU; unset it, or name a GPU by index or uuid"
        return [*notes, Check("visible", "problem", text)]
    named = ((one.name or one.uuid or "unknown GPU") + (f" ({one.problem})" if one.problem else "") for one in seen)
    return [*notes, Check("visible", "ok", f"CUDA_VISIBLE_DEVICES leaves {', '.join(named)}")]


def compatible(
    driver: str | None, driver_cuda: int | None, torch: str | None, cuda: str | None, cards: Sequence[Gpu]
) -> list[Check]:
    """Check whether this driver and these GPUs can run this torch, which was built with CUDA `cuda` (None: for CPUs).

    `driver_cuda` is the newest CUDA that the driver supports, as NVML gives it (12080 is 12.8). Any driver of the same
    major version will do.
    """
    if torch is None:
        return []
    if cuda is None:
        return [Check("torch", "problem", f"{torch} is a CPU build, which cannot use the GPU; install a CUDA build")]
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
        text = f"torch is built with CUDA {cuda}, too new for {said}; install {wanted}, or {other}"
        checks.append(Check("cuda", "problem", text))
    else:
        newer = has is not None and has < need[:2]
        note = "; the driver's CUDA is older (same major version), so only precompiled kernels work" if newer else ""
        checks.append(Check("cuda", "note" if newer else "ok", f"torch is built with CUDA {cuda}, {said}{note}"))
    low, high = capabilities(torch, cuda)
    for card in cards:
        if card.capability is not None and not low <= card.capability < high:
            has_text, where = ".".join(map(str, card.capability)), f"gpu {card.index}"
            cure = "CUDA 12.8 or newer" if card.capability >= high else "CUDA 12.6"
            text = f"torch {torch} has no kernels for compute capability {has_text}; install one built with {cure}"
            checks.append(Check(where, "problem", text))
    return checks


def capabilities(torch: str, cuda: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the lowest compute capability with kernels in PyTorch's own builds, and the first above it without.

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
    """Return the first two numbers of a version, 0 for a missing one."""
    found = [int(n) for n in re.findall(r"\d+", text.split("+")[0])]
    return tuple([*found, 0, 0][:2])


def _disk(results: Path) -> Check:
    """Check the free space for rows in `results`, or in the nearest folder above it that exists."""
    try:
        place = results.resolve()
        folder = next((folder for folder in (place, *place.parents) if folder.exists()), Path("/"))
        free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        return Check("disk", "problem", f"cannot read {results}: {error.strerror}; give another folder with --results")
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


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep doctor`; return the exit status."""
    from rich.text import Text

    from vramsweep.harness.messages.console import Console, make_table

    arguments = read_parser("doctor").parse_args(argv)
    checks = doctor(arguments.results)
    if arguments.json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        colours = {"ok": "green", "note": "yellow", "problem": "red"}
        rows = [(check.name, Text(check.level, style=colours[check.level]), check.text) for check in checks]
        Console().print(make_table(("check", "", ""), rows))
    return int(any(check.level == "problem" for check in checks))
