"""A node's memory in bytes: how much there is, how many ranks share it, and what their processes take besides tensors.

runners/predict/replay_trace.py predicts the memory of the tensors, and runners/measure/counters.py measures it.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from vramsweep.harness.spec import runner_table

if TYPE_CHECKING:  # a user's own script may be measured without pydantic installed (observer.py)
    from vramsweep.harness.spec.trial import Trial

GIB = 1 << 30
MIB = 1 << 20
# Private memory of a data loader's worker after 200 batches of token ids (benchmarks/host_check.py); its other pages
# are its rank's. A data set that reads and decodes more takes more.
LOADER_WORKER = 16 * MIB


def ranks(trial: "Trial") -> int:
    """Return the number of ranks on the fullest node."""
    return min(trial.world_size, trial.device.gpus_per_node) if trial.device.name == "simulated" else trial.world_size


def loader_workers(trial: "Trial") -> int:
    """Return the number of processes that load data for each rank."""
    option = runner_table.runner(trial.runner.name).loader_workers
    return int(trial.runner.options.get(option) or 0) if option else 0


def limit(trial: "Trial") -> int | None:
    """Return the simulated node's memory in bytes; None if unknown."""
    return None if trial.device.node_memory_gib is None else int(trial.device.node_memory_gib * GIB)


class Room(NamedTuple):
    """Memory of this machine or of a cgroup in bytes: all that may be used, and what is free or can be freed."""

    total: int
    available: int


def memory_room(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Room:
    """Return the memory of the machine or of the cgroup that limits us, whichever has the least available."""
    machine = psutil.virtual_memory()
    return min([Room(machine.total, machine.available), *_limited(own, root)], key=lambda one: one.available)


def memory_here(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory of this machine in bytes, or the lowest limit of our cgroups if that is less."""
    return min([psutil.virtual_memory().total, *(limited.total for limited in _limited(own, root))])


def _limited(own: Path, root: Path) -> Iterator[Room]:
    """Yield the memory of each of our cgroups that has a limit. Cached files, and reclaimable slab in cgroup v2, count
    as available. ZFS's cache does not, because the kernel does not call it available.

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
                with contextlib.suppress(OSError, ValueError):  # a cgroup that has a limit but no usage
                    cached = sum(map(int, given_back.findall((folder / "memory.stat").read_text())))
                    taken = max(0, int((folder / used).read_text()) - cached)
                yield Room(limit, max(0, limit - taken))
            if folder == top:
                break
