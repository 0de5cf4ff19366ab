"""The meter that measures training step by step: memory per phase and step, step times, FLOPs.

A runner calls `built` once model and optimizer exist, then `step_begin` and `step_end` around each optimizer step. The
meter's plan gives each step its purpose, one object per step:

    Warmup ... | Probe | Measured ...                  | Count              | Recorded, if asked for
    timed on   | phase | only a mark at each boundary, | FLOPs, after every | every event of the
    the host   | peaks | one synchronise at the end    | peak has been read | CUDA allocator

The meter publishes the row's columns when the last measured step is over. If a later step fails, the row is kept
without that step's columns, and a note says so.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from vramsweep.harness.process.worker_files import RECORDING, STEPS
from vramsweep.harness.spec import length_distribution
from vramsweep.runners.measure import counters
from vramsweep.runners.measure.counters import COUNTERS, HostMemory, Peaks, backward_boundaries
from vramsweep.runners.measure.flop_step import Count
from vramsweep.runners.measure.model_description import look_at_gradients
from vramsweep.runners.measure.rank_instruments import Gauges, larger, meet_ranks
from vramsweep.runners.measure.steady_memory import PHASES_UNKNOWN, all_known, reached_plateau, steps_until_full
from vramsweep.runners.rank.aggregate_ranks import Columns, over_ranks

if TYPE_CHECKING:  # a user's own script may be measured without pydantic installed (observer.py)
    from vramsweep.harness.spec.trial import Trial

RECORDED_EVENTS = 1_000_000  # a step of an 8 B model has about 50,000; the buffer drops the oldest when it is full
COMPILED_UNSEEN = "allocated bytes are unknown, because on a CPU compiled code makes tensors without torch's operators"
OTHER_STEPS = "peak allocated is unknown, because lengths vary and on a CPU only the probe step counts tensors"
RECOMPILED = "torch.compile compiled {} more graphs during the measured steps; their times include this"
LEAST_ENERGY_S = 1.0  # NVML's counter moves now and then; its power is a mean over 1 s (nvmlDeviceGetPowerUsage)
SPEED = (
    *("elapsed_s", "host_elapsed_s", "step_times_s", "step_median_s", "step_iqr_s", "warmup_step_times_s"),
    *("tokens_per_s", "samples_per_s"),
)
COUNTED = "speed is unknown, because counting every tensor of a whole job slows a CPU down"
GRAPHED = ("reduce-overhead", "max-autotune")
REPLAYED = "allocated peaks of steps and phases are unknown, because counters do not see the memory of a CUDA graph"


@dataclass(frozen=True)
class MeterSpec:
    """The facts about the training that a meter cannot see for itself, among them the numbers of steps.

    `tokens_per_step` and `samples_per_step` are sums over all ranks, padding included; None if unknown. If
    `measured_steps` is None, the meter measures every step after the plan's, until `finish` is called.
    """

    warmup_steps: int
    measured_steps: int | None
    record: bool = False
    tokens_per_step: int | None = None
    samples_per_step: int | None = None
    world_size: int = 1
    precision: str | None = None
    job: bool = False  # tell the parts of a whole job apart
    graphed: bool = False  # torch.compile replays CUDA graphs
    fused_loss: bool = False  # Liger's, which computes its gradients in the forward pass
    uneven: bool = False  # steps differ in length, so the peak of one is not the peak of the others


def meter_spec(trial: Trial) -> MeterSpec:
    """Return the facts about a trial that its meter needs."""
    return MeterSpec(
        trial.protocol.warmup_steps,
        trial.protocol.measured_steps,
        trial.record,
        None if length_distribution.names_lengths(trial.data) else trial.tokens_per_step(),
        trial.samples_per_step(),
        trial.world_size,
        trial.precision,
        trial.protocol.job,
        trial.compile in GRAPHED,
        trial.loss == "fused_linear" or (trial.loss == "default" and trial.kernels == "liger"),
        length_distribution.has_varying_lengths(trial) and trial.padding_to != length_distribution.FULL,
    )


class StepMeter(Protocol):
    """The interface through which a runner reports its progress."""

    rank: int

    def built(self, describe: Callable[[], Columns], skipped: Callable[[], int | None] | None = None) -> None:
        """Note that model, optimizer and data exist; the next step is the first.

        `describe` is called after the measured steps, and returns the columns about what was built. `skipped` returns
        how many updates were skipped so far because of an overflow; without it the number is unknown. It is only called
        outside the measured steps.
        """

    def step_begin(self) -> None:
        """Note that the next optimizer step begins."""

    def fed(self, batch: Mapping[str, Any]) -> None:
        """Note the batch of the next forward pass in this step."""

    def run_pass(self, one: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a forward and backward pass, and return its loss."""

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        """Note that the host has issued the optimizer step; the GPU may still be running it."""


class Warmup:
    """Warm-up step: timed by the host's clock until the device has finished it."""

    def __init__(self, gauges: Gauges) -> None:
        self.gauges = gauges
        self.times: list[float] = []
        self.loss_first: float | None = None

    def enter(self) -> None:
        """Note the time at which the step begins."""
        self._began = time.perf_counter()

    def leave(self, loss: torch.Tensor | None) -> None:
        """Wait for the device and keep the step's time in seconds; for the first step also its loss."""
        self.gauges.synchronize()
        self.times.append(time.perf_counter() - self._began)
        self.gauges.take()
        if len(self.times) == 1:
            self.loss_first = _finite(loss)

    def columns(self) -> Columns:
        """Return the number of warm-up steps, their times in seconds, and the first loss."""
        return {"warmup_steps": len(self.times), "warmup_step_times_s": self.times, "loss_first": self.loss_first}


class Probe:
    """Untimed step: the peaks of each phase, separated by watching the autograd engine. `then` is called at its end."""

    def __init__(self, gauges: Gauges, then: Callable[[], None]) -> None:
        self.gauges, self.then = gauges, then
        self.phases: dict[str, Peaks] = {}
        self.spent = 0.0
        self._unseen = False
        self._context = contextlib.ExitStack()

    def enter(self) -> None:
        """Begin to watch the phases; without a GPU also count tensors, unless code is compiled or they are counted."""
        self._began = time.perf_counter()
        memory = self.gauges.memory
        self._unseen = isinstance(memory, HostMemory) and self.gauges.compiler.compiled()
        counted = isinstance(memory, HostMemory) and memory.live is not None  # a whole job is counted from its start
        if isinstance(memory, HostMemory) and not self._unseen and not counted:  # LiveBytes would stop compiled code
            self._context.enter_context(memory.counting(self.gauges.imported))
        self._context.enter_context(backward_boundaries(lambda: self._end("forward"), lambda: self._end("backward")))
        self.gauges.take()

    def leave(self, loss: torch.Tensor | None) -> None:
        """End the optimizer's phase, stop watching, and call `then`."""
        self._end("optimizer")
        self.close()
        self.spent = time.perf_counter() - self._began
        self.then()

    def close(self) -> None:
        """Stop watching, even in the middle of the step."""
        self._context.close()

    def _end(self, phase: str) -> None:
        peaks = self.gauges.take()
        self.phases[phase] = larger(self.phases.get(phase, peaks), peaks)

    def columns(self) -> Columns:
        """Return each phase's peaks in bytes; None, with a note, if no backward pass was seen."""
        known = "backward" in self.phases
        phases = self.phases if known else {}
        return {
            f"{phase}_peak_{c}_bytes": phases.get(phase, {}).get(c)
            for phase in ("forward", "backward", "optimizer")
            for c in ("allocated", "reserved")
        } | {"notes": [PHASES_UNKNOWN] * (not known) + [COMPILED_UNSEEN] * self._unseen}


class Measured:
    """Measured step: marks the clock and takes the peaks at its boundary. `then` is called after the last one."""

    def __init__(self, gauges: Gauges, asked: MeterSpec, then: Callable[[], None]) -> None:
        self.gauges, self.asked, self.then = gauges, asked, then
        self.skipped: Callable[[], int | None] = lambda: None
        self.peaks: list[Peaks] = []
        self.held: list[int | None] = []
        self.reserved: list[int | None] = []  # at the end of each step; `held` is allocated
        self.tokens: list[int | None] = []
        self.elapsed = 0.0
        self._columns: Columns = {}

    def start(self) -> None:
        """Read the state before the measured steps, and mark their first boundary."""
        self.gauges.process.rest()
        self._skipped = self.skipped()
        self._graphs = self.gauges.compiler.graphs()
        self.gauges.synchronize()
        self._reasons = self.gauges.nvml.throttle_reasons()
        self._clock_mhz = self.gauges.nvml.sm_clock_mhz()
        self.notes = [] if self.asked.measured_steps is None else meet_ranks()  # else some ranks may have no meter
        self._energy = self.gauges.nvml.energy_j()
        self._host = counters.host_counts()
        self.gauges.clock.mark()

    def enter(self) -> None:
        """Begin a step; its first boundary is the end of the step before."""
        self.fed: int | None = None

    def leave(self, loss: torch.Tensor | None) -> None:
        """Mark the boundary, and keep the step's peaks, memory and tokens; after the last step, finish."""
        self.gauges.clock.mark()
        self.peaks.append(self.gauges.take())
        self.held.append(self.gauges.memory.held)
        self.reserved.append(self.gauges.memory.held_reserved)
        self.tokens.append(self.fed)
        if len(self.peaks) == self.asked.measured_steps:
            self.finish(loss)

    def finish(self, loss: torch.Tensor | None) -> None:
        """Read clock and counters after the last step, and keep their columns."""
        nvml = self.gauges.nvml
        reasons, clock_mhz = nvml.throttle_reasons(), nvml.sm_clock_mhz()  # while the GPU still works
        times = self.gauges.clock.times()
        disturbed = counters.disturbed_since(self._host)
        self.elapsed = elapsed = sum(times)
        energy = nvml.energy_j() if elapsed >= LEAST_ENERGY_S else None
        joules = None if energy is None or self._energy is None else energy - self._energy
        skipped = self.skipped()
        recompiled = self.gauges.compiler.graphs() - self._graphs
        fed = all_known(self.tokens)
        tokens = None if fed is None else sum(fed)
        if self.asked.tokens_per_step is not None:
            tokens = self.asked.tokens_per_step * len(times)
        samples = None if self.asked.samples_per_step is None else self.asked.samples_per_step * len(times)
        self.notes += [RECOMPILED.format(recompiled)] * bool(recompiled)
        self._columns = {
            **self.gauges.memory.summary(),
            **nvml.facts(),
            **disturbed,
            **self.gauges.clock.issue_columns(times),
            "device_used_bytes": nvml.used(),
            "gpu_sm_clock_mhz": clock_mhz,
            "gpu_sm_clock_before_mhz": self._clock_mhz,
            "gpu_energy_j": joules,
            "gpu_power_w": None if joules is None else joules / elapsed,
            "throttle_reasons": None if reasons is None else sorted(reasons | (self._reasons or set())),
            **timed(times),
            "host_elapsed_s": self.gauges.clock.by_host if self.asked.measured_steps is not None else None,
            "compile_s": self.gauges.compiler.seconds(),
            "tokens_per_s": None if tokens is None else tokens / elapsed,
            "samples_per_s": None if samples is None else samples / elapsed,
            "skipped_steps": None if skipped is None or self._skipped is None else skipped - self._skipped,
            "loss_last": _finite(loss),
        }
        self.then()

    def columns(self) -> Columns:
        """Return the columns that `finish` kept, and those that are made from single steps."""
        reserved = [peaks["reserved"] for peaks in self.peaks]
        growth = self.gauges.memory.growth(self.held)
        taken = [self._columns["device_used_bytes"], self.peaks[-1]["allocated"]]
        known = all_known([self._columns["device_total_bytes"], self.reserved[-1], *taken])
        free = None if known is None else known[0] + known[1] - sum(known[2:])
        before = self.asked.warmup_steps + (2 if self.asked.measured_steps is None else 1)
        return {
            **self._columns,
            "measured_steps": len(self.peaks),
            "step_peak_allocated_bytes": all_known([peaks["allocated"] for peaks in self.peaks]),
            "step_peak_reserved_bytes": all_known(reserved),
            "step_allocated_bytes": all_known(self.held),
            "step_reserved_bytes": all_known(self.reserved),
            "step_tokens": all_known(self.tokens) if self.asked.tokens_per_step is None else None,
            "step_growth_bytes": growth,
            "full_after_steps": steps_until_full(before + len(self.peaks), growth, free),
            "plateau": reached_plateau(reserved),
        }


class Recorded:
    """Untimed step that records every event of the CUDA allocator to `path`; a rank without a path only runs it."""

    purpose = "records the allocator's events"

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._context = contextlib.ExitStack()

    def enter(self) -> None:
        """Begin to record at most RECORDED_EVENTS events, without tracebacks, if there is a path."""
        if self.path:
            self._context.callback(torch.cuda.memory._record_memory_history, enabled=None)
            torch.cuda.memory._record_memory_history(context=None, max_entries=RECORDED_EVENTS)

    def leave(self, loss: torch.Tensor | None) -> None:
        """Write the recording if there is a path, and stop recording."""
        if self.path:
            torch.cuda.memory._dump_snapshot(str(self.path))
        self.close()

    def close(self) -> None:
        """Stop recording, even in the middle of the step."""
        self._context.close()


# The purposes of a step. `enter` is called when the step begins, `leave` when the host has issued it.
Step = Warmup | Probe | Measured | Count | Recorded
Publish = Callable[[Columns], Columns]


class Meter:
    """The StepMeter that measures the steps of one trial on one rank, with that rank's instruments.

    `publish` is called with this rank's columns when the last measured step is over. It returns the columns of the row,
    and is needed only if there are several ranks.
    """

    def __init__(
        self, asked: MeterSpec, folder: Path, gauges: Gauges, rank: int, publish: Publish | None = None
    ) -> None:
        self.rank, self.asked, self.gauges = rank, asked, gauges
        self.warmup = Warmup(self.gauges)
        self.measured = Measured(self.gauges, asked, self._publish)
        self.probe = Probe(self.gauges, self.measured.start)
        of_rank = None if asked.tokens_per_step is None else asked.tokens_per_step // asked.world_size
        own = asked.measured_steps is not None  # otherwise every step belongs to the user's own training
        self.count = Count(self.gauges.compiler, of_rank, asked.precision, asked.world_size, asked.fused_loss, own)
        self.graphed = asked.graphed
        self.recorded = Recorded(folder / RECORDING if rank == 0 else None)
        warmup = [self.warmup] * asked.warmup_steps
        self.plan: tuple[Step, ...]
        if asked.measured_steps is None:  # the measured steps follow
            self.plan = (*warmup, self.count, self.probe)
        else:
            measured = [self.measured] * asked.measured_steps
            self.plan = (*warmup, self.probe, *measured, self.count, *[self.recorded] * asked.record)
        self.index = 0
        self._training = False
        self._looks = register_optimizer_step_post_hook(look_at_gradients)
        self.row: Columns | None = None  # once it is published
        self._to_publish = publish or (lambda own: over_ranks([own]))  # of the only rank
        self._load: Peaks = {}
        self._host_load: int | None = None
        self._describe: Callable[[], Columns] = dict
        self._records = (folder / STEPS).open("ab", buffering=0) if rank == 0 else None
        self._record({"event": "load"})

    def built(self, describe: Callable[[], Columns], skipped: Callable[[], int | None] | None = None) -> None:
        """Keep the peaks of loading and both functions, and record that training begins."""
        self._load = self.gauges.take()
        self._host_load = self.gauges.process.look()
        self._describe = describe
        if self.asked.job:
            self.gauges.enter("first_step")
        if skipped is not None:
            self.measured.skipped = skipped
        self._training = True
        self._record({"event": "train"})

    def step_begin(self) -> None:
        """Begin the present step, as its purpose requires."""
        self.step().enter()

    def fed(self, batch: Mapping[str, Any]) -> None:
        """Count the token ids of a measured or FLOP-counting step, unless every step has the same number."""
        step, ids = self.plan[self.index], batch.get("input_ids")
        if self.asked.tokens_per_step is not None or not isinstance(ids, torch.Tensor):
            return
        if step is self.measured:
            self.measured.fed = (self.measured.fed or 0) + ids.numel()
        elif step is self.count:
            self.count.tokens = (self.count.tokens or 0) + ids.numel()

    def run_pass(self, one: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run the pass as it is, and return its loss."""
        return one()

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        """Record the moment in the file of steps, and end the step as its purpose requires."""
        self._write(f'{{"step": {self.index}, "at_s": {time.perf_counter()}}}')  # three times as fast as json
        self.step().leave(loss)
        self.index += 1
        if self.asked.job and self.index == 1:
            self.gauges.enter("steps")

    def step(self) -> Step:
        """Return the purpose of the current step; after the plan, every step is measured."""
        return self.plan[self.index] if self.index < len(self.plan) else self.measured

    def finish(self) -> None:
        """End the measured steps if their number was not given in advance."""
        if self.row is None and self.measured.peaks:
            self.measured.finish(None)

    def abandon(self) -> None:
        """Stop watching, even in the middle of a step, and undo every change to torch."""
        for step in (self.probe, self.count, self.recorded):  # at most one has begun and not ended
            step.close()
        self._looks.remove()
        self.gauges.release()
        if self._records is not None:
            self._records.close()
            self._records = None

    def stopped(self, phase: str) -> None:
        """Note in which step, and in which phase, training stopped, if it had begun."""
        if self._training:
            self._record({"phase": phase, "at_step": self.index})

    def seen(self) -> Columns:
        """Return the columns about the device and its other processes, at any moment, even after memory ran out."""
        return {
            "device_total_bytes": self.gauges.nvml.facts()["device_total_bytes"],
            "device_baseline_bytes": self.gauges.baseline,
            "foreign_processes": self.gauges.others(),
        }

    def columns(self) -> Columns:
        """Return all known columns of the row. Raises RuntimeError if the measured steps are not over."""
        if self.row is None:
            raise RuntimeError(f"training ended after {self.index} of {len(self.plan)} steps, before all were measured")
        spent = sum(self.warmup.times) + self.probe.spent + self.measured.elapsed + self.count.spent
        return self.row | self.count.columns(self.row) | self.gauges.part_columns() | {"steps_s": spent}

    def failed(self, error: BaseException) -> str:
        """Stop watching, and return a note on what ended training after the measured steps."""
        self.abandon()
        what = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        if self.index == len(self.plan):
            return f"failed after the last step: {what}"
        purpose = getattr(self.plan[self.index], "purpose", "was measured last")
        return f"the step that {purpose} failed after the measured steps: {what}"

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
            "host_load_peak_bytes": self._host_load if gauges.worker is None else None,
            "steps_s": sum(self.warmup.times) + self.probe.spent + self.measured.elapsed,
            **described,
            "notes": [*self.probe.columns()["notes"], *self.measured.notes, *(described.get("notes") or ())],
        }
        if isinstance(gauges.memory, HostMemory) and gauges.memory.live is not None:
            own |= {**dict.fromkeys(SPEED), "notes": [*own["notes"], COUNTED]}
        elif self.asked.uneven and own["peak_allocated_bytes"] is not None and not gauges.cuda:
            own |= {"peak_allocated_bytes": None, "notes": [*own["notes"], OTHER_STEPS]}
        if self.graphed and gauges.cuda:
            phases = [f"{phase}_peak_allocated_bytes" for phase in ("forward", "backward", "optimizer", "step")]
            own |= {**dict.fromkeys(phases), "notes": [*own["notes"], REPLAYED]}
        self.row = self._to_publish(own | self.seen())
        self._describe, self.measured.skipped = dict, lambda: None  # the callbacks would keep model and optimizer alive

    def _record(self, record: dict[str, Any]) -> None:
        self._write(json.dumps(record))

    def _write(self, line: str) -> None:
        if self._records is not None:
            self._records.write(f"{line}\n".encode())


def timed(times: Sequence[float]) -> Columns:
    """Return the columns of the measured steps' times, in seconds, one by one and in total.

    Quartiles between two values are interpolated linearly.
    """
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times
    return {
        "elapsed_s": sum(times),
        "step_times_s": list(times),
        "step_median_s": statistics.median(times),
        "step_iqr_s": quartiles[-1] - quartiles[0],
    }


def _finite(loss: torch.Tensor | None) -> float | None:
    value = math.nan if loss is None else float(loss.detach())
    return value if math.isfinite(value) else None
