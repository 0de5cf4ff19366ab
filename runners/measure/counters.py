"""Counters of one rank: allocator, host memory, NVML, a clock of marks, backward passes, skipped updates.

In: a device and this process. Out: bytes, seconds and counts, None where unknown.
"""

import contextlib
import gc
import json
import math
import os
import re
import resource
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import torch

from vramsweep.harness.machine import machine
from vramsweep.runners.measure.dispatch_modes import LiveBytes
from vramsweep.runners.measure.patches import patched
from vramsweep.runners.measure.peak_counters import SharedPeaks
from vramsweep.runners.measure.steady_memory import step_growth
from vramsweep.runners.measure.torch_hooks import BACKWARD, Passes

Peaks = dict[str, int | None]
COUNTERS = ("allocated", "active", "requested", "reserved", "inactive_split")


class CudaMemory:
    """PyTorch's allocator counters of one GPU, current or not; `shared` with a script that also resets them.

    The driver's allocator (cudaMallocAsync) fills only three of them.
    """

    name = "cuda_allocator"

    def __init__(self, device: torch.device, shared: SharedPeaks | None = None) -> None:
        self._device, self._shared = device, shared
        native = torch.cuda.get_allocator_backend() == "native"
        self.counters = COUNTERS if native else ("allocated", "active", "reserved")
        self.native = native
        self.held: int | None = None  # bytes allocated at the last call of `take`
        self.held_reserved: int | None = None

    def take(self) -> Peaks:
        """Return the peaks since the last call, in bytes; None for a counter that this backend does not fill."""
        if self._shared is None:
            stats = torch.cuda.memory_stats_as_nested_dict(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            stats = self._shared.take(self._device)
        self.held, self.held_reserved = (stats[f"{c}_bytes"]["all"]["current"] for c in ("allocated", "reserved"))
        return {c: stats[f"{c}_bytes"]["all"]["peak"] if c in self.counters else None for c in COUNTERS}

    def summary(self) -> dict[str, Any]:
        """Return the columns that are read once, at the end of the last measured step."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        reserved, allocated = (stats[f"{c}_bytes"]["all"]["current"] for c in ("reserved", "allocated"))
        return {
            "reserved_unallocated_bytes": reserved - allocated,
            "alloc_retries": self._counted(stats, "num_alloc_retries"),
            "alloc_ooms": self._counted(stats, "num_ooms"),
        }

    def growth(self, held: Sequence[int | None]) -> int | None:
        """Return by how much allocated grew in every step, from the values of `held` at their ends."""
        return step_growth(held)

    def _counted(self, stats: dict[str, Any], name: str) -> int | None:
        if not self.native:
            return None
        return int(stats[name]) if self._shared is None else self._shared.counted(self._device, name)


LOOK_S = 0.01


class Process:
    """This process's memory as the kernel counts it (/proc/self/status), in bytes; None where it gives no count.

    The kernel keeps the largest resident set, which includes mapped files and pages of other processes. It is unknown
    where the kernel cannot reset it (gVisor). From `watch` to `rest`, a thread reads every `LOOK_S` the memory that
    cannot be given back, anonymous and shared; `peak` is the largest value. A process that has `begun` long ago is not
    reset, and has no baseline.
    """

    def __init__(self, begun: bool = False) -> None:
        self._anew = True
        try:
            if not begun:
                Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, which would keep the parent's peak
        except OSError:
            self._anew = False
        self._status = os.open("/proc/self/status", os.O_RDONLY)  # stays open, because it is read at every step
        self._done = threading.Event()
        self._resident: int | None = None  # VmHWM at the last reading
        self.resident_baseline = None if begun else self.resident_peak()
        self.peak = self.rested = self.held()
        self.baseline = None if begun else self.peak

    def _counted(self, *names: bytes) -> int | None:
        text = os.pread(self._status, 1 << 14, 0)
        found = [re.search(rb"^%b:\s*(\d+) kB$" % name, text, re.MULTILINE) for name in names]
        return None if None in found else sum(int(match[1]) * 1024 for match in found if match)

    def resident_peak(self) -> int | None:
        """Return VmHWM since this object was made, in bytes; None if the kernel could not reset it.

        getrusage is never below VmHWM. If it equals the last VmHWM, that has not risen, and the file is not read.
        Reading the file at every step would be our largest cost to a script.
        """
        if not self._anew:
            return None
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if most != self._resident:
            self._resident = self._counted(b"VmHWM")
        return self._resident

    def held(self) -> int | None:
        """Return the bytes that cannot be given back now: anonymous and shared memory."""
        return self._counted(b"RssAnon", b"RssShmem")

    def look(self) -> int | None:
        """Read the bytes that cannot be given back, and return the largest value so far."""
        now = self.held()
        self.peak = None if now is None or self.peak is None else max(self.peak, now)
        return self.peak

    def watch(self) -> None:
        """Start a thread that looks again and again, until `rest` is called or this object is gone."""
        self._done.clear()
        threading.Thread(target=_look, args=(weakref.ref(self), self._done), daemon=True).start()

    def rest(self) -> None:
        """Stop the thread, and look a last time."""
        self._done.set()
        self.look()
        self.rested = self.held()

    def started(self) -> int | None:
        """Sum the private bytes of all descendants, such as data loader workers; None if they cannot be read."""
        with contextlib.suppress(OSError, psutil.Error, StopIteration):  # the kernel gives no count, or denies access
            return sum(_own_bytes(child.pid) for child in psutil.Process().children(recursive=True))
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
    except ProcessLookupError:  # it has ended, reaped or not
        return 0
    except FileNotFoundError:
        if folder.exists():  # kernels without that file
            raise
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:"))


def host_counts() -> tuple[int, int, int] | None:
    """Return the machine's stolen and whole CPU time, in ticks, and this process's involuntary context switches.

    The ticks are from /proc/stat (proc_stat(5)); guests' time is a part of user time. None if it cannot be read.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = [int(one) for one in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return ticks[7], sum(ticks), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    return None


def disturbed_since(before: tuple[int, int, int] | None) -> dict[str, Any]:
    """Return the columns on what others took from the host since `before`; None for what the kernel does not count."""
    now = host_counts()
    if before is None or now is None:
        return {"host_steal_fraction": None, "involuntary_switches": None}
    stolen, spent, switches = (b - a for a, b in zip(before, now, strict=True))
    return {
        "host_steal_fraction": stolen / spent if spent > 0 else None,  # gVisor's ticks stand still
        "involuntary_switches": switches if now[2] else None,  # a kernel that counts has counted some by now
    }


def pinned_peak() -> int | None:
    """Return the peak of page-locked memory in torch's host allocator, in bytes; None if torch does not count it."""
    told = getattr(torch.cuda, "host_memory_stats", dict[str, int])()
    return told.get("reserved_bytes.peak", told.get("allocated_bytes.peak"))  # its first name, and today's name


class HostMemory:
    """Memory on a CPU. Reserved is the process's peak resident set; allocated is known only while `live` counts it."""

    name = "cpu_tensors_and_rss"

    def __init__(self, process: Process) -> None:
        self.live: LiveBytes | None = None
        self.held: int | None = None  # not counted, because counting slows every step down
        self.held_reserved: int | None = None  # nothing is reserved
        self._left: int | None = None  # bytes of tensors that the counted step left
        self._process = process

    def take(self) -> Peaks:
        """Return the peaks in bytes: reserved since `Process` was made, allocated since the last call."""
        peaks: Peaks = dict.fromkeys(COUNTERS)
        peaks["reserved"] = self._process.resident_peak()
        if self.live is not None:
            peaks["allocated"] = self.live.take()
        return peaks

    @contextlib.contextmanager
    def counting(self, others: Iterable[torch.UntypedStorage]) -> Iterator[None]:
        """Count tensors inside, which is one step, without `others` (LiveBytes)."""
        with LiveBytes(others) as self.live:
            before = self.live.live
            yield
            gc.collect()
            self._left, self.live = self.live.live - before, None

    def growth(self, held: Sequence[int | None]) -> int | None:
        """Return the bytes that the counted step left, or 0 if the process did not grow by half of that in each of the
        steps that ended with `held`: LiveBytes misses the end of tensors from before that only autograd's graph had."""
        now, then, left = self._process.held(), self._process.rested, self._left
        if now is None or then is None or left is None or len(held) < 3:
            return None
        return left if left <= 0 or 2 * (now - then) >= left * len(held) else 0

    def summary(self) -> dict[str, Any]:
        """Return no columns, because host memory has no allocator's counters."""
        return {}


Memory = CudaMemory | HostMemory  # a source of memory counters, in bytes


class Nvml:
    """The GPU as NVML sees it; every value is None without a GPU, or if the device does not report it."""

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
        """Return the answer to an NVML query about the device. Queries go by name because an old pynvml lacks some."""
        return None if self._handle is None else machine.ask_nvml(query, self._handle, *arguments)[0]

    def used(self) -> int | None:
        """Return the bytes in use on the device, by any process."""
        info = self.read("nvmlDeviceGetMemoryInfo")
        return None if info is None else int(info.used)

    def energy_j(self) -> float | None:
        """Return the energy since the driver loaded, in joules."""
        millijoules = self.read("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def throttle_reasons(self) -> set[str] | None:
        """Return the names of the clock event reasons in force, except being idle."""
        bits = self.read("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # its name before driver 535
            bits = self.read("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else {name for bit, name in _REASONS.items() if bits & int(bit, 16)}

    def processes(self) -> frozenset[int] | None:
        """Return the ids of the compute processes on the device."""
        listed = self.read("nvmlDeviceGetComputeRunningProcesses")
        return None if listed is None else frozenset(process.pid for process in listed)

    def sm_clock_mhz(self) -> int | None:
        """Return the present SM clock in MHz."""
        clock = self.read("nvmlDeviceGetClockInfo", _SM)
        return None if clock is None else int(clock)

    def facts(self) -> dict[str, Any]:
        """Return the columns about the device."""
        info = self.read("nvmlDeviceGetMemoryInfo")
        return {
            "gpu_name": self.read("nvmlDeviceGetName"),
            "gpu_uuid": self.read("nvmlDeviceGetUUID"),
            "driver_version": None if self._handle is None else machine.ask_nvml("nvmlSystemGetDriverVersion")[0],
            "device_total_bytes": None if info is None else int(info.total),
            "gpu_temperature_c": self.read("nvmlDeviceGetTemperature", 0),  # NVML_TEMPERATURE_GPU
            "gpu_sm_clock_max_mhz": self.read("nvmlDeviceGetMaxClockInfo", _SM),
        }


_SM = 1  # NVML_CLOCK_SM
# nvmlClocksEventReason* in nvml.h, by bit
_REASONS: dict[str, str] = json.loads(Path(__file__).with_name("clock_event_reasons.json").read_text("utf-8"))


def ours(pids: Iterable[int], worker: int | None = None) -> set[int]:
    """Return the processes of this attempt: those in the worker's session, or with an ancestor in it.

    `worker` is the worker's pid, which may be a parent of this process; None means this process.
    """
    session = os.getsid(worker or 0)
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError, psutil.Error):  # it has ended, or the pid is not of this container
            family = (pid, *(parent.pid for parent in psutil.Process(pid).parents()))
            if any(os.getsid(one) == session for one in family):
                found.add(pid)
    return found


def foreign(before: Collection[int] | None, after: Collection[int] | None, own: Collection[int]) -> list[int] | None:
    """Return the compute processes on the device that are not ours, from NVML's lists before we touched it and at work.

    A container hides our own pid, and often the whole list; a missing or empty list gives None. Without our pid in the
    list, one new entry is ours, and entries from before are not. Several new ones cannot be told apart, so all are
    returned. Without a new entry we were there before, or are not listed, which also gives None.
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


# On an H100 and an H200, all steps were issued in 0.6 to 0.83 of their time where the GPU is the limit, and in 0.92 to
# 1.0 of it where the host is. Nobody has measured the two fractions below on a GPU yet.
GPU_BOUND, HOST_BOUND = 0.85, 0.9
LAGGED = 50  # steps; later the clocks of GPU and host have drifted apart by too much of a step


class Clock:
    """Marks at step boundaries: CUDA events, for which the device does not wait, or the host's clock on a CPU.

    The host's time at which each mark was issued is kept as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._marks: list[Any] = []
        self._issued: list[float] = []
        self.by_host: float | None = None  # CUDA: seconds from the first mark until the host knew of the last

    def mark(self) -> None:
        """Mark a boundary now."""
        self._issued.append(time.perf_counter())
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)

    def times(self) -> list[float]:
        """Wait for the last mark, and return the seconds between consecutive marks."""
        if self._cuda and self._marks:
            self._marks[-1].synchronize()
            self.by_host = time.perf_counter() - self._issued[0]
            return [a.elapsed_time(b) / 1000 for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [b - a for a, b in zip(self._issued, self._issued[1:], strict=False)]

    def issue_columns(self, times: Sequence[float]) -> dict[str, Any]:
        """Return `issue_fraction` and what `times`, in seconds, were bound by; None on a CPU and without a step.

        The fraction is of the first step, when the GPU's queue is empty: the time to issue it / the median step. A
        second one must agree: 1 - (median time from issuing a mark until the GPU reaches it) / the median step. A host
        that waits inside its steps, or for room in the queue of launches, has both near 1 next to a busy GPU. So
        "host" is only a suspicion, which `Count` drops unless it can rule that out. "gpu" includes waiting for links.
        """
        if not self._cuda or not times:
            return {"issue_fraction": None, "bound_by": None}
        step, issued = statistics.median(times), [at - self._issued[0] for at in self._issued[1:]]
        lags = [reached - at for reached, at in zip(accumulate(times[:LAGGED]), issued, strict=False)]
        both = issued[0] / step, 1 - statistics.median(lags) / step
        by = "gpu" if max(both) < GPU_BOUND else "host" if min(both) > HOST_BOUND else None
        return {"issue_fraction": both[0], "bound_by": by}


def backward_boundaries(
    entered: Callable[[], None], left: Callable[[], None]
) -> contextlib.AbstractContextManager[None]:
    """Call `entered` before each outermost backward pass, and `left` after each that completes."""

    def ended(over: bool) -> None:
        if over:
            left()

    passes = Passes(entered, ended)
    return patched((*one, passes.watched(getattr(*one))) for one in BACKWARD)


def scaler_skips(scaler: torch.amp.GradScaler, steps: int) -> Callable[[], int | None]:
    """Return a function that counts the updates that `scaler` skips from now on; it waits for the device when called.

    Each skip multiplies the scale by the backoff factor. The count is None if the scale has risen, is 0 or is not
    finite. It is also None if the `steps` to come reach the growth interval, because the scale may grow then.
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
