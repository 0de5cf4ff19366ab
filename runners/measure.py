"""What is read while a trial trains: memory per phase and step, the step clock, FLOPs, the device's health.

A runner calls `Meter.built` once model and optimizer exist, then `step_begin` and `step_end` around each optimizer
step; the meter counts the steps and knows what each is for:

    warm-up ... | probe | measured ...                  | count              | record, if asked for
    timed on    | phase | only a mark at each boundary, | FLOPs, after every | every event of the
    the host    | peaks | one synchronise at the end    | peak has been read | CUDA allocator

Not covered: how training is driven (torch_loop, trainer, deepspeed_zero, custom), what columns mean (harness/row.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from vramsweep.harness import machine
from vramsweep.harness.attempt import RECORDING, STEPS
from vramsweep.harness.gpus import peak_flops
from vramsweep.harness.trial import Trial
from vramsweep.runners.dispatch import FlopCount, LiveBytes

Peaks = dict[str, int | None]
RECORDED_EVENTS = 1_000_000  # a step of an 8 B model has about 50,000; a fuller ring buffer would drop its oldest
COUNTERS = ("allocated", "active", "requested", "reserved", "inactive_split")


class Memory(Protocol):
    """A source of memory counters, in bytes."""

    name: str

    def take(self) -> Peaks:
        """The peaks since the last call; a counter that this source does not fill is None."""
        ...

    def summary(self) -> dict[str, Any]:
        """Columns that are read once, at the end of the last measured step."""
        ...


class CudaMemory:
    """PyTorch's allocator counters. The driver's allocator (cudaMallocAsync) fills three of them, and no others."""

    name = "cuda_allocator"

    def __init__(self) -> None:
        native = torch.cuda.get_allocator_backend() == "native"
        self.counters = COUNTERS if native else ("allocated", "active", "reserved")
        self.native = native

    def take(self) -> Peaks:
        stats = torch.cuda.memory_stats_as_nested_dict()
        torch.cuda.reset_peak_memory_stats()
        return {c: stats[f"{c}_bytes"]["all"]["peak"] if c in self.counters else None for c in COUNTERS}

    def summary(self) -> dict[str, Any]:
        stats = torch.cuda.memory_stats_as_nested_dict()
        reserved, allocated = (stats[f"{c}_bytes"]["all"]["current"] for c in ("reserved", "allocated"))
        return {
            "reserved_unallocated_bytes": reserved - allocated,
            "alloc_retries": stats["num_alloc_retries"] if self.native else None,
            "alloc_ooms": stats["num_ooms"] if self.native else None,
        }


class HostMemory:
    """On CPU: reserved is the process's peak resident set; allocated is known only while a LiveBytes mode counts it."""

    name = "cpu_tensors_and_rss"

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew: it would remember the parent's peak
        self.live: LiveBytes | None = None
        self._status = Path("/proc/self/status").open("rb")  # noqa: SIM115 - read at every step, for the process's life

    def resident_peak(self) -> int:
        """VmHWM in bytes."""
        self._status.seek(0)
        text = self._status.read()
        start = text.index(b"VmHWM:") + 6
        return int(text[start : text.index(b"kB", start)]) * 1024

    def take(self) -> Peaks:
        peaks: Peaks = dict.fromkeys(COUNTERS)
        peaks["reserved"] = self.resident_peak()
        if self.live is not None:
            peaks["allocated"] = self.live.take()
        return peaks

    def summary(self) -> dict[str, Any]:
        return {}


class Nvml:
    """The device's own view, through NVML; every value is None without a GPU or where the device does not give it."""

    def __init__(self, device: torch.device) -> None:
        self._handle: Any = None
        if device.type != "cuda":
            return
        cards = machine.visible_gpus(os.environ)
        index = device.index or 0
        if index < len(cards) and cards[index].uuid is not None:
            machine.ask("nvmlInit")
            self._handle, _ = machine.ask("nvmlDeviceGetHandleByUUID", cards[index].uuid)

    def read(self, query: str, *arguments: Any) -> Any:
        """One NVML query about the device, by its name."""
        return None if self._handle is None else machine.ask(query, self._handle, *arguments)[0]

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
        if bits is None:
            return None
        return {name for bit, name in _REASONS.items() if bits & bit}

    def facts(self) -> dict[str, Any]:
        """Columns about the device."""
        info = self.read("nvmlDeviceGetMemoryInfo")
        return {
            "gpu_name": self.read("nvmlDeviceGetName"),
            "gpu_uuid": self.read("nvmlDeviceGetUUID"),
            "driver_version": None if self._handle is None else machine.ask("nvmlSystemGetDriverVersion")[0],
            "device_total_bytes": None if info is None else int(info.total),
            "gpu_temperature_c": self.read("nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
            "gpu_sm_clock_mhz": self.read("nvmlDeviceGetClockInfo", _CLOCK_SM),
        }


# Numbers of nvml.h, which do not change; an outdated module that shadows NVIDIA's lacks some of their names.
_TEMPERATURE_GPU, _CLOCK_SM = 0, 1
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


class Clock:
    """Marks at step boundaries: CUDA events, which cost the device no wait, or the host's clock on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """A boundary is here."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def times(self) -> list[float]:
        """Seconds between consecutive marks; waits for the last one."""
        if self._cuda and self._marks:
            self._marks[-1].synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]


@contextlib.contextmanager
def backward_boundaries(entered: Callable[[], None], left: Callable[[], None]) -> Iterator[None]:
    """Call `entered` and `left` around each outermost backward pass, whoever starts it.

    `Tensor.backward` and every framework end in `torch.autograd.backward`; reentrant checkpointing calls it again from
    within, which is no boundary.
    """
    original = torch.autograd.backward
    depth = 0

    def backward(*args: Any, **kwargs: Any) -> None:
        nonlocal depth
        if depth == 0:
            entered()
        depth += 1
        try:
            original(*args, **kwargs)
        finally:
            depth -= 1
        if depth == 0:
            left()

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


class Meter:
    """Counts and measures the steps of one trial on one rank, and turns what it saw into columns."""

    def __init__(self, trial: Trial, folder: Path, device: torch.device, rank: int) -> None:
        self.trial, self.device, self.rank = trial, device, rank
        protocol = trial.protocol
        self.probe = protocol.warmup_steps
        self.last_measured = self.probe + protocol.measured_steps
        self.count = self.last_measured + 1
        self.record = self.count + 1 if trial.record else None
        self.recording = folder / RECORDING
        self.index = 0
        self.nvml = Nvml(device)
        self.baseline = self.nvml.used()
        self.records = (folder / STEPS).open("a", buffering=1) if rank == 0 else None
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats()
        self.memory: Memory = CudaMemory() if self.cuda else HostMemory()
        self.rss_baseline = self.memory.resident_peak() if isinstance(self.memory, HostMemory) else None
        self.clock = Clock(device)
        self.warmup_times: list[float] = []
        self.load: Peaks = {}
        self.peaks: Peaks = dict.fromkeys(COUNTERS)
        self.phases: dict[str, Peaks] = {}
        self.step_peaks: list[Peaks] = []
        self.flops: dict[str, int] | None = None
        self.values: dict[str, Any] = {}
        self.losses: dict[str, float | None] = {}
        self._began = 0.0
        self._spent = 0.0
        self._context = contextlib.ExitStack()
        self._record({"event": "load"})

    def built(self) -> None:
        """Model, optimizer and data exist; the next step is the first."""
        self.load = self._take()
        self._record({"event": "train"})

    def step_begin(self) -> None:
        """The next optimizer step begins."""
        if self.index <= self.probe or self.index == self.count:
            self._began = time.perf_counter()
        if self.index == self.probe:
            self._enter_probe()
        elif self.index == self.count:
            self._enter_count()
        elif self.index == self.record and self.rank == 0:
            torch.cuda.memory._record_memory_history(context=None, max_entries=RECORDED_EVENTS)

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        """The optimizer step has been issued."""
        if self.index == self.probe:
            self._phase("optimizer")
            self._leave()
        elif self.index < self.probe:
            self._synchronize()
            self.warmup_times.append(time.perf_counter() - self._began)
            self._take()
            if self.index == 0:
                self.losses["loss_first"] = _finite(loss)
        elif self.index <= self.last_measured:
            self.clock.mark()
            self.step_peaks.append(self._take())
        elif self.index == self.count:
            self._leave()
        elif self.index == self.record and self.rank == 0:
            torch.cuda.memory._dump_snapshot(str(self.recording))
            torch.cuda.memory._record_memory_history(enabled=None)
        if self.index <= self.probe or self.index == self.count:
            self._spent += time.perf_counter() - self._began
        self._record({"step": self.index, "at_s": time.perf_counter()})
        if self.index == self.probe:
            self._begin_measured()
        elif self.index == self.last_measured:
            self._end_measured(loss)
        self.index += 1

    def _begin_measured(self) -> None:
        self._synchronize()
        self._energy = self.nvml.energy_j()
        self._reasons = self.nvml.throttle_reasons()
        self.clock.mark()

    def _end_measured(self, loss: torch.Tensor | None) -> None:
        times = self.clock.times()
        elapsed = sum(times)
        reasons = self.nvml.throttle_reasons()
        energy = self.nvml.energy_j()
        joules = None if energy is None or self._energy is None else energy - self._energy
        self._spent += elapsed
        self.losses["loss_last"] = _finite(loss)
        self.values = {
            **self.memory.summary(),
            **self.nvml.facts(),
            "device_used_bytes": self.nvml.used(),
            "device_baseline_bytes": self.baseline,
            "rss_baseline_bytes": self.rss_baseline,
            "gpu_energy_j": joules,
            "gpu_power_w": None if joules is None else joules / elapsed,
            "throttle_reasons": None if reasons is None else sorted(reasons | (self._reasons or set())),
            "elapsed_s": elapsed,
            "step_times_s": times,
            "step_median_s": statistics.median(times),
            "step_iqr_s": float(np.subtract(*np.percentile(times, [75, 25]))),
            "tokens_per_s": self.trial.tokens_per_step() * len(times) / elapsed,
            "samples_per_s": self.trial.samples_per_step() * len(times) / elapsed,
        }

    def _enter_probe(self) -> None:
        if isinstance(self.memory, HostMemory):
            self.memory.live = self._context.enter_context(LiveBytes())
        self._context.enter_context(
            backward_boundaries(lambda: self._phase("forward"), lambda: self._phase("backward"))
        )
        self._take()

    def _enter_count(self) -> None:
        count = self._context.enter_context(FlopCount())
        seen = {"backward": 0}
        at: list[int] = []

        def left() -> None:
            seen["backward"] += count.total - at.pop()

        self._context.enter_context(backward_boundaries(lambda: at.append(count.total), left))

        def total() -> None:
            self.flops = {"forward": count.total - seen["backward"], "total": count.total}

        self._context.callback(total)

    def _leave(self) -> None:
        self._context.close()
        if isinstance(self.memory, HostMemory):
            self.memory.live = None

    def _phase(self, name: str) -> None:
        peaks = self._take()
        held = self.phases.setdefault(name, peaks)
        self.phases[name] = _larger(held, peaks)

    def _take(self) -> Peaks:
        peaks = self.memory.take()
        self.peaks = _larger(self.peaks, peaks)
        return peaks

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _record(self, record: dict[str, Any]) -> None:
        if self.records is not None:
            self.records.write(json.dumps(record) + "\n")

    def columns(self) -> dict[str, Any]:
        """Every column that the meter knows, for this rank."""
        trial = self.trial
        tokens = trial.micro_batch * trial.grad_accum * trial.seq_len  # of this rank, whose FLOPs were counted
        speed = self.values["tokens_per_s"]
        model = None if self.flops is None else 3 * self.flops["forward"] / tokens
        hardware = None if self.flops is None else self.flops["total"] / tokens
        peak = peak_flops(self.values["gpu_name"], trial.precision) if self.values["gpu_name"] else None
        reserved = [p["reserved"] for p in self.step_peaks]
        return {
            **self.values,
            **self.losses,
            **{f"peak_{c}_bytes": self.peaks[c] for c in COUNTERS if c != "inactive_split"},
            "inactive_split_peak_bytes": self.peaks["inactive_split"],
            **{f"load_peak_{c}_bytes": self.load.get(c) for c in ("allocated", "reserved")},
            **{
                f"{phase}_peak_{c}_bytes": self.phases.get(phase, {}).get(c)
                for phase in ("forward", "backward", "optimizer")
                for c in ("allocated", "reserved")
            },
            "step_peak_allocated_bytes": _known([p["allocated"] for p in self.step_peaks]),
            "step_peak_reserved_bytes": _known(reserved),
            "plateau": plateau(reserved),
            "memory_source": self.memory.name,
            "warmup_steps": trial.protocol.warmup_steps,
            "measured_steps": len(self.step_peaks),
            "warmup_step_times_s": self.warmup_times,
            "model_flops_per_token": model,
            "hardware_flops_per_token": hardware,
            "peak_flops": peak,
            "mfu": None if model is None or peak is None else speed * model / (peak * trial.world_size),
            "hfu": None if hardware is None or peak is None else speed * hardware / (peak * trial.world_size),
            "steps_s": self._spent,
        }


def plateau(reserved: list[int | None]) -> bool | None:
    """Whether the peak reserved had stopped rising by half-way; None for fewer than two steps or unknown values."""
    known = [value for value in reserved if value is not None]
    if len(known) < 2 or len(known) != len(reserved):
        return None
    half = len(known) // 2
    return max(known[half:]) <= max(known[:half])


def _larger(a: Peaks, b: Peaks) -> Peaks:
    return {c: max((v for v in (a[c], b[c]) if v is not None), default=None) for c in COUNTERS}


def _known(values: list[int | None]) -> list[int] | None:
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def _finite(loss: torch.Tensor | None) -> float | None:
    if loss is None:
        return None
    value = float(loss.detach())
    return value if np.isfinite(value) else None
