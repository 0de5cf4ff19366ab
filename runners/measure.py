"""What is read while a trial trains, step by step: memory per phase and step, the step clock, FLOPs.

A runner calls `built` once model and optimizer exist, then `step_begin` and `step_end` around each optimizer step. The
meter's plan says what each step is for, one object a step:

    Warmup ... | Probe | Measured ...                  | Count              | Recorded, if asked for
    timed on   | phase | only a mark at each boundary, | FLOPs, after every | every event of the
    the host   | peaks | one synchronise at the end    | peak has been read | CUDA allocator

When the last measured step is over the row's columns are published. What follows is extra: where it fails the row lacks
what it would have told, and has a note that says so.

Not covered: how training is driven (torch_loop, trainer, deepspeed_zero, custom), what it is read with
(instruments.py), FLOPs (count.py), what columns mean (harness/row.py), which rank's they are (over_ranks.py).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from vramsweep.harness import node
from vramsweep.harness.attempt import RECORDING, STEPS
from vramsweep.harness.errors import EnvironmentFault
from vramsweep.harness.outcome import of_the_machine
from vramsweep.harness.trial import Trial
from vramsweep.runners.count import NO_BACKWARD, Count
from vramsweep.runners.dispatch import LiveBytes, storages_alive
from vramsweep.runners.instruments import (
    COUNTERS,
    Clock,
    Compiler,
    CudaMemory,
    HostMemory,
    Memory,
    Nvml,
    Peaks,
    Process,
    backward_boundaries,
    foreign,
    ours,
    pinned_peak,
)
from vramsweep.runners.over_ranks import Columns, over_ranks

RECORDED_EVENTS = 1_000_000  # a step of an 8 B model has about 50,000; a fuller ring buffer would drop its oldest
PHASES_UNKNOWN = f"the peaks of the phases are not known: {NO_BACKWARD}"
COMPILED_UNSEEN = "allocated bytes are not known: compiled code makes its tensors past torch's operators on a CPU"
RECOMPILED = "torch.compile compiled {} more graphs in the measured steps, whose times that is part of"
GRAPHED = ("reduce-overhead", "max-autotune")
REPLAYED = "allocated peaks of steps and phases are not known: counters do not see what a CUDA graph replays in"


class StepMeter(Protocol):
    """What a runner tells of its progress, and to whom."""

    rank: int

    def built(self, describe: Callable[[], Columns], skipped: Callable[[], int | None] | None = None) -> None:
        """Model, optimizer and data exist; the next step is the first.

        `describe` gives the columns about what was built, once the measured steps are over. `skipped` gives the number
        of optimizer steps so far whose update was skipped for an overflow; without it that is unknown. It is asked
        outside the measured steps only.
        """
        ...

    def step_begin(self) -> None:
        """The next optimizer step begins."""
        ...

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        """The optimizer step has been issued."""
        ...


class Step(Protocol):
    """What a step is for."""

    def enter(self) -> None:
        """The step begins."""
        ...

    def leave(self, loss: torch.Tensor | None) -> None:
        """The step has been issued."""
        ...


class Gauges:
    """The instruments of one rank, and the largest of all peaks that were taken with them.

    The device's memory and processes are read before torch touches the device, which makes a context there.
    """

    def __init__(self, device: torch.device) -> None:
        self.process = Process()
        self.process.watch()
        self.nvml = Nvml(device)
        self.baseline = self.nvml.used()
        self.listed = self.nvml.processes()
        self.cuda = device.type == "cuda"
        if self.cuda:
            try:
                torch.cuda.set_device(device)  # makes the context
                torch.cuda.init()
            except RuntimeError as error:  # driver too old, error 802, memory full of others': no trial has begun
                if not of_the_machine(str(error)):  # an allocator's setting that the driver refuses is the trial's
                    raise
                raise EnvironmentFault(f"CUDA does not start on {device}: {str(error).splitlines()[0]}") from error
            torch.cuda.reset_peak_memory_stats()
        self.memory: Memory = CudaMemory() if self.cuda else HostMemory(self.process)
        self.imported = [] if self.cuda else storages_alive()  # a template's, of before its gc.freeze, show nowhere
        self.clock = Clock(device)
        self.compiler = Compiler()
        self.peaks: Peaks = dict.fromkeys(COUNTERS)

    def others(self) -> list[int] | None:
        """Compute processes on the device that are not ours; None where that cannot be told."""
        listed = self.nvml.processes()
        return foreign(self.listed, listed, ours(listed or ()))

    def take(self) -> Peaks:
        """The peaks since the last call."""
        peaks = self.memory.take()
        self.peaks = _larger(self.peaks, peaks)
        return peaks

    def host(self) -> Columns:
        """This rank's share of the columns on host memory, read once the measured steps are over."""
        peak, started = self.process.look(), self.process.started()
        return {
            "host_ranks": 1,
            "host_peak_bytes": None if peak is None or started is None else peak + started,
            "host_processes_bytes": self.process.baseline,
            "host_workers_bytes": started,
            "host_pinned_peak_bytes": pinned_peak() if self.cuda else None,
            "host_resident_peak_bytes": self.process.resident_peak(),
            "host_total_bytes": node.memory_here(),
        }

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()


class Warmup:
    """Timed on the host, each step to its end on the device."""

    def __init__(self, gauges: Gauges) -> None:
        self.gauges = gauges
        self.times: list[float] = []
        self.loss_first: float | None = None

    def enter(self) -> None:
        self._began = time.perf_counter()

    def leave(self, loss: torch.Tensor | None) -> None:
        self.gauges.synchronize()
        self.times.append(time.perf_counter() - self._began)
        self.gauges.take()
        if len(self.times) == 1:
            self.loss_first = _finite(loss)

    def columns(self) -> Columns:
        return {
            "warmup_steps": len(self.times),
            "warmup_step_times_s": self.times,
            "loss_first": self.loss_first,
        }


class Probe:
    """Untimed: the peaks of each phase, told apart by watching the autograd engine. `then` is called at its end."""

    def __init__(self, gauges: Gauges, then: Callable[[], None]) -> None:
        self.gauges, self.then = gauges, then
        self.phases: dict[str, Peaks] = {}
        self.spent = 0.0
        self._unseen = False
        self._context = contextlib.ExitStack()

    def enter(self) -> None:
        self._began = time.perf_counter()
        memory = self.gauges.memory
        self._unseen = isinstance(memory, HostMemory) and self.gauges.compiler.graphs() > 0
        if isinstance(memory, HostMemory) and not self._unseen:  # under a mode compiled code would not even run
            memory.live = self._context.enter_context(LiveBytes(self.gauges.imported))
        self._context.enter_context(backward_boundaries(lambda: self._end("forward"), lambda: self._end("backward")))
        self.gauges.take()

    def leave(self, loss: torch.Tensor | None) -> None:
        self._end("optimizer")
        self._context.close()
        if isinstance(self.gauges.memory, HostMemory):
            self.gauges.memory.live = None
        self.spent = time.perf_counter() - self._began
        self.then()

    def _end(self, phase: str) -> None:
        peaks = self.gauges.take()
        self.phases[phase] = _larger(self.phases.get(phase, peaks), peaks)

    def columns(self) -> Columns:
        known = "backward" in self.phases
        phases = self.phases if known else {}
        return {
            f"{phase}_peak_{c}_bytes": phases.get(phase, {}).get(c)
            for phase in ("forward", "backward", "optimizer")
            for c in ("allocated", "reserved")
        } | {"notes": [PHASES_UNKNOWN] * (not known) + [COMPILED_UNSEEN] * self._unseen}


class Measured:
    """A mark of the clock and the peaks at each boundary. `then` is called when the last of the steps is over."""

    def __init__(self, gauges: Gauges, trial: Trial, then: Callable[[], None]) -> None:
        self.gauges, self.trial, self.then = gauges, trial, then
        self.skipped: Callable[[], int | None] = lambda: None
        self.peaks: list[Peaks] = []
        self.held: list[int | None] = []
        self.elapsed = 0.0
        self.notes: list[str] = []
        self._columns: Columns = {}

    def start(self) -> None:
        """The next boundary is the first."""
        self.gauges.process.rest()
        self._skipped = self.skipped()
        self._graphs = self.gauges.compiler.graphs()
        self.gauges.synchronize()
        self._energy = self.gauges.nvml.energy_j()
        self._reasons = self.gauges.nvml.throttle_reasons()
        self.gauges.clock.mark()

    def enter(self) -> None:
        """Nothing: the boundary was the end of the step before."""

    def leave(self, loss: torch.Tensor | None) -> None:
        self.gauges.clock.mark()
        self.peaks.append(self.gauges.take())
        self.held.append(self.gauges.memory.held)
        if len(self.peaks) == self.trial.protocol.measured_steps:
            self._finish(loss)
            self.then()

    def _finish(self, loss: torch.Tensor | None) -> None:
        nvml = self.gauges.nvml
        times = self.gauges.clock.times()
        self.elapsed = elapsed = sum(times)
        reasons = nvml.throttle_reasons()
        energy = nvml.energy_j()
        joules = None if energy is None or self._energy is None else energy - self._energy
        skipped = self.skipped()
        recompiled = self.gauges.compiler.graphs() - self._graphs
        self.notes = [RECOMPILED.format(recompiled)] if recompiled else []
        self._columns = {
            **self.gauges.memory.summary(),
            **nvml.facts(),
            "device_used_bytes": nvml.used(),
            "gpu_energy_j": joules,
            "gpu_power_w": None if joules is None else joules / elapsed,
            "throttle_reasons": None if reasons is None else sorted(reasons | (self._reasons or set())),
            "elapsed_s": elapsed,
            "step_times_s": times,
            "compile_s": self.gauges.compiler.seconds(),
            "step_median_s": statistics.median(times),
            "step_iqr_s": float(np.subtract(*np.percentile(times, [75, 25]))),
            "tokens_per_s": self.trial.tokens_per_step() * len(times) / elapsed,
            "samples_per_s": self.trial.samples_per_step() * len(times) / elapsed,
            "skipped_steps": None if skipped is None or self._skipped is None else skipped - self._skipped,
            "loss_last": _finite(loss),
        }

    def columns(self) -> Columns:
        reserved = [peaks["reserved"] for peaks in self.peaks]
        return {
            **self._columns,
            "measured_steps": len(self.peaks),
            "step_peak_allocated_bytes": _known([peaks["allocated"] for peaks in self.peaks]),
            "step_peak_reserved_bytes": _known(reserved),
            "step_growth_bytes": growth(self.held),
            "plateau": plateau(reserved),
        }


class Recorded:
    """Untimed: every event of the CUDA allocator, in the file `path`; the ranks without one only take part."""

    purpose = "records the allocator's events"

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def enter(self) -> None:
        if self.path:
            torch.cuda.memory._record_memory_history(context=None, max_entries=RECORDED_EVENTS)

    def leave(self, loss: torch.Tensor | None) -> None:
        if self.path:
            torch.cuda.memory._dump_snapshot(str(self.path))
            torch.cuda.memory._record_memory_history(enabled=None)


def alone(own: Columns) -> Columns:
    """The row's columns where there is but one rank."""
    return over_ranks([own])


class Meter:
    """Measures the steps of one trial on one rank, as StepMeter.

    `publish` is called when the last measured step is over: it takes this rank's columns and returns the row's.
    """

    def __init__(
        self,
        trial: Trial,
        folder: Path,
        device: torch.device,
        rank: int,
        publish: Callable[[Columns], Columns] = alone,
    ) -> None:
        self.rank, self.trial = rank, trial
        self.gauges = Gauges(device)
        self.warmup = Warmup(self.gauges)
        self.measured = Measured(self.gauges, trial, self._publish)
        self.probe = Probe(self.gauges, self.measured.start)
        self.count = Count(self.gauges.compiler, trial)
        recorded = Recorded(folder / RECORDING if rank == 0 else None)
        self.plan: tuple[Step, ...] = (
            *[self.warmup] * trial.protocol.warmup_steps,
            self.probe,
            *[self.measured] * trial.protocol.measured_steps,
            self.count,
            *[recorded] * trial.record,
        )
        self.index = 0
        self._training = False
        self.row: Columns | None = None  # once it is published
        self._to_publish = publish
        self._load: Peaks = {}
        self._host_load: int | None = None
        self._describe: Callable[[], Columns] = dict
        self._records = (folder / STEPS).open("a", buffering=1) if rank == 0 else None
        self._record({"event": "load"})

    def built(self, describe: Callable[[], Columns], skipped: Callable[[], int | None] | None = None) -> None:
        self._load = self.gauges.take()
        self._host_load = self.gauges.process.look()
        self._describe = describe
        if skipped is not None:
            self.measured.skipped = skipped
        self._training = True
        self._record({"event": "train"})

    def step_begin(self) -> None:
        self.plan[self.index].enter()

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        self._record({"step": self.index, "at_s": time.perf_counter()})
        self.plan[self.index].leave(loss)
        self.index += 1

    def stopped(self, phase: str) -> None:
        """Note the phase of the step in which training ended, if it had begun."""
        if self._training:
            self._record({"phase": phase, "at_step": self.index})

    def seen(self) -> Columns:
        """What tells of the device and of others on it, at any moment: also where memory ran out."""
        return {
            "device_total_bytes": self.gauges.nvml.facts()["device_total_bytes"],
            "device_baseline_bytes": self.gauges.baseline,
            "foreign_processes": self.gauges.others(),
        }

    def columns(self) -> Columns:
        """The row's columns as far as they are known. Raises RuntimeError if the measured steps are not over."""
        if self.row is None:
            raise RuntimeError(f"training ended after {self.index} of {len(self.plan)} steps, before all were measured")
        spent = sum(self.warmup.times) + self.probe.spent + self.measured.elapsed + self.count.spent
        return self.row | self.count.columns(self.row) | {"steps_s": spent}

    def failed(self, error: BaseException) -> str:
        """A note on what ended training after the measured steps; nothing is watched any longer."""
        self.count.close()
        what = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        if self.index == len(self.plan):
            return f"failed after the last step: {what}"
        purpose = getattr(self.plan[self.index], "purpose", "was measured last")
        return f"the step that {purpose} failed, after the measured ones: {what}"

    def _publish(self) -> None:
        gauges, described = self.gauges, self._describe()
        own = {
            **self.warmup.columns(),
            **self.probe.columns(),
            **self.measured.columns(),
            **{f"peak_{c}_bytes": gauges.peaks[c] for c in COUNTERS if c != "inactive_split"},
            "inactive_split_peak_bytes": gauges.peaks["inactive_split"],
            **{f"load_peak_{c}_bytes": self._load.get(c) for c in ("allocated", "reserved")},
            "rss_baseline_bytes": None if gauges.cuda else gauges.process.resident_baseline,
            "memory_source": gauges.memory.name,
            **gauges.host(),
            "host_load_peak_bytes": self._host_load,
            "steps_s": sum(self.warmup.times) + self.probe.spent + self.measured.elapsed,
            **described,
            "notes": [*self.probe.columns()["notes"], *self.measured.notes, *(described.get("notes") or ())],
        }
        if self.trial.compile in GRAPHED and gauges.cuda:
            phases = [f"{phase}_peak_allocated_bytes" for phase in ("forward", "backward", "optimizer", "step")]
            own |= {**dict.fromkeys(phases), "notes": [*own["notes"], REPLAYED]}
        self.row = self._to_publish(own | self.seen())

    def _record(self, record: dict[str, Any]) -> None:
        if self._records is not None:
            self._records.write(json.dumps(record) + "\n")


def growth(held: Sequence[int | None]) -> int | None:
    """The least by which a step ended with more than the one before; None for fewer than three steps or unknown values.

    A step that ends with as much as another, or with less, leaves nothing behind.
    """
    known = [value for value in held if value is not None]
    if len(known) < 3 or len(known) != len(held):
        return None
    return min(after - before for before, after in itertools.pairwise(known))


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
