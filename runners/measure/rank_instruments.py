"""The instruments of one rank in one object, and the largest peaks read from them, in total and by part of a job.

In: a device. Out: peaks in bytes, and columns on parts of a job, host memory and other processes.
"""

import datetime
import os
from collections.abc import Sequence
from typing import Any

import torch

from vramsweep.harness.machine import host_memory, machine
from vramsweep.harness.messages.errors import EnvironmentFault
from vramsweep.harness.rows.outcome import is_machine_fault
from vramsweep.harness.rows.schema import OF_TRAINING, PARTS
from vramsweep.runners.measure import counters
from vramsweep.runners.measure.compile_events import Compiler
from vramsweep.runners.measure.counters import COUNTERS, Clock, CudaMemory, HostMemory, Memory, Nvml, Peaks, Process
from vramsweep.runners.measure.dispatch_modes import LiveBytes, storages_alive
from vramsweep.runners.measure.peak_counters import SHARED
from vramsweep.runners.rank.aggregate_ranks import Columns

MET = "vramsweep: ranks before the measured steps"
MEETING_S = 10.0  # a pipeline stage may only arrive after the one before it has continued


class Gauges:
    """The instruments of one rank, and the largest of all peaks taken with them.

    The device's memory and processes are read before torch touches the device, because torch makes a context there.
    In the process of a script, which `worker` has started, torch has done so already. Then peaks count from that
    process's start, and no thread watches it between the steps. `imported` are the storages that its imports had made,
    and `compiler` was there before anything was compiled.
    """

    def __init__(
        self,
        device: torch.device,
        worker: int | None = None,
        imported: Sequence[torch.UntypedStorage] = (),
        compiler: Compiler | None = None,
    ) -> None:
        self.worker = worker
        self.process = Process(begun=worker is not None)
        self.nvml = Nvml(device)
        self.device, self.cuda = device, device.type == "cuda"
        if worker is None:
            self.process.watch()
            self.baseline = self.nvml.used()
            self.listed = self.nvml.processes()
            _begin(device)
            imported = [] if self.cuda else storages_alive()  # a fork server's, from before its gc.freeze, show nowhere
        else:
            self.baseline = self.listed = None
        self.imported = imported
        self.memory: Memory = HostMemory(self.process)
        if self.cuda and worker is None:
            self.memory = CudaMemory(device)
        elif self.cuda:
            SHARED.install()
            self.memory = CudaMemory(device, SHARED)
        self.clock = Clock(device)
        self.compiler = compiler or Compiler()
        self.peaks: Peaks = dict.fromkeys(COUNTERS)
        self.part: str | None = None  # the present part of a whole job
        self.parts: dict[str, Peaks] = {}
        self._kept: Peaks = dict.fromkeys(COUNTERS)  # peaks of the training, from before another part interrupted it

    def release(self) -> None:
        """Leave the script's process as it was found."""
        SHARED.uninstall()

    def others(self) -> list[int] | None:
        """Return the compute processes on the device that are not ours; None if unknown."""
        listed = self.nvml.processes()
        return counters.foreign(self.listed, listed, counters.ours(listed or (), self.worker))

    def take(self) -> Peaks:
        """Return the peaks since the last call, without those of parts of a job that are no training."""
        read = self._read()
        peaks = read if self.part is None or self.part in OF_TRAINING else dict.fromkeys(COUNTERS)
        peaks, self._kept = larger(self._kept, peaks), dict.fromkeys(COUNTERS)
        self.peaks = larger(self.peaks, peaks)
        return peaks

    def begin_job(self, counted: bool = True) -> None:
        """Start to tell the parts of a whole job apart, load first; on a CPU count every tensor, if `counted`."""
        self.part = "load"
        if isinstance(self.memory, HostMemory) and counted:
            self.memory.live = LiveBytes(self.imported)
            self.memory.live.__enter__()  # to the end of the process

    def enter(self, part: str | None) -> None:
        """Begin this part of a job, one of PARTS, or end the job with None."""
        peaks = self._read()
        if self.part in OF_TRAINING:
            self._kept = larger(self._kept, peaks)
        self.part = part

    def _read(self) -> Peaks:
        peaks = self.memory.take()
        if self.part is not None:
            self.parts[self.part] = larger(self.parts.get(self.part, peaks), peaks)
        return peaks

    def part_columns(self) -> Columns:
        """Return the peaks of each part of a job as columns; none without parts.

        On a CPU reserved is left out, because the resident set of a process only ever rises.
        """
        if not self.parts:
            return {}
        of = ("allocated", "reserved") if self.cuda else ("allocated",)
        found = {c: {p: peak for p in PARTS if p in self.parts and (peak := self.parts[p][c]) is not None} for c in of}
        known = next((peaks for peaks in found.values() if peaks), {})
        return {
            **{f"part_peak_{c}_bytes": peaks or None for c, peaks in found.items()},
            "largest_part": max(known, key=lambda part: known[part], default=None),
        }

    def host(self) -> Columns:
        """Return this rank's share of the columns on host memory, read after the measured steps."""
        peak, started = self.process.look(), self.process.started()
        if self.worker is not None:  # only read now and then
            peak = None
        return {
            "host_ranks": 1,
            "host_peak_bytes": None if peak is None or started is None else peak + started,
            "host_processes_bytes": self.process.baseline,
            "host_workers_bytes": started,
            "host_pinned_peak_bytes": counters.pinned_peak() if self.cuda else None,
            "host_resident_peak_bytes": self.process.resident_peak(),
            "host_total_bytes": host_memory.memory_here(),
        }

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)


def meet_ranks() -> list[str]:
    """Wait until every rank of the process group is here; return a note if one did not come within MEETING_S seconds.

    They meet in the group's store, because NCCL's barrier would allocate on the GPU.
    """
    group = torch.distributed
    if not (group.is_available() and group.is_initialized()) or group.get_world_size() == 1:
        return []
    store: Any = group.distributed_c10d._get_default_store()
    if store is None:  # with MPI
        return []
    try:
        if store.add(MET, 1) == group.get_world_size():
            store.set(f"{MET} all", "")
        store.wait([f"{MET} all"], datetime.timedelta(seconds=MEETING_S))
    except RuntimeError:
        return [f"the ranks did not begin the measured steps together, because one was over {MEETING_S:g} s late"]
    return []


def _begin(device: torch.device) -> None:
    """Make the context on a CUDA device, with its peaks at zero. Raises EnvironmentFault if CUDA does not start."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.set_device(device)
        torch.cuda.init()
    except RuntimeError as error:  # driver too old, error 802, memory used by others: no trial has begun
        if not is_machine_fault(str(error)):  # an allocator setting that the driver refuses is the trial's fault
            raise
        raise EnvironmentFault(f"CUDA does not start on {device}: {str(error).splitlines()[0]}") from error
    _same_card(device)
    _name_by_index()
    torch.cuda.reset_peak_memory_stats(device)


def _same_card(device: torch.device) -> None:
    """Raise EnvironmentFault if CUDA has given another GPU than the one that CUDA_VISIBLE_DEVICES names by uuid."""
    name = dict(enumerate(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))).get(device.index or 0, "").strip()
    given = torch.cuda.get_device_properties(device)
    uuid = getattr(given, "uuid", None)  # an older torch has none
    if uuid is not None and name.startswith(("GPU-", "MIG-")) and machine.is_same_gpu(name, str(uuid)) is False:
        raise EnvironmentFault(
            f"CUDA gave this worker {given.name} (GPU-{uuid}), but CUDA_VISIBLE_DEVICES names {name}, so the "
            "wrong GPU would be measured; `vramsweep doctor` lists the GPUs"
        )


def _name_by_index() -> None:
    """Name the GPUs of CUDA_VISIBLE_DEVICES by index, for libraries that query NVML; CUDA has read it by now.

    DeepSpeed 0.19.8 takes each entry for NVML's index (accelerator/cuda_accelerator.py: _get_nvml_gpu_id). It ends in a
    ValueError if a scheduler, a user or this harness has named GPUs by uuid.
    """
    entries = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
    cards = machine.visible_gpus(os.environ)
    if entries and len(cards) == len(entries) and not any(str(card.uuid).startswith("MIG-") for card in cards):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(card.index) for card in cards)


def larger(a: Peaks, b: Peaks) -> Peaks:
    """Return the larger value of each counter; None if neither is known."""
    return {c: max((v for v in (a[c], b[c]) if v is not None), default=None) for c in COUNTERS}
