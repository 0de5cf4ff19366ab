"""What a rank is read with: the allocator's counters, the device's own view, a clock of marks, the autograd engine.

Not covered: which step is read how (step_meter.py), the operators of a step (dispatch_modes.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import psutil
import torch

from vramsweep.harness.machine import machine
from vramsweep.runners.measure.dispatch_modes import LiveBytes
from vramsweep.runners.measure.patches import patched
from vramsweep.runners.measure.peak_counters import SharedPeaks
from vramsweep.runners.measure.torch_hooks import BACKWARD, Passes

Peaks = dict[str, int | None]
COUNTERS = ("allocated", "active", "requested", "reserved", "inactive_split")


class CudaMemory:
    """PyTorch's allocator counters of one card, whichever is current; `shared` with a script that resets them, too.

    The driver's allocator (cudaMallocAsync) fills three of them, and no others.
    """

    name = "cuda_allocator"

    def __init__(self, device: torch.device, shared: SharedPeaks | None = None) -> None:
        self._device, self._shared = device, shared
        native = torch.cuda.get_allocator_backend() == "native"
        self.counters = COUNTERS if native else ("allocated", "active", "reserved")
        self.native = native
        self.held: int | None = None  # what was allocated at the last call of `take`
        self.held_reserved: int | None = None

    def take(self) -> Peaks:
        """The peaks since the last call; a counter that this backend does not fill is None."""
        if self._shared is None:
            stats = torch.cuda.memory_stats_as_nested_dict(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            stats = self._shared.take(self._device)
        self.held, self.held_reserved = (stats[f"{c}_bytes"]["all"]["current"] for c in ("allocated", "reserved"))
        return {c: stats[f"{c}_bytes"]["all"]["peak"] if c in self.counters else None for c in COUNTERS}

    def summary(self) -> dict[str, Any]:
        """Columns that are read once, at the end of the last measured step."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        reserved, allocated = (stats[f"{c}_bytes"]["all"]["current"] for c in ("reserved", "allocated"))
        return {
            "reserved_unallocated_bytes": reserved - allocated,
            "alloc_retries": self._counted(stats, "num_alloc_retries"),
            "alloc_ooms": self._counted(stats, "num_ooms"),
        }

    def _counted(self, stats: dict[str, Any], name: str) -> int | None:
        if not self.native:
            return None
        return int(stats[name]) if self._shared is None else self._shared.counted(self._device, name)


LOOK_S = 0.01


class Process:
    """This process's memory as the kernel counts it (/proc/self/status), in bytes; None where it does not tell.

    The kernel remembers the largest resident set, which mapped files and pages of others are part of; unknown where it
    cannot be told to start anew (gVisor's). What cannot be given back, anonymous and shared memory, is looked at by a
    thread from `watch` to `rest`, every `LOOK_S`; `peak` is the largest seen. One that has `begun` long ago keeps what
    it has, and has no baseline.
    """

    def __init__(self, begun: bool = False) -> None:
        self._anew = True
        try:
            if not begun:
                Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew: it would remember the parent's peak
        except OSError:
            self._anew = False
        self._status = os.open("/proc/self/status", os.O_RDONLY)  # read at every step, for the process's life
        self._done = threading.Event()
        self._resident: int | None = None  # VmHWM when it was read
        self.resident_baseline = None if begun else self.resident_peak()
        self.peak = self.held()
        self.baseline = None if begun else self.peak

    def _counted(self, *names: bytes) -> int | None:
        text = os.pread(self._status, 1 << 14, 0)
        found = [re.search(rb"^%b:\s*(\d+) kB$" % name, text, re.MULTILINE) for name in names]
        return None if None in found else sum(int(match[1]) * 1024 for match in found if match)

    def resident_peak(self) -> int | None:
        """VmHWM, since this object was made.

        Where getrusage, which is never less, stands at what that was, it has not risen, and the file need not be read:
        at every step that would be what a script notices most of us.
        """
        if not self._anew:
            return None
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if most != self._resident:
            self._resident = self._counted(b"VmHWM")
        return self._resident

    def held(self) -> int | None:
        """What cannot be given back now."""
        return self._counted(b"RssAnon", b"RssShmem")

    def look(self) -> int | None:
        """The largest amount seen that cannot be given back, the present one included."""
        now = self.held()
        self.peak = None if now is None or self.peak is None else max(self.peak, now)
        return self.peak

    def watch(self) -> None:
        """Look again and again, until `rest` or until nobody needs this object."""
        self._done.clear()
        threading.Thread(target=_look, args=(weakref.ref(self), self._done), daemon=True).start()

    def rest(self) -> None:
        """Look no more."""
        self._done.set()
        self.look()

    def started(self) -> int | None:
        """What the processes that this one has started have for themselves (data loader workers), and theirs."""
        try:
            return sum(_own_bytes(child.pid) for child in psutil.Process().children(recursive=True))
        except (OSError, psutil.Error, StopIteration):  # the kernel does not tell, or does not let us look
            return None

    def __del__(self) -> None:
        os.close(self._status)


def _look(process: weakref.ref[Process], done: threading.Event) -> None:
    while not done.wait(LOOK_S):
        found = process()
        if found is None:
            return
        found.look()
        del found


def _own_bytes(pid: int) -> int:
    folder = Path(f"/proc/{pid}")
    try:
        lines = (folder / "smaps_rollup").read_text().splitlines()
    except ProcessLookupError:  # it has ended, whether or not somebody has waited for it
        return 0
    except FileNotFoundError:
        if folder.exists():  # kernels without that file
            raise
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:"))


def pinned_peak() -> int | None:
    """The largest page-locked memory that torch's host allocator held, in bytes; None where it does not tell."""
    told = getattr(torch.cuda, "host_memory_stats", dict[str, int])()
    return told.get("reserved_bytes.peak", told.get("allocated_bytes.peak"))  # its first name, and today's


class HostMemory:
    """On CPU: reserved is the process's peak resident set; allocated is known only while a LiveBytes mode counts it."""

    name = "cpu_tensors_and_rss"

    def __init__(self, process: Process) -> None:
        self.live: LiveBytes | None = None
        self.held: int | None = None  # of every step it would have to be counted, which slows them down
        self.held_reserved: int | None = None  # nothing is reserved
        self._process = process

    def take(self) -> Peaks:
        peaks: Peaks = dict.fromkeys(COUNTERS)
        peaks["reserved"] = self._process.resident_peak()
        if self.live is not None:
            peaks["allocated"] = self.live.take()
        return peaks

    def summary(self) -> dict[str, Any]:
        return {}


Memory = CudaMemory | HostMemory  # a source of memory counters, in bytes


class Nvml:
    """The device's own view, through NVML; every value is None without a GPU or where the device does not give it."""

    def __init__(self, device: torch.device) -> None:
        self._handle: Any = None
        if device.type != "cuda":
            return
        cards = machine.visible_gpus(os.environ)
        index = device.index or 0
        if index < len(cards) and cards[index].uuid is not None:
            machine.ask_nvml("nvmlInit")
            self._handle, _ = machine.ask_nvml("nvmlDeviceGetHandleByUUID", cards[index].uuid)

    def read(self, query: str, *arguments: Any) -> Any:
        """One of NVML's queries about the device, by its name: an old pynvml lacks some."""
        return None if self._handle is None else machine.ask_nvml(query, self._handle, *arguments)[0]

    def used(self) -> int | None:
        """Bytes in use on the device, by anyone."""
        info = self.read("nvmlDeviceGetMemoryInfo")
        return None if info is None else int(info.used)

    def energy_j(self) -> float | None:
        """Energy since the driver loaded, in joules."""
        millijoules = self.read("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def throttle_reasons(self) -> set[str] | None:
        """Names of the clock event reasons in force, being idle left out."""
        bits = self.read("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # its name before driver 535
            bits = self.read("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else {name for bit, name in _REASONS.items() if bits & bit}

    def processes(self) -> frozenset[int] | None:
        """Ids of the compute processes on the device."""
        listed = self.read("nvmlDeviceGetComputeRunningProcesses")
        return None if listed is None else frozenset(process.pid for process in listed)

    def sm_clock_mhz(self) -> int | None:
        """The SM clock at this moment."""
        clock = self.read("nvmlDeviceGetClockInfo", _SM)
        return None if clock is None else int(clock)

    def facts(self) -> dict[str, Any]:
        """Columns about the device."""
        info = self.read("nvmlDeviceGetMemoryInfo")
        return {
            "gpu_name": self.read("nvmlDeviceGetName"),
            "gpu_uuid": self.read("nvmlDeviceGetUUID"),
            "driver_version": None if self._handle is None else machine.ask_nvml("nvmlSystemGetDriverVersion")[0],
            "device_total_bytes": None if info is None else int(info.total),
            "gpu_temperature_c": self.read("nvmlDeviceGetTemperature", 0),  # NVML_TEMPERATURE_GPU
            "gpu_sm_clock_mhz": self.sm_clock_mhz(),
            "gpu_sm_clock_max_mhz": self.read("nvmlDeviceGetMaxClockInfo", _SM),
        }


_SM = 1  # NVML_CLOCK_SM
# nvmlClocksEventReason* in nvml.h
_REASONS = {
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


def ours(pids: Iterable[int], worker: int | None = None) -> set[int]:
    """Those of the processes that belong to this attempt: to the worker's session, or started by one of it.

    The worker may be another process than this, one of its parents.
    """
    session = os.getsid(worker or 0)
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError, psutil.Error):  # it has ended, or the number is not of this container
            family = (pid, *(parent.pid for parent in psutil.Process(pid).parents()))
            if any(os.getsid(one) == session for one in family):
                found.add(pid)
    return found


def foreign(before: Collection[int] | None, after: Collection[int] | None, own: Collection[int]) -> list[int] | None:
    """Compute processes on the device that are not ours, from what NVML lists before we touched it and at work.

    A container hides our own number, and often the whole list: that tells nothing. A list without us in other numbers
    has one new entry that is ours; those that were there before are not, and of several new ones none can be told
    apart, so all are given. Without a new one we were there before, or are not listed: that tells nothing either.
    """
    if after is None:
        return None
    if set(own) & set(after):
        return sorted(set(after) - set(own))
    if not after or before is None:
        return None
    new = set(after) - set(before)
    if not new:
        return None
    return sorted(set(after) & set(before) | (new if len(new) > 1 else set()))


class Clock:
    """Marks at step boundaries: CUDA events, which cost the device no wait, or the host's clock on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._marks: list[Any] = []
        self._began = 0.0
        self.by_host: float | None = None  # seconds from the first mark to when the host knew of the last; on CUDA

    def mark(self) -> None:
        """A boundary is here."""
        if self._cuda:
            if not self._marks:
                self._began = time.perf_counter()
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def times(self) -> list[float]:
        """Seconds between consecutive marks; waits for the last one."""
        if self._cuda and self._marks:
            self._marks[-1].synchronize()
            self.by_host = time.perf_counter() - self._began
            return [a.elapsed_time(b) / 1000 for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]


def backward_boundaries(
    entered: Callable[[], None], left: Callable[[], None]
) -> contextlib.AbstractContextManager[None]:
    """Call `entered` before and `left` after each outermost backward pass that comes to its end."""

    def ended(over: bool) -> None:
        if over:
            left()

    passes = Passes(entered, ended)
    return patched((*one, passes.watched(getattr(*one))) for one in BACKWARD)


def scaler_skips(scaler: torch.amp.GradScaler, steps: int) -> Callable[[], int | None]:
    """How many updates `scaler` has skipped since now; of `steps` that are to come. Waits for the device when called.

    Each skip multiplies the scale by the backoff factor. None where it may have grown meanwhile, after that many
    updates in a row, or where it says nothing any more.
    """
    begun = scaler.state_dict()
    if not begun:  # it is not enabled
        return lambda: 0

    def skipped() -> int | None:
        scale = float(scaler.state_dict()["scale"])
        if steps >= begun["growth_interval"] or not 0 < scale <= begun["scale"] < math.inf:
            return None
        return round(math.log(scale / begun["scale"]) / math.log(begun["backoff_factor"]))

    return skipped
