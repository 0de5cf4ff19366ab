"""A node's memory: how many ranks share it, how much there is, and what their processes take of it beside tensors.

Sizes in bytes. What the tensors take is predicted by runners/predict/replay_trace.py and measured by
runners/measure/counters.py.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from vramsweep.harness.spec import runner_table

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

GIB = 1 << 30
MIB = 1 << 20
# What a data loader's worker has for itself, the rest being its rank's pages, after 200 batches of token ids, by
# benchmarks/host_check.py. A data set that reads and decodes more takes more.
LOADER_WORKER = 16 * MIB


def ranks(trial: Trial) -> int:
    """How many ranks the fullest node has."""
    return min(trial.world_size, trial.device.gpus_per_node) if trial.device.name == "simulated" else trial.world_size


def loader_workers(trial: Trial) -> int:
    """How many processes load data for each rank."""
    option = runner_table.runner(trial.runner.name).loader_workers
    return int(trial.runner.options.get(option) or 0) if option else 0


def limit(trial: Trial) -> int | None:
    """The simulated node's memory; None where it is not known."""
    given = trial.device.node_memory_gib
    return None if given is None else int(given * GIB)


class Room(NamedTuple):
    """Memory of this machine, or of a cgroup: all that may be used, and what is still free or would be made free."""

    total: int
    available: int


def memory_room(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Room:
    """Where least is left: on this machine, or in one of the cgroups that limit us."""
    machine = psutil.virtual_memory()
    return min([Room(machine.total, machine.available), *_limited(own, root)], key=lambda one: one.available)


def memory_here(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """The memory of this machine, or of the least of our cgroups."""
    return min([psutil.virtual_memory().total, *(limited.total for limited in _limited(own, root))])


def _limited(own: Path, root: Path) -> Iterator[Room]:
    """The cgroups that have a limit. Of what is used there, files read from a disk, and what is known of folders, make
    room for others. Not covered: ZFS's cache, which the kernel does not call available.

    Source: the kernel's Documentation/admin-guide, cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    for line in own.read_text().splitlines() if own.exists() else []:
        controllers, path = line.split(":", 2)[1:]
        if controllers not in ("", "memory"):
            continue
        second = controllers == ""
        top = root if second else root / "memory"
        most, used = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        names = r"(?:(?:in)?active_file|slab_reclaimable)" if second else r"total_(?:in)?active_file"
        given_back = re.compile(rf"^{names} (\d+)$", re.MULTILINE)
        place = top / path.lstrip("/")
        for folder in (place, *place.parents):
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                limit = int((folder / most).read_text())
                taken = 0
                with contextlib.suppress(OSError, ValueError):  # a limit that does not say what is used
                    cached = sum(map(int, given_back.findall((folder / "memory.stat").read_text())))
                    taken = max(0, int((folder / used).read_text()) - cached)
                yield Room(limit, max(0, limit - taken))
            if folder == top:
                break
